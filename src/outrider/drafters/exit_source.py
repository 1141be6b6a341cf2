"""Candidates from a trained early exit: the target's first blocks, then the exit's logits in place of the target's.

The blocks before the exit compute guesses' rows exactly as the whole target does: their entries are the target's own,
and only the head's reading of the state is a guess. Knows no shape and no verifier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.base import DraftParts
from outrider.drafters.feature_source import DraftVocabulary
from outrider.drafters.head_options import AUTO, RANDOM, bind_target, compute_dtype, open_head
from outrider.drafters.model_source import RowSource
from outrider.drafters.shipped import shipped_head
from outrider.errors import InvalidOptionError
from outrider.heads.build import exit_block, untrained_head
from outrider.heads.cached import pack
from outrider.heads.exit import EarlyExit
from outrider.models.base import LanguageModel, Segment, SequenceCache, blocks_after
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import FloatArray, RankedChildren
from outrider.trees.token_tree import TokenTree

METHOD = "layer_skip"


def open_exit(head: str, layers: int, has_skip: bool, parts: DraftParts) -> EarlyExit:
    """The exit that ``head`` names, checked against the target, in the dtype it drafts in.

    Args:
        head: file, ``auto`` or ``random``.
        layers: blocks that the user wants to run, 0 for those of the head.
        has_skip: whether a subset of sublayers was asked for as well.

    Raises:
        InvalidOptionError: for a subset beside a head, other layers than the head's, or no such head.
        ModelFileError, IllegalCombinationError: as ``open_head``.
    """
    target = parts.target
    if has_skip:
        raise InvalidOptionError(
            "layer_skip takes head=... or skip=..., not both: a head reads the state behind the first blocks; "
            "leave one out"
        )
    if layers >= target.num_layers:
        raise InvalidOptionError(f"layer_skip layers={layers} must be below the target's {target.num_layers} layers")
    if head == AUTO and shipped_head(METHOD, target) is None:
        raise InvalidOptionError(
            f"no layer_skip head ships for '{target.name}'; train one with 'outrider train layer-skip' and give "
            "--drafter layer_skip:head=FILE, or leave head out"
        )
    if head == RANDOM and target.num_layers == 1:
        raise InvalidOptionError(f"layer_skip cannot draft with '{target.name}': it has only one layer")
    if head == RANDOM:
        network = untrained_head(METHOD, target, features=(layers or exit_block(target.num_layers),))
        bind_target(network, target)
    else:
        network = open_head(METHOD, head, parts)
    if not isinstance(network, EarlyExit):
        raise TypeError(f"{METHOD} heads are early exits, not {type(network).__name__}")
    if layers not in (0, network.block):
        raise InvalidOptionError(
            f"layer_skip layers={layers}: the head reads the state after {network.block} blocks; leave layers out"
        )
    return pack(network, compute_dtype(target), target.device)


class ExitSource(RowSource):
    """A ``ChildSource`` for one proposal of a trained exit.

    Args:
        name, pipeline, output: as ``RowSource``; the root is the first scratch row.
        target, cache: whose blocks before the exit run, and where their entries go; the caller rolls back.
        head: of ``open_exit``.
    """

    def __init__(
        self,
        name: str,
        target: LanguageModel,
        cache: SequenceCache,
        pipeline: LogitsPipeline,
        output: Sequence[int],
        head: EarlyExit,
    ) -> None:
        super().__init__(name, pipeline, output, None, cache.length)
        self.target = target
        self.cache = cache
        self.head = head
        self._skip = blocks_after(head.block, target.num_layers)
        self._dtype = compute_dtype(target)
        self._vocabulary = DraftVocabulary(head.draft_ids, pipeline.vocab_size)

    @torch.inference_mode()
    def forward_rows(
        self, tree: TokenTree, nodes: Sequence[int], positions: list[int], mask: NDArray[np.bool_]
    ) -> Tensor:
        block = self.head.block
        segment = Segment(self.cache, [tree.tokens[node] for node in nodes], positions, mask, logit_rows=())
        state = self.target.forward([segment], (block,), self._skip)[0].hidden[block]
        logits: Tensor = self.head({block: state.to(self._dtype)})
        return logits

    def over_target_vocabulary(self, rows: Tensor) -> Tensor:
        return self._vocabulary.spread(rows)

    def rank(self, rows: Tensor, k: int, least: FloatArray | None) -> RankedChildren:
        return self._vocabulary.named(super().rank(self._vocabulary.cut(rows), k, least))
