"""The coarse test on the real model: many seeded continuations of a prompt, plain and speculative, one law or two?

For each prompt both ways of decoding make the same number of continuations, with different seeds, through
``Engine.run``. Compared are the first tokens (chi-square, one test a position), the lengths where they vary
(chi-square), and the counts of tokens and of token pairs over whole continuations: tokens of one continuation depend on
each other, so a chi-square test of these counts would be wrong, and a permutation test hands out whole continuations
instead. All p-values are corrected for their number with Holm's method. Knows no verification rule.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.audit.significance import Significance, holm, permutation_test, two_samples
from outrider.engine.engine import Engine
from outrider.engine.result import Result
from outrider.sampling.params import SamplingParams

ALPHA = 0.01
"""Probability that all tests of a part together condemn a correct engine."""

FIRST_TOKENS = 3
PERMUTATIONS = 9_999
PERMUTATIONS_PER_PROMPT = 1_000
"""At least so many for each prompt: a p-value has to survive the correction for six tests a prompt."""
ENDED = -1
"""Stands for the token of a continuation that ended before."""

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class LawTest:
    """One comparison; ``corrected`` is the p-value after Holm's correction over all tests of the part."""

    name: str
    test: Significance
    corrected: float = 1.0

    @property
    def passed(self) -> bool:
        return self.corrected >= ALPHA


@dataclass(slots=True)
class PromptComparison:
    """One prompt's two samples. ``drafted`` and ``accepted`` count guesses of all speculative continuations."""

    prompt: int
    samples: int
    tokens: int
    drafted: int = 0
    accepted: int = 0
    tests: list[LawTest] = field(default_factory=list)


def statistical_audit(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    samples: int,
    seed: int,
    batch: int = 32,
    progress: Progress | None = None,
) -> list[PromptComparison]:
    """Compare ``engine`` with its plain form.

    Args:
        engine: with the parts to audit.
        prompts: token ids.
        params: sampling parameters, temperature above 0; ``max_tokens`` is the length of a continuation.
        samples: continuations of each prompt and way of decoding.
        seed: every continuation's seed is a function of it.
        batch: continuations decoded together.
        progress: called with (continuations done, continuations in all).

    Raises:
        UsageError: when the engine's parts are not exact for these parameters.
    """
    ways = (engine.plain(), engine)
    rows, done = [], 0
    for index, prompt in enumerate(prompts):
        row = PromptComparison(index, samples, params.max_tokens)
        made: list[list[tuple[int, ...]]] = []
        for way, decoder in enumerate(ways):
            outputs: list[tuple[int, ...]] = [()] * samples
            seeds = [seed_of(seed, index, way, number) for number in range(samples)]
            for number, result in continuations(decoder, prompt, params, seeds, batch):
                outputs[number] = result.tokens
                if way == 1:
                    row.drafted += result.stats.num_draft_tokens
                    row.accepted += result.stats.num_accepted_tokens
                done += 1
                if progress is not None:
                    progress(done, len(ways) * samples * len(prompts))
            made.append(outputs)
        permutations = max(PERMUTATIONS, PERMUTATIONS_PER_PROMPT * len(prompts))
        row.tests = compare_continuations(made[0], made[1], params.max_tokens, seed, permutations)
        rows.append(row)
    correct([test for row in rows for test in row.tests])
    return rows


def seed_of(*key: int) -> int:
    """A seed in [0, 2^64) for ``key``: neighbouring audits and samples share no random number."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def continuations(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int], batch: int
) -> Iterator[tuple[int, Result]]:
    """(number, result) of a continuation for each of ``seeds``, as they finish."""
    requests = ((number, prompt, params.model_copy(update={"seed": seed})) for number, seed in enumerate(seeds))
    for key, result in engine.run(requests, batch, reuse=True):
        yield int(str(key)), result


def compare_continuations(
    plain: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
    length: int,
    seed: int,
    permutations: int = PERMUTATIONS,
) -> list[LawTest]:
    """Every test of two samples of continuations, p-values uncorrected; tests with nothing to compare are left out."""
    found: dict[str, Significance | None] = {}
    for position in range(min(FIRST_TOKENS, length)):
        a, b = ([_token(tokens, position) for tokens in sample] for sample in (plain, speculative))
        found[f"token {position + 1}"] = two_samples(a, b)
    found["length"] = two_samples([len(tokens) for tokens in plain], [len(tokens) for tokens in speculative])
    for name, count in (("token counts", _tokens), ("pair counts", _pairs)):
        a_counts, b_counts = ([count(tokens) for tokens in sample] for sample in (plain, speculative))
        found[name] = permutation_test(a_counts, b_counts, permutations, seed)
    return [LawTest(name, test) for name, test in found.items() if test is not None]


def correct(tests: Sequence[LawTest]) -> None:
    """Fill in ``corrected`` over all ``tests``."""
    for test, corrected in zip(tests, holm([t.test.p_value for t in tests]), strict=True):
        test.corrected = corrected


def _token(tokens: Sequence[int], position: int) -> int:
    return tokens[position] if position < len(tokens) else ENDED


def _tokens(tokens: Sequence[int]) -> Counter[Hashable]:
    return Counter(tokens)


def _pairs(tokens: Sequence[int]) -> Counter[Hashable]:
    return Counter(pairwise(tokens))
