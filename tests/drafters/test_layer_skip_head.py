"""``layer_skip`` with a trained exit: same output, the training form's logits, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny_engines import build_engine, engine_law, letters_tokenizer, random_prompts
from models.tiny_checkpoints import LLAMA, write_pretrained
from outrider.drafters.base import DraftParts
from outrider.drafters.exit_source import ExitSource, open_exit
from outrider.drafters.layer_skip import LayerSkip, LayerSkipOptions
from outrider.errors import IllegalCombinationError, InvalidOptionError, ModelFileError
from outrider.heads.build import new_config, start_network, untrained_head
from outrider.heads.exit import EarlyExit, ExitConfig
from outrider.heads.file import save_head
from outrider.models.base import Segment, blocks_after, extend_cache
from outrider.models.decoder import Decoder
from outrider.models.load import open_checkpoint, resolve
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind

TOY = ToyModel(vocab_size=12, order=2, seed=3)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A llama of four blocks with random weights."""
    path = tmp_path_factory.mktemp("tiny")
    write_pretrained(path, {**LLAMA, "num_hidden_layers": 4})
    return Decoder(
        open_checkpoint(resolve(str(path))), WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))
    )


def trained(target: Decoder | ToyModel, path: Path, draft_ids: torch.Tensor | None = None, block: int = 2) -> EarlyExit:
    """A stored head with random numbers in every product."""
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    config = new_config("layer_skip", target, features=(block,), draft_vocab_size=size)
    assert isinstance(config, ExitConfig)
    network = EarlyExit(config)
    start_network(network, target, 1)
    torch.manual_seed(2)
    with torch.no_grad():
        network.mlp.down_proj.weight.normal_(std=0.1)
    network.draft_ids = draft_ids
    save_head(path, network, dtype=torch.float32)
    network.bind(target.output_rows(draft_ids))
    return network.eval().requires_grad_(False)


def built(target: Decoder | ToyModel, **options: object) -> LayerSkip:
    return LayerSkip(LayerSkipOptions.model_validate(options), Chain(ChainOptions(length=3)), DraftParts(target))


# -- exactness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["layer_skip:head=random", "layer_skip:3,head=random"])
@pytest.mark.parametrize("shape", ["chain:4", "widths:2,2,1", "best_first:8"])
def test_greedy_output_is_the_targets(drafter: str, shape: str) -> None:
    """The toy cache refuses to commit an entry of a pass that skipped sublayers: scratch entries never stay."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = build_engine(drafter, shape, target=TOY)
    for prompt in random_prompts(3, 12, seed=1):
        result = engine.generate(prompt, params)
        assert result.stats.num_draft_tokens > 0
        assert result.tokens == engine.plain().generate(prompt, params).tokens


def test_greedy_output_of_a_decoder_is_the_targets(tiny: Decoder, tmp_path: Path) -> None:
    trained(tiny, tmp_path / "exit.safetensors", torch.arange(0, 48, 3))
    engine = build_engine(f"layer_skip:head={tmp_path / 'exit.safetensors'}", "widths:2,2", target=tiny)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    assert engine.generate(TEXT, params).tokens == engine.plain().generate(TEXT, params).tokens


@pytest.mark.parametrize(
    ("shape", "proposal", "verifier"),
    [
        ("chain:2", ProposalKind.IID, "multi_step"),
        ("widths:2,1", ProposalKind.WITHOUT_REPLACEMENT, "multi_step"),
        ("chain:2", ProposalKind.IID, "block"),
    ],
)
@pytest.mark.parametrize("is_reduced", [False, True])
def test_the_law_above_temperature_0_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str, proposal: ProposalKind, verifier: str, is_reduced: bool
) -> None:
    target = ToyModel(3, order=1, sharpness=0.9, seed=10)
    path = tmp_path / "exit.safetensors"
    trained(target, path, torch.tensor([0, 2]) if is_reduced else None)
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3, ignore_eos=True)
    tokenizer = letters_tokenizer(3, with_end=False)
    engine = build_engine(
        f"layer_skip:head={path}", shape, proposal, verifier, target=target, tokenizer=tokenizer, max_nodes=3
    )
    law, accepted = engine_law(monkeypatch, engine, [0, 1], params)
    pipeline = LogitsPipeline(params, 3, prompt=[0, 1])
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*output, token): mass * float(p[token])
            for output, mass in expected.items()
            for p in [pipeline.probabilities(target.logits_after([0, 1, *output]), output)]
            for token in range(3)
            if p[token] > 0
        }
    assert accepted > 0
    assert max(abs(law[tokens] - mass) for tokens, mass in expected.items()) < 1e-12
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)


# -- what is proposed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("draft_ids", [None, torch.tensor([1, 5, 6, 30, 47])])
def test_the_drafters_logits_are_the_training_forms(
    tiny: Decoder, tmp_path: Path, block: int, draft_ids: torch.Tensor | None
) -> None:
    """Root and guesses: blocks before the exit give a guess's row the state that the whole target has there."""
    path = tmp_path / "exit.safetensors"
    network = trained(tiny, path, draft_ids, block)
    hidden = tiny.forward([Segment(tiny.new_cache(), TEXT)], (block,))[0].hidden
    expected = network(dict(hidden))

    known = 6
    cache = tiny.new_cache()
    extend_cache(tiny, cache, TEXT[:known])
    tree = TokenTree(TEXT[known])
    for depth, token in enumerate(TEXT[known + 1 :]):
        tree.add(depth, token)
    drafter = built(tiny, head=str(path))
    assert drafter.skip == blocks_after(block, 4)
    assert drafter.exit is not None
    with cache.speculation():
        pipeline = LogitsPipeline(SamplingParams(), 48, prompt=TEXT)
        source = ExitSource("layer_skip", tiny, cache, pipeline, [], drafter.exit)
        rows = [source.evaluate(tree, [node]) for node in range(len(tree))]
        spread = source.over_target_vocabulary(rows[0])
    torch.testing.assert_close(torch.cat(rows), expected[known:], rtol=1e-4, atol=1e-3)
    allowed = np.arange(48) if draft_ids is None else draft_ids.numpy()
    assert np.flatnonzero(np.isfinite(spread[0].numpy())).tolist() == allowed.tolist()


def test_no_product_with_the_whole_head_is_made(tiny: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = built(tiny, head="random")
    asked = []
    forward = tiny.forward

    def recorded(segments, hidden=(), skip=frozenset()):  # type: ignore[no-untyped-def]
        asked.append((segments[0].logit_rows, hidden, skip))
        return forward(segments, hidden, skip)

    monkeypatch.setattr(tiny, "forward", recorded)
    cache = tiny.new_cache()
    assert drafter.exit is not None
    source = ExitSource("x", tiny, cache, LogitsPipeline(SamplingParams(), 48, prompt=[1]), [], drafter.exit)
    with cache.speculation():
        source.evaluate(TokenTree(1), [0])
    assert asked == [((), (2,), blocks_after(2, 4))]


def test_before_training_it_guesses_as_the_plain_exit_does(tiny: Decoder) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for layers in (1, 2, 3):
        plain, headed = (
            build_engine(f"layer_skip:{layers}{head}", "chain:3", target=tiny).generate(TEXT, params)  # type: ignore[arg-type]
            for head in ("", ",head=random")
        )
        assert plain.stats.num_accepted_tokens == headed.stats.num_accepted_tokens
        assert [record.drafted for record in plain.records] == [record.drafted for record in headed.records]


def test_tokens_outside_the_draft_vocabulary_are_never_guessed(tmp_path: Path) -> None:
    path = tmp_path / "exit.safetensors"
    trained(TOY, path, torch.tensor([2, 3, 11]))
    engine = build_engine(f"layer_skip:head={path}", "widths:3,3", target=TOY)
    drafter = next(iter(engine._lanes.values())).drafter
    session = drafter.new_session()
    guessed: set[int] = set()
    grow = type(session).grow

    def recorded(self, limits):  # type: ignore[no-untyped-def]
        tree = grow(self, limits)
        guessed.update(tree.tokens[1:])
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session), "grow", recorded)
        engine.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    assert guessed == {2, 3, 11}


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head": "random", "skip": "1a"}, "takes head=... or skip=..., not both"),
        ({"head": "random", "layers": 4}, "layers=4 must be below the target's 4 layers"),
        ({"head": "auto"}, "no layer_skip head ships for 'toy'; train one with 'outrider train layer-skip' and give "
         "--drafter layer_skip:head=FILE"),
        ({"head": "nowhere.safetensors"}, "no head file 'nowhere.safetensors'"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_or_lead_nowhere_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said.replace(".", r"\.")):
        built(TOY, **options)


def test_a_model_of_one_layer_has_no_exit() -> None:
    target = ToyModel(vocab_size=12)
    target.num_layers = 1
    with pytest.raises(InvalidOptionError, match="has only one layer"):
        built(target, head="random")


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    trained(TOY, path, block=3)
    assert built(TOY, head=str(path), layers=3).skip == blocks_after(3, 4)
    with pytest.raises(InvalidOptionError, match="layers=2: the head reads the state after 3 blocks"):
        built(TOY, head=str(path), layers=2)
    target = ToyModel(vocab_size=12)
    target.num_layers = 3
    with pytest.raises(IllegalCombinationError, match="reads the input of block 3, 'toy' has blocks 0 to 2"):
        built(target, head=str(path))
    with pytest.raises(IllegalCombinationError, match="vocabulary 12, 'toy' has 13"):
        built(ToyModel(vocab_size=13), head=str(path))
    save_head(path, untrained_head("mtp", TOY))
    with pytest.raises(ModelFileError, match="is a head for --drafter mtp, not layer_skip"):
        open_exit(str(path), 0, False, DraftParts(TOY))
