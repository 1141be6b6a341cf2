"""Every family that our decoder runs, against transformers' own code on tiny random models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models.base import Segment
from outrider.models.decoder import Decoder
from outrider.models.pretrained import PretrainedCheckpoint
from outrider.models.weights import WeightFormat, WeightPlan

WINDOW = 6
PROMPT = [5, 40, 17, 3, 22, 9, 33, 51, 8, 12, 44, 27, 60, 19, 2, 36, 50]  # longer than the window
PLAN = WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def rope(kind: str, **options: float | bool) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **options}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
GEMMA2 = {"sliding_window": WINDOW, "layer_types": KINDS, "query_pre_attn_scalar": 12, "head_dim": 8}
GEMMA3 = {**GEMMA2, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 10}),
    "llama_no_grouping": ("llama", {"num_key_value_heads": 4}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_linear": ("llama", rope("linear", factor=3.0)),
    "llama_llama3": ("llama", rope("llama3", **LLAMA3)),
    "llama_yarn": ("llama", rope("yarn", **YARN)),
    "llama_yarn_betas": ("llama", rope("yarn", **YARN, beta_fast=4.0, beta_slow=0.5, truncate=False)),
    "llama_yarn_factor": ("llama", rope("yarn", **YARN, attention_factor=0.8)),
    "llama_yarn_mscale": ("llama", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.9)),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 8}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen3_bias": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "gemma2": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}),
    "gemma2_uncapped": ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3_ropes": (
        "gemma3_text",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS, autouse=True)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Decoder, torch.nn.Module]]:
    """Our decoder, loaded from what transformers saved, and the saved model itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    family, options = VARIANTS[request.param]
    yield build(family, options, tmp_path_factory.mktemp(family))
    torch.set_num_threads(threads)


def build(family: str, options: dict[str, Any], directory: Path) -> tuple[Decoder, torch.nn.Module]:
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **{**SHAPE, **options})
    # Only the eager implementation applies Gemma-2's soft caps.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)  # norms and biases are trivial when freshly made
    model.save_pretrained(directory)
    return Decoder(PretrainedCheckpoint(directory), PLAN), model


def reference(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """transformers' logits [n, vocab] without any cache."""
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("chunk", [len(PROMPT), 5, 1])
def test_logits_equal_transformers(pair: tuple[Decoder, torch.nn.Module], chunk: int) -> None:
    decoder, model = pair
    cache = decoder.new_cache()
    parts = []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        parts.append(decoder.forward([Segment(cache, tokens)])[0].logits)
        cache.commit(range(len(tokens)))
    torch.testing.assert_close(torch.cat(parts), reference(model, PROMPT), rtol=1e-4, atol=1e-4)


def best_new(logits: Tensor, text: list[int]) -> int:
    """Greedy, each token at most once: tiny random models repeat one token for ever, which would test little."""
    logits = logits.clone()
    logits[text] = -torch.inf
    return int(logits.argmax())


def test_greedy_text_equals_transformers(pair: tuple[Decoder, torch.nn.Module]) -> None:
    decoder, model = pair
    found, wanted, pending = list(PROMPT), list(PROMPT), list(PROMPT)
    cache = decoder.new_cache()
    for _ in range(20):
        logits = decoder.forward([Segment(cache, pending, logit_rows=(len(pending) - 1,))])[0].logits
        cache.commit(range(len(pending)))
        pending = [best_new(logits[0], found)]
        found += pending
        wanted.append(best_new(reference(model, wanted)[-1], wanted))
    assert found == wanted


def test_hidden_states_equal_transformers(pair: tuple[Decoder, torch.nn.Module]) -> None:
    decoder, model = pair
    names: list[str | int] = [0, 1, 2, "final"]
    hidden = decoder.forward([Segment(decoder.new_cache(), PROMPT)], hidden=names)[0].hidden
    wanted = model(input_ids=torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True).hidden_states
    for name, state in zip(names, wanted, strict=True):
        torch.testing.assert_close(hidden[name], state[0], rtol=1e-4, atol=1e-4)


def test_variant_has_what_its_name_says(pair: tuple[Decoder, torch.nn.Module], request: pytest.FixtureRequest) -> None:
    """So that a configuration field that transformers renames cannot empty these tests."""
    decoder, _ = pair
    config, name = decoder.config, request.node.callspec.params["pair"]
    windowed = name.startswith(("gemma", "qwen2_window")) or name == "mistral"
    assert (WINDOW in config.windows) is windowed
    assert config.tie_embeddings is (name in ("llama_tied_bias", "qwen3") or name.startswith("gemma"))
    assert config.qkv_bias is ("bias" in name or name.startswith("qwen2"))
    assert (config.attention_soft_cap == 1.5) is (name == "gemma2")
    for kind in ("linear", "llama3", "yarn"):
        if kind in name.split("_"):
            assert config.rope_full.scaling["rope_type"] == kind
    if name == "gemma3_ropes":
        assert (config.rope_full.scaling["rope_type"], config.rope_sliding.theta) == ("linear", 100.0)
