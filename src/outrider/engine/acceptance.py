"""Measures which child of a node the target accepts: the acceptance vector that Sequoia's optimal trees are made from.

Sequoia (Chen et al. 2024, arXiv:2402.12374) assumes that the b-th proposed child of a node is the accepted one with a
probability p_b that does not depend on where the node is. Here the engine decodes with a star, one level of ``width``
children, and counts which of the root's children was accepted, step by step. The vector belongs to one target, drafter,
temperature, proposal and verifier, and the file names them. Knows no tree shape but the star.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from outrider.engine.build import plan_parts
from outrider.engine.engine import Engine, Prompt
from outrider.errors import IllegalCombinationError, InvalidOptionError, RunError
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, StepRecord

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train travels 60 km in 45 minutes. What is its average speed in km/h? Show your steps.",
    "Translate into French: The library opens at nine and closes at six.",
    "Summarise the causes of the First World War in five sentences.",
    "List five healthy breakfasts and say what is good about each.",
    "Write a polite e-mail that asks for a meeting to be moved to Thursday.",
)
"""Used when the user gives no file: one short prompt for each common kind of work."""

WIDEST = 64
_COUNTABLE = (ProposalKind.DETERMINISTIC, ProposalKind.WITHOUT_REPLACEMENT)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was measured, and of what. ``vector[b]`` is the share of steps whose b-th child was accepted (b from 0).

    ``none`` is the share of steps that accepted no child: ``vector`` and ``none`` together sum to 1.
    """

    model: str
    drafter: str
    draft_model: str | None
    temperature: float
    proposal: str
    verifier: str
    prompts: int
    steps: int
    vector: tuple[float, ...]
    none: float
    date: str

    def save(self, path: Path, command: str) -> None:
        """Write JSON, under a temporary name first: an interrupted run leaves the old file whole.

        Raises:
            RunError: when the file cannot be written.
        """
        text = json.dumps(asdict(self) | {"command": command}, indent=2) + "\n"
        try:
            descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".new")
        except OSError as error:
            raise _cannot_write(path, error) from None
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(name, 0o644)  # temporary files are private
            os.replace(name, path)
        except BaseException as error:
            Path(name).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _cannot_write(path, error) from None
            raise


def measure_acceptance(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    width: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Acceptance:
    """Decode ``prompts`` with a star of ``width`` children and count which child is accepted.

    Args:
        engine: any engine with the drafter in question; its models are used, its shape is not.
        prompts: as ``Engine.generate`` takes them.
        params: temperature and the other sampling parameters that the vector is for.
        width: children of the root, 1 to 64.
        progress: called with (prompts done, prompts in all).

    Raises:
        InvalidOptionError: no prompts, or a width out of range.
        IllegalCombinationError: a proposal whose trials cannot be told apart afterwards, a drafter that merges others'
            trees, or parts that are not exact.
        RunError: no guess was accepted, so that there is no vector to make a tree from.
    """
    if not 1 <= width <= WIDEST:
        raise InvalidOptionError(f"width={width} is not allowed: a star has 1 to {WIDEST} children")
    if not prompts:
        raise InvalidOptionError("there are no prompts to measure on; give at least one")
    star = engine.with_parts(shape=f"widths:{width}", adaptive=False, max_nodes=None)
    plan = plan_parts(star.config, params.regime)
    if plan.draft.drafter.cls.merges:
        raise IllegalCombinationError(
            f"drafter '{plan.draft.drafter.name}' proposes the trees of its members, which have vectors of their own; "
            "measure the members one by one"
        )
    if plan.draft.proposal not in _COUNTABLE:
        raise IllegalCombinationError(
            f"{plan.draft.proposal.value} proposals merge equal trials, so it cannot be told which one was accepted; "
            "measure with --proposal deterministic or without_replacement"
        )
    counts, steps = [0] * width, 0
    for done, prompt in enumerate(prompts):
        result = star.generate(prompt, params)
        room = min(params.max_tokens, star.model.context_length - result.prompt_tokens)
        for child in accepted_children(result.records, room):
            steps += 1
            if child is not None:
                counts[child] += 1
        if progress is not None:
            progress(done + 1, len(prompts))
    if not any(counts):
        raise RunError(
            f"no guess of drafter '{star.config.drafter}' was accepted in {steps} steps, so there is nothing to make a "
            "tree from; give more prompts, more --max-new-tokens or another drafter"
        )
    return Acceptance(
        model=star.config.model,
        drafter=star.config.drafter,
        draft_model=star.config.draft_model,
        temperature=params.temperature,
        proposal=plan.draft.proposal.value,
        verifier=plan.verifier.name,
        prompts=len(prompts),
        steps=steps,
        vector=tuple(count / steps for count in counts),
        none=(steps - sum(counts)) / steps,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def accepted_children(records: Iterable[StepRecord], room: int) -> list[int | None]:
    """For every decode step that could draft, the place among the root's children of the accepted one, or ``None``.

    Children of the root are in trial order for deterministic and without-replacement proposals, whose trials are all
    different. A step that found nothing to guess counts as ``None``; the last one of ``room`` tokens may not draft and
    does not count.
    """
    found: list[int | None] = []
    for record in records:
        if record.phase != "decode" or record.position >= room - 1:
            continue
        if not record.accepted_path:
            found.append(None)
            continue
        children = [node for node, parent in enumerate(record.parents) if parent == 0]
        found.append(children.index(record.accepted_path[0]))
    return found


def check_output(path: Path) -> None:
    """Refuse a file that could not be written after minutes of measuring.

    Raises:
        InvalidOptionError: a directory, or a file in a directory that does not exist or is not writable.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidOptionError(f"--output {path} cannot be written there; name a file in a directory that exists")


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write the acceptance vector to {path}: {error.strerror or error}; choose another --output")
