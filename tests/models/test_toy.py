"""The toy model: tree rows equal plain text, and every misuse of its cache is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import CacheRollbackError, InvalidOptionError
from outrider.models.base import Segment, blocks_after, tree_segment
from outrider.models.toy import ToyCache, ToyModel
from outrider.trees.token_tree import TokenTree

PROMPT = [3, 1, 4, 1, 5]


def prefilled(model: ToyModel, tokens: list[int] = PROMPT) -> ToyCache:
    cache = model.new_cache()
    model.forward([Segment(cache, tokens, logit_rows=())])
    cache.commit(range(len(tokens)))
    return cache


def branching() -> TokenTree:
    """Root 9; children 2 and 6; 2 -> 5, 3; 6 -> 5; 5 (under 2) -> 8."""
    tree = TokenTree(9)
    left, right = tree.add(0, 2), tree.add(0, 6)
    five = tree.add(left, 5)
    tree.add(left, 3)
    tree.add(right, 5)
    tree.add(five, 8)
    return tree


@pytest.mark.parametrize(
    "options", [{}, {"order": 2}, {"order": 0}, {"window": 3}, {"window": 1}, {"noise": 0.4}], ids=str
)
def test_every_row_of_a_prefill_equals_the_plain_text(options: dict[str, float]) -> None:
    model = ToyModel(16, **options)
    (out,) = model.forward([Segment(model.new_cache(), PROMPT)])
    for row in range(len(PROMPT)):
        assert torch.equal(out.logits[row], model.logits_after(PROMPT[: row + 1]))
    assert out.logits.dtype is torch.float64


@pytest.mark.parametrize("options", [{}, {"order": 2}, {"window": 3}, {"window": 7}], ids=str)
def test_tree_rows_equal_their_branches(options: dict[str, int]) -> None:
    model = ToyModel(16, **options)
    cache, tree = prefilled(model), branching()
    with cache.speculation():
        (out,) = model.forward([tree_segment(cache, tree)])
        for node in range(len(tree)):
            assert torch.equal(out.logits[node], model.logits_after([*PROMPT, 9, *tree.path_tokens(node)]))
    assert cache.scratch == 0


def test_step_by_step_equals_one_pass() -> None:
    model = ToyModel(16)
    cache = model.new_cache()
    for length in range(1, len(PROMPT) + 1):
        (out,) = model.forward([Segment(cache, PROMPT[length - 1 : length])])
        assert torch.equal(out.logits[0], model.logits_after(PROMPT[:length]))
    assert (cache.length, cache.scratch) == (0, len(PROMPT))


def test_a_tree_level_by_level_equals_one_pass() -> None:
    model = ToyModel(16)
    cache = prefilled(model)
    model.forward([Segment(cache, [9])])
    (level,) = model.forward([Segment(cache, [2, 6], [6, 6], np.array([[True, True, False], [True, False, True]]))])
    (deep,) = model.forward([Segment(cache, [5], [7], np.array([[True, False, True, True]]))])
    assert torch.equal(level.logits[0], model.logits_after([*PROMPT, 9, 2]))
    assert torch.equal(level.logits[1], model.logits_after([*PROMPT, 9, 6]))
    assert torch.equal(deep.logits[0], model.logits_after([*PROMPT, 9, 6, 5]))
    cache.commit([0, 2, 3])
    assert cache.tokens == (*PROMPT, 9, 6, 5)


def test_batch_neighbours_do_not_matter() -> None:
    model = ToyModel(16)
    one, two = prefilled(model), prefilled(model, [7, 7])
    both = model.forward([Segment(one, [9]), Segment(two, [9, 2], logit_rows=[1])])
    assert torch.equal(both[0].logits[0], model.logits_after([*PROMPT, 9]))
    assert torch.equal(both[1].logits, model.logits_after([7, 7, 9, 2])[None])


def test_logit_rows() -> None:
    model = ToyModel(16)
    (out,) = model.forward([Segment(model.new_cache(), PROMPT, logit_rows=[4, 0])])
    assert torch.equal(out.logits, torch.stack([model.logits_after(PROMPT), model.logits_after(PROMPT[:1])]))
    (none,) = model.forward([Segment(model.new_cache(), PROMPT, logit_rows=())])
    assert none.logits.shape == (0, 16)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_steps_leave_the_cache_of_a_fresh_prefill(data: st.DataObject) -> None:
    model = ToyModel(6)
    cache = prefilled(model, [1, 2])
    text = [1, 2]
    for _ in range(data.draw(st.integers(1, 4))):
        tree = TokenTree(data.draw(st.integers(0, 5)))
        for _ in range(data.draw(st.integers(0, 6))):
            tree.add(data.draw(st.integers(0, len(tree) - 1)), data.draw(st.integers(0, 5)))
        model.forward([tree_segment(cache, tree)])
        node = data.draw(st.integers(0, len(tree) - 1))
        cache.commit([0, *tree.path(node)])
        text += [tree.tokens[0], *tree.path_tokens(node)]
        if data.draw(st.booleans()):
            text = text[: data.draw(st.integers(1, len(text)))]
            cache.truncate(len(text))
        assert cache.tokens == tuple(text)
        assert (cache.length, cache.scratch) == (len(text), 0)
    (out,) = model.forward([Segment(cache, [3])])
    assert torch.equal(out.logits[0], model.logits_after([*text, 3]))


def test_a_wrong_mask_is_noticed() -> None:
    model = ToyModel(16)
    tree = branching()
    good = tree_segment(prefilled(model), tree)
    assert good.mask is not None
    for row, column in ((3, 0), (3, 1), (3, 3), (3, 2), (4, 3), (6, 5)):
        mask = good.mask.copy()
        mask[row, column] = not mask[row, column]
        with pytest.raises(ValueError, match="must see itself and one scratch entry"):
            model.forward([Segment(prefilled(model), tree.tokens, good.positions, mask)])


def test_a_mask_that_shows_another_branch_of_the_same_depth_changes_the_output() -> None:
    model = ToyModel(16)
    tree = branching()
    good = tree_segment(prefilled(model), tree)
    assert good.mask is not None
    mask = good.mask.copy()
    mask[6, [1, 2]] = mask[6, [2, 1]]
    cache = prefilled(model)
    (out,) = model.forward([Segment(cache, tree.tokens, good.positions, mask)])
    assert not torch.equal(out.logits[6], model.logits_after([*PROMPT, 9, 2, 5, 8]))
    with pytest.raises(ValueError, match="computed under another prefix"):
        cache.commit([0, 1, 3, 6])


def test_wrong_positions_and_shapes_are_noticed() -> None:
    model = ToyModel(16)
    for positions in ([4], [6]):
        with pytest.raises(ValueError, match="at position"):
            model.forward([Segment(prefilled(model), [9], positions)])
    with pytest.raises(ValueError, match="mask of shape"):
        model.forward([Segment(prefilled(model), [9], [5], np.ones((1, 2), dtype=bool))])


def test_a_wrong_commit_is_noticed() -> None:
    model = ToyModel(16)
    tree = branching()
    for slots in ([0, 2, 3], [0, 1, 4, 6], [1], [1, 0], [0, 0]):
        cache = prefilled(model)
        model.forward([tree_segment(cache, tree)])
        with pytest.raises(ValueError, match="computed under another prefix"):
            cache.commit(slots)
        assert (cache.length, cache.tokens) == (len(PROMPT), tuple(PROMPT))
    with pytest.raises(ValueError, match="not one of the 0 scratch entries"):
        prefilled(model).commit([0])


def test_speculation_rolls_back_on_an_exception() -> None:
    model = ToyModel(16)
    cache = prefilled(model)

    def interrupted() -> None:
        with cache.speculation():
            model.forward([Segment(cache, [9, 2])])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (out,) = model.forward([Segment(cache, [7])])
    assert torch.equal(out.logits[0], model.logits_after([*PROMPT, 7]))


def test_an_early_exit_is_distorted_less_the_later_it_is() -> None:
    model = ToyModel(16)
    p = torch.softmax(model.logits_after(PROMPT), -1)
    distances = []
    for exit_layer in (1, 2, 3, 4):
        (out,) = model.forward([Segment(model.new_cache(), PROMPT, logit_rows=[4])], skip=blocks_after(exit_layer, 4))
        distances.append(float((torch.softmax(out.logits[0], -1) - p).abs().sum()))
    assert distances[0] > distances[1] > distances[2] > distances[3] == 0.0
    assert model.supports_skip


def test_entries_of_an_early_exit_cannot_be_kept_or_seen_by_later_blocks() -> None:
    model = ToyModel(16)
    cache = prefilled(model)
    model.forward([Segment(cache, [9])], skip=blocks_after(2, 4))
    model.forward([Segment(cache, [2])], skip=blocks_after(1, 4))
    with pytest.raises(ValueError, match="an entry it sees has skipped"):
        model.forward([Segment(cache, [2])])
    with pytest.raises(ValueError, match="cannot be committed"):
        cache.commit([0])
    with pytest.raises(ValueError, match="must leave out some"):
        model.forward([Segment(prefilled(model), [9])], skip=frozenset({8}))


def test_hidden_states() -> None:
    model = ToyModel(16)
    (plain,) = model.forward([Segment(model.new_cache(), [1, 2, 1])], hidden=["final", 0, 2])
    assert {name: tuple(state.shape) for name, state in plain.hidden.items()} == dict.fromkeys(("final", 0, 2), (3, 8))
    assert torch.equal(plain.hidden[0][0], plain.hidden[0][2])
    assert not torch.equal(plain.hidden[2][0], plain.hidden[2][2])
    cache = prefilled(model, [1, 2])
    (later,) = model.forward([Segment(cache, [1])], hidden=["final", 2])
    assert torch.equal(later.hidden["final"][0], plain.hidden["final"][2])
    for name in ("first", 4, -1):
        with pytest.raises(ValueError, match="no hidden state"):
            model.forward([Segment(model.new_cache(), [1])], hidden=[name])


def test_a_window_hides_and_drops() -> None:
    model = ToyModel(16, window=3)
    cache = prefilled(model)
    assert cache.tokens == tuple(PROMPT[-2:])
    assert cache.length == 5
    (out,) = model.forward([Segment(cache, [9])])
    assert torch.equal(out.logits[0], model.logits_after([1, 5, 9]))
    cache.rollback()
    assert cache.can_truncate(5)
    assert not cache.can_truncate(4)
    with pytest.raises(CacheRollbackError, match="sliding window of 3"):
        cache.truncate(4)
    short = prefilled(model, [1, 2])
    short.truncate(1)
    assert short.tokens == (1,)


def test_truncate_beyond_the_end_is_refused() -> None:
    cache = prefilled(ToyModel(16))
    for length in (6, -1):
        assert not cache.can_truncate(length)
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(length)


def test_seed_and_order() -> None:
    assert torch.equal(ToyModel(16).logits_after(PROMPT), ToyModel(16).logits_after(PROMPT))
    assert not torch.equal(ToyModel(16, seed=1).logits_after(PROMPT), ToyModel(16).logits_after(PROMPT))
    markov = ToyModel(16, order=2)
    assert torch.equal(markov.logits_after([0, 0, 1, 5]), markov.logits_after([7, 1, 5]))
    assert not torch.equal(markov.logits_after([1, 5]), markov.logits_after([2, 5]))
    whole = ToyModel(16)
    assert not torch.equal(whole.logits_after([0, 0, 1, 5]), whole.logits_after([1, 0, 1, 5]))
    assert torch.equal(ToyModel(16, sharpness=0).logits_after(PROMPT), torch.zeros(16, dtype=torch.float64))


def test_noise_gives_a_draft_model_that_mostly_agrees() -> None:
    target, draft = ToyModel(16), ToyModel(16, noise=0.2)
    contexts = [[a, b] for a in range(16) for b in range(16)]
    agree = sum(int(target.logits_after(c).argmax() == draft.logits_after(c).argmax()) for c in contexts)
    assert 0.7 < agree / len(contexts) < 1.0


def test_from_table() -> None:
    rows = [[0.0, 1.0, 0.0], [0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]
    model = ToyModel.from_table(rows)
    (out,) = model.forward([Segment(model.new_cache(), [2, 0, 1])])
    torch.testing.assert_close(torch.softmax(out.logits, -1), torch.tensor([rows[2], rows[0], rows[1]]).double())


@pytest.mark.parametrize("rows", [[], [[1.0], [1.0]], [[0.5, 0.6], [0.5, 0.5]], [[1.5, -0.5], [0.5, 0.5]]])
def test_a_bad_table_is_refused(rows: list[list[float]]) -> None:
    with pytest.raises(InvalidOptionError):
        ToyModel.from_table(rows)


@pytest.mark.parametrize("name", ["vocab_size", "context_length", "window"])
def test_options_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name}=0"):
        ToyModel(**{name: 0})
    with pytest.raises(InvalidOptionError, match="noise"):
        ToyModel(noise=1.5)


def test_misuse_of_forward() -> None:
    model = ToyModel(16, context_length=6)
    cache = prefilled(model)
    with pytest.raises(ValueError, match="share a cache"):
        model.forward([Segment(cache, [1]), Segment(cache, [2])])
    with pytest.raises(ValueError, match="beyond the context"):
        model.forward([Segment(cache, [1, 2])])
    with pytest.raises(ValueError, match="token 16"):
        model.forward([Segment(cache, [16])])
    assert cache.scratch == 0
