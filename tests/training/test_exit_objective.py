"""Training an early exit: the shift, the mask, the simulated chain, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.tiny_checkpoints import LLAMA, write_pretrained
from outrider.drafters.base import DraftParts
from outrider.drafters.exit_source import ExitSource, open_exit
from outrider.heads.build import new_config
from outrider.heads.exit import EarlyExit, ExitConfig
from outrider.heads.file import save_head
from outrider.models.base import FINAL_HIDDEN, LanguageModel, Segment
from outrider.models.decoder import Decoder
from outrider.models.load import open_checkpoint, resolve
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.training.batch import Batch
from outrider.training.generate import Answer, Request, answer_all
from outrider.training.objective import simulated_acceptance
from outrider.training.objectives.exit import ExitObjective, ExitOptions
from outrider.trees.token_tree import TokenTree

SIZE = 12


class Counting(ToyModel):
    """A target whose next token is the last one plus 1; states and output rows are one-hot."""

    hidden_size = SIZE

    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        rows = torch.eye(SIZE)
        return rows if tokens is None else rows[tokens]

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.eye(SIZE)[tokens]


def counting_batch(rows: list[list[list[int]]], prompt: int = 2) -> Batch:
    """Rows of documents that count; the first ``prompt`` tokens of each are a prompt. Padded with token 0."""
    length = max(sum(map(len, row)) for row in rows)
    tokens = torch.zeros((len(rows), length), dtype=torch.int64)
    documents = torch.full_like(tokens, -1)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    positions = torch.zeros_like(tokens)
    for b, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            part = slice(start, start + len(document))
            tokens[b, part] = torch.tensor(document)
            documents[b, part] = number
            positions[b, part] = torch.arange(len(document))
            answers[b, start + prompt : start + len(document)] = True
            start += len(document)
    one_hot = torch.eye(SIZE)
    best = (tokens + 1) % SIZE
    final = 20.0 * one_hot[best]
    features = {1: one_hot[tokens], FINAL_HIDDEN: final}
    return Batch(tokens, answers, documents, positions, features, best, torch.logsumexp(final, -1))


COUNTING = counting_batch([[[3, 4, 5, 6, 7], [10, 11, 0, 1]], [[0, 1, 2, 3, 4, 5], [7, 8]], [[5, 6, 7, 8, 9, 10, 11]]])


def objective(target: LanguageModel, ids: Tensor | None = None, block: int = 1, **options: object) -> ExitObjective:
    size = target.vocab_size if ids is None else len(ids)
    config = new_config("layer_skip", target, features=(block,), draft_vocab_size=size)
    assert isinstance(config, ExitConfig)
    network = EarlyExit(config)
    network.draft_ids = ids
    built = ExitObjective(network, target, ExitOptions.model_validate(options))
    built.initialise(0)
    return built


def train(one: ExitObjective, batch: Batch, steps: int, rate: float = 0.01) -> list[float]:
    optimizer = torch.optim.Adam(one.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        loss = one.evaluate(batch, True, step / steps).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# -- shift and mask ----------------------------------------------------------------------------------------------


def test_it_learns_the_very_next_token_of_a_counting_language() -> None:
    """An exit does not know x_{t+1}: a head trained with another head's shift would learn to add 2 (or 0)."""
    one = objective(Counting(vocab_size=SIZE), steps=1)
    losses = train(one, COUNTING, 150)
    assert losses[-1] < 0.1 * losses[0]
    supervised = [3 + 1, 5, 6, 11, 0, 1, 2, 3, 4, 7, 8, 9, 10]
    with torch.no_grad():
        best = one.network({1: torch.eye(SIZE)}).argmax(-1)
    assert best[supervised].tolist() == [(token + 1) % SIZE for token in supervised]


def test_positions_are_supervised_by_their_label() -> None:
    result = objective(Counting(vocab_size=SIZE), steps=3).evaluate(COUNTING, True, 0.0)
    masks = [step.mask.int().tolist() for step in result.steps]
    # documents of lengths 5 + 4; 6 + 2; 7, two prompt tokens each: row t is supervised iff token t + 1 + i is an answer
    assert masks[0] == [[0, 1, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0, 0]]
    assert masks[1] == [[1, 1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert masks[2] == [[1, 1, 0, 0, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0]]


def test_positions_that_are_not_supervised_have_no_influence() -> None:
    one = objective(Counting(vocab_size=SIZE))
    mask = one.evaluate(COUNTING, True, 0.0).steps[0].mask
    other = {
        name: torch.where(mask[..., None], state, torch.randn(state.shape)) for name, state in COUNTING.features.items()
    }
    changed = Batch(**{**{name: getattr(COUNTING, name) for name in Batch.__slots__}, "features": other})
    for is_training in (True, False):
        first, second = (one.evaluate(batch, is_training, 0.0) for batch in (COUNTING, changed))
        assert float(first.loss.detach()) == float(second.loss.detach())
        for a, b in zip(first.steps, second.steps, strict=True):
            assert torch.equal(a.correct, b.correct)


def test_a_soft_capped_targets_rows_are_capped_for_the_exit_too() -> None:
    target = Counting(vocab_size=SIZE)
    target.final_soft_cap = 0.5
    one = objective(target)
    states = {1: 30.0 * torch.eye(SIZE)}
    capped = one.network(states)
    one.network.bind(target.output_rows())
    plain = one.network(states)
    torch.testing.assert_close(capped, 0.5 * torch.tanh(plain / 0.5))
    assert float(plain.detach().abs().max()) > 0.5


def test_a_batch_without_labels_gives_a_loss_of_0_with_a_graph() -> None:
    one = objective(Counting(vocab_size=SIZE))
    result = one.evaluate(counting_batch([[[1, 2]], [[3, 4]]]), True, 0.0)
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert float(result.loss.detach()) == 0.0
    assert simulated_acceptance(result.steps) == (0, 0)


# -- what it reports ---------------------------------------------------------------------------------------------


def test_later_steps_repeat_the_outcome_of_the_following_rows() -> None:
    one = objective(Counting(vocab_size=SIZE), steps=3)
    train(one, counting_batch([[[3, 4, 5, 6, 7], [10, 11, 0, 1]]]), 40)
    steps = one.evaluate(COUNTING, False, 1.0).steps
    first = steps[0].correct
    assert 0 < int(first.sum()) < int(steps[0].mask.sum()), "both outcomes must occur"
    for i, step in enumerate(steps):
        for b in range(first.shape[0]):
            for t in range(first.shape[1]):
                expected = bool(step.mask[b, t]) and bool(first[b, t + i])
                assert bool(step.correct[b, t]) == expected


def test_overlap_is_the_mass_shared_with_the_targets_true_distribution() -> None:
    ids = torch.tensor([1, 4, 5, 9, 11])
    one = objective(Counting(vocab_size=SIZE), ids, steps=2)
    train(one, COUNTING, 20)
    steps = one.evaluate(COUNTING, False, 1.0).steps
    with torch.no_grad():
        q = torch.softmax(one.network({1: COUNTING.features[1]}), -1)
    p = torch.softmax(COUNTING.features[FINAL_HIDDEN], -1)[..., ids]
    shared = torch.minimum(p, q).sum(-1)
    for i, step in enumerate(steps):
        rows = [(b, t) for b, t in step.mask.nonzero().tolist()]
        assert step.overlap == pytest.approx(sum(float(shared[b, t + i]) for b, t in rows), rel=1e-5)


def test_tokens_outside_the_draft_vocabulary_count_as_misses_in_target_ids() -> None:
    """heads.md 4, item 7: accuracy is counted in the target's ids, and labels that cannot be guessed stay in it."""
    ids = torch.tensor([1, 4, 5, 6, 11])
    one = objective(Counting(vocab_size=SIZE), ids, steps=1)
    train(one, COUNTING, 200)
    step = one.evaluate(COUNTING, False, 1.0).steps[0]
    best = COUNTING.best
    reachable = torch.isin(best, ids)
    assert torch.equal(step.correct, step.mask & reachable)
    assert int(step.mask.sum()) > int(step.correct.sum()) > 0


# -- a real decoder ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A llama of three blocks with random weights."""
    path = tmp_path_factory.mktemp("tiny")
    write_pretrained(path, {**LLAMA, "num_hidden_layers": 3})
    plan = WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))
    return Decoder(open_checkpoint(resolve(str(path))), plan)


def own_answers(target: Decoder, count: int) -> list[Answer]:
    """Sequences of 30 tokens, 24 of them the target's own samples, with its states."""
    requests = [Request(i, [i + 1, 2 * i, 7, 3, 5, 40 - i], temperature=1.0, seed=i) for i in range(count)]
    return [
        Answer(a.request, a.tokens, {k: v.clone() for k, v in a.features.items()}, a.best, a.log_sum.clone(), True)
        for a in answer_all(target, requests, (2, FINAL_HIDDEN), frozenset(), 24)
    ]


def packed(answers: list[Answer]) -> Batch:
    """Two answers a row."""
    pairs = [answers[i : i + 2] for i in range(0, len(answers), 2)]
    tokens = torch.tensor([[t for a in pair for t in a.tokens] for pair in pairs])
    lengths = [[len(a.tokens) for a in pair] for pair in pairs]
    prompt = len(answers[0].request.prompt)
    return Batch(
        tokens=tokens,
        answers=torch.tensor([[t >= prompt for n in row for t in range(n)] for row in lengths]),
        documents=torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in lengths]),
        positions=torch.tensor([[t for n in row for t in range(n)] for row in lengths]),
        features={
            k: torch.stack([torch.cat([a.features[k] for a in pair]) for pair in pairs]) for k in (2, FINAL_HIDDEN)
        },
        best=torch.stack([torch.cat([a.best for a in pair]) for pair in pairs]).long(),
        log_sum=torch.stack([torch.cat([a.log_sum for a in pair]) for pair in pairs]),
    )


def test_it_overfits_eight_sequences_and_the_drafter_says_the_same(tiny: Decoder, tmp_path: Path) -> None:
    """The overfit gate: 95% top-1, then the stored head guesses in the drafter what it guessed in training."""
    answers = own_answers(tiny, 8)
    batch = packed(answers)
    one = objective(tiny, block=2)
    train(one, batch, 250)
    steps = one.evaluate(batch, False, 1.0).steps
    count = int(steps[0].mask.sum())
    assert count == 8 * 24
    assert int(steps[0].correct.sum()) >= 0.95 * count
    kept, positions = simulated_acceptance(steps)
    assert kept / positions > 4.5

    path = tmp_path / "exit.safetensors"
    save_head(path, one.network, dtype=torch.float32)
    text = answers[0].tokens
    tree = TokenTree(text[0])
    for depth, token in enumerate(text[1:-1]):
        tree.add(depth, token)
    cache = tiny.new_cache()
    pipeline = LogitsPipeline(SamplingParams(), tiny.vocab_size, prompt=text[:1])
    source = ExitSource("layer_skip", tiny, cache, pipeline, [], open_exit(str(path), 0, False, DraftParts(tiny)))
    with cache.speculation():
        drafted = torch.cat([source.evaluate(tree, [node]) for node in range(len(tree))])
    with torch.no_grad():
        trained = one.network({2: answers[0].features[2][:-1]})
    torch.testing.assert_close(drafted, trained, rtol=1e-3, atol=1e-2)


def test_the_simulated_chain_is_what_drafting_accepts(tiny: Decoder) -> None:
    """Blocks before the exit are exact on guesses too, so the text's own states predict every accepted chain."""
    answers = own_answers(tiny, 8)
    greedy = list(answer_all(tiny, [Request(9, [1, 2, 3])], (2, FINAL_HIDDEN), frozenset(), 40))
    one = objective(tiny, block=2)
    train(one, packed(answers), 60)
    text, prompt = greedy[0].tokens, 3
    with torch.no_grad():
        guesses = one.network({2: greedy[0].features[2].clone()}).argmax(-1).tolist()
    right = [guess == token for guess, token in zip(guesses[:-1], text[1:], strict=True)]
    assert any(right[prompt:]) and not all(right[prompt:])  # noqa: PT018
    for start in range(prompt, len(text) - 4):
        run = next((i for i in range(3) if not right[start + i]), 3)
        cache = tiny.new_cache()
        with cache.speculation():
            tiny.forward([Segment(cache, text[:start])])
            cache.commit(range(start))
        tree = TokenTree(text[start])
        pipeline = LogitsPipeline(SamplingParams(), tiny.vocab_size, prompt=text[:1])
        source = ExitSource("x", tiny, cache, pipeline, [], one.network)
        with cache.speculation():
            for depth in range(3):
                tree.add(depth, int(source.evaluate(tree, [depth])[0].argmax()))
        path = tree.tokens[1:]
        found = next((i for i in range(3) if path[i] != text[start + 1 + i]), 3)
        assert found == run


def test_rows_of_a_prompt_are_learnt_where_nobody_noted_the_best_token() -> None:
    """``--whole-text`` supervises prompts, whose best tokens feature files do not hold: they still have a loss."""
    one = objective(Counting(vocab_size=SIZE), steps=1)
    unknown = replace(COUNTING, best=torch.full_like(COUNTING.best, -1))
    known, found = (one.evaluate(batch, True, 0.0) for batch in (COUNTING, unknown))
    assert float(known.loss.detach()) > 0.0
    assert float(found.loss.detach()) == pytest.approx(float(known.loss.detach()))
    assert torch.equal(found.steps[0].correct, known.steps[0].correct)


def test_training_starts_with_the_targets_final_norm(tiny: Decoder) -> None:
    """The output rows are made for states behind the target's final norm; ones would scale every logit."""
    tiny.final_norm.copy_(torch.linspace(0.5, 1.5, tiny.hidden_size))
    one = objective(tiny)
    assert torch.equal(one.network.norm.weight.detach(), tiny.final_norm)
