"""The output law of production drafting and verification on toy models, and the target's own law to compare it with.

A ``World`` is a target, a draft source and a request's parameters. ``joint_law`` enumerates every tree that a shape can
draw and every verdict on it, extends each outcome by the target's own distribution to a fixed number of tokens, and
returns the joint distribution of these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import Candidates, GrowLimits
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind
from outrider.verifiers.base import Verifier

FloatArray = NDArray[np.float64]
Grow = Callable[["World", EnumeratingStream], TokenTree]
Tamper = Callable[[TokenTree], TokenTree]
PROMPT = (0, 1, 1)
KEPT = (1, 0)
"""Output tokens kept before the step; the last one is the root."""


@dataclass
class World:
    """Target and draft as functions of the tokens above a node."""

    vocab_size: int
    target_params: SamplingParams
    draft_params: SamplingParams
    order: int | None = None
    memo: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Seeds chosen so that p exceeds q on two tokens or more at most nodes: with one, the residual is one-hot and
        # several mistakes leave no trace.
        self.models = {
            "target": ToyModel(self.vocab_size, order=self.order, sharpness=0.7, seed=10),
            "draft": ToyModel(self.vocab_size, order=self.order, sharpness=0.7, seed=30),
            "second": ToyModel(self.vocab_size, order=self.order, sharpness=0.7, seed=39),
        }
        params = {"target": self.target_params, "draft": self.draft_params, "second": self.draft_params}
        self.pipelines = {
            name: LogitsPipeline(params[name], self.vocab_size, stop_ids=frozenset({0}), prompt=PROMPT)
            for name in params
        }

    def logits(self, who: str, above: Sequence[int]) -> Tensor:
        return self.models[who].logits_after([*PROMPT, *KEPT, *above])

    def probabilities(self, who: str, above: Sequence[int]) -> Tensor:
        """float64 [vocabulary] after ``KEPT`` and the tokens ``above``."""
        key = (who, tuple(above))
        if key not in self.memo:
            self.memo[key] = self.pipelines[who].probabilities(self.logits(who, above), [*KEPT, *above])
        return self.memo[key]

    def target_law(self, above: Sequence[int], count: int) -> FloatArray:
        """The target's joint distribution of the next ``count`` tokens, flattened, [vocabulary ** count]."""
        if count == 0:
            return np.ones(1)
        p = self.probabilities("target", above).numpy()
        return np.concatenate([p[t] * self.target_law([*above, t], count - 1) for t in range(self.vocab_size)])


@dataclass
class Source:
    """A ``ChildSource`` over one of the world's draft models; deterministic proposals get a ranking without q."""

    world: World
    kind: ProposalKind
    name: str = "draft"

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._candidates(tree.path_tokens(node)) for node in nodes]

    def _candidates(self, above: list[int]) -> Candidates:
        q = self.world.probabilities(self.name, above)
        if self.kind is not ProposalKind.DETERMINISTIC:
            return Candidates(probabilities=q)
        scores, tokens = torch.sort(torch.softmax(self.world.logits(self.name, above), -1), descending=True)
        return Candidates(tokens.tolist(), scores.tolist())


@dataclass
class Target:
    """``TargetDistributions`` of the world's target at a tree's nodes."""

    world: World
    tree: TokenTree

    def probabilities(self, node: int) -> Tensor:
        return self.world.probabilities("target", self.tree.path_tokens(node))

    def greedy_token(self, node: int) -> int:
        above = self.tree.path_tokens(node)
        return self.world.pipelines["target"].greedy_token(self.world.logits("target", above), [*KEPT, *above])


def limits(stream: EnumeratingStream, max_nodes: int = 64, max_depth: int = 8) -> GrowLimits:
    return GrowLimits(max_nodes, max_depth, len(KEPT), stream)


def joint_law(world: World, verifier: Verifier, grow: Grow, length: int, tamper: Tamper | None = None) -> FloatArray:
    """The law of the first ``length`` output tokens of a step, flattened, [vocabulary ** length]."""
    size = world.vocab_size
    joint = np.zeros(size**length)
    tails: dict[tuple[int, ...], FloatArray] = {}

    def verify(tree: TokenTree, stream: EnumeratingStream) -> tuple[int, ...]:
        verdict = verifier.verify(tree, Target(world, tree), stream, len(KEPT))
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)

    for drawn, tree_probability in outcomes(partial(grow, world)):
        tree = drawn if tamper is None else tamper(drawn)
        for tokens, probability in outcomes(partial(verify, tree)):
            if len(tokens) > length:
                raise ValueError(f"a step gave {len(tokens)} tokens, more than the {length} compared")
            if tokens not in tails:
                tails[tokens] = world.target_law(tokens, length - len(tokens))
            start = 0
            for token in tokens:
                start = start * size + token
            tail = tails[tokens]
            joint[start * len(tail) : (start + 1) * len(tail)] += tree_probability * probability * tail
    return joint


def total_variation(world: World, verifier: Verifier, grow: Grow, length: int, tamper: Tamper | None = None) -> float:
    """Distance between the law of a step's first ``length`` tokens and the target's."""
    joint = joint_law(world, verifier, grow, length, tamper)
    return 0.5 * float(np.abs(joint - world.target_law((), length)).sum())
