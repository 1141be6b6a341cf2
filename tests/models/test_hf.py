"""The transformers fallback: what it loads, what it refuses and when, and that it agrees with transformers itself.

Trees, commits and rollbacks are tested with every other model in ``tests/contracts/test_language_models.py``.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from outrider.errors import CacheRollbackError, ContextLengthError, ModelFileError, UnsupportedModelError
from outrider.models.base import Segment
from outrider.models.hf import TransformersModel
from outrider.models.hf_cache import TransformersCache
from outrider.models.hf_support import check_config, context_length

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
    "pad_token_id": 0,
}
TOKENS = [5, 40, 17, 3, 22, 9, 33, 51, 8, 12, 44, 27]


def tiny(family: str, **options: object) -> PreTrainedModel:
    return perturbed(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **options})))


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(3)
    model = model.float().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def saved(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    return TransformersModel.from_directory(directory, dtype, CPU)


EXPERTS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 10}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "opt": {"ffn_dim": 40},
    "phi3": {"sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 6},
    "deepseek_v3": {**EXPERTS, **LATENT, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_architectures_pass_the_self_check(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, **OTHERS[family]).to(dtype)
    ours = TransformersModel(model, family)
    found = ours.forward([Segment(ours.new_cache(), TOKENS)])[0].logits
    wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    bound = 1e-4 if dtype is torch.float32 else 0.1 * float(wanted.float().std())
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=bound)


def test_loading(tmp_path: Path) -> None:
    reference = tiny("gpt2")
    model = load(saved(reference, tmp_path), torch.bfloat16)
    assert (model.vocab_size, model.context_length, model.num_layers, model.hidden_size) == (61, 64, 2, 24)
    assert (model.bos_id, model.eos_ids, model.dtype) == (1, (2, 4), torch.bfloat16)
    assert not model.supports_skip
    logits = model.forward([Segment(model.new_cache(), TOKENS)])[0].logits
    assert logits.dtype is torch.bfloat16


def test_position_beyond_the_context_is_refused(tmp_path: Path) -> None:
    model = load(saved(tiny("gpt2"), tmp_path))
    cache = model.new_cache()
    model.forward([Segment(cache, [3] * 64)])
    cache.commit(range(64))
    with pytest.raises(ContextLengthError, match="context of 64"):
        model.forward([Segment(cache, [3])])


# -- files ---------------------------------------------------------------------------------------------------


def test_missing_tensor_is_not_filled_with_noise(tmp_path: Path) -> None:
    saved(tiny("gpt_neox"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.dense_h_to_4h"):
        load(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    path = saved(tiny("gpt_neox"), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelFileError, match="cannot load"):
        load(tmp_path)


def test_no_model_in_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        load(tmp_path)
    saved(tiny("gpt2"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="cannot load"):
        load(tmp_path)


def test_pickled_weights_load_and_malicious_ones_do_not_run(tmp_path: Path) -> None:
    reference = tiny("gpt_neox")
    saved(reference, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    model = load(tmp_path)
    logits = model.forward([Segment(model.new_cache(), TOKENS)])[0].logits
    torch.testing.assert_close(logits, reference(input_ids=torch.tensor([TOKENS])).logits[0], rtol=1e-4, atol=1e-4)
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(marker),)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"gpt_neox.embed_in.weight": Attack()}, 2))
    with pytest.raises(ModelFileError, match="cannot load"):
        load(tmp_path)
    assert not marker.exists()


def test_remote_code_does_not_run_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = saved(tiny("gpt2"), tmp_path / "model")
    marker = tmp_path / "ran"
    (directory / "configuration_own.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise RuntimeError('ran')\n")
    config = json.loads((directory / "config.json").read_text())
    config.update(model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="trust_remote_code"):
        load(directory)
    assert not marker.exists()


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mamba", {}, "cannot be rolled back"),
        ("rwkv", {}, "cannot be rolled back"),
        ("recurrent_gemma", {}, "cannot be rolled back"),
        ("jamba", {}, "cannot be rolled back"),
        ("qwen3_next", {}, "cannot be rolled back"),
        ("lfm2", {}, "cannot be rolled back"),
        ("t5", {}, "encoder-decoder"),
        ("llama4_text", {}, "attention_chunk_size"),
        ("gpt_neo", {}, "window_size"),
    ],
)
def test_state_that_cannot_be_rolled_back_is_refused_before_weights(
    tmp_path: Path, family: str, options: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(family, **options)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_architectures_without_positions_are_refused(family: str) -> None:
    sizes = {"n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4, "hidden_size": 24, "d_model": 24}
    config = AutoConfig.for_model(family, vocab_size=61, **sizes)
    with pytest.raises(UnsupportedModelError, match="position_ids"):
        TransformersModel(perturbed(AutoModelForCausalLM.from_config(config)), family)


def test_bidirectional_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="other logits"):
        TransformersModel(tiny("bert", num_hidden_layers=3), "bert")


class IgnoresMask(GPT2LMHeadModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any, **_: Any) -> Any:
        return super().forward(input_ids, position_ids=position_ids, cache=cache)


class IgnoresPositions(GPT2LMHeadModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any, **_: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, cache=cache)


class IgnoresCache(GPT2LMHeadModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any, **_: Any) -> Any:
        return super().forward(input_ids, position_ids=position_ids, use_cache=False)


class KeepsLastRowsOnly(GPT2LMHeadModel):
    def forward(self, input_ids: Tensor, logits_to_keep: Any = 0, **options: Any) -> Any:
        count = len(logits_to_keep) if isinstance(logits_to_keep, Tensor) else logits_to_keep
        return super().forward(input_ids, logits_to_keep=count, **options)


class Raises(GPT2LMHeadModel):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any, **_: Any) -> Any:
        raise RuntimeError("The size of tensor a must match")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [IgnoresMask, IgnoresPositions, IgnoresCache, Raises])
def test_unknown_architecture_that_would_be_silently_wrong_is_refused(
    broken: type[GPT2LMHeadModel], dtype: torch.dtype
) -> None:
    class Model(broken):  # type: ignore[misc,valid-type]
        """Wrong only where the test says: run plainly (the self-check's reference) it is GPT-2."""

        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Any = None,
            position_ids: Any = None,
            cache: Any = None,
            use_cache: bool = True,
        ) -> Any:
            if cache is None:
                return GPT2LMHeadModel.forward(self, input_ids, use_cache=False)
            return broken.forward(self, input_ids, attention_mask, position_ids, cache)

    model = perturbed(Model(AutoConfig.for_model("gpt2", **SHAPE))).to(dtype)
    with pytest.raises(UnsupportedModelError, match="use a model of another architecture"):
        TransformersModel(model, "broken")


def test_head_that_ignores_which_rows_are_wanted_is_refused() -> None:
    class Model(KeepsLastRowsOnly):
        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Any = None,
            position_ids: Any = None,
            cache: Any = None,
            logits_to_keep: Any = 0,
            use_cache: bool = True,
        ) -> Any:
            options = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
            return super().forward(input_ids, logits_to_keep, use_cache=use_cache, **options)

    with pytest.raises(UnsupportedModelError, match="other logits"):
        TransformersModel(perturbed(Model(AutoConfig.for_model("gpt2", **SHAPE))), "broken")


def test_length_dependent_rope_limits_the_context() -> None:
    """Beyond the original length all angles change, so cached keys would not be those of a fresh prefill."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    assert context_length(AutoConfig.for_model("llama", **{**SHAPE, "rope_parameters": rope})) == 16
    assert context_length(AutoConfig.for_model("llama", **SHAPE)) == 64


# -- the cache -------------------------------------------------------------------------------------------------


def test_cache_grows_and_reports_memory() -> None:
    cache = TransformersCache([True, False, True])
    assert (len(cache.layers), len(cache.dynamic.layers), cache.nbytes) == (2, 3, 0)
    for start in range(0, 600, 50):
        entries = torch.arange(start, start + 50.0)[None, None, :, None].expand(1, 2, 50, 3)
        for index in (0, 2):
            keys, _ = cache.dynamic.update(entries, entries[..., :2], index)
            assert keys.shape == (1, 2, start + 50, 3)
        cache.add_scratch(range(start, start + 50))
        cache.commit(range(50))
    keys = cache.layers[1].keys
    assert keys is not None
    assert torch.equal(keys[0, 1, :, 2], torch.arange(600.0))
    assert cache.nbytes == 2 * 1024 * 2 * (3 + 2) * 4
    cache.truncate(10)
    assert cache.layers[0].get_seq_length() == 10
    with pytest.raises(CacheRollbackError, match="holds 10"):
        cache.truncate(11)
