"""Retrieval from a store: its guesses, its refusals, and exactness with a store of the toy target's own texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.tiny_engines import build_engine, letters_tokenizer, random_prompts
from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.drafters.base import DraftBudget, DraftContext, DraftParts, DraftSession, Observation
from outrider.drafters.datastore import Datastore, DatastoreOptions
from outrider.drafters.datastore_file import FILE_NAME, save_store
from outrider.drafters.datastore_index import StoreHeader, build_store
from outrider.engine.engine import Engine
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.text.tokenizer import Tokenizer
from outrider.text.vocabulary import vocabulary_hash
from outrider.trees.shapes.base import Shape
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind

MODEL = ToyModel(100)
BUDGET = DraftBudget(64, 64)
CHAIN = Chain(ChainOptions(length=8))


TOKENIZER = letters_tokenizer(12)


def stored(path: Path, documents: list[list[int]], vocab_size: int = 100, tokenizer: Tokenizer = TOKENIZER) -> str:
    header = StoreHeader(vocab_size, vocabulary_hash(tokenizer), "tiny", ())
    save_store(build_store(header, documents), path / FILE_NAME)
    return str(path)


def started(path: str, prompt: list[int], shape: Shape = CHAIN, **options: int) -> DraftSession:
    chosen = DatastoreOptions.model_validate({"path": path, **options})
    session = Datastore(chosen, shape, DraftParts(MODEL)).new_session()
    session.begin(
        DraftContext(prompt, LogitsPipeline(SamplingParams(), 100), SeededStream(0), MODEL, MODEL.new_cache())
    )
    return session


def guesses(session: DraftSession, budget: DraftBudget = BUDGET) -> list[int]:
    return session.propose(budget).tree.tokens[1:]


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


# -- guesses -----------------------------------------------------------------------------------------------------


def test_continues_the_longest_match(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3, 50, 51, 52], [9, 2, 3, 60], [8, 2, 3, 60]])
    assert guesses(started(path, [7, 1, 2, 3])) == [50, 51, 52]
    assert guesses(started(path, [7, 1, 2, 3], max_match=2))[0] == 60
    assert guesses(started(path, [7, 2, 3])) == [60]
    assert set(started(path, [2, 3]).propose(BUDGET).tree.sources[1:]) == {"datastore"}


def test_a_miss_gives_no_guesses(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3, 4]])
    assert guesses(started(path, [5, 6])) == []
    assert guesses(started(path, [6, 1])) == []
    assert guesses(started(path, [6, 1], min_match=1)) == [2, 3, 4]
    assert guesses(started(path, [3, 4])) == []


def test_no_guess_runs_into_another_document(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3], [4, 5, 6]])
    assert guesses(started(path, [1, 2])) == [3]
    assert guesses(started(path, [3, 4])) == []


def test_continuations_are_merged_by_frequency(tmp_path: Path) -> None:
    class Recorder(Widths):
        def grow(self, root_token, source, limits):  # type: ignore[no-untyped-def]
            (candidates,) = source.candidates(TokenTree(root_token), [0])
            assert list(candidates.tokens) == [20, 10]
            # Of three occurrences and the text's end, whose continuation is unknown.
            assert list(candidates.scores) == [2 / 4, 1 / 4]
            return super().grow(root_token, source, limits)

    path = stored(tmp_path, [[1, 2, 10, 11], [1, 2, 20, 21], [1, 2, 20, 22], [20, 23]])
    tree = started(path, [1, 2], Recorder(WidthsOptions(widths=(3, 2)))).propose(BUDGET).tree
    assert paths(tree) == {(20,), (10,), (20, 21), (20, 22), (10, 11)}


def test_observed_tokens_are_looked_up(tmp_path: Path) -> None:
    session = started(stored(tmp_path, [[1, 2, 3, 4, 5]]), [9])
    assert guesses(session) == []
    session.observe(Observation([2, 3]))
    assert guesses(session) == [4, 5]


def test_the_budget_limits_the_tree(tmp_path: Path) -> None:
    session = started(stored(tmp_path, [list(range(1, 30))]), [1, 2])
    assert guesses(session) == list(range(3, 11))
    assert guesses(session, DraftBudget(2, 64)) == [3, 4]
    assert guesses(session, DraftBudget(64, 1)) == [3]
    assert guesses(session, DraftBudget(0, 64)) == []


# -- refusals ----------------------------------------------------------------------------------------------------


def test_a_path_is_needed() -> None:
    with pytest.raises(InvalidOptionError, match="give datastore:FILE"):
        build_engine("datastore")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"no datastore at '.*nowhere'; build one"):
        build_engine(f"datastore:{tmp_path / 'nowhere'}")


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """U69, U71: the spelling of every id decides, not the size of the model's head."""
    path = stored(tmp_path, [[1, 2]], 12)
    with pytest.raises(IllegalCombinationError, match="build it again with --model"):
        build_engine(f"datastore:{path}", target=ToyModel(13), tokenizer=letters_tokenizer(13))
    padded = build_engine(f"datastore:{path}", target=ToyModel(16), tokenizer=letters_tokenizer(12))
    assert padded.generate([1], SamplingParams(max_tokens=3)).tokens


def test_a_token_beyond_the_targets_head_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, [[99]])
    with pytest.raises(IllegalCombinationError, match="build it again with --model"):
        Datastore(DatastoreOptions(path=path), CHAIN, DraftParts(ToyModel(98)))


@pytest.mark.parametrize("options", [{"min_match": 17}, {"max_match": 65}, {"hits": 0}, {"file": "x"}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DatastoreOptions.model_validate(options)


# -- exactness ---------------------------------------------------------------------------------------------------


def texts_of(engine: Engine, count: int) -> list[list[int]]:
    """The target's own greedy texts: a store in which guesses are often right."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = random_prompts(count, engine.model.vocab_size, seed=5)
    return [[*prompt, *engine.generate(prompt, params).tokens] for prompt in prompts]


@pytest.mark.parametrize("shape", ["chain:6", "widths:3,2,1"])
def test_greedy_output_is_plain(tmp_path: Path, shape: str) -> None:
    """Invariant 1, and guesses are really accepted."""
    plain = build_engine("none")
    path = stored(tmp_path, texts_of(plain, 12), vocab_size=12)
    engine = build_engine(f"datastore:{path}", shape)
    accepted = 0
    for params in (
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, ignore_eos=True, frequency_penalty=0.4),
    ):
        for prompt in random_prompts(8, 12):
            result = engine.generate(prompt, params)
            assert result.tokens == plain.generate(prompt, params).tokens
            assert max(record.drafted for record in result.records) <= 15
            accepted += result.stats.num_accepted_tokens
    assert accepted > 40


@pytest.mark.parametrize("max_nodes", [0, 1, 3])
def test_the_node_budget_is_kept(tmp_path: Path, max_nodes: int) -> None:
    plain = build_engine("none")
    path = stored(tmp_path, texts_of(plain, 12), vocab_size=12)
    engine = build_engine(f"datastore:{path}", "widths:3,2,1", max_nodes=max_nodes)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for prompt in random_prompts(4, 12):
        result = engine.generate(prompt, params)
        assert result.tokens == plain.generate(prompt, params).tokens
        assert max(record.drafted for record in result.records) <= max_nodes


@pytest.mark.parametrize("verifier", ["multi_step", "sample_match"])
@pytest.mark.parametrize("shape", ["chain:2", "widths:2,1"])
def test_the_law_at_temperature_1_is_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, verifier: str
) -> None:
    """Invariant 2: every random outcome of prefill and steps, end to end, on a vocabulary of 3."""
    size, prompt = 3, [0, 1]
    params = SamplingParams(temperature=1.0, max_tokens=4, frequency_penalty=0.3)
    target = ToyModel(size, order=1, sharpness=0.9, seed=10)
    tokenizer = letters_tokenizer(size, with_end=False)
    path = stored(tmp_path, [[0, 1, 2, 0, 1, 1], [1, 2, 0, 2], [0, 2, 1]], size, tokenizer)
    engine = build_engine(
        f"datastore:{path},min_match=1", shape, ProposalKind.DETERMINISTIC, verifier, target=target, tokenizer=tokenizer
    )
    law: dict[tuple[int, ...], float] = {}
    accepted: set[int] = set()

    def run(stream: EnumeratingStream) -> tuple[int, ...]:
        monkeypatch.setattr("outrider.engine.engine.SeededStream", lambda seed: stream)
        result = engine.generate(prompt, params)
        accepted.update(record.accepted for record in result.records)
        return result.tokens

    for tokens, probability in outcomes(run):
        law[tokens] = law.get(tokens, 0.0) + probability
    pipeline = LogitsPipeline(params, size, prompt=prompt)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        rows = {output: pipeline.probabilities(target.logits_after([*prompt, *output]), output) for output in expected}
        expected = {(*output, t): expected[output] * float(p[t]) for output, p in rows.items() for t in range(size)}
    assert accepted >= {0, 1, 2}
    assert max(abs(law[tokens] - mass) for tokens, mass in expected.items()) < 1e-12
