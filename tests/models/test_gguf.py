"""GGUF files: exact 4-bit blocks, row order, names, and that damage is always one clear error."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from tiny_checkpoints import LLAMA, converter_permutation, packed_k_blocks, write_gguf

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.models.expected import expected_shapes
from outrider.models.family import config_from_hf
from outrider.models.gguf import GGUFCheckpoint
from outrider.models.gguf_header import read_header
from outrider.models.gguf_names import half_split_rows, to_gguf, to_transformers

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
WIDE = LLAMA | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 8}


def test_dense_weights_come_back_in_transformers_order(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.tensor(name), torch.from_numpy(weight)), name


def test_half_split_rows_undo_the_converter_permutation() -> None:
    weights = np.arange(6 * 16 * 3, dtype=np.float32).reshape(96, 3)
    stored = converter_permutation(weights, heads=6)
    assert not np.array_equal(stored, weights)
    assert np.array_equal(stored[half_split_rows(96, 16).numpy()], weights)


def test_other_architectures_are_not_permuted_and_qwen2_has_biases(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", LLAMA | {"model_type": "qwen2"}, architecture="qwen2")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.config.qkv_bias
    assert not checkpoint.config.output_bias
    for name in (Q_PROJ, "model.layers.1.self_attn.k_proj.bias"):
        assert torch.equal(checkpoint.tensor(name), torch.from_numpy(weights[name]))


def test_llama_biases_are_permuted_like_their_rows(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", LLAMA | {"attention_bias": True})
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.config.qkv_bias
    assert checkpoint.config.output_bias
    name = Q_PROJ.replace("weight", "bias")
    assert torch.equal(checkpoint.tensor(name), torch.from_numpy(weights[name]))


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1])
def test_int4_dequantises_exactly_to_the_tensor(tmp_path: Path, kind: Q) -> None:
    names = (Q_PROJ, K_PROJ, DOWN)
    weights = write_gguf(tmp_path / "m.gguf", kinds=dict.fromkeys(names, kind))
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    for name in names:
        blocks = checkpoint.int4(name)
        assert blocks is not None
        assert blocks.codes.dtype == torch.uint8
        assert int(blocks.codes.max()) <= 15
        assert torch.equal(blocks.dequantize(), checkpoint.tensor(name))
        assert (checkpoint.tensor(name) - torch.from_numpy(weights[name])).abs().max() < 0.5
    assert checkpoint.int4("model.layers.1.self_attn.q_proj.weight") is None
    assert checkpoint.int4("model.norm.weight") is None


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_other_types_round_as_the_gguf_package_does(tmp_path: Path, kind: Q) -> None:
    weights = write_gguf(tmp_path / "m.gguf", kinds={DOWN: kind})
    tensor = GGUFCheckpoint(tmp_path / "m.gguf").tensor(DOWN)
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights[DOWN], kind), kind)
    dense = {Q.F16: torch.float16, Q.BF16: torch.bfloat16}
    assert tensor.dtype == dense.get(kind, torch.float32)
    assert torch.equal(tensor.float(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q6_K])
def test_k_quants(tmp_path: Path, kind: Q) -> None:
    write_gguf(tmp_path / "m.gguf", WIDE, kinds={DOWN: kind})
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    expected = gguf.quants.dequantize(packed_k_blocks(kind, 256, 256), kind)
    assert torch.equal(checkpoint.tensor(DOWN), torch.from_numpy(expected))
    assert checkpoint.int4(DOWN) is None


def test_gemma3_names_norms_and_windows(tmp_path: Path) -> None:
    weights = write_gguf(
        tmp_path / "m.gguf", GEMMA3, architecture="gemma3", extra={"gemma3.attention.sliding_window": 8}
    )
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.config.windows == (8, 8, 8, 8, 8, None, 8)
    assert checkpoint.config.norm_offset == 0.0
    assert checkpoint.config.tie_embeddings
    assert set(checkpoint.names()) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.tensor(name), torch.from_numpy(weight)), name


def test_names_translate_both_ways() -> None:
    hf = config_from_hf(GEMMA3 | {"attention_bias": True, "tie_word_embeddings": False})
    for name in expected_shapes(hf):
        there = to_gguf(name, "gemma3")
        assert there is not None
        assert to_transformers(there, "gemma3") == name
    assert to_transformers("blk.3.ffn_norm.weight", "llama") == "model.layers.3.post_attention_layernorm.weight"
    assert to_transformers("blk.3.ffn_norm.weight", "gemma2") == "model.layers.3.pre_feedforward_layernorm.weight"
    assert to_transformers("blk.3.post_ffw_norm.weight", "llama") is None
    assert to_transformers("output.bias", "llama") is None


def test_llama3_factors_reach_the_configuration(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", added={"rope_freqs.weight": factors})
    scaling = GGUFCheckpoint(tmp_path / "m.gguf").config.rope_full.scaling
    assert scaling == {"rope_type": "llama3_factors", "factors": [float(f) for f in factors]}
    write_gguf(tmp_path / "bad.gguf", added={"rope_freqs.weight": factors[:5]})
    with pytest.raises(ModelFileError, match="8 frequency factors"):
        GGUFCheckpoint(tmp_path / "bad.gguf")


def test_metadata_is_plain_python(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", extra={"x.flags": [True, False], "x.scores": [0.5, 1.5]})
    metadata = GGUFCheckpoint(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(48)]
    assert metadata["x.flags"] == [True, False]
    assert metadata["x.scores"] == [0.5, 1.5]


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", drop=(DOWN,))
    with pytest.raises(ModelFileError, match=f"no tensor '{DOWN}'"):
        GGUFCheckpoint(tmp_path / "m.gguf")
    write_gguf(tmp_path / "n.gguf", extra={"llama.rope.dimension_count": 16})
    good = GGUFCheckpoint(tmp_path / "n.gguf")
    with pytest.raises(ModelFileError, match=r"n\.gguf has no tensor 'nope'"):
        good.tensor("nope")
    with pytest.raises(ModelFileError, match="no tensor 'nope'"):
        good.int4("nope")
    data = (tmp_path / "n.gguf").read_bytes()
    key = b"llama.feed_forward_length"
    at = data.index(key) + len(key) + 4
    (tmp_path / "n.gguf").write_bytes(data[:at] + (64).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelFileError, match="configuration needs"):
        GGUFCheckpoint(tmp_path / "n.gguf")


def test_a_tensor_that_the_decoder_would_ignore_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", added={"blk.0.attn_sub_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(UnsupportedModelError, match="attn_sub_norm"):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_truncation_anywhere_is_a_model_file_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kinds={DOWN: Q.Q4_1})
    data = (tmp_path / "m.gguf").read_bytes()
    end = max(info.start + info.nbytes for info in read_header(tmp_path / "m.gguf").tensors.values())
    header_end = min(info.start for info in read_header(tmp_path / "m.gguf").tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, header_end, 13), *range(header_end, end, 4999), end - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            GGUFCheckpoint(cut)
    with pytest.raises(ModelFileError, match=rf"truncated: tensor '.*' ends at byte {end}, the file has {end - 1}"):
        GGUFCheckpoint(cut)


def test_bit_flips_in_the_header_load_or_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    header = min(info.start for info in read_header(tmp_path / "m.gguf").tensors.values())
    rng, flipped = random.Random(0), tmp_path / "flipped.gguf"
    refused = 0
    tracemalloc.start()
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        flipped.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(flipped)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except (ModelFileError, UnsupportedModelError):
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 50
    assert peak < 32 << 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "only 0 bytes"),
        (b"GGML" + bytes(40), "starts with b'GGML'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "number of tensors"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "lacks 'general.architecture'"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_overlapping_and_misaligned_tensors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    tensors = read_header(tmp_path / "m.gguf").tensors
    base = min(info.start for info in tensors.values())
    name = b"blk.1.ffn_down.weight"
    field = data.index(name) + len(name) + 4 + 2 * 8 + 4
    stored = int.from_bytes(data[field : field + 8], "little")
    assert stored == tensors[name.decode()].start - base
    for offset, message in [(stored - 32, "overlap"), (stored + 4, "no multiple of 32"), (1 << 50, "truncated")]:
        (tmp_path / "bad.gguf").write_bytes(data[:field] + offset.to_bytes(8, "little") + data[field + 8 :])
        with pytest.raises(ModelFileError, match=message):
            GGUFCheckpoint(tmp_path / "bad.gguf")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"absent\.gguf"):
        GGUFCheckpoint(tmp_path / "absent.gguf")
