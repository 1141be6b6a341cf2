"""Growing, reading and deriving token trees."""

from __future__ import annotations

import pytest
import torch

from outrider.trees.merge import merge
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology


def small_tree() -> TokenTree:
    """Root 9 with children 1 (children 3, 4; 3 has child 5) and 2 (child 3)."""
    tree = TokenTree(9)
    one, two = tree.add(0, 1, "a"), tree.add(0, 2, "a")
    three = tree.add(one, 3, "b")
    tree.add(one, 4, "b")
    tree.add(two, 3, "b")
    tree.add(three, 5, "c")
    return tree


def test_arrays() -> None:
    tree = small_tree()
    assert tree.tokens == [9, 1, 2, 3, 4, 3, 5]
    assert tree.parent_array().tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.depths == [0, 1, 1, 2, 2, 2, 3]
    assert (len(tree), tree.drafted) == (7, 6)
    assert tree.sources == ["", "a", "a", "b", "b", "b", "c"]


def test_paths_and_walk() -> None:
    tree = small_tree()
    assert tree.path(0) == []
    assert tree.path(6) == [1, 3, 6]
    assert tree.path_tokens(6) == [1, 3, 5]
    assert tree.walk([1, 3, 5, 7]) == [1, 3, 6]
    assert tree.walk([2, 4]) == [2]
    assert tree.walk([8]) == []


def test_same_token_under_different_parents_stays_distinct() -> None:
    tree = small_tree()
    assert tree.children(1)[3] != tree.children(2)[3]


def test_topology() -> None:
    chain = TokenTree(0)
    assert chain.topology is Topology.CHAIN
    chain.add(chain.add(0, 1), 2)
    assert chain.topology is Topology.CHAIN
    chain.add(0, 3)
    assert chain.topology is Topology.TREE


def test_a_repeated_deterministic_proposal_adds_nothing() -> None:
    tree = TokenTree(0)
    assert tree.add(0, 5) == tree.add(0, 5) == 1
    assert [trial.token for trial in tree.trials(0)] == [5]


def test_a_repeated_iid_draw_is_one_node_and_two_trials() -> None:
    tree = TokenTree(0, ProposalKind.IID)
    q = torch.tensor([0.5, 0.5])
    row = tree.add_row(q)
    assert tree.add(0, 1, "d", row) == tree.add(0, 1, "d", row) == 1
    assert [trial.token for trial in tree.trials(0)] == [1, 1]
    assert all(torch.equal(tree.trial_distribution(trial), q) for trial in tree.trials(0))


def test_draws_without_replacement_carry_the_renormalised_distribution() -> None:
    tree = TokenTree(0, ProposalKind.WITHOUT_REPLACEMENT)
    row = tree.add_row(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    for token in (1, 0, 2):
        tree.add(0, token, "d", row)
    distributions = [tree.trial_distribution(trial).tolist() for trial in tree.trials(0)]
    assert distributions[0] == [0.5, 0.3, 0.2]
    assert distributions[1] == pytest.approx([0.5 / 0.7, 0.0, 0.2 / 0.7])
    assert distributions[2] == [0.0, 0.0, 1.0]
    assert tree.rows[row].tolist() == [0.5, 0.3, 0.2]


def test_a_deterministic_trial_has_no_distribution() -> None:
    tree = TokenTree(0)
    tree.add(0, 1)
    with pytest.raises(ValueError, match="one-hot"):
        tree.trial_distribution(tree.trials(0)[0])


def test_subtree_keeps_trials_and_rows() -> None:
    tree = TokenTree(0, ProposalKind.IID)
    first = tree.add_row(torch.tensor([0.0, 0.6, 0.4]))
    child = tree.add(0, 1, "d", first)
    tree.add(0, 2, "d", first)
    second = tree.add_row(torch.tensor([0.2, 0.8, 0.0]))
    for token in (1, 1, 0):
        tree.add(child, token, "d", second)
    below = tree.subtree(child)
    assert below.tokens == [1, 1, 0]
    assert below.parents == [-1, 0, 0]
    assert below.depths == [0, 1, 1]
    assert [trial.token for trial in below.trials(0)] == [1, 1, 0]
    assert torch.equal(below.trial_distribution(below.trials(0)[0]), tree.rows[second])


def test_prune_keeps_the_best_nodes_connected() -> None:
    tree = small_tree()
    pruned = tree.prune([1.0, 0.5, 0.9, 0.4, 0.1, 0.2, 0.95], budget=3)
    # Node 6 (token 5) is the best but needs 1 and 3 above it; that fills the budget.
    assert pruned.tokens == [9, 1, 3, 5]
    assert pruned.parents == [-1, 0, 1, 2]
    assert [trial.token for trial in pruned.trials(0)] == [1]
    assert tree.prune([0.0] * 7, budget=0).tokens == [9]
    assert tree.prune([0.0] * 7, budget=6).tokens == tree.tokens


@pytest.mark.parametrize("kind", [k for k in ProposalKind if k is not ProposalKind.DETERMINISTIC])
def test_a_drawn_tree_cannot_be_pruned_by_score(kind: ProposalKind) -> None:
    with pytest.raises(ValueError, match="every drawn child stays a trial"):
        TokenTree(0, kind).prune([1.0], budget=1)


def test_merge_is_the_union_of_the_paths() -> None:
    first, second = small_tree(), TokenTree(9)
    second.add(second.add(second.add(0, 1, "z"), 3, "z"), 6, "z")
    second.add(0, 7, "z")
    merged = merge(first, second)
    assert merged.kind is ProposalKind.DETERMINISTIC
    paths = {tuple(merged.path_tokens(node)) for node in range(len(merged))}
    assert paths == {tuple(t.path_tokens(n)) for t in (first, second) for n in range(len(t))}
    assert len(merged) == len(paths)
    assert merged.sources[merged.walk([1, 3, 6])[-1]] == "z"
    assert merged.sources[merged.walk([1])[0]] == "a"
    assert all(parent < node for node, parent in enumerate(merged.parents))


def test_merge_of_drawn_trees_tries_a_shared_token_twice_each_with_its_own_q() -> None:
    trees = []
    for q in ([0.5, 0.5, 0.0], [0.1, 0.9, 0.0]):
        tree = TokenTree(0, ProposalKind.IID)
        tree.add(0, 1, "d", tree.add_row(torch.tensor(q)))
        trees.append(tree)
    merged = merge(*trees)
    assert merged.kind is ProposalKind.PER_SOURCE
    assert merged.tokens == [0, 1]
    assert [merged.trial_distribution(t).tolist() for t in merged.trials(0)] == [
        pytest.approx([0.5, 0.5, 0.0]),
        pytest.approx([0.1, 0.9, 0.0]),
    ]


def test_merge_keeps_exclusions_of_draws_without_replacement() -> None:
    tree = TokenTree(0, ProposalKind.WITHOUT_REPLACEMENT)
    row = tree.add_row(torch.tensor([0.5, 0.25, 0.25]))
    tree.add(0, 0, "d", row)
    tree.add(0, 2, "d", row)
    other = TokenTree(0)
    other.add(0, 2)
    merged = merge(other, tree)
    assert [(trial.token, trial.excluded) for trial in merged.trials(0)] == [(2, ()), (0, ()), (2, (0,))]
    assert merged.trial_distribution(merged.trials(0)[2]).tolist() == [0.0, 0.5, 0.5]


def test_merge_refuses_different_roots() -> None:
    with pytest.raises(ValueError, match="different roots"):
        merge(TokenTree(1), TokenTree(2))
