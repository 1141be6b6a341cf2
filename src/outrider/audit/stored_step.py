"""Real-model distributions at the root of a proposal, kept so that the step can be drawn and judged again at will.

``capture_steps`` runs the engine's own drafter, schedule and target for a few steps and keeps p, the rows q that the
root's children were drawn from, how many were drawn, and the children themselves where they were not drawn. The
vocabulary is relabelled: the best tokens of p and of each q keep a label, all others share one. Probabilities of the
shared label are sums, so p and q stay distributions of the real model, over fewer names. Knows no verification rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from outrider.drafters.base import DraftContext
from outrider.engine.engine import Engine
from outrider.sampling.draw import OffsetStream, RandomStream, SeededStream
from outrider.sampling.params import SamplingParams
from outrider.schedules.sequence import RunningSequence
from outrider.schedules.stopping import StopRules
from outrider.trees.merge import merge
from outrider.trees.shapes.base import Candidates, GrowLimits, add_children
from outrider.trees.token_tree import TokenTree, Trial
from outrider.types import FinishReason, ProposalKind, Regime
from outrider.verifiers.base import TargetDistributions, Verdict, Verifier

LABELS = 64
"""Best tokens of p, and of each q, that keep a label of their own."""


@dataclass(frozen=True, slots=True)
class Draws:
    """``count`` children from one source: drawn from ``q`` [labels] as ``kind`` says, or the fixed ``labels``."""

    kind: ProposalKind
    count: int
    q: Tensor | None = None
    labels: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredStep:
    """One step's root.

    Attributes:
        prompt, position: index of the prompt, and output tokens before the step.
        kind: kind of the whole proposal.
        p: the target's distribution at the root, float64 [labels].
        draws: where its children come from, in the order in which they are tried.
        tokens: label -> token id, [labels]; -1 for the label that stands for all other tokens.
    """

    prompt: int
    position: int
    kind: ProposalKind
    p: Tensor
    draws: tuple[Draws, ...]
    tokens: tuple[int, ...]

    @property
    def children(self) -> int:
        """Trials of the root."""
        return sum(draw.count for draw in self.draws)

    @cached_property
    def proposal(self) -> Tensor:
        """The mean of what the children are drawn from, float64 [labels]; a fixed child counts as a one-hot."""
        total = torch.zeros_like(self.p)
        for draw in self.draws:
            if draw.q is not None:
                total += draw.count * draw.q.double()
            else:
                total[list(draw.labels)] += 1.0
        return total / max(1, self.children)

    @property
    def overlap(self) -> float:
        """Mass that a proposal and the target share, in [0, 1]: about how often one child is accepted."""
        fixed = [label for draw in self.draws for label in draw.labels]
        if fixed:
            return float(self.p[sorted(set(fixed))].sum())
        return float(torch.minimum(self.p, self.proposal).sum())

    @property
    def weight(self) -> float:
        """How much replaying says: a child must be accepted and rejected, and p must not be certain already."""
        return self.overlap * (1.0 - self.overlap) * (1.0 - float(self.p.max()))

    def draw(self, position: int, random: RandomStream) -> TokenTree:
        """A fresh tree of depth 1 under keys of ``position``; the root's token is label 0, which nothing looks at."""
        limits = GrowLimits(self.children, 1, position, random)
        trees: list[TokenTree] = []
        for member, draw in enumerate(self.draws):
            tree = TokenTree(0, draw.kind)
            if len(self.draws) > 1:
                limits = GrowLimits(self.children, 1, position, OffsetStream(random, member))
            add_children(tree, 0, Candidates(draw.labels, (), draw.q), draw.count, "stored", limits)
            trees.append(tree)
        return trees[0] if len(trees) == 1 else reduce(lambda a, b: merge(a, b, self.kind), trees)


class _Recorder(Verifier):
    """The production rule, and a record of every root that it was asked about."""

    def __init__(self, rule: Verifier, prompt: int) -> None:
        self.rule = rule
        self.prompt = prompt
        self.steps: list[StoredStep] = []

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        if tree.trials(0):
            self.steps.append(store_step(self.prompt, position, tree, target.probabilities(0)))
        return self.rule.verify(tree, target, random, position)


@torch.inference_mode()
def capture_steps(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, count: int, seed: int
) -> list[StoredStep]:
    """The ``count`` steps of ``prompts`` with the largest ``weight``; fewer when fewer say anything.

    Args:
        engine: with the parts to audit.
        prompts: token ids.
        params: sampling parameters, temperature above 0; ``max_tokens`` bounds the steps run for each prompt.
        count: steps to return at most.
        seed: of the run.

    Raises:
        UsageError: when the engine's parts are not exact for these parameters.
    """
    found: list[StoredStep] = []
    for index, prompt in enumerate(prompts):
        found += _run(engine, index, prompt, params, (seed + index) % 2**64)
    telling = sorted((step for step in found if step.weight > 1e-4), key=lambda step: -step.weight)
    return sorted(telling[:count], key=lambda step: (step.prompt, step.position))


def _run(engine: Engine, index: int, prompt: Sequence[int], params: SamplingParams, seed: int) -> list[StoredStep]:
    lane = engine.lane(Regime.SAMPLED)
    pipeline = engine.pipeline(params, prompt)
    lane.verifier.admit(params, pipeline.vocab_size, lane.drafter.shape.most_children)
    recorder = _Recorder(lane.verifier, index)
    random = SeededStream(seed)
    cache, session = engine.model.new_cache(), lane.drafter.new_session()
    most = min(params.max_tokens, engine.model.context_length - len(prompt))
    rules = StopRules(frozenset(pipeline.stop_ids), params.min_tokens, most, FinishReason.LENGTH)
    sequence = RunningSequence(prompt, pipeline, random, rules, recorder, cache, session, is_adaptive=False)
    session.begin(DraftContext(prompt, pipeline, random, engine.model, cache))
    try:
        lane.schedule.prefill(sequence)
        while sequence.finish is None:
            lane.schedule.step([sequence])
    finally:
        session.end()
    return recorder.steps


def store_step(prompt: int, position: int, tree: TokenTree, p: Tensor) -> StoredStep:
    """Keep the root of ``tree`` (with at least one trial) and the target's distribution ``p`` [vocabulary] there."""
    groups: dict[int | None, list[Trial]] = {}
    for trial in tree.trials(0):
        groups.setdefault(trial.row, []).append(trial)
    rows = [tree.rows[row].detach().cpu() for row in groups if row is not None]
    fixed = [trial.token for trial in groups.get(None, ())]
    p = p.detach().cpu()
    kept = _labelled(p, rows, fixed)
    draws = tuple(_draws(tree, row, trials, kept) for row, trials in groups.items())
    return StoredStep(prompt, position, tree.kind, _relabelled(p, kept), draws, (*kept.tolist(), -1))


def _draws(tree: TokenTree, row: int | None, trials: Sequence[Trial], kept: Tensor) -> Draws:
    if row is None:
        labels = torch.searchsorted(kept, torch.tensor([trial.token for trial in trials]))
        return Draws(ProposalKind.DETERMINISTIC, len(trials), labels=tuple(labels.tolist()))
    kind = tree.kind
    if kind is ProposalKind.PER_SOURCE:
        is_ordered = any(trial.excluded for trial in trials)
        kind = ProposalKind.WITHOUT_REPLACEMENT if is_ordered else ProposalKind.IID
    return Draws(kind, len(trials), _relabelled(tree.rows[row].detach().cpu(), kept))


def _labelled(p: Tensor, rows: Sequence[Tensor], fixed: Sequence[int]) -> Tensor:
    """Token ids, ascending, that keep a label of their own."""
    best = [torch.topk(row, min(LABELS, row.shape[-1])) for row in (p, *rows)]
    kept = [top.indices[top.values > 0.0] for top in best]
    tokens: Tensor = torch.unique(torch.cat([*kept, torch.tensor(fixed, dtype=torch.long)]))
    return tokens


def _relabelled(row: Tensor, kept: Tensor) -> Tensor:
    """``row`` [vocabulary] over the labels, [labels]: its own mass for each kept token, then that of all others."""
    others = row.clone()
    others[kept] = 0.0
    return torch.cat([row[kept], others.sum()[None]])
