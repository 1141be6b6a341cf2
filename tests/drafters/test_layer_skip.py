"""Which sublayers ``layer_skip`` leaves out: what is written, stored and shipped, and what it does to guesses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.tiny_engines import build_engine, random_prompts
from models.tiny_checkpoints import LLAMA, write_gguf, write_pretrained
from outrider.drafters import layer_subsets
from outrider.drafters.base import DraftParts
from outrider.drafters.layer_skip import LayerSkip, LayerSkipOptions
from outrider.drafters.layer_subsets import LayerSubset, find_subset, format_skip, parse_skip, save_subset
from outrider.engine.spec import parse_part
from outrider.errors import InvalidOptionError, ModelFileError
from outrider.models.base import blocks_after
from outrider.models.decoder import Decoder
from outrider.models.fingerprint import fingerprint
from outrider.models.load import open_checkpoint, resolve
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.types import ProposalKind

TOY = ToyModel(vocab_size=12, order=2, seed=3)
FOUND = LayerSubset(
    model="tiny", skip="1a", matchness=0.9, held_out=0.8, speedup=1.1, chain=2, tokens=9, seed=0, evaluations=4,
    command="outrider tune layers",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own cache is neither read nor written."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layer_subsets"


def decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    plan = WeightPlan(dtype, WeightFormat.AUTO, torch.device("cpu"))
    return Decoder(open_checkpoint(resolve(str(path))), plan)


@pytest.fixture
def tiny(tmp_path: Path) -> Decoder:
    """A llama of two blocks with random weights."""
    write_pretrained(tmp_path / "tiny")
    return decoder(tmp_path / "tiny")


def built(model: ToyModel | Decoder, **options: object) -> LayerSkip:
    return LayerSkip(LayerSkipOptions.model_validate(options), Chain(ChainOptions(length=3)), DraftParts(model))


# -- how a subset is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12a", {24}),
        ("13m", {27}),
        ("14", {28, 29}),
        ("12a.13m.14", {24, 27, 28, 29}),
        ("2-4m", {5, 7, 9}),
        ("0-1.1a", {0, 1, 2, 3}),
    ],
)
def test_notation(text: str, expected: set[int]) -> None:
    assert parse_skip(text, 20) == expected


def test_every_subset_survives_writing_and_the_option_parser() -> None:
    source = random.Random(0)
    for _ in range(200):
        skip = frozenset(source.sample(range(60), source.randint(1, 59)))
        text = format_skip(skip)
        assert parse_skip(text, 30) == skip
        assert parse_part("drafter", f"layer_skip:skip={text}").options.skip == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a block"),
        ("1.", "'' is not a block"),
        ("3x", "'3x' is not a block; write blocks between dots, as in 12a.13m.14-16"),
        ("-1", "'-1' is not a block"),
        ("4", "a model of 4 blocks has no '4'; blocks are 0 to 3"),
        ("2-1", "has no '2-1'"),
        ("0-3", "leaves nothing of the model"),
    ],
)
def test_text_that_names_no_subset_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said.replace("(", r"\(")):
        parse_skip(text, 4)


# -- what is left out --------------------------------------------------------------------------------------------


def test_what_the_options_leave_out() -> None:
    assert built(TOY).skip == blocks_after(2, 4)
    assert built(TOY, layers=3).skip == blocks_after(3, 4)
    assert built(TOY, skip="1a.2m").skip == {2, 5}


def test_options_that_contradict_each_other_or_the_model_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="layers=2 or skip=1a, not both"):
        built(TOY, layers=2, skip="1a")
    with pytest.raises(InvalidOptionError, match="layers=4 must be below the target's 4 layers"):
        built(TOY, layers=4)
    with pytest.raises(InvalidOptionError, match="no subset was searched for 'toy'; run 'outrider tune layers'"):
        built(TOY, skip="searched")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain:4", "widths:2,2,1"])
def test_any_subset_gives_the_targets_output(shape: str, temperature: float) -> None:
    """The toy cache refuses to commit an entry of a pass that skipped sublayers: scratch entries never stay."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=3)
    for skip in ("0a", "3m", "1-2", "0m.1a.2-3"):
        engine = build_engine(f"layer_skip:skip={skip}", shape, target=TOY)
        for prompt in random_prompts(3, 12, seed=4):
            result = engine.generate(prompt, params)
            assert result.stats.num_draft_tokens > 0
            if temperature == 0.0:
                assert result.tokens == engine.plain().generate(prompt, params).tokens


def test_the_fewer_are_left_out_the_more_is_accepted() -> None:
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    lengths = [
        build_engine(f"layer_skip:skip={skip}", "chain:3", target=TOY).generate([1, 2, 3], params).stats
        for skip in ("0a", "0-1", "0-2.3a")
    ]
    accepted = [stats.mean_acceptance_length for stats in lengths]
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] > accepted[-1]


# -- what is stored ----------------------------------------------------------------------------------------------


def test_a_stop_looks_at_what_sampling_parameters_leave() -> None:
    """With ``top_k`` 1 the best guess is the only one, however unsure the draft is without it."""
    engine = build_engine("layer_skip:2", "chain:8,stop=0.9", ProposalKind.DETERMINISTIC)
    drafted = [
        engine.generate([3, 4, 5], SamplingParams(temperature=1.0, top_k=k, seed=1, max_tokens=20, ignore_eos=True))
        for k in (0, 1)
    ]
    unsure, sure = (result.stats.num_draft_tokens for result in drafted)
    assert unsure < sure
    assert sure >= 20


def test_a_stored_subset_is_used(tiny: Decoder, cache_folder: Path) -> None:
    assert find_subset(tiny) is None
    assert built(tiny).skip == {2, 3}
    assert save_subset(tiny, FOUND) == cache_folder / f"{fingerprint(tiny)}.json"
    assert [file.suffix for file in cache_folder.iterdir()] == [".json"]
    assert find_subset(tiny) == FOUND
    assert built(tiny).skip == built(tiny, skip="searched").skip == {2}
    assert built(tiny, layers=1).skip == {2, 3}


def test_a_stored_subset_beats_a_shipped_one(tiny: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = FOUND.model_copy(update={"skip": "0m"})
    monkeypatch.setattr(layer_subsets, "_shipped", lambda: {fingerprint(tiny): shipped})
    assert built(tiny, skip="searched").skip == {1}
    save_subset(tiny, FOUND)
    assert built(tiny, skip="searched").skip == {2}


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"skip": 3}'])
def test_a_damaged_file_is_named(tiny: Decoder, damage: bytes) -> None:
    path = save_subset(tiny, FOUND)
    assert path is not None
    path.write_bytes(damage)
    with pytest.raises(ModelFileError, match="is damaged; delete it or tune again"):
        built(tiny)
    assert built(tiny, layers=1).skip == {2, 3}


def test_an_interrupted_save_leaves_the_old_file(
    tiny: Decoder, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_subset(tiny, FOUND)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_subsets.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_subset(tiny, FOUND.model_copy(update={"skip": "0m"}))
    assert find_subset(tiny) == FOUND
    assert len(list(cache_folder.iterdir())) == 1


def test_a_model_without_weights_of_ours_stores_nothing(cache_folder: Path) -> None:
    assert fingerprint(TOY) is None
    assert save_subset(TOY, FOUND) is None
    assert not cache_folder.exists()


def test_fingerprints_tell_models_apart_not_formats(tmp_path: Path, tiny: Decoder) -> None:
    write_gguf(tmp_path / "same.gguf")
    same = decoder(tmp_path / "same.gguf")
    assert fingerprint(tiny) == fingerprint(same) == fingerprint(decoder(tmp_path / "tiny", torch.bfloat16))
    write_pretrained(tmp_path / "wider", {**LLAMA, "intermediate_size": 128})
    assert fingerprint(decoder(tmp_path / "wider")) != fingerprint(tiny)
    tiny.blocks[1].mlp_norm[3] *= 1.5
    assert fingerprint(tiny) != fingerprint(same)


def test_the_shipped_subsets_are_valid_and_say_how_they_were_made() -> None:
    shipped = layer_subsets._shipped()
    assert [subset.model for subset in shipped.values()] == ["smollm2-135m"]
    for key, subset in shipped.items():
        assert len(key) == 24
        assert parse_skip(subset.skip, 30)
        assert subset.command.startswith("outrider tune layers --model smollm2-135m")
        assert 0.3 < subset.held_out <= 1.0
