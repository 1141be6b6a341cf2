"""Typical acceptance (Medusa, Cai et al. 2024, arXiv:2401.10774): keep guesses that the target finds plausible. LOSSY.

A child x of a node whose target distribution is p stays when p(x) > min(epsilon, delta exp(-H(p))), H the entropy in
nats: where the target is unsure, less likely tokens pass. The longest path of such children wins and the next token is
drawn from p at its end. The output's law is not the target's, so ``--lossy`` must be given. At temperature 0, p is
one-hot and the rule is greedy verification. Knows no model, cache, clock or q.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outrider.sampling.draw import RandomStream, Role
from outrider.trees.token_tree import TokenTree
from outrider.verifiers.base import Exactness, TargetDistributions, Verdict, Verifier


class TypicalOptions(BaseModel):
    """Options of ``Typical``; the defaults are those of Medusa's code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Below 1, so that a one-hot p keeps its one token.
    epsilon: Annotated[float, Field(ge=0.0, lt=1.0, description="a guess more likely than this always stays")] = 0.09
    delta: Annotated[
        float, Field(ge=0.0, le=100.0, description="weight of exp(-entropy), the threshold where the target is unsure")
    ] = 0.3


class Typical(Verifier):
    """The longest path of plausible guesses; of equally long ones the likeliest."""

    Options: ClassVar[type[BaseModel] | None] = TypicalOptions
    positional: ClassVar[str | None] = "epsilon"
    exact_for: ClassVar[Exactness] = frozenset()
    lossy: ClassVar[bool] = True
    summary = "keep guesses above an entropy-dependent threshold; changes the output, needs --lossy"
    source = "Medusa, Cai et al. 2024, arXiv:2401.10774"

    def __init__(self, options: TypicalOptions | None = None) -> None:
        self.options = options or TypicalOptions()

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        likelihood = {0: 0.0}  # log-likelihood of the path to each node that may stay
        waiting = [0]
        while waiting:
            node = waiting.pop()
            for child, probability in self._plausible(tree, node, target):
                likelihood[child] = likelihood[node] + math.log(probability)
                waiting.append(child)
        best = max(likelihood, key=lambda n: (tree.depths[n], likelihood[n], -n))
        path = tree.path(best)
        next_token = random.categorical(target.probabilities(best), position + len(path), Role.TARGET, 0)
        return Verdict(tuple(path), next_token)

    def _plausible(self, tree: TokenTree, node: int, target: TargetDistributions) -> list[tuple[int, float]]:
        """The children of ``node`` that may stay, each with its probability under the target."""
        children = tree.children(node)
        if not children:
            return []
        p = target.probabilities(node)
        threshold = self.threshold(p)
        found = p[torch.tensor(list(children), device=p.device)].tolist()
        return [(child, mass) for child, mass in zip(children.values(), found, strict=True) if mass > threshold]

    def threshold(self, p: Tensor) -> float:
        """min(epsilon, delta exp(-H(p))) for a distribution [vocabulary]; a guess must be more likely than that."""
        entropy = float(torch.special.entr(p).sum())
        return min(self.options.epsilon, self.options.delta * math.exp(-entropy))
