"""Writers of tiny model files for the tests of this folder: GGUF files, and transformers directories."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray
from safetensors.torch import save_file

from outrider.models.config import DecoderConfig
from outrider.models.expected import expected_shapes
from outrider.models.family import config_from_hf
from outrider.models.gguf_names import to_gguf

Array = NDArray[np.float32]

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, Array]:
    """A float32 array for every tensor that the decoder needs."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in expected_shapes(config).items()}


def converter_permutation(weights: Array, heads: int) -> Array:
    """What llama.cpp's converter does to q and k of Llama models: half-split rows -> interleaved rows."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def packed_k_blocks(kind: Q, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random blocks of Q4_K or Q6_K (which the package cannot quantise) with small finite float16 scales."""
    blocks, nbytes = columns // 256, gguf.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (rows, blocks, 2)).astype(np.float16).view(np.uint8).reshape(rows, blocks, 4)
    if kind is Q.Q4_K:
        data[:, :, :4] = scales
    else:
        data[:, :, -2:] = scales[:, :, :2]
    return data.reshape(rows, -1)


def write_gguf(
    path: Path,
    hf_config: dict[str, object] | None = None,
    kinds: dict[str, Q] | None = None,
    architecture: str = "llama",
    extra: dict[str, object] | None = None,
    drop: tuple[str, ...] = (),
    added: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Write a model under llama.cpp's names and conventions.

    Args:
        path: file to write.
        hf_config: shape, ``LLAMA`` by default.
        kinds: storage type by transformers name; F32 otherwise.
        architecture: llama.cpp's name.
        extra: further metadata (integers, floats, texts, lists).
        drop: transformers names to leave out.
        added: further float32 tensors by GGUF name.

    Returns:
        The weights in transformers' order, before quantisation.
    """
    config = config_from_hf(dict(hf_config or LLAMA))
    weights = random_weights(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_full.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    for name, weight in weights.items():
        if name not in drop:
            _add_tensor(writer, config, architecture, name, weight, (kinds or {}).get(name, Q.F32))
    for name, weight in (added or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, config: DecoderConfig, architecture: str, name: str, weight: Array, kind: Q
) -> None:
    stored = weight
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        stored = converter_permutation(weight, config.num_heads if ".q_proj." in name else config.num_kv_heads)
    file_name = to_gguf(name, architecture)
    assert file_name is not None
    if kind in (Q.Q4_K, Q.Q6_K):
        writer.add_tensor(file_name, packed_k_blocks(kind, *weight.shape), raw_dtype=kind)
    elif kind in (Q.F32, Q.F16):
        writer.add_tensor(file_name, gguf.quants.quantize(stored, kind))
    else:
        writer.add_tensor(file_name, gguf.quants.quantize(stored, kind), raw_dtype=kind)


def write_pretrained(
    directory: Path, hf_config: dict[str, object] | None = None, prefix: str = "", shards: int = 1
) -> dict[str, torch.Tensor]:
    """Write ``config.json`` and safetensors; ``prefix`` replaces ``model.``. Returns the tensors by canonical name."""
    chosen = dict(hf_config or LLAMA)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(chosen))
    weights = {name: torch.from_numpy(array) for name, array in random_weights(config_from_hf(chosen)).items()}
    stored = {
        prefix + name.removeprefix("model.") if prefix and name.startswith("model.") else name: tensor
        for name, tensor in weights.items()
    }
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return weights
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(stored.items())[shard::shards])
        save_file(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weights
