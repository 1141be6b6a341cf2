"""Union of token trees by common prefix (SpecInfer, Miao et al. 2024, section 3: merge-based construction)."""

from __future__ import annotations

from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind


def merge(first: TokenTree, second: TokenTree, kind: ProposalKind | None = None) -> TokenTree:
    """Every root-to-node path of either tree, with ``first``'s proposals tried before ``second``'s.

    Args:
        first, second: trees below the same root.
        kind: what the merged tree is; ``None`` is deterministic when both are, else ``per_source``, in which every
            trial keeps the distribution that it was drawn from, so that a token proposed by both is tried twice.

    Raises:
        ValueError: when the roots differ.
    """
    if first.tokens[0] != second.tokens[0]:
        raise ValueError(f"cannot merge trees with different roots: {first.tokens[0]} and {second.tokens[0]}")
    if kind is None:
        both = {first.kind, second.kind}
        kind = ProposalKind.DETERMINISTIC if both == {ProposalKind.DETERMINISTIC} else ProposalKind.PER_SOURCE
    merged = TokenTree(first.tokens[0], kind)
    for tree in (first, second):
        offset = len(merged.rows)
        merged.rows.extend(tree.rows)
        new_index = {0: 0}
        for node in range(len(tree)):
            for trial in tree.trials(node):
                row = None if trial.row is None else trial.row + offset
                source = tree.sources[trial.child]
                new_index[trial.child] = merged.graft(new_index[node], trial, row, source)
    return merged
