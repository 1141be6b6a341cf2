"""EAGLE drafters on whole engines: plain text for every shape, the target's law, reduced vocabularies, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.tiny_engines import build_engine, distance_from_plain, letters_tokenizer, random_prompts
from heads.tiny_heads import fill, head_file, head_for
from outrider.drafters.base import DraftParts
from outrider.drafters.feature_session import RecurrentHeadDrafter, RecurrentHeadSession
from outrider.drafters.feature_source import DraftVocabulary
from outrider.drafters.head_options import check_head, open_head
from outrider.engine.engine import Engine
from outrider.engine.registry import SHAPES, load_class
from outrider.errors import IllegalCombinationError, InvalidOptionError, ModelFileError
from outrider.heads.build import new_config
from outrider.heads.file import save_head
from outrider.heads.registry import network_class
from outrider.models.base import LanguageModel, Segment
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import RankedChildren
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime

METHODS = ["eagle", "eagle3"]
TARGET = ToyModel(vocab_size=12, order=2, seed=3)
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = random_prompts(2, 12, seed=7)


def drafter_of(engine: Engine, regime: Regime = Regime.GREEDY) -> RecurrentHeadDrafter:
    drafter = engine._lanes[regime].drafter
    assert isinstance(drafter, RecurrentHeadDrafter)
    return drafter


# -- greedy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, "static:eagle_25", "widths:3,2,2", "best_first:60,preset=eagle2"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_for_every_shape(tmp_path: Path, method: str, shape: str) -> None:
    """Invariant 1, with a reduced vocabulary, penalties and a forbidden token."""
    path = head_file(tmp_path / "head", method, TARGET, range(1, 12, 2), seed=5)
    engine = build_engine(f"{method}:{path}", shape)
    for prompt, more in zip(PROMPTS, ({}, {"repetition_penalty": 1.3, "logit_bias": {3: -9.0}}), strict=True):
        params = PARAMS.model_copy(update=more)
        result = engine.generate(prompt, params)
        assert result.tokens == engine.plain().generate(prompt, params).tokens
        assert result.stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_default_shape_is_eagle_2s(method: str) -> None:
    shape = build_engine(f"{method}:random").describe()["shape"]
    assert shape.startswith("best_first:")
    assert "budget=16" in shape
    assert "expand=level" in shape


@pytest.mark.parametrize("method", METHODS)
def test_guesses_are_the_heads_own_best_tokens(tmp_path: Path, method: str) -> None:
    """A chain's guesses, from the network by hand: argmax, then the next pair from its own output and that token."""
    path = head_file(tmp_path / "head", method, TARGET, range(1, 12, 2), seed=5)
    engine = build_engine(f"{method}:{path}", "chain:3")
    stream = engine.stream([3, 4, 5, 6, 7], PARAMS)
    tokens = [3, 4, 5, 6, 7, *next(stream).tokens]
    record = next(stream).record
    assert record is not None
    head = drafter_of(build_engine(f"{method}:{path}", "chain:3")).head
    states = TARGET.forward([Segment(TARGET.new_cache(), tokens[:-1])], head.config.features)[0].hidden
    cache, found = head.new_cache(), list(tokens)
    embedded = TARGET.embed(torch.tensor(tokens[1:])).float()
    output = head.forward(cache, embedded, head.fuse(states), range(len(tokens) - 1))[-1:]
    for _ in range(3):
        best = int(head.network.logits(output).argmax())
        found.append(2 * best + 1)
        position = [len(found) - 2]
        output = head.forward(
            cache, TARGET.embed(torch.tensor(found[-1:])).float(), head.network.recur(output), position
        )
    assert record.tokens[1:] == tuple(found[len(tokens) :])


def test_padding_tokens_of_the_target_are_never_guessed(tmp_path: Path) -> None:
    """The tokenizer knows ten tokens, the output matrix and the head's vocabulary two more."""
    for ids in (None, [1, 4, 7, 9, 10, 11]):
        path = head_file(tmp_path / "head", "eagle3", TARGET, ids, seed=5)
        engine = build_engine(f"eagle3:{path}", "widths:4,3", tokenizer=letters_tokenizer(10))
        for params in (PARAMS, SamplingParams(temperature=2.0, seed=1, max_tokens=16, ignore_eos=True)):
            result = engine.generate([3, 4], params)
            drafted = {token for record in result.records for token in record.tokens[1:]}
            assert drafted <= set(range(10)) & set(ids or range(12))
            assert len(drafted) > 2


# -- the law above temperature 0 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "verifier"),
    [
        (ProposalKind.DETERMINISTIC, "best_first:3,preset=eagle2", "multi_step"),
        (ProposalKind.DETERMINISTIC, "static:0/1/0.0", "sample_match"),
        (ProposalKind.IID, "widths:2,1", "multi_step"),
        (ProposalKind.IID, "chain:2", "block"),
        (ProposalKind.WITHOUT_REPLACEMENT, "widths:2,1", "multi_step"),
        (ProposalKind.WITHOUT_REPLACEMENT, "static:0/1/0.0", "multi_step"),
    ],
)
@pytest.mark.parametrize("draft_ids", [[0, 2], [1]], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_the_law_is_the_targets_with_a_reduced_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    draft_ids: list[int],
    kind: ProposalKind,
    shape: str,
    verifier: str,
) -> None:
    """Invariant 2 and heads.md section 4, item 20: tokens that the head cannot guess keep their probability."""
    target = ToyModel(3, order=1, sharpness=0.9, seed=10)
    tokenizer = letters_tokenizer(3, with_end=False)
    path = head_file(tmp_path / "head", method, target, draft_ids, seed=3)
    engine = build_engine(f"{method}:{path}", shape, kind, verifier, target=target, tokenizer=tokenizer, max_nodes=3)
    levels = 1 if kind is ProposalKind.IID and shape == "widths:2,1" else 2  # what enumerates in a second
    params = SamplingParams(temperature=0.9, max_tokens=levels + 2)
    far, accepted = distance_from_plain(monkeypatch, engine, [0, 1], params)
    assert accepted == levels
    assert far < 1e-12


def test_a_distribution_that_is_not_the_one_drawn_from_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted: q is noted as spread over the target's vocabulary where the head draws from its own two tokens."""
    add_row = TokenTree.add_row
    monkeypatch.setattr(TokenTree, "add_row", lambda self, q: add_row(self, torch.full_like(q, 1 / 3)))
    case = (ProposalKind.IID, "chain:2", "multi_step")
    with pytest.raises(AssertionError, match="e-12"):
        test_the_law_is_the_targets_with_a_reduced_vocabulary(monkeypatch, tmp_path, "eagle3", [0, 2], *case)


# -- the draft vocabulary ------------------------------------------------------------------------------------------


def test_logits_are_spread_over_the_targets_tokens() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = DraftVocabulary(torch.tensor([1, 4, 6]), 6).spread(rows)
    minus = -torch.inf
    assert found.tolist() == [[minus, 1.0, minus, minus, 2.0, minus], [minus, 4.0, minus, minus, 5.0, minus]]
    assert DraftVocabulary(None, 2).spread(rows).tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_children_get_the_targets_ids() -> None:
    def children(tokens: list[int]) -> RankedChildren:
        ones: NDArray[np.float64] = np.ones(len(tokens))
        return RankedChildren(np.zeros(len(tokens), dtype=np.int64), np.array(tokens), ones)

    assert DraftVocabulary(torch.tensor([1, 4, 6]), 9).named(children([2, 0])).tokens.tolist() == [6, 1]
    assert DraftVocabulary(None, 9).named(children([2, 0])).tokens.tolist() == [2, 0]


# -- as a member -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter",
    [
        "ensemble:eagle3:random@widths:2,2+ngram@chain:3",
        "ensemble:(eagle:random@chain:3)+(eagle3:random@widths:2,1)+layer_skip:2@chain:2",
        "hybrid:ngram@chain:3+(eagle3:random@chain:2)",
        "cascade:cheap=eagle:random",
        "cascade:cheap=eagle3:random",
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_members_see_hidden_states_and_sessions_go_on(drafter: str, temperature: float) -> None:
    """States are passed on under every name that a member asks for; a chat's turns keep its pairs."""
    engine = build_engine(drafter)
    session, text = engine.new_session(), list(PROMPTS[0])
    lane = engine._lanes[Regime.SAMPLED if temperature else Regime.GREEDY]
    for turn in range(3):
        params = SamplingParams(temperature=temperature, seed=turn, max_tokens=9, ignore_eos=True)
        result = engine.generate(text, params, session)
        assert result.tokens == engine.generate(text, params).tokens
        if not temperature:
            assert result.tokens == engine.plain().generate(text, params).tokens
        text += [*result.tokens, 3 + turn]
        heads = [one for one in member_sessions(session.drafts[lane.drafter]) if isinstance(one, RecurrentHeadSession)]
        assert heads
        for head in heads:
            assert head.first == 0
            assert head.known == len(text) - 2
            assert head.reusable(text) == len(text) - 2


def member_sessions(session: Any) -> list[Any]:
    return list(session.members) if hasattr(session, "members") else [session.cheap]


@pytest.mark.parametrize(
    "drafter",
    ["ensemble:(eagle3:random@chain:2)+ngram", "hybrid:ngram+(eagle3:random@chain:2)", "cascade:eagle3:random"],
)
def test_the_target_keeps_no_entry_that_a_member_must_see(drafter: str) -> None:
    """A turn that leaves the text before its end: the head's pairs go on without a gap."""
    engine = build_engine(drafter, target=TARGET)
    session = engine.new_session()
    text = [3, 4, 5, 6, 7, *engine.generate([3, 4, 5, 6, 7], PARAMS, session).tokens]
    engine.generate([*text[:9], (text[9] + 1) % 12, 2], PARAMS, session)
    whole = session.drafts[engine.lane(Regime.GREEDY).drafter]
    heads = [one for one in (*getattr(whole, "members", ()), getattr(whole, "cheap", None)) if one is not None]
    found = [head for head in heads if isinstance(head, RecurrentHeadSession)]
    assert [(head.first, head.known) for head in found] == [(0, 10 + PARAMS.max_tokens)]


def test_the_law_of_an_ensemble_with_a_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = ToyModel(2, order=1, sharpness=0.9, seed=10)
    tokenizer = letters_tokenizer(2, with_end=False)
    drafter = "ensemble:eagle3:random@widths:1,1+layer_skip:2@widths:2"
    engine = build_engine(drafter, target=target, tokenizer=tokenizer, max_nodes=4)
    params = SamplingParams(temperature=1.0, max_tokens=3)
    far, accepted = distance_from_plain(monkeypatch, engine, [0, 1], params)
    assert accepted > 0
    assert far < 1e-12


# -- which head ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_no_head_ships_for_a_toy(method: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"no {method} head ships for 'toy'; train one with 'outrider train"):
        build_engine(method)
    with pytest.raises(InvalidOptionError, match=r"no head file 'missing\.safetensors'"):
        build_engine(f"{method}:missing.safetensors")
    assert load_class("drafter", method).Options().head == "auto"


def test_a_file_of_another_method_or_damage_is_refused(tmp_path: Path) -> None:
    path = head_file(tmp_path / "head", "eagle", TARGET)
    with pytest.raises(ModelFileError, match="is a head for --drafter eagle, not eagle3"):
        build_engine(f"eagle3:{path}")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelFileError, match="cannot read the head"):
        build_engine(f"eagle:{path}")


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("eagle", {"hidden_size": 9}, "hidden size 9, 'toy' has 8"),
        ("eagle3", {"vocab_size": 13, "draft_vocab_size": 13}, "vocabulary 13, 'toy' has 12"),
        ("eagle3", {"features": (1, 2, 4)}, "reads the input of block 4, 'toy' has blocks 0 to 3"),
        ("eagle3", {"features": (-1, 2)}, "reads the input of block -1"),
        ("eagle", {"features": ("last",)}, "reads the input of block last"),
        ("eagle", {"tokenizer": "other"}, "another tokenizer"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, method: str, fields: dict[str, object], message: str
) -> None:
    """heads.md section 4, item 9."""
    network = fill(network_class(method)(new_config(method, TARGET, **fields)), 0)  # type: ignore[arg-type]
    save_head(tmp_path / "head", network)
    with pytest.raises(IllegalCombinationError, match=message):
        build_engine(f"{method}:{tmp_path / 'head'}")


def test_a_head_of_another_fine_tune_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = head_for("eagle", TARGET)
    network.config = network.config.model_copy(update={"target": "a" * 24})
    check_head(network, DraftParts(TARGET), "here")  # a toy has no fingerprint to compare
    monkeypatch.setattr("outrider.drafters.head_options.fingerprint", lambda target: "b" * 24)
    with pytest.raises(IllegalCombinationError, match=r"trained on a target with fingerprint a+, 'toy' has b+"):
        check_head(network, DraftParts(TARGET), "here")


def test_a_head_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head_file(tmp_path / "head", "eagle", TARGET)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_head("eagle", "~/head", DraftParts(TARGET)).config.method == "eagle"


def test_shared_rows_are_those_of_the_draft_vocabulary_and_capped_as_the_targets(tmp_path: Path) -> None:
    class Capped(ToyModel):
        final_soft_cap = 3.0

    target: LanguageModel = Capped(vocab_size=12, order=2, seed=3)
    path = head_file(tmp_path / "head", "eagle", TARGET, [1, 5, 6])
    network = open_head("eagle", str(path), DraftParts(target))
    state = torch.randn((2, 8), dtype=torch.float64)
    products = state @ target.output_rows(torch.tensor([1, 5, 6])).T
    torch.testing.assert_close(network.target_logits(state), 3.0 * torch.tanh(products / 3.0))


def test_a_budget_of_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without guesses runs no row of the head."""
    engine = build_engine("eagle3:random", max_nodes=0)
    monkeypatch.setattr("outrider.heads.cached.CachedHead.forward", None)
    assert engine.generate([3, 4], PARAMS).tokens == engine.plain().generate([3, 4], PARAMS).tokens
