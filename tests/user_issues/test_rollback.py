"""State that was not, or not rightly, taken back after rejected guesses; group G and the rollback cases of group A."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from engine.tiny_engines import ScriptModel, build_engine, letters_tokenizer, random_prompts
from outrider.config import EngineConfig
from outrider.drafters.small_model import SmallModelSession
from outrider.engine.engine import Engine
from outrider.engine.loading import LoadedModel, load_model
from outrider.errors import UnsupportedModelError
from outrider.models.base import Segment, tree_segment
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.trees.token_tree import TokenTree
from user_issues.toy_decoding import plain_text, step_by_step, tiny_decoder


@pytest.mark.parametrize("shape", ["chain:5", "widths:2,2,1"])
def test_rollback_full_sliding_window_u01(shape: str) -> None:
    """With a sliding window that has filled up, rejected guesses could not be cut off and the text went astray.

    Greedy text must be plain decoding's far beyond the window, with a draft model that is often wrong.
    """
    target, draft = (ToyModel(vocab_size=12, window=8, noise=noise) for noise in (0.0, 0.6))
    engine = build_engine("small_model", shape, target=target, draft=draft)
    for prompt in random_prompts(4, 12, seed=1):
        result = engine.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True))
        assert result.tokens == plain_text(target, prompt, 32)
        assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_rollback_no_token_twice_u08() -> None:
    """On a prompt that repeats a list, a token came twice where a block of accepted guesses ended (off by one).

    The n-gram guesses go on with the list; the target leaves it after every possible number of accepted ones.
    """
    k, items = 5, [1, 2, 3, 4]
    prompt = items * 3
    seen: set[int] = set()
    for leaves_at in range(1, 3 * k):
        script = (items * 9)[:leaves_at] + [9] + items * 9
        engine = build_engine("ngram", f"chain:{k}", target=ScriptModel(script, len(prompt), 12))
        result = engine.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True))
        assert result.tokens == tuple(script[:32])
        seen |= {record.accepted for record in result.records if record.drafted == k}
    assert seen == set(range(k + 1))


def test_rollback_window_after_any_append_u61(tmp_path: Path) -> None:
    """A rotating cache never dropped anything when more than one token was appended at a time.

    Appended in pieces of 1 to W + 3, a window of W must give the logits, and hold the entries, of token by token.
    """
    window = 6
    toy = ToyModel(vocab_size=48, window=window)
    options: dict[str, object] = {"model_type": "mistral", "sliding_window": window, "max_position_embeddings": 2048}
    decoder = tiny_decoder(tmp_path / "mistral", **options)
    source = random.Random(61)
    text = [source.randrange(48) for _ in range(330)]
    for model in (toy, decoder):
        single, pieces = model.new_cache(), model.new_cache()
        logits = []
        for token in text:
            logits.append(model.forward([Segment(single, [token])])[0].logits[0])
            single.commit([0])
        while pieces.length < len(text):
            piece = text[pieces.length : pieces.length + source.randint(1, window + 3)]
            found = model.forward([Segment(pieces, piece)])[0].logits
            torch.testing.assert_close(found, torch.stack(logits[pieces.length :][: len(piece)]), atol=2e-3, rtol=1e-3)
            pieces.commit(range(len(piece)))
            if isinstance(pieces, ToyCache):
                assert list(pieces.tokens) == text[max(0, pieces.length - (window - 1)) : pieces.length]
    held = pieces.groups[0]  # type: ignore[attr-defined]
    assert held.base > 50  # entries were dropped, and no room was added
    assert held.capacity == 256


RECURRENT: dict[str, dict[str, object]] = {
    "mamba": {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2},
    "hybrid": {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "hidden_size": 32},
    "linear attention": {
        "model_type": "qwen3_next",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("config", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("fallback", [False, True])
def test_rollback_recurrent_models_say_so_u63(tmp_path: Path, config: dict[str, object], fallback: bool) -> None:
    """Speculation was silently off for recurrent and hybrid models, whose state cannot be cut back.

    They are refused before any weight is read, in one sentence that names the reason and what to use instead.
    """
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(tmp_path), EngineConfig(fallback=fallback))
    message = str(caught.value)
    assert "state" in message
    assert "attention" in message


@pytest.mark.parametrize("shape", ["chain:3", "widths:2,2,1"])
def test_rollback_draft_cache_is_a_fresh_prefill_u65(shape: str) -> None:
    """With several guesses a step, the bonus token's entry was overwritten in the draft cache; acceptance collapsed.

    After every step the draft cache continues the committed text as a fresh prefill would; and a draft model that is
    the target is never wrong.
    """
    for noise in (0.0, 0.4):
        target, draft = ToyModel(vocab_size=12), ToyModel(vocab_size=12, noise=noise)
        engine = build_engine("small_model", shape, target=target, draft=draft)
        for prompt in random_prompts(3, 12, seed=65):
            text = list(prompt)
            for event, sequence in step_by_step(engine, prompt, SamplingParams(max_tokens=30, ignore_eos=True)):
                text += event.tokens
                session = sequence.session
                assert isinstance(session, SmallModelSession)
                with session.cache.speculation():
                    pending = text[session.cache.length :]
                    row = draft.forward([Segment(session.cache, pending, logit_rows=[len(pending) - 1])])[0].logits[0]
                assert torch.equal(row, draft.logits_after(text))
                assert len(pending) <= 2 or not event.record or not event.record.drafted  # accepted guesses are kept
            assert event.result is not None
            assert noise > 0.0 or event.result.stats.mean_acceptance_length > 3.5


def test_rollback_preallocated_cache_is_cropped_u67(tmp_path: Path) -> None:
    """A static cache was refused together with a draft model, because it could not be cropped.

    Our cache is preallocated: guesses, commit and crop move no memory, and what follows equals a fresh prefill.
    """
    model = tiny_decoder(tmp_path / "llama")
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    cache = model.new_cache()
    model.forward([Segment(cache, text)])
    cache.commit(range(8))
    memory, size = cache.groups[0].entries.data_ptr(), cache.nbytes
    tree = TokenTree(7)
    for parent, token in ((0, 10), (0, 11), (1, 12), (2, 13)):
        tree.add(parent, token)
    model.forward([tree_segment(cache, tree)])
    cache.commit([0, 2, 4])
    cache.truncate(10)
    fresh = model.new_cache()
    expected = model.forward([Segment(fresh, [*text, 7, 11, 20])])[0].logits[-1]
    found = model.forward([Segment(cache, [20])])[0].logits[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert (cache.groups[0].entries.data_ptr(), cache.nbytes) == (memory, size)
    loaded = LoadedModel(model, letters_tokenizer(48), "tiny", torch.float32, "random")
    config = EngineConfig(model="tiny", drafter="small_model", draft_model="tiny", shape="chain:4", adaptive=False)
    fast = Engine(config, loaded, [loaded])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    result = fast.generate(text, params)
    assert result.tokens == fast.plain().generate(text, params).tokens
    assert result.stats.num_accepted_tokens > 6


@pytest.mark.parametrize("drafter", ["none", "small_model", "ngram"])
def test_rollback_prefix_reuse_with_a_window_u68(drafter: str) -> None:
    """The second turn of a chat shared a few tokens with the first: a rotating cache was scrambled, or it crashed.

    Where the window has dropped what the shared prefix needs, the cache is begun anew; the text is a fresh request's.
    """
    target, draft = (ToyModel(vocab_size=12, window=5, noise=noise) for noise in (0.0, 0.3))
    engine = build_engine(drafter, "widths:2,1", target=target, draft=draft if drafter == "small_model" else None)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = [1, 2, 3, 4, 5, 6]
    session = engine.new_session()
    assert engine.generate(first, params, session).tokens == plain_text(target, first, 20)
    assert session.cache is not None
    assert not session.cache.can_truncate(4)
    for second in ([1, 2, 3, 4, 9, 9, 8], first[:4], [7, 7]):
        assert engine.generate(second, params, session).tokens == plain_text(target, second, 20)
