"""Small packed batches, and recurrent heads evaluated the slow, obvious way: one query at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.heads.build import new_config
from outrider.heads.network import RecurrentNetwork
from outrider.heads.registry import network_class
from outrider.heads.rotary import Rotary
from outrider.models.base import LanguageModel
from outrider.training.batch import Batch


def random_batch(
    target: LanguageModel,
    rows: Sequence[Sequence[tuple[int, int]]],
    seed: int = 0,
    features: Sequence[str | int] = (1, 2, "final"),
) -> Batch:
    """``rows`` of documents (prompt length, answer length); features, tokens and true distributions are random.

    ``best`` and ``log_sum`` are those of the target's output rows times the final feature.
    """
    generator = torch.Generator().manual_seed(seed)
    length = max(sum(p + a for p, a in row) for row in rows)
    size = (len(rows), length)
    tokens = torch.randint(target.vocab_size, size, generator=generator)
    answers = torch.zeros(size, dtype=torch.bool)
    documents, positions = torch.full(size, -1), torch.zeros(size, dtype=torch.int64)
    for b, row in enumerate(rows):
        start = 0
        for number, (prompt, answer) in enumerate(row):
            end = start + prompt + answer
            answers[b, start + prompt : end] = True
            documents[b, start:end] = number
            positions[b, start:end] = torch.arange(end - start)
            start = end
    hidden = {
        name: torch.randn((*size, target.hidden_size), generator=generator, dtype=torch.float64) for name in features
    }
    logits = hidden["final"] @ target.output_rows().double().T
    return Batch(tokens, answers, documents, positions, hidden, logits.argmax(-1), logits.logsumexp(-1).float())


def documents_of(batch: Batch) -> list[Batch]:
    """Each document as a batch of its own."""
    found = []
    for b in range(len(batch.tokens)):
        for number in range(int(batch.documents[b].max()) + 1):
            at = (batch.documents[b] == number).nonzero().flatten()
            cut = {name: state[b, at][None] for name, state in batch.features.items()}
            found.append(
                Batch(
                    batch.tokens[b, at][None],
                    batch.answers[b, at][None],
                    torch.zeros((1, len(at)), dtype=torch.int64),
                    batch.positions[b, at][None],
                    cut,
                    batch.best[b, at][None],
                    batch.log_sum[b, at][None],
                )
            )
    return found


def make_network(
    method: str, target: LanguageModel, draft_ids: Tensor | None = None, seed: int = 0, **fields: object
) -> RecurrentNetwork:
    """A float64 network; numbers large enough for attention to matter."""
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    if method == "eagle3":
        fields = {"features": (1, 2, "final"), **fields}
    network = network_class(method)(new_config(method, target, draft_vocab_size=size, **fields)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    network.draft_ids = draft_ids
    assert isinstance(network, RecurrentNetwork)
    return network


def slow_outputs(
    network: RecurrentNetwork, target: LanguageModel, document: Batch, row: int, steps: int, is_unrolled: bool
) -> list[Tensor]:
    """Outputs [H] of a document's row at each step, every key written down explicitly.

    Step i's query sees the step-0 keys of rows up to its own, then the row's own later keys (EAGLE-3), or step i's
    keys of rows up to its own (MTP).
    """
    count = len(document.tokens[0])
    states = network.fuse({name: document.features[name][0] for name in network.config.features})
    first: list[tuple[Tensor, Tensor]] = []
    own: list[tuple[Tensor, Tensor]] = []
    outputs = []
    rows = list(range(row + 1)) if not is_unrolled else [row]
    current = {r: states[r] for r in range(count)}
    for step in range(steps):
        seen: list[tuple[Tensor, Tensor]] = [] if not is_unrolled or step == 0 else [*first, *own]
        for r in range(row + 1) if step == 0 else rows:
            entry: list[tuple[Tensor, Tensor]] = []
            output = _slow_step(network, target, document, current[r], r, step, seen, entry)
            seen.append(entry[0])
            current[r] = network.recur(output)
        if step == 0:
            first = list(seen)
        else:
            own.append(seen[-1])
        outputs.append(output)
    return outputs


def _slow_step(
    network: RecurrentNetwork,
    target: LanguageModel,
    document: Batch,
    state: Tensor,
    row: int,
    step: int,
    seen: list[tuple[Tensor, Tensor]],
    entry: list[tuple[Tensor, Tensor]],
) -> Tensor:
    config = network.config
    rotary = Rotary(config, torch.device("cpu"))
    cos, sin = rotary.at(torch.tensor([row + step]), torch.float64)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = Rotary.turn(queries.view(1, config.num_heads, -1), cos, sin)[0]
        k = Rotary.turn(keys.view(1, config.num_kv_heads, -1), cos, sin)[0]
        entry.append((k, values.view(config.num_kv_heads, -1)))
        everything = [*seen, entry[0]]
        group = config.num_heads // config.num_kv_heads
        out = []
        for head in range(config.num_heads):
            scores = torch.stack([q[head] @ key[head // group] for key, _ in everything]) / config.head_dim**0.5
            weights = scores.softmax(0)
            out.append(sum(w * value[head // group] for w, (_, value) in zip(weights, everything, strict=True)))
        return torch.cat(out)

    newest = row + 1 + step
    token = document.tokens[0, newest] if newest < len(document.tokens[0]) else torch.tensor(0)
    return network.step(token=target.embed(token).double(), state=state, attend=attend)
