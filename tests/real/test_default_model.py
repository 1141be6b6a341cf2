"""The default model: plain decoding equals transformers, speculation equals plain decoding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outrider import SamplingParams, compare_outputs
from outrider.engine.engine import Engine
from outrider.models.base import Segment
from outrider.models.decoder import Decoder
from outrider.models.gguf import GGUFCheckpoint
from outrider.models.store import pull

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from peers import transformers_model

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return transformers_model(GGUFCheckpoint(pull("smollm2-135m")), torch.float32)


def test_prefill_logits_equal_transformers(
    float32_engine: Engine, reference: torch.nn.Module, prompts: list[list[int]]
) -> None:
    model = float32_engine.model
    with torch.inference_mode():
        for prompt in prompts[:6]:
            expected = reference(torch.tensor([prompt])).logits[0]
            got = model.forward([Segment(model.new_cache(), prompt)])[0].logits
            torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-4)


def test_plain_greedy_equals_transformers_on_20_prompts(
    float32_engine: Engine, reference: torch.nn.Module, prompts: list[list[int]]
) -> None:
    differing = []
    for index, prompt in enumerate(prompts[:20]):
        ours = float32_engine.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True)).tokens
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=64,
            min_new_tokens=64,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        comparison = compare_outputs(float32_engine, prompt, ours, theirs)
        if not comparison.is_identical:
            differing.append((index, comparison.describe()))
    assert differing == []


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [("ngram", "chain:8"), ("ngram", "widths:3,1,1"), ("layer_skip:24", "widths:2,1"), ("replay:0.8", "chain:5")],
)
def test_speculation_leaves_greedy_output_unchanged(
    float32_engine: Engine, prompts: list[list[int]], drafter: str, shape: str
) -> None:
    engine = float32_engine.with_parts(drafter=drafter, shape=shape, adaptive=False)
    params = SamplingParams(max_tokens=32)
    for prompt in prompts[::5]:
        plain = float32_engine.generate(prompt, params)
        fast = engine.generate(prompt, params)
        comparison = compare_outputs(float32_engine, prompt, plain.tokens, fast.tokens)
        assert comparison.is_identical or comparison.is_near_tie, comparison.describe()


def test_batch_neighbours_change_nothing(float32_engine: Engine, prompts: list[list[int]]) -> None:
    engine = float32_engine.with_parts(drafter="ngram", adaptive=False)
    params = SamplingParams(max_tokens=24)
    chosen = prompts[::6]
    together = dict(engine.run(((i, p, params) for i, p in enumerate(chosen)), batch=3))
    for index, prompt in enumerate(chosen):
        alone = engine.generate(prompt, params)
        comparison = compare_outputs(engine, prompt, alone.tokens, together[index].tokens)
        assert comparison.is_identical or comparison.is_near_tie, comparison.describe()


def test_seeded_sampling_is_reproducible_and_samples(int4_engine: Engine, prompts: list[list[int]]) -> None:
    def run(seed: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=seed)
        return int4_engine.generate(prompts[0], params).tokens

    assert run(5) == run(5)
    assert len({run(seed) for seed in range(6)}) > 1


def test_kernels_for_few_and_many_rows_agree(int4_engine: Engine, prompts: list[list[int]]) -> None:
    """The int4 kernel (1 row) and prepacked bfloat16 (12 rows) hold the same values: logits differ by rounding only."""
    model = int4_engine.model
    assert isinstance(model, Decoder)
    worst = 0.0
    for prompt in prompts[:6]:
        cache = model.new_cache()
        model.forward([Segment(cache, prompt[:-12], logit_rows=())])
        cache.commit(range(cache.scratch))
        many = model.forward([Segment(cache, prompt[-12:])])[0].logits.float()
        cache.rollback()
        few = []
        for token in prompt[-12:]:
            few.append(model.forward([Segment(cache, [token])])[0].logits.float())
            cache.commit([0])
        worst = max(worst, float((torch.cat(few) - many).abs().max()))
    assert 0.0 < worst < 1.5


def test_tokens_per_second_is_not_absurd(int4_engine: Engine, prompts: list[list[int]]) -> None:
    stats = int4_engine.generate(prompts[0], SamplingParams(max_tokens=32, ignore_eos=True)).stats
    assert stats.tokens_per_second > 3


def test_which_kernels_a_models_rows_went_through(float32_engine: Engine, int4_engine: Engine) -> None:
    """What feature folders are kept apart by, and what default trees are made for."""
    assert float32_engine.model.weight_format == "full"
    assert int4_engine.model.weight_format == "int4"
    assert (float32_engine.model.cheap_rows, int4_engine.model.cheap_rows) == (8, 4)
