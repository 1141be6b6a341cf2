"""Transformers directories: shards, prefixes, and refusal of what is damaged, missing or unsafe."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import LLAMA, write_pretrained

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.models.pretrained import PretrainedCheckpoint, normalised

NORM = "model.norm.weight"
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}


class Payload:
    """Unpickling this would create the file ``target``."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_come_back(tmp_path: Path, shards: int) -> None:
    weights = write_pretrained(tmp_path, shards=shards)
    checkpoint = PretrainedCheckpoint(tmp_path)
    assert set(checkpoint.names()) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.tensor(name), weight)
        assert checkpoint.int4(name) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: weight.to(dtype) for name, weight in write_pretrained(tmp_path).items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert PretrainedCheckpoint(tmp_path).tensor(NORM).dtype == dtype


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_prefixes(tmp_path: Path, prefix: str) -> None:
    outer: dict[str, object] = {"model_type": "gemma3", "text_config": GEMMA3}
    weights = write_pretrained(tmp_path, outer, prefix)
    checkpoint = PretrainedCheckpoint(tmp_path)
    assert torch.equal(checkpoint.tensor(NORM), weights[NORM])
    assert checkpoint.config.family == "gemma3"
    assert checkpoint.config.norm_offset == 1.0


def test_normalised_names() -> None:
    assert normalised("language_model.lm_head.weight") == "lm_head.weight"
    assert normalised("layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert normalised("vision_tower.x") == "vision_tower.x"


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    weights = write_pretrained(tmp_path)
    save_file(weights | {"norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="same tensor"):
        PretrainedCheckpoint(tmp_path)


def test_missing_tensor_names_tensor_and_file(tmp_path: Path) -> None:
    weights = write_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match=r"model\.safetensors has no tensor 'nope'"):
        PretrainedCheckpoint(tmp_path).tensor("nope")
    del weights[NORM]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"model\.safetensors has no tensor '{NORM}'"):
        PretrainedCheckpoint(tmp_path)


def test_wrong_shape_and_wrong_type(tmp_path: Path) -> None:
    weights = write_pretrained(tmp_path)
    save_file(weights | {NORM: torch.zeros(65)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' is \[65\], .* needs \[64\]"):
        PretrainedCheckpoint(tmp_path)
    save_file(weights | {NORM: torch.zeros(64, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="neither float32"):
        PretrainedCheckpoint(tmp_path)


def test_tied_models_need_no_head_and_untied_ones_do(tmp_path: Path) -> None:
    weights = write_pretrained(tmp_path)
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        PretrainedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in PretrainedCheckpoint(tmp_path).names()


def test_generation_config_gives_the_stop_tokens(tmp_path: Path) -> None:
    write_pretrained(tmp_path)
    assert PretrainedCheckpoint(tmp_path).config.eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert PretrainedCheckpoint(tmp_path).config.eos_ids == (5, 7)


def test_damaged_index(tmp_path: Path) -> None:
    write_pretrained(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    (tmp_path.parent / "outside.safetensors").write_bytes(b"secret")
    for file in ("../outside.safetensors", "/etc/passwd", "a\\..\\b", "..", ""):
        index.write_text(json.dumps({"weight_map": weight_map | {NORM: file}}))
        with pytest.raises(ModelFileError, match="outside its own directory"):
            PretrainedCheckpoint(tmp_path)
    for value, message in [({}, "weight_map"), ({"weight_map": {NORM: [1]}}, "outside"), ([], "dictionary")]:
        index.write_text(json.dumps(value))
        with pytest.raises(ModelFileError, match=message):
            PretrainedCheckpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": weight_map[NORM]}}))
    with pytest.raises(ModelFileError, match="lacks tensor 'ghost'"):
        PretrainedCheckpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_pretrained(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002\.safetensors is missing"):
        PretrainedCheckpoint(tmp_path)


def test_truncated_safetensors_at_many_positions(tmp_path: Path) -> None:
    write_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for length in [*range(0, 2000, 41), *range(2000, len(data), 9973), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            PretrainedCheckpoint(tmp_path)


def test_bit_flips_in_the_safetensors_header(tmp_path: Path) -> None:
    write_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    rng, refused = random.Random(1), 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(length)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            checkpoint = PretrainedCheckpoint(tmp_path)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except ModelFileError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_state_dict(tmp_path: Path, sharded: bool) -> None:
    weights = write_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save(weights, tmp_path / file)
    if sharded:
        index = {"weight_map": dict.fromkeys(weights, file)}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    checkpoint = PretrainedCheckpoint(tmp_path)
    assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in weights.items())


def test_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    weights: dict[str, object] = dict(write_pretrained(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights | {"payload": Payload(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="could run code"):
        PretrainedCheckpoint(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_other_pickles(tmp_path: Path) -> None:
    weights = write_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save({"state": weights}, path)
    with pytest.raises(ModelFileError, match="no dictionary of tensors"):
        PretrainedCheckpoint(tmp_path)
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelFileError, match=r"torch before 1\.6"):
        PretrainedCheckpoint(tmp_path)
    torch.save(weights, path)
    data = path.read_bytes()
    for length in (0, 10, 500, len(data) // 2, len(data) - 5):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"pytorch_model\.bin"):
            PretrainedCheckpoint(tmp_path)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        PretrainedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        PretrainedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelFileError, match="has no weights"):
        PretrainedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        PretrainedCheckpoint(tmp_path)
