"""The MTP drafter on toy models and a tiny decoder: same output as without it, and a cache of target features only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.tiny_engines import build_engine, engine_law, letters_tokenizer, random_prompts
from models.tiny_checkpoints import LLAMA, write_pretrained
from outrider.drafters.base import DraftParts
from outrider.drafters.feature_session import RecurrentHeadSession
from outrider.drafters.head_options import RecurrentHeadOptions
from outrider.drafters.mtp import MtpDrafter
from outrider.errors import IllegalCombinationError
from outrider.heads.build import untrained_head
from outrider.heads.file import save_head
from outrider.models.base import FINAL_HIDDEN, Segment
from outrider.models.decoder import Decoder
from outrider.models.load import open_checkpoint, resolve
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import GrowLimits
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind

TOY = ToyModel(vocab_size=12, order=2, seed=3)


@pytest.mark.parametrize("shape", ["chain:4", "widths:2,2,1", "best_first:8"])
def test_greedy_output_is_the_targets(shape: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = build_engine("mtp:random", shape, target=TOY)
    for prompt in random_prompts(4, 12, seed=1):
        result = engine.generate(prompt, params)
        assert result.stats.num_draft_tokens > 0
        assert result.tokens == engine.plain().generate(prompt, params).tokens


@pytest.mark.parametrize(
    ("shape", "proposal", "verifier"),
    [
        ("chain:2", ProposalKind.IID, "block"),
        ("widths:2,1", ProposalKind.WITHOUT_REPLACEMENT, "multi_step"),
        ("widths:2,1", ProposalKind.DETERMINISTIC, "sample_match"),
    ],
)
def test_the_law_above_temperature_0_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, shape: str, proposal: ProposalKind, verifier: str
) -> None:
    target = ToyModel(3, order=1, sharpness=0.9, seed=10)
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3, ignore_eos=True)
    tokenizer = letters_tokenizer(3, with_end=False)
    engine = build_engine("mtp:random", shape, proposal, verifier, target=target, tokenizer=tokenizer, max_nodes=3)
    law, accepted = engine_law(monkeypatch, engine, [0, 1], params)
    pipeline = LogitsPipeline(params, 3, prompt=[0, 1])
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*output, token): mass * float(p[token])
            for output, mass in expected.items()
            for p in [pipeline.probabilities(target.logits_after([0, 1, *output]), output)]
            for token in range(3)
            if p[token] > 0
        }
    assert accepted > 0
    assert {tokens for tokens, mass in law.items() if mass > 1e-15} == expected.keys()
    assert max(abs(law[tokens] - mass) for tokens, mass in expected.items()) < 1e-12


def tiny(path: Path) -> Decoder:
    write_pretrained(path, {**LLAMA, "num_hidden_layers": 3})
    plan = WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))
    return Decoder(open_checkpoint(resolve(str(path))), plan)


def fresh_entries(session: RecurrentHeadSession) -> torch.Tensor:
    """Keys and values of all pairs of the committed text, from one pass of the target and one of the head."""
    tokens, head = session.tokens, session.head
    states = session.target.forward([Segment(session.target.new_cache(), tokens[:-1])], (FINAL_HIDDEN,))[0].hidden
    cache = head.new_cache()
    token = session.target.embed(torch.tensor(tokens[1:])).to(head.dtype)
    head.forward(cache, token, head.fuse(dict(states)), range(len(tokens) - 1))
    cache.commit()
    return cache.entries[:, : cache.length]


@pytest.mark.parametrize("shape", ["chain:4", "widths:2,2,1"])
@pytest.mark.parametrize("is_real", [False, True])
def test_the_cache_equals_a_fresh_one_after_every_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str, is_real: bool
) -> None:
    """Invariant 4; EAGLE's known flaw (heads.md 4, item 13): the head's own guesses left in its cache."""
    target: ToyModel | Decoder = tiny(tmp_path / "tiny") if is_real else TOY
    steps = 0
    grow = RecurrentHeadSession.grow

    def checked(self: RecurrentHeadSession, limits: GrowLimits) -> TokenTree:
        nonlocal steps
        tree = grow(self, limits)
        assert self.cache.scratch == 0
        assert self.cache.length == len(self.tokens) - 1
        fresh = fresh_entries(self)
        torch.testing.assert_close(self.cache.entries[:, : self.cache.length], fresh, rtol=1e-4, atol=1e-4)
        steps += 1
        return tree

    monkeypatch.setattr(RecurrentHeadSession, "grow", checked)
    engine = build_engine("mtp:random", shape, target=target)  # type: ignore[arg-type]
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [9, 8]):
        engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0))
    assert steps > 10


@torch.inference_mode()
def test_a_guess_reads_its_parents_output_and_the_pairs_before(tmp_path: Path) -> None:
    """The drafter's second guess = the training form: pair (own output, guess 1) behind the committed pairs."""
    target = tiny(tmp_path / "tiny")
    head = untrained_head("mtp", target, seed=4)
    save_head(tmp_path / "mtp.safetensors", head, dtype=torch.float32)
    options = RecurrentHeadOptions(head=str(tmp_path / "mtp.safetensors"))
    drafter = MtpDrafter(options, Chain(ChainOptions(length=2)), DraftParts(target))
    session = drafter.new_session()
    text = [3, 1, 4, 1, 5, 9]
    session.tokens = text
    session._waiting = [dict(target.forward([Segment(target.new_cache(), text[:-1])], drafter.hidden)[0].hidden)]
    session._extend()
    first = session._root_output
    assert first is not None
    guess = int((first @ target.output_rows().T).argmax())
    token = target.embed(torch.tensor([guess]))
    second = session.head.forward(session.cache, token, first, [len(text) - 1])

    states = target.forward([Segment(target.new_cache(), text[:-1])], (FINAL_HIDDEN,))[0].hidden[FINAL_HIDDEN]
    whole = session.head.new_cache()
    tokens = target.embed(torch.tensor([*text[1:], guess]))
    both = session.head.forward(whole, tokens, torch.cat([states, first]), range(len(text)))
    torch.testing.assert_close(both[-2:], torch.cat([first, second]), rtol=1e-4, atol=1e-5)


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mtp.safetensors"
    save_head(path, untrained_head("mtp", TOY))
    with pytest.raises(IllegalCombinationError, match="vocabulary 12, 'toy' has 13"):
        build_engine(f"mtp:{path}", target=ToyModel(vocab_size=13))
