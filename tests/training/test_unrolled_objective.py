"""The recurrent heads' objectives against one-position-at-a-time evaluation in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.toy import ToyModel
from outrider.training.batch import Batch
from outrider.training.objective import simulated_acceptance
from outrider.training.objectives.unrolled import (
    Eagle3Objective,
    Eagle3Options,
    EagleObjective,
    EagleOptions,
    MtpObjective,
    MtpOptions,
    UnrolledObjective,
    UnrolledOptions,
)
from training.unrolled_cases import documents_of, make_network, random_batch, slow_outputs

TARGET = ToyModel(vocab_size=16)
DRAFT = torch.tensor([0, 1, 3, 4, 6, 7, 9, 10, 11, 14])
ROWS = (((3, 5), (2, 6)), ((4, 7), (1, 2)))

OBJECTIVES: dict[str, tuple[type[UnrolledObjective], UnrolledOptions]] = {
    "eagle3": (Eagle3Objective, Eagle3Options(steps=3)),
    "eagle": (EagleObjective, EagleOptions()),
    "mtp": (MtpObjective, MtpOptions(steps=3, loss="soft_cross_entropy", attention="unrolled")),
}
METHODS = list(OBJECTIVES)


def make(method: str, draft_ids: Tensor | None = DRAFT) -> UnrolledObjective:
    cls, options = OBJECTIVES[method]
    return cls(make_network(method, TARGET, draft_ids), TARGET, options)


@torch.no_grad()
def slow_result(objective: UnrolledObjective, batch: Batch) -> tuple[list[Tensor], list[int], list[int], list[float]]:
    """Per step: mean loss, supervised positions, right guesses, overlap."""
    draft = objective.network.draft_ids
    assert draft is not None
    steps = objective.options.steps
    losses: list[list[Tensor]] = [[] for _ in range(steps)]
    count, right, kept = [0] * steps, [0] * steps, [0.0] * steps
    rows = TARGET.output_rows()
    for document in documents_of(batch):
        for t in range(document.tokens.shape[1]):
            outputs = slow_outputs(objective.network, TARGET, document, t, steps, is_unrolled=True)
            for i, output in enumerate(outputs):
                label = t + 2 + i
                if label >= document.tokens.shape[1] or not bool(document.answers[0, label]):
                    continue
                logits = objective.network.logits(output)
                final = document.features["final"][0, label - 1]
                truth = (rows @ final).softmax(0)
                best = int(truth.argmax())
                count[i] += 1
                right[i] += int(draft[logits.argmax()]) == best
                kept[i] += float(torch.minimum(logits.softmax(0), truth[draft]).sum())
                if best in draft.tolist():
                    loss = -((rows[draft] @ final).softmax(0) * logits.log_softmax(0)).sum()
                    if objective.method == "eagle":
                        loss = 0.1 * loss + F.smooth_l1_loss(output, final)
                    losses[i].append(loss)
    return [torch.stack(one).mean() for one in losses], count, right, kept


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_counts_equal_those_of_single_positions(method: str) -> None:
    objective, batch = make(method), random_batch(TARGET, ROWS)
    losses, count, right, kept = slow_result(objective, batch)
    result = objective.evaluate(batch, is_training=False, progress=1.0)
    assert [int(step.mask.sum()) for step in result.steps] == count
    assert [int(step.correct.sum()) for step in result.steps] == right
    torch.testing.assert_close(torch.stack([step.loss for step in result.steps]), torch.stack(losses))
    # log_sum is kept in float32
    assert [step.overlap for step in result.steps] == pytest.approx(kept, rel=1e-5)
    weights = objective.step_weights(len(losses))
    torch.testing.assert_close(result.loss, sum(w * x for w, x in zip(weights, losses, strict=True)))


@pytest.mark.parametrize("method", METHODS)
def test_packed_rows_give_what_each_document_gives_alone(method: str) -> None:
    objective, batch = make(method), random_batch(TARGET, ROWS, seed=3)
    packed = objective.evaluate(batch, is_training=False, progress=1.0)
    alone = [objective.evaluate(document, is_training=False, progress=1.0) for document in documents_of(batch)]
    for step, result in enumerate(packed.steps):
        parts = [one.steps[step] for one in alone]
        assert int(result.correct.sum()) == sum(int(part.correct.sum()) for part in parts)
        assert result.overlap == pytest.approx(sum(part.overlap for part in parts))
        in_loss = [_in_loss(objective, document, step) for document in documents_of(batch)]
        total = sum(count * part.loss for count, part in zip(in_loss, parts, strict=True))
        torch.testing.assert_close(result.loss * sum(in_loss), total)


def _in_loss(objective: UnrolledObjective, document: Batch, step: int) -> int:
    labels = torch.arange(min(2 + step, document.tokens.shape[1]), document.tokens.shape[1])
    best = document.best[0, labels - 1]
    return int((document.answers[0, labels] & (objective.teacher.draft_index(best) >= 0)).sum())


@pytest.mark.parametrize("method", METHODS)
def test_training_and_evaluation_agree_without_noise(method: str) -> None:
    cls, options = OBJECTIVES[method]
    quiet = cls(make_network(method, TARGET, DRAFT), TARGET, options.model_copy(update={"noise": 0.0}))
    batch = random_batch(TARGET, ROWS, seed=4)
    training, evaluation = (quiet.evaluate(batch, is_training=flag, progress=1.0) for flag in (True, False))
    torch.testing.assert_close(training.loss, evaluation.loss)
    for one, other in zip(training.steps, evaluation.steps, strict=True):
        assert torch.equal(one.correct, other.correct)
        assert torch.equal(one.mask, other.mask)
        assert math.isnan(one.overlap)
    assert sum(evaluation.parts.values()) == pytest.approx(float(evaluation.loss.detach()))


@pytest.mark.parametrize("method", METHODS)
def test_what_no_supervised_position_may_see_changes_nothing(method: str) -> None:
    objective, batch = make(method), random_batch(TARGET, (((3, 5),), ((2, 3),)), seed=5)
    before = _gradient(objective, batch)
    generator = torch.Generator().manual_seed(9)
    # padding, and the last token's features: no label is behind them
    hidden = torch.zeros_like(batch.answers)
    hidden[0, 7] = hidden[1, 4:] = True
    noise = {name: torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in batch.features.items()}
    features = {name: torch.where(hidden[..., None], noise[name], x) for name, x in batch.features.items()}
    tokens = torch.where(batch.documents < 0, 7, batch.tokens)
    after = _gradient(objective, replace(batch, features=features, tokens=tokens, best=batch.best * ~hidden))
    torch.testing.assert_close(after, before)


def _gradient(objective: UnrolledObjective, batch: Batch) -> Tensor:
    torch.manual_seed(0)  # of the noise
    loss = objective.evaluate(batch, is_training=False, progress=1.0).loss
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, objective.parameters())])


def test_positions_outside_the_draft_vocabulary_are_misses_without_a_loss() -> None:
    objective, batch = make("eagle3"), random_batch(TARGET, ROWS, seed=6)
    step = objective.evaluate(batch, is_training=True, progress=1.0).steps[0]
    best = torch.nn.functional.pad(batch.best[:, 1:], (0, 1))
    outside = step.mask & ~torch.isin(best, DRAFT)
    assert outside.any()
    assert not step.correct[outside].any()
    doubled = replace(batch, features={**batch.features, "final": batch.features["final"].clone()})
    b, t = outside.nonzero()[0].tolist()
    doubled.features["final"][b, t + 1] *= -1.0  # what the teacher says there is never asked
    network_reads_final = replace(doubled, best=batch.best)
    other = Eagle3Objective(make_network("eagle3", TARGET, DRAFT, features=(1, 2)), TARGET, Eagle3Options())
    torch.testing.assert_close(
        other.evaluate(network_reads_final, True, 1.0).loss, other.evaluate(batch, True, 1.0).loss
    )


@pytest.mark.parametrize("loss", ["kl", "tv", "nla", "lk_hybrid", "hard_cross_entropy", "soft_cross_entropy"])
def test_every_loss_reaches_every_parameter(loss: str) -> None:
    for method in METHODS:
        cls, options = OBJECTIVES[method]
        objective = cls(make_network(method, TARGET, DRAFT), TARGET, options.model_copy(update={"loss": loss}))
        objective.evaluate(random_batch(TARGET, ROWS, seed=7), is_training=True, progress=1.0).loss.backward()
        for name, parameter in objective.module.named_parameters():
            assert parameter.grad is not None, (method, name)
            assert bool(parameter.grad.isfinite().all()), (method, name)
            assert bool((parameter.grad != 0).any()), (method, name)


def test_gradients_equal_finite_differences() -> None:
    objective, batch = make("eagle3"), random_batch(TARGET, ROWS, seed=8)
    gradient = _gradient(objective, batch)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    losses = []
    for sign in (1.0, -1.0):
        _move(objective, sign * 1e-6 * direction)
        losses.append(float(objective.evaluate(batch, is_training=False, progress=1.0).loss.detach()))
        _move(objective, -sign * 1e-6 * direction)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float(gradient @ direction), rel=1e-5)


def _move(objective: UnrolledObjective, by: Tensor) -> None:
    start = 0
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += by[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()


def test_hard_labels_are_the_texts_own_tokens() -> None:
    options = MtpOptions(steps=2)
    objective = MtpObjective(make_network("mtp", TARGET, DRAFT), TARGET, options)
    (document,) = documents_of(random_batch(TARGET, (((2, 6),),), seed=2))
    losses = []
    for i in range(2):
        rows = []
        for t in range(8 - 2 - i):
            label = int(document.tokens[0, t + 2 + i])
            if document.answers[0, t + 2 + i] and label in DRAFT.tolist():
                logits = objective.network.logits(slow_outputs(objective.network, TARGET, document, t, 2, False)[i])
                rows.append(-logits.log_softmax(0)[DRAFT.tolist().index(label)])
        losses.append(torch.stack(rows).mean())
    result = objective.evaluate(document, is_training=True, progress=1.0)
    torch.testing.assert_close(torch.stack([step.loss for step in result.steps]), torch.stack(losses))
    torch.testing.assert_close(result.loss, losses[0] / 1.6 + losses[1] * 0.6 / 1.6)


def test_steps_grow_during_the_warm_up() -> None:
    options = Eagle3Options(steps=3, k_warmup=0.3)
    objective = Eagle3Objective(make_network("eagle3", TARGET, DRAFT), TARGET, options)
    batch = random_batch(TARGET, ROWS)
    at = {
        p: len(objective.evaluate(batch, is_training=True, progress=p).steps) for p in (0.0, 0.05, 0.15, 0.25, 0.3, 1)
    }
    assert list(at.values()) == [1, 1, 2, 3, 3, 3]
    assert len(objective.evaluate(batch, is_training=False, progress=0.0).steps) == 3


def test_a_batch_without_labels_has_loss_zero_and_no_gradient() -> None:
    for method in METHODS:
        objective = make(method)
        batch = random_batch(TARGET, (((5, 0),),))
        result = objective.evaluate(batch, is_training=True, progress=1.0)
        result.loss.backward()
        assert float(result.loss.detach()) == 0.0
        assert simulated_acceptance(result.steps) == (0, 0)
        assert all(p.grad is None or not p.grad.any() for p in objective.parameters())


def test_noise_is_for_training_only_and_follows_torchs_generator() -> None:
    objective, batch = make("eagle"), random_batch(TARGET, ROWS)
    torch.manual_seed(1)
    first = objective.evaluate(batch, is_training=True, progress=1.0).loss
    second = objective.evaluate(batch, is_training=True, progress=1.0).loss
    torch.manual_seed(1)
    again = objective.evaluate(batch, is_training=True, progress=1.0).loss
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    quiet = [objective.evaluate(batch, is_training=False, progress=1.0).loss for _ in range(2)]
    assert torch.equal(quiet[0], quiet[1])


def test_bfloat16_autocast_is_close_to_float32() -> None:
    network = make_network("eagle3", TARGET, DRAFT).float()
    objective = Eagle3Objective(network, TARGET, Eagle3Options(), torch.float32)
    batch = random_batch(TARGET, ROWS)
    exact = objective.evaluate(batch, is_training=True, progress=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        half = objective.evaluate(batch, is_training=True, progress=1.0)
    assert half.loss.dtype is torch.float32
    assert float(half.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.05)


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_soft_capped_targets_rows_are_capped_for_the_head_too(method: str) -> None:
    target = ToyModel(vocab_size=16)
    target.final_soft_cap = 2.0
    cls, options = OBJECTIVES[method]
    network = cls(make_network(method, target, DRAFT), target, options).network
    output = 30.0 * torch.randn((5, 8), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    capped = network.logits(output)
    network.bind(target.output_rows(DRAFT))
    plain = network.logits(output)
    torch.testing.assert_close(capped, 2.0 * torch.tanh(plain / 2.0))
    assert float(plain.abs().max()) > 2.0


def test_initialise_takes_output_rows_and_is_reproducible() -> None:
    objective = make("eagle3")
    objective.initialise(3)
    first = {name: value.clone() for name, value in objective.module.state_dict().items()}
    objective.initialise(3)
    assert all(torch.equal(first[name], value) for name, value in objective.module.state_dict().items())
    torch.testing.assert_close(first["lm_head.weight"], TARGET.output_rows(DRAFT))
    assert set(first) == set(objective.network.expected())


def test_a_feature_loss_is_of_the_normed_output() -> None:
    """Each step's own, in the positions that its token loss looks at, weighted as the steps are."""
    batch = random_batch(TARGET, ROWS)
    network = make_network("eagle3", TARGET, DRAFT)
    plain = Eagle3Objective(network, TARGET, Eagle3Options(steps=2)).evaluate(batch, True, 1.0)
    options = Eagle3Options(steps=2, feature_weight=3.0)
    found = Eagle3Objective(network, TARGET, options).evaluate(batch, True, 1.0)
    parts: list[list[Tensor]] = [[], []]
    for document in documents_of(batch):
        for t in range(document.tokens.shape[1]):
            outputs = slow_outputs(network, TARGET, document, t, 2, is_unrolled=True)
            for i, output in enumerate(outputs):
                label = t + 2 + i
                if label < document.tokens.shape[1] and bool(document.answers[0, label]):
                    final = document.features["final"][0, label - 1]
                    if int((TARGET.output_rows() @ final).argmax()) in DRAFT.tolist():
                        parts[i].append(F.smooth_l1_loss(network.get_submodule("norm")(output), final).detach())
    expected = 3.0 * sum(options.decay**i * float(torch.stack(one).mean()) for i, one in enumerate(parts))
    assert found.parts["feature"] == pytest.approx(expected, rel=1e-5)
    assert float(found.loss.detach()) == pytest.approx(float(plain.loss.detach()) + expected, rel=1e-5)


def test_a_frozen_output_matrix_stays_and_the_rest_learns() -> None:
    objective = Eagle3Objective(
        make_network("eagle3", TARGET, DRAFT), TARGET, Eagle3Options(steps=2, freeze_output=True)
    )
    objective.evaluate(random_batch(TARGET, ROWS), True, 1.0).loss.backward()
    named = dict(objective.module.named_parameters())
    assert named.pop("lm_head.weight").grad is None
    assert all(parameter.grad is not None for parameter in named.values())
    assert {id(parameter) for parameter in objective.parameters()} == {id(parameter) for parameter in named.values()}


def test_rows_of_a_prompt_learn_the_best_of_the_draft_vocabulary() -> None:
    """Where nobody noted the target's best token, the judge takes it from the target's own logits."""
    from outrider.training.align import align
    from outrider.training.objectives.judge import Judge

    objective = make("eagle3")
    batch = random_batch(TARGET, ROWS)
    batch = replace(batch, best=torch.full_like(batch.best, -1))
    aligned = [align(batch, 0, 2)]
    judge = Judge(objective.teacher, "soft_cross_entropy", batch, aligned, True)
    chosen = judge.chosen(0)
    assert bool(chosen.any())
    assert bool((chosen == aligned[0].mask).all())
    rows = aligned[0].at_teacher(batch.features["final"])[chosen]
    result = judge.result(0, objective.teacher.logits(rows))
    assert bool(result.correct[chosen].all())
