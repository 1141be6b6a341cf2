"""One suite for every ``LanguageModel``: what design.md, invariants 3 and 4, promises of forwards and caches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import IMPLEMENTATIONS, PLAN, WINDOW, FirstLayers, Implementation
from torch import Tensor

from outrider.errors import CacheRollbackError
from outrider.models.base import FINAL_HIDDEN, LanguageModel, Segment, SequenceCache, blocks_after, tree_segment
from outrider.models.cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.hf_cache import TransformersCache
from outrider.models.pretrained import PretrainedCheckpoint
from outrider.models.toy import ToyCache
from outrider.trees.token_tree import TokenTree
from outrider.trees.topology import ancestors_mask

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield IMPLEMENTATIONS[request.param]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(implementation: Implementation, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return implementation.build(tmp_path_factory.mktemp("model"))


# -- helpers -----------------------------------------------------------------------------------------------


def draw(rng: random.Random, model: LanguageModel, count: int) -> list[int]:
    return [rng.randrange(3, model.vocab_size) for _ in range(count)]


def append(model: LanguageModel, cache: SequenceCache, tokens: Sequence[int]) -> Tensor:
    """Evaluate and commit a chain; logits [n, vocab]."""
    logits = model.forward([Segment(cache, tokens)])[0].logits
    cache.commit(range(len(tokens)))
    return logits


def fresh(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocab] of one prefill in a new cache: the reference."""
    return append(model, model.new_cache(), tokens)


def prefilled(model: LanguageModel, tokens: Sequence[int]) -> SequenceCache:
    cache = model.new_cache()
    append(model, cache, tokens)
    return cache


def probe(model: LanguageModel, cache: SequenceCache, token: int) -> Tensor:
    """Logits [1, vocab] after one more token, which is taken back."""
    with cache.speculation():
        return model.forward([Segment(cache, [token])])[0].logits


def random_tree(rng: random.Random, model: LanguageModel, nodes: int) -> TokenTree:
    """Branching, and usually deeper than the window: half of the nodes continue the newest one."""
    tree = TokenTree(rng.randrange(3, model.vocab_size))
    while len(tree) < nodes:
        parent = len(tree) - 1 if rng.random() < 0.6 else rng.randrange(len(tree))
        tree.add(parent, rng.randrange(3, model.vocab_size))
    return tree


def path_slots(tree: TokenTree, node: int) -> list[int]:
    return [0, *tree.path(node)]


def path_text(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[0], *tree.path_tokens(node)]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def close_entries(found: SequenceCache, wanted: SequenceCache) -> None:
    """The stored entries of both caches agree wherever both still hold them, at least the window."""
    if isinstance(found, KVCache) and isinstance(wanted, KVCache):
        for mine, other in zip(found.groups, wanted.groups, strict=True):
            base = max(mine.base, other.base)
            assert base <= max(0, found.length - (mine.window or found.length) + 1)
            close(
                mine.entries[:, :, base - mine.base : found.length - mine.base],
                other.entries[:, :, base - other.base : found.length - other.base],
            )
    elif isinstance(found, TransformersCache) and isinstance(wanted, TransformersCache):
        for layer, reference in zip(found.layers, wanted.layers, strict=True):
            for a, b in ((layer.keys, reference.keys), (layer.values, reference.values)):
                assert a is not None
                assert b is not None
                close(a[:, :, : found.length], b[:, :, : found.length])
    elif isinstance(found, ToyCache) and isinstance(wanted, ToyCache):
        assert found.tokens == wanted.tokens
    else:
        pytest.fail(f"no comparison for {type(found).__name__} and {type(wanted).__name__}")


# -- (a), (k) prefill however it is cut ---------------------------------------------------------------------


def test_prefill_in_chunks_or_steps_equals_one_forward(model: LanguageModel) -> None:
    tokens = draw(random.Random(1), model, 3 * WINDOW + 2)
    wanted = fresh(model, tokens)
    assert wanted.shape == (len(tokens), model.vocab_size)
    for size in (1, 3, WINDOW, WINDOW + 1, 2 * WINDOW + 1):
        cache = model.new_cache()
        parts = [append(model, cache, tokens[i : i + size]) for i in range(0, len(tokens), size)]
        close(torch.cat(parts), wanted)
        assert (cache.length, cache.scratch) == (len(tokens), 0)


@pytest.mark.parametrize("rows", range(1, WINDOW + 4))
def test_appending_in_random_chunks_equals_token_by_token(model: LanguageModel, rows: int) -> None:
    rng = random.Random(rows)
    prompt, tokens = draw(rng, model, rng.choice((2, WINDOW - 1, WINDOW, 2 * WINDOW))), draw(rng, model, rows)
    chunked, stepwise = prefilled(model, prompt), prefilled(model, prompt)
    wanted = torch.cat([append(model, stepwise, [token]) for token in tokens])
    found, done = [], 0
    while done < rows:
        size = rng.randint(1, rows - done)
        found.append(append(model, chunked, tokens[done : done + size]))
        done += size
    close(torch.cat(found), wanted)
    close_entries(chunked, stepwise)


# -- (b), (c), (e) trees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", [1, WINDOW - 1, 2 * WINDOW + 3])
@pytest.mark.parametrize("seed", range(3))
def test_tree_equals_each_branch_alone(model: LanguageModel, prompt_length: int, seed: int) -> None:
    rng = random.Random(100 + seed)
    prompt, tree = draw(rng, model, prompt_length), random_tree(rng, model, 24)
    logits = model.forward([tree_segment(prefilled(model, prompt), tree)])[0].logits
    for node in range(len(tree)):
        close(logits[node], fresh(model, [*prompt, *path_text(tree, node)])[-1])


def test_order_of_siblings_does_not_matter(model: LanguageModel) -> None:
    rng = random.Random(3)
    prompt, tree = draw(rng, model, WINDOW + 2), random_tree(rng, model, 20)
    permuted, place, waiting = TokenTree(tree.tokens[0]), {0: 0}, list(tree.children(0).values())
    while waiting:
        node = waiting.pop(rng.randrange(len(waiting)))
        place[node] = permuted.add(place[tree.parents[node]], tree.tokens[node])
        waiting.extend(tree.children(node).values())
    assert [place[node] for node in range(len(tree))] != list(range(len(tree)))
    wanted = model.forward([tree_segment(prefilled(model, prompt), tree)])[0].logits
    found = model.forward([tree_segment(prefilled(model, prompt), permuted)])[0].logits
    close(found[[place[node] for node in range(len(tree))]], wanted)


@pytest.mark.parametrize("seed", range(3))
def test_tree_grown_by_several_forwards_equals_one(model: LanguageModel, seed: int) -> None:
    rng = random.Random(200 + seed)
    prompt, tree = draw(rng, model, rng.choice((2, 2 * WINDOW))), random_tree(rng, model, 22)
    mask = ancestors_mask(tree.parent_array())
    cache = prefilled(model, prompt)
    cuts = [0, *sorted(rng.sample(range(1, len(tree)), 3)), len(tree)]
    parts = []
    for start, stop in pairwise(cuts):
        positions = [cache.length + depth for depth in tree.depths[start:stop]]
        grown = Segment(cache, tree.tokens[start:stop], positions, mask[start:stop, :stop])
        parts.append(model.forward([grown])[0].logits)
    whole = prefilled(model, prompt)
    close(torch.cat(parts), model.forward([tree_segment(whole, tree)])[0].logits)
    node = len(tree) - 1
    for each in (cache, whole):
        each.commit(path_slots(tree, node))
    close_entries(cache, whole)
    close(probe(model, cache, 5), fresh(model, [*prompt, *path_text(tree, node), 5])[-1:])


# -- (d) accept, roll back, truncate ------------------------------------------------------------------------


def check_state(model: LanguageModel, cache: SequenceCache, text: list[int]) -> None:
    assert (cache.length, cache.scratch) == (len(text), 0)
    close(probe(model, cache, 7), fresh(model, [*text, 7])[-1:])
    if text:
        close_entries(cache, prefilled(model, text))


@pytest.mark.parametrize("seed", range(4))
def test_cache_equals_fresh_prefill_after_any_history(model: LanguageModel, seed: int) -> None:
    rng = random.Random(300 + seed)
    text = draw(rng, model, rng.choice((1, 4, 3 * WINDOW)))
    cache = prefilled(model, text)
    for _ in range(12):
        action = rng.choice(("tree", "tree", "reject", "chain", "truncate"))
        if action == "chain":
            more = draw(rng, model, rng.randint(1, WINDOW + 2))
            append(model, cache, more)
            text += more
        elif action == "truncate":
            length = len(text) - rng.randint(0, min(3, len(text)))
            if cache.can_truncate(length):
                cache.truncate(length)
                del text[length:]
        else:
            tree = random_tree(rng, model, rng.randint(1, 14))
            with cache.speculation():
                model.forward([tree_segment(cache, tree)])
                assert cache.scratch == len(tree)
                if action == "tree":
                    node = rng.randrange(len(tree))
                    cache.commit(path_slots(tree, node))
                    text += path_text(tree, node)
        check_state(model, cache, text)


def test_last_token_can_be_taken_back(model: LanguageModel) -> None:
    """A chat turn that re-sends its last token."""
    text = draw(random.Random(4), model, 2)
    cache = prefilled(model, text)
    cache.truncate(1)
    check_state(model, cache, text[:1])
    cache.truncate(0)
    check_state(model, cache, [])


# -- (f) batches --------------------------------------------------------------------------------------------


def test_ragged_batch_equals_each_sequence_alone(model: LanguageModel) -> None:
    rng = random.Random(5)
    prompts = [draw(rng, model, length) for length in (2, WINDOW + 3, 3 * WINDOW)]
    trees = [random_tree(rng, model, size) for size in (1, 9, 17)]
    rows: list[Sequence[int] | None] = [None, (7, 2), None]
    together = [prefilled(model, prompt) for prompt in prompts]
    segments = [tree_segment(*each) for each in zip(together, trees, rows, strict=True)]
    outputs = model.forward(segments, hidden=[FINAL_HIDDEN, 1])
    for index, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        alone = prefilled(model, prompt)
        single = model.forward([tree_segment(alone, tree, rows[index])], hidden=[FINAL_HIDDEN, 1])[0]
        close(outputs[index].logits, single.logits)
        for name in (FINAL_HIDDEN, 1):
            close(outputs[index].hidden[name], single.hidden[name])
            assert outputs[index].hidden[name].shape == (len(tree), model.hidden_size)
        for cache in (alone, together[index]):
            cache.commit(path_slots(tree, len(tree) - 1))
        close_entries(together[index], alone)


def test_one_cache_twice_in_a_batch_is_refused(model: LanguageModel) -> None:
    cache = prefilled(model, [3, 4])
    with pytest.raises(ValueError, match="share"):
        model.forward([Segment(cache, [5]), Segment(cache, [6])])
    check_state(model, cache, [3, 4])


# -- (g) checked rollback -----------------------------------------------------------------------------------


def test_commit_beyond_scratch_is_refused(model: LanguageModel) -> None:
    text = draw(random.Random(6), model, 4)
    cache = prefilled(model, text)
    model.forward([Segment(cache, [3, 4])])
    for slots in ([2], [0, 1, 2], [-1]):
        with pytest.raises(ValueError, match="scratch"):
            cache.commit(slots)
        assert (cache.length, cache.scratch) == (4, 2)
    cache.rollback()
    check_state(model, cache, text)


def test_truncate_is_exact_or_refused(model: LanguageModel, implementation: Implementation) -> None:
    text = draw(random.Random(8), model, 600)
    cache = model.new_cache()
    for start in range(0, len(text), 50):
        append(model, cache, text[start : start + 50])
    legal = [length for length in range(len(text) + 1) if cache.can_truncate(length)]
    assert legal[-1] == len(text)
    assert legal == list(range(legal[0], len(text) + 1))
    assert (legal[0] > 0) is implementation.drops_entries
    if implementation.drops_entries:
        with pytest.raises(CacheRollbackError, match="window"):
            cache.truncate(legal[0] - 1)
        close(probe(model, cache, 9), fresh(model, [*text, 9])[-1:])
    cache.truncate(legal[0])
    assert cache.length == legal[0]
    close(probe(model, cache, 9), fresh(model, [*text[: legal[0]], 9])[-1:])


# -- (h) speculation ----------------------------------------------------------------------------------------


def test_speculation_rolls_back_on_an_exception(model: LanguageModel) -> None:
    rng = random.Random(9)
    text = draw(rng, model, WINDOW + 1)
    cache = prefilled(model, text)

    def interrupted() -> None:
        with cache.speculation():
            model.forward([tree_segment(cache, random_tree(rng, model, 6))])
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        interrupted()
    check_state(model, cache, text)


def test_a_forward_that_fails_leaves_the_cache_usable(model: LanguageModel) -> None:
    text = draw(random.Random(10), model, 5)
    cache = prefilled(model, text)
    wrong = Segment(cache, [3, 4], [5, 5], np.ones((2, 7), dtype=np.bool_))
    with pytest.raises((ValueError, RuntimeError)), cache.speculation():
        model.forward([wrong])
    check_state(model, cache, text)


# -- (i) what comes back -------------------------------------------------------------------------------------


def test_logits_only_of_the_rows_asked_for(model: LanguageModel) -> None:
    rng = random.Random(11)
    prompt, tree = draw(rng, model, 4), random_tree(rng, model, 8)
    cache = prefilled(model, prompt)
    with cache.speculation():
        wanted = model.forward([tree_segment(cache, tree)])[0].logits
    for rows in ([7], [0, 3, 4], [5, 1], list(range(8))[::-1], [2, 2], []):
        with cache.speculation():
            found = model.forward([tree_segment(cache, tree, rows)])[0].logits
        assert found.shape == (len(rows), model.vocab_size)
        close(found, wanted[rows])


def test_hidden_states(model: LanguageModel) -> None:
    tokens = draw(random.Random(12), model, 9)
    names: list[str | int] = [FINAL_HIDDEN, 0, model.num_layers - 1]
    output = model.forward([Segment(model.new_cache(), tokens)], hidden=names)[0]
    assert set(output.hidden) == set(names)
    assert all(state.shape == (len(tokens), model.hidden_size) for state in output.hidden.values())
    final, index = output.hidden[FINAL_HIDDEN], torch.tensor(tokens)
    if isinstance(model, Decoder):
        logits = model.head(final)
        cap = model.config.final_soft_cap
        close(logits if cap is None else torch.tanh(logits / cap) * cap, output.logits)
        close(output.hidden[0], model.embedding[index] * model.config.embedding_scale)
    elif isinstance(model, TransformersModel):
        close(model.model.get_output_embeddings()(final), output.logits)
        plain = model.model(input_ids=index[None], output_hidden_states=True).hidden_states
        close(output.hidden[0], plain[0][0])
        close(output.hidden[model.num_layers - 1], plain[-2][0])
    else:
        again = model.forward([Segment(model.new_cache(), tokens[-1:])], hidden=[0])[0]
        close(again.hidden[0], output.hidden[0][-1:])


def test_unknown_hidden_state_is_refused(model: LanguageModel) -> None:
    for name in ("last", model.num_layers, -1):
        with pytest.raises(ValueError, match="hidden state"):
            model.forward([Segment(model.new_cache(), [3])], hidden=[name])


# -- (j) early exits ------------------------------------------------------------------------------------------


def test_early_exit(model: LanguageModel) -> None:
    rng = random.Random(13)
    tokens, tree = draw(rng, model, WINDOW + 3), random_tree(rng, model, 7)
    cache = prefilled(model, tokens)
    if not model.supports_skip:
        with pytest.raises(ValueError, match="cannot skip"):
            model.forward([tree_segment(cache, tree)], skip=blocks_after(1, model.num_layers))
        return
    for skip in (blocks_after(0, model.num_layers), frozenset({2 * model.num_layers}), frozenset({-1})):
        with pytest.raises(ValueError, match="must leave out some"):
            model.forward([tree_segment(cache, tree)], skip=skip)
    for layers in range(1, model.num_layers + 1):
        with cache.speculation():
            found = model.forward([tree_segment(cache, tree)], skip=blocks_after(layers, model.num_layers))[0].logits
        if isinstance(model, Decoder):
            short = Decoder(FirstLayers(PretrainedCheckpoint(model.name), layers), PLAN)
            close(found, short.forward([tree_segment(prefilled(short, tokens), tree)])[0].logits)
    close(found, model.forward([tree_segment(prefilled(model, tokens), tree)])[0].logits)
    check_state(model, cache, tokens)
