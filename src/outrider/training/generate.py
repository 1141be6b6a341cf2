"""Self-distillation: the target answers many prompts in one batch, and its hidden states are kept along the way.

The states cost nothing beside decoding: each row's pass makes them anyway. A finished answer's place is taken by the
next prompt at once; prompts are evaluated in the pass that decodes the others. What comes before an answer (the chat
template, the user's text, earlier turns) is prompt, and only what was generated behind it is ever supervised. What a
request is answered with depends on its own prompt, temperature and seed only (bfloat16 rounding of batched products
aside), so a run that was killed goes on with the requests that are left. Knows nothing of text and of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.models.base import PREFILL_ROWS, LanguageModel, Segment, SegmentOutput, SequenceCache
from outrider.sampling.draw import SeededStream
from outrider.types import Role

Feature = str | int
"""Name of a hidden state: an integer is the input of that block, ``final`` the state after the final norm."""

_PASS_ROWS = 8 * PREFILL_ROWS
"""Rows of one pass from which new prompts wait for the next one: bounds what activations take."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer.

    Attributes:
        index: which request of the run; part of what identifies its answer.
        prompt: token ids [n], at least one.
        temperature: 0 for the most probable tokens, else samples of the target's distribution at this temperature.
        seed: of the samples.
    """

    index: int
    prompt: Sequence[int]
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's text and the target's hidden states.

    Attributes:
        request: what was asked.
        tokens: prompt and answer, an end token included, [n].
        features: by name, [n, hidden_size] in the target's dtype; row t is the state that predicted token t + 1. The
            last token was never evaluated: its row is 0 and nothing may be predicted from it.
        best: int32 [n], the target's most probable token after row t, for rows that predicted a token of the answer;
            -1 elsewhere.
        log_sum: float32 [n], log of the sum of exp of all logits at those rows, 0 elsewhere: with the final hidden
            state it gives the true probability of any token without another pass over the vocabulary.
        is_finished: whether the answer ended by itself (else it was cut at the limit).
    """

    request: Request
    tokens: list[int]
    features: dict[Feature, Tensor]
    best: Tensor
    log_sum: Tensor
    is_finished: bool


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    cache: SequenceCache
    tokens: list[int]
    stream: SeededStream
    rows: dict[Feature, list[Tensor]] = field(default_factory=dict)
    best: list[int] = field(default_factory=list)
    log_sum: list[float] = field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        """Tokens that the next pass evaluates: a piece of the prompt, or the newest token."""
        return self.tokens[self.cache.length : self.cache.length + PREFILL_ROWS]


@torch.inference_mode()
def answer_all(
    model: LanguageModel,
    requests: Iterable[Request],
    features: Sequence[Feature],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    batch: int = 32,
) -> Iterator[Answer]:
    """Answer ``requests``, ``batch`` at a time, in the order in which they finish.

    Args:
        model: the target.
        requests: read only as places become free; it may run empty and give more after an answer was taken.
        features: names of the hidden states to keep.
        stop_ids: tokens that end an answer (kept as its last token).
        max_new_tokens: tokens of an answer at most; the context limit cuts earlier.
        batch: answers decoded together.
    """
    waiting = iter(requests)
    running: list[_Running] = []
    while True:
        rows = sum(len(one.pending) for one in running)
        while len(running) < batch and rows < _PASS_ROWS and (request := next(waiting, None)) is not None:
            running.append(_Running(request, model.new_cache(), list(request.prompt), SeededStream(request.seed)))
            rows += len(running[-1].pending)
        if not running:
            return
        outputs = model.forward([_segment(one) for one in running], features)
        for one, output in zip(running, outputs, strict=True):
            _keep(one, output)
        ready = [one for one, output in zip(running, outputs, strict=True) if len(output.logits)]
        for one, token in zip(ready, _next_tokens(ready, [output.logits for output in outputs]), strict=True):
            one.tokens.append(token)
        done = [one for one in ready if _is_done(one, model, stop_ids, max_new_tokens)]
        for one in done:
            running.remove(one)
            yield _answer(one, one.tokens[-1] in stop_ids)


def _segment(one: _Running) -> Segment:
    tokens = one.pending
    is_last = one.cache.length + len(tokens) == len(one.tokens)
    return Segment(one.cache, tokens, logit_rows=[len(tokens) - 1] if is_last else ())


def _keep(one: _Running, output: SegmentOutput) -> None:
    count = len(one.pending)
    one.cache.commit(range(count))
    for name, state in output.hidden.items():
        # A view keeps the states of the whole pass alive: few rows when all decode, many when prompts are among them.
        one.rows.setdefault(name, []).append(state if count == 1 else state.clone())


def _next_tokens(running: Sequence[_Running], rows: Sequence[Tensor]) -> list[int]:
    """One token for each sequence from logits [0 or 1, vocabulary]."""
    if not running:
        return []
    logits = torch.cat(list(rows))
    wide = logits.float()  # the most probable token is the same, and found faster, where that only adds zeros
    tokens: list[int] = (wide if logits.element_size() < 4 else logits).argmax(dim=-1).tolist()
    for one, best, log_sum in zip(running, tokens, torch.logsumexp(wide, dim=-1).tolist(), strict=True):
        one.best.append(best)
        one.log_sum.append(log_sum)
    sampled = [i for i, one in enumerate(running) if one.request.temperature > 0.0]
    if sampled:
        scale = torch.tensor([[1.0 / running[i].request.temperature] for i in sampled], device=logits.device)
        mass = torch.softmax(wide[sampled] * scale, dim=-1).double().cumsum(dim=-1)
        drawn = [running[i].stream.uniform(_answered(running[i]), Role.TARGET, 0) for i in sampled]
        thresholds = torch.tensor(drawn, dtype=torch.float64, device=logits.device)[:, None] * mass[:, -1:]
        found = torch.searchsorted(mass, thresholds, right=True)[:, 0].clamp(max=logits.shape[-1] - 1).tolist()
        for i, token in zip(sampled, found, strict=True):
            tokens[i] = token
    return tokens


def _answered(one: _Running) -> int:
    return len(one.tokens) - len(one.request.prompt)


def _is_done(one: _Running, model: LanguageModel, stop_ids: frozenset[int], limit: int) -> bool:
    is_full = len(one.tokens) >= model.context_length
    return one.tokens[-1] in stop_ids or _answered(one) >= limit or is_full


def _answer(one: _Running, is_finished: bool) -> Answer:
    best, log_sum = torch.tensor(one.best, dtype=torch.int32), torch.tensor(one.log_sum)
    return new_answer(one.request, one.tokens, one.rows, best, log_sum, is_finished)


def new_answer(
    request: Request,
    tokens: list[int],
    rows: Mapping[Feature, Sequence[Tensor]],
    best: Tensor,
    log_sum: Tensor,
    is_finished: bool,
) -> Answer:
    """Put an answer together.

    Args:
        request, tokens, is_finished: as in ``Answer``, n tokens.
        rows: pieces of each hidden state's rows 0 ... n - 2, in order.
        best, log_sum: of the rows that predicted the answer's tokens only.
    """
    features = {}
    for name, parts in rows.items():
        features[name] = torch.cat([*parts, parts[0].new_zeros((1, parts[0].shape[1]))])
    # Row t predicted token t + 1: the first answer token's row is the prompt's last.
    first = len(request.prompt) - 1
    all_best = torch.full((len(tokens),), -1, dtype=torch.int32)
    all_best[first:-1] = best
    all_sums = torch.zeros(len(tokens))
    all_sums[first:-1] = log_sum
    return Answer(request, tokens, features, all_best, all_sums, is_finished)
