"""Token trees at temperature 0: their form and their other branches must not show in the text."""

from __future__ import annotations

import random

import pytest
import torch

from engine.tiny_engines import build_engine
from outrider.audit.enumeration import EnumeratingStream
from outrider.engine.registry import VERIFIERS, load_class
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.schedules.target_rows import TargetRows
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology
from user_issues.toy_decoding import plain_text


def random_paths(source: random.Random, size: int) -> str:
    """``size`` ranked paths, each below another one or the root, as ``static`` takes them."""
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= size:
        parent = source.choice(paths)
        rank = sum(len(path) == len(parent) + 1 and path[: len(parent)] == parent for path in paths)
        paths.append((*parent, rank))
    return "/".join(".".join(map(str, path)) for path in paths[1:])


def test_tree_choice_never_changes_the_text_u09() -> None:
    """Another choice of tree gave another greedy text.

    Twenty random trees, all different, one text.
    """
    target = ToyModel(vocab_size=12)
    source = random.Random(9)
    shapes = {random_paths(source, source.randint(2, 14)) for _ in range(20)}
    assert len(shapes) == 20
    prompt, params = [5, 1, 7], SamplingParams(max_tokens=24, ignore_eos=True)
    expected, accepted = plain_text(target, prompt, 24), set()
    draft = ToyModel(vocab_size=12, noise=0.4)
    for shape in shapes:
        result = build_engine("small_model", f"static:{shape}", target=target, draft=draft).generate(prompt, params)
        assert result.tokens == expected, shape
        accepted.add(result.stats.num_accepted_tokens)
    assert len(accepted) > 3


GREEDY_RULES = [
    name
    for name in VERIFIERS
    if (ProposalKind.DETERMINISTIC, Topology.TREE, Regime.GREEDY) in load_class("verifier", name).exact_for
]


@pytest.mark.parametrize("name", GREEDY_RULES)
def test_tree_only_the_argmax_child_is_accepted_u10(name: str) -> None:
    """A reader took a greedy tree to be free to keep any plausible child.

    With the best token absent and the next best ones present nothing is kept and the best token is emitted; with the
    best one last in line it is the one that is kept.
    """
    model = ToyModel(vocab_size=12)
    ranked = model.logits_after([3]).argsort(descending=True).tolist()
    best, others = ranked[0], ranked[1:4]
    for children, kept in ((others, ()), ([*others, best], (4,))):
        tree = TokenTree(3)
        for token in children:
            tree.add(0, token)
        texts = [[3], *([3, token] for token in children)]
        logits = [model.logits_after(text) for text in texts]
        rows = TargetRows(torch.stack(logits), LogitsPipeline(SamplingParams(), 12), tree, [3])
        verdict = load_class("verifier", name)().verify(tree, rows, EnumeratingStream(), 1)
        assert verdict.path == kept
        assert verdict.next_token == (plain_text(model, [3, best], 1)[0] if kept else best)
