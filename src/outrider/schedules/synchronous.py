"""Draft, verify, commit, one after the other, for one sequence or a batch.

``step`` is the whole of speculative decoding on one screen; plain decoding is the same step with a drafter that guesses
nothing. All sequences of a batch share one target pass, each with its own tree over its own cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from outrider.drafters.base import DraftBudget, Drafter, Observation, Proposal
from outrider.models.base import PREFILL_ROWS, LanguageModel, Segment, SegmentOutput, tree_segment
from outrider.schedules.base import Schedule
from outrider.schedules.controller import Controller
from outrider.schedules.sequence import RunningSequence
from outrider.schedules.target_rows import TargetRows
from outrider.trees.token_tree import TokenTree
from outrider.types import StepRecord, StepTimes
from outrider.verifiers.base import Verdict


class Clock:
    """Laps of one step; waits for the GPU before each reading when there is one."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.started = self.last = self._now()

    def lap(self) -> float:
        """Seconds since the previous lap."""
        now = self._now()
        seconds, self.last = now - self.last, now
        return seconds

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Synchronous(Schedule):
    """One step at a time.

    Args:
        target: the target model.
        drafter: names the hidden states that its sessions observe.
        max_nodes: guesses per sequence and step at most.
        controller: lowers that by measurement; ``None`` always drafts ``max_nodes``.
    """

    summary = "draft, verify, commit in turn"
    source = "Leviathan et al. 2023; SpecInfer (Miao et al. 2024)"

    def __init__(self, target: LanguageModel, drafter: Drafter, max_nodes: int, controller: Controller | None) -> None:
        self.target = target
        self.hidden = drafter.hidden
        self.max_nodes = max_nodes
        self.controller = controller

    @torch.inference_mode()
    def prefill(self, sequence: RunningSequence) -> StepRecord:
        clock = Clock(self.target.device)
        cache = sequence.cache
        pending = list(sequence.prompt[cache.length :])
        states: list[dict[str | int, Tensor]] = []
        with cache.speculation():
            while len(pending) > PREFILL_ROWS:
                chunk = Segment(cache, pending[:PREFILL_ROWS], logit_rows=())
                states.append(self.target.forward([chunk], self.hidden)[0].hidden)
                cache.commit(range(PREFILL_ROWS))
                del pending[:PREFILL_ROWS]
            last = [len(pending) - 1]
            output = self.target.forward([Segment(cache, pending, logit_rows=last)], self.hidden)[0]
            target = clock.lap()
            tree = TokenTree(pending[-1])
            verdict, rows = self._verify(sequence, tree, output.logits)
            verify = clock.lap()
            emitted, trimmed = self._keep(sequence, tree, verdict, rows)
            cache.commit(range(len(pending)))
        rows_seen = {name: torch.cat([part[name] for part in (*states, output.hidden)]) for name in self.hidden}
        hidden = {name: state[-1:] for name, state in rows_seen.items()}
        before = {name: state[:-1] for name, state in rows_seen.items()}
        sequence.session.observe(Observation(emitted, hidden, prompt_hidden=before))
        times = StepTimes(0.0, target, verify, clock.lap())
        return self._record(sequence, "prefill", tree, verdict, emitted, trimmed, times)

    @torch.inference_mode()
    def step(self, sequences: Sequence[RunningSequence]) -> list[StepRecord]:
        clock = Clock(self.target.device)
        with ExitStack() as speculative:
            for sequence in sequences:
                speculative.enter_context(sequence.cache.speculation())
            # Seeded requests draft a fixed tree whatever the clock says: a batch with one tells nothing about a level.
            controller = self.controller if all(sequence.is_adaptive for sequence in sequences) else None
            budget = self.max_nodes if controller is None else controller.choose()
            proposals = [self._draft(sequence, budget) for sequence in sequences]
            draft = clock.lap()
            outputs = self._evaluate(sequences, proposals)
            target = clock.lap()
            verdicts = [
                self._verify(sequence, proposal.tree, output.logits)
                for sequence, proposal, output in zip(sequences, proposals, outputs, strict=True)
            ]
            verify = clock.lap()
            kept = [
                self._commit(sequence, proposal, verdict, rows, output)
                for sequence, proposal, output, (verdict, rows) in zip(
                    sequences, proposals, outputs, verdicts, strict=True
                )
            ]
        other = clock.lap()
        share = len(sequences)
        if controller is not None:
            drafted = sum(proposal.tree.drafted for proposal in proposals)
            # Per sequence, so that steps of different batch sizes can be compared.
            tokens = sum(len(emitted) for emitted, _ in kept) / share
            has_extra_rows = any(proposal.segment is not None for proposal in proposals)
            controller.record(drafted, tokens, draft + target + verify + other, draft, has_extra_rows)
        times = StepTimes(draft / share, target / share, verify / share, other / share)
        return [
            self._record(sequence, "decode", proposal.tree, verdict, emitted, trimmed, times)
            for sequence, proposal, (verdict, _), (emitted, trimmed) in zip(
                sequences, proposals, verdicts, kept, strict=True
            )
        ]

    # -- the phases of a step ------------------------------------------------------------------------------

    def _draft(self, sequence: RunningSequence, budget: int) -> Proposal:
        # The bonus token always follows the guesses, so a guess is useful only if one more token may be kept.
        depth = sequence.remaining - 1
        return sequence.session.propose(DraftBudget(budget if depth > 0 else 0, depth))

    def _evaluate(self, sequences: Sequence[RunningSequence], proposals: Sequence[Proposal]) -> list[SegmentOutput]:
        segments = [
            proposal.segment or tree_segment(sequence.cache, proposal.tree)
            for sequence, proposal in zip(sequences, proposals, strict=True)
        ]
        return self.target.forward(segments, self.hidden)

    def _verify(self, sequence: RunningSequence, tree: TokenTree, logits: Tensor) -> tuple[Verdict, TargetRows]:
        rows = TargetRows(logits, sequence.pipeline, tree, sequence.output)
        return sequence.verifier.verify(tree, rows, sequence.random, len(sequence.output)), rows

    def _keep(
        self, sequence: RunningSequence, tree: TokenTree, verdict: Verdict, rows: TargetRows
    ) -> tuple[list[int], int]:
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        count, sequence.finish = sequence.rules.keep(len(sequence.output), tokens)
        emitted = tokens[:count]
        sequence.note_logprobs(rows.logits[[0, *verdict.path][:count]], emitted)
        sequence.output.extend(emitted)
        return emitted, len(tokens) - count

    def _commit(
        self,
        sequence: RunningSequence,
        proposal: Proposal,
        verdict: Verdict,
        rows: TargetRows,
        output: SegmentOutput,
    ) -> tuple[list[int], int]:
        emitted, trimmed = self._keep(sequence, proposal.tree, verdict, rows)
        # The root and all kept tokens but the last have entries; the last one is the next root.
        nodes = [0, *verdict.path][: len(emitted)]
        sequence.cache.commit(nodes)
        hidden = {name: state[nodes] for name, state in output.hidden.items()}
        extra = output.logits[len(proposal.tree) :]
        sequence.session.observe(Observation(emitted, hidden, extra, len(verdict.path)))
        return emitted, trimmed

    def _record(
        self,
        sequence: RunningSequence,
        phase: str,
        tree: TokenTree,
        verdict: Verdict,
        emitted: Sequence[int],
        trimmed: int,
        times: StepTimes,
    ) -> StepRecord:
        record = StepRecord(
            phase=phase,
            position=len(sequence.output) - len(emitted),
            drafted=tree.drafted,
            accepted=len(verdict.path),
            emitted=tuple(emitted),
            trimmed=trimmed,
            tokens=tuple(tree.tokens),
            parents=tuple(tree.parents),
            sources=tuple(tree.sources),
            accepted_path=verdict.path,
            times=times,
        )
        sequence.records.append(record)
        return record
