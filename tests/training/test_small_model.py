"""Small models trained from scratch: the module's mathematics, its objective, boosting, and what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.loading import load_model
from outrider.errors import RunError, UsageError
from outrider.models.base import FINAL_HIDDEN, Segment
from outrider.training.batch import Batch
from outrider.training.boosting import agreements, select
from outrider.training.loop import LoopSettings, Trainer, Upkeep
from outrider.training.model_directory import check_place, write_model
from outrider.training.objective import simulated_acceptance
from outrider.training.objectives.small_model import SmallModelObjective
from outrider.training.optimizer import OptimizerSettings
from outrider.training.packing import open_corpus
from outrider.training.small_model import TrainableLlama, llama_config, principal_directions, small_config, start
from training.tiny_llamas import (
    FLOAT32,
    VOCABULARY,
    letters,
    random_llama,
    save_llama,
    target_on_disk,
    tiny_config,
    write_features,
)


def packed(*documents: list[int], prompt: int = 1, hidden: int = 4) -> Batch:
    """One row of documents; what the target thinks is for the tests to fill in."""
    tokens = torch.tensor([[token for document in documents for token in document]])
    numbers = [[number for number, document in enumerate(documents) for _ in document]]
    positions = [[place for document in documents for place in range(len(document))]]
    answers = torch.tensor(positions) >= prompt
    return Batch(
        tokens=tokens,
        answers=answers,
        documents=torch.tensor(numbers),
        positions=torch.tensor(positions),
        features={FINAL_HIDDEN: torch.zeros(*tokens.shape, hidden)},
        best=torch.full_like(tokens, -1),
        log_sum=torch.zeros(tokens.shape),
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_are_those_of_the_decoder_after_saving_and_loading(tmp_path: Path, is_tied: bool) -> None:
    module = random_llama(tiny_config(tie_embeddings=is_tied))
    loaded = load_model(str(save_llama(tmp_path / "model", module)), FLOAT32)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 35, 8], [9, 7, 9, 32, 38, 4]]
    batch = packed(*texts)
    with torch.no_grad():
        states = module(batch.tokens, batch.documents, batch.positions)
        ours = states[0] @ module.output_matrix.T
    theirs = [loaded.model.forward([Segment(loaded.model.new_cache(), text)])[0].logits for text in texts]
    torch.testing.assert_close(ours, torch.cat(theirs), atol=1e-4, rtol=1e-4)
    assert llama_config(loaded.model.config).model_dump(exclude={"method"}) == module.config.model_dump(  # type: ignore[attr-defined]
        exclude={"method"}
    )
    assert loaded.tokenizer.vocabulary() == letters().vocabulary()
    assert loaded.tokenizer.eos_ids == frozenset({0})


def test_padding_rows_are_finite() -> None:
    batch = packed([1, 2, 3])
    batch = replace(batch, documents=torch.tensor([[0, 0, -1]]))
    assert torch.isfinite(random_llama(tiny_config())(batch.tokens, batch.documents, batch.positions)).all()


def test_the_counting_language_is_predicted_one_ahead() -> None:
    """A student that says t + 1 after t is right at its first step, and one that says t or t + 2 never is."""
    text = list(range(2, 14))
    batch = packed(text)
    batch = replace(batch, best=batch.tokens + 1)
    for said, right in ((1, 1.0), (0, 0.0), (2, 0.0)):
        objective = _saying(lambda token, said=said: token + said)
        result = objective.evaluate(batch, is_training=False, progress=0.0)
        first = result.steps[0]
        assert int(first.mask.sum()) == len(text) - 1  # every token but the prompt's is a label
        assert int(first.correct.sum()) == right * (len(text) - 1)
        kept, starts = simulated_acceptance(result.steps)
        assert (kept, starts) == ((1 + objective.steps * right) * starts, len(text) - objective.steps)


def test_steps_do_not_reach_into_the_next_document() -> None:
    batch = packed([2, 3, 4], [5, 6, 7, 8])
    batch = replace(batch, best=batch.tokens + 1)
    result = _saying(lambda token: token + 1).evaluate(batch, is_training=False, progress=0.0)
    assert result.steps[1].mask.tolist() == [[True, False, False, True, True, False, False]]
    assert result.steps[1].correct.tolist() == [[True, False, False, True, True, False, False]]


def test_sampled_loss_is_the_whole_loss_on_average() -> None:
    """Few negatives, weighted, stand for all: the loss over the whole vocabulary is what their mean comes to."""
    torch.manual_seed(0)
    config = tiny_config(vocab_size=400, draft_vocab_size=400)
    module = random_llama(config, scale=0.2)
    rows = torch.randn(400, 8)
    rows[20:] *= 0.1  # the target hardly ever wants a rare token
    batch = packed([1, 5, 9, 3, 7, 2], hidden=8)
    final = torch.randn(1, 6, 8)
    batch = replace(batch, features={FINAL_HIDDEN: final}, log_sum=(final @ rows.T).logsumexp(-1))
    batch = replace(batch, best=(final @ rows.T).argmax(-1))

    def loss(negatives: int, progress: float) -> float:
        objective = SmallModelObjective(module, rows, None, torch.arange(20), negatives)
        return float(objective.evaluate(batch, True, progress).loss.detach())

    everything = loss(400, 0.0)
    sampled = torch.tensor([loss(60, number / 150) for number in range(150)])
    assert float(sampled.std()) > 0.001  # different draws
    assert abs(float(sampled.mean()) - everything) < 0.02 * everything
    assert loss(60, 0.25) == loss(60, 0.25)  # a resumed run draws the same


def test_overlap_is_one_for_a_student_that_is_the_target() -> None:
    module = random_llama(tiny_config())
    batch = packed([1, 2, 3, 4, 5])
    with torch.no_grad():
        final = module(batch.tokens, batch.documents, batch.positions)
        logits = final @ module.output_matrix.T
    batch = replace(batch, features={FINAL_HIDDEN: final}, log_sum=logits.logsumexp(-1), best=logits.argmax(-1))
    everything = torch.arange(VOCABULARY)
    objective = SmallModelObjective(module, module.output_matrix.detach(), None, everything)
    first = objective.evaluate(batch, False, 0.0).steps[0]
    assert first.overlap == pytest.approx(4.0, abs=1e-4)
    assert bool(first.correct[first.mask].all())


def test_start_keeps_what_the_target_takes_for_similar() -> None:
    torch.manual_seed(3)
    rows = torch.randn(60, 3) @ torch.randn(3, 16) + 5.0  # three directions and a common offset
    directions = principal_directions(rows, 3)
    torch.testing.assert_close(directions.T @ directions, torch.eye(3), atol=1e-5, rtol=1e-5)
    module = TrainableLlama(tiny_config(hidden_size=4, num_heads=1, num_kv_heads=1, head_dim=4, vocab_size=60))
    start(module, rows, torch.arange(60), seed=0)
    centred = rows - rows.mean(0)
    got = module.output_matrix.detach()[:, :3]
    torch.testing.assert_close(got @ got.T, centred @ centred.T, atol=1e-3, rtol=1e-3)


def test_eight_answers_are_learnt_by_heart_and_decoded(tmp_path: Path) -> None:
    target = target_on_disk(tmp_path / "target")
    corpus = open_corpus([write_features(tmp_path / "features", target)], (FINAL_HIDDEN,), 64, validation=0.0)
    rows = target.model.output_rows().float()
    config = small_config(VOCABULARY, hidden=32, layers=2, heads=2, intermediate=64, context=128)
    module = TrainableLlama(config)
    frequent = torch.arange(20)
    start(module, rows, frequent, seed=0)
    objective = SmallModelObjective(module, rows, None, frequent, negatives=8)
    settings = LoopSettings(tokens=60_000, batch_rows=4, optimizer=OptimizerSettings(learning_rate=5e-3))
    Trainer(objective, corpus, settings, Upkeep(tmp_path / "run"), {}).run()
    saved = save_llama(tmp_path / "student", module, target.tokenizer)
    student = load_model(str(saved), FLOAT32)
    assert float(agreements(corpus, [student.model], lambda done, total: None).mean()) > 0.95


def test_boosting_selects_the_answers_that_the_earlier_models_miss(tmp_path: Path) -> None:
    target = target_on_disk(tmp_path / "target")
    other = target_on_disk(tmp_path / "other", seed=5)
    corpus = open_corpus([write_features(tmp_path / "features", target, answers=9)], (FINAL_HIDDEN,), 64, 0.0)
    told: list[tuple[int, int]] = []
    exact = agreements(corpus, [target.model], lambda done, total: told.append((done, total)))
    assert exact.tolist() == [1.0] * 9
    assert told[-1] == (9, 9)
    weak = agreements(corpus, [other.model], lambda done, total: None)
    assert float(weak.mean()) < 0.5
    assert agreements(corpus, [other.model, target.model], lambda done, total: None).tolist() == [1.0] * 9
    known = torch.tensor([0.9, 0.1, 0.5, 0.8, 0.2, 0.6, 0.3, 0.7, 0.4])
    hard = [corpus.training[place] for place in (1, 4, 6, 8)]
    assert select(corpus, known).training == hard
    twice = select(corpus, known, weight=3).training
    assert twice[:9] == corpus.training
    assert all(twice.count(piece) == (3 if piece in hard else 1) for piece in corpus.training)
    with pytest.raises(UsageError, match="nothing to boost"):
        select(corpus, exact)


def test_agreement_is_counted_per_token(tmp_path: Path) -> None:
    """Against a hand count: the share of answer tokens at which the model's best token is the target's."""
    target = target_on_disk(tmp_path / "target")
    other = target_on_disk(tmp_path / "other", seed=5)
    corpus = open_corpus([write_features(tmp_path / "features", target, answers=3)], (FINAL_HIDDEN,), 64, 0.0)
    found = agreements(corpus, [other.model], lambda done, total: None)
    for piece, share in zip(corpus.training, found.tolist(), strict=True):
        text = corpus.shards[0].tokens[piece.start : piece.stop].tolist()
        logits = other.model.forward([Segment(other.model.new_cache(), text)])[0].logits
        hits = [int(logits[row].argmax()) == text[row + 1] for row in range(piece.prompt - 1, len(text) - 1)]
        assert share == pytest.approx(sum(hits) / len(hits))


def test_answers_longer_than_an_earlier_models_context_are_refused(tmp_path: Path) -> None:
    target = target_on_disk(tmp_path / "target")
    corpus = open_corpus([write_features(tmp_path / "features", target, answers=2)], (FINAL_HIDDEN,), 300, 0.0)
    with pytest.raises(UsageError, match="--row of 256"):
        agreements(corpus, [target.model], lambda done, total: None)


def test_only_empty_places_and_own_models_are_written_to(tmp_path: Path) -> None:
    module = random_llama(tiny_config())
    save_llama(tmp_path / "model", module)
    save_llama(tmp_path / "model", module)  # over one of ours
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="choose another --output"):
        check_place(tmp_path / "other")
    with pytest.raises(UsageError, match="choose another"):
        save_llama(tmp_path / "other", module)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    module = random_llama(tiny_config())
    monkeypatch.setattr("outrider.training.model_directory.save_file", full)
    with pytest.raises(RunError, match="No space left"):
        write_model(tmp_path / "model", module.config, module.state_dict(), letters(), {})
    assert list(tmp_path.iterdir()) == []


def _saying(rule: object) -> SmallModelObjective:
    """An objective whose student says ``rule(token)`` after each token."""
    module = random_llama(tiny_config(hidden_size=VOCABULARY, head_dim=10, num_kv_heads=4))
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))

    class Saying(torch.nn.Module):
        output_matrix = module.output_matrix

        def forward(self, tokens: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            said = rule(tokens).clamp(max=VOCABULARY - 1)  # type: ignore[operator]
            return torch.nn.functional.one_hot(said, VOCABULARY).float()

    rows = torch.zeros(VOCABULARY, 4)
    return SmallModelObjective(Saying(), rows, None, torch.arange(VOCABULARY), steps=3)  # type: ignore[arg-type]
