"""Our head file: written whole or not at all, read strictly, a reduced vocabulary never without a valid map."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.tiny_heads import tiny_head
from outrider.errors import ModelFileError, RunError, UnknownNameError
from outrider.heads.file import draft_offsets, load_head, read_card, save_head
from outrider.heads.network import RecurrentNetwork

Edit = Callable[[dict[str, Tensor], dict[str, str]], object]
IDS = [0, 2, 3, 9, 19]


def reduced() -> RecurrentNetwork:
    """An EAGLE-3 head that guesses five of twenty tokens."""
    network = tiny_head("eagle3", draft_vocab_size=len(IDS))
    network.draft_ids = torch.tensor(IDS)
    return network


def edited(tmp_path: Path, network: RecurrentNetwork, edit: Edit) -> Path:
    """A file whose tensors and metadata somebody changed."""
    save_head(tmp_path / "whole.safetensors", network)
    tensors = load_file(tmp_path / "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", "pt") as file:
        metadata = dict(file.metadata())
    edit(tensors, metadata)
    save_file(tensors, tmp_path / "edited.safetensors", metadata)
    return tmp_path / "edited.safetensors"


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    network = tiny_head(method, draft_vocab_size=len(IDS), context_length=99, rope_scaling={"rope_type": "default"})
    network.draft_ids = torch.tensor(IDS)
    save_head(tmp_path / "deep" / "head", network, {"command": "x", "seed": 3}, dtype)
    back = load_head(tmp_path / "deep" / "head", method)
    assert back.config == network.config
    assert back.draft_ids is not None
    assert back.draft_ids.tolist() == IDS
    for name, tensor in network.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.to(dtype).float()), name
    assert not back.training
    assert not any(parameter.requires_grad for parameter in back.parameters())
    assert read_card(tmp_path / "deep" / "head") == {"command": "x", "seed": 3}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["head"]


def test_stored_maps_are_offsets(tmp_path: Path) -> None:
    """EAGLE-3's convention, so that ``d2t`` means the same in every file."""
    save_head(tmp_path / "head", reduced())
    assert load_file(tmp_path / "head")["d2t"].tolist() == [0, 1, 1, 6, 15]
    assert draft_offsets(torch.tensor(IDS)).tolist() == [0, 1, 1, 6, 15]
    save_head(tmp_path / "full", tiny_head("eagle3"))
    assert "d2t" not in load_file(tmp_path / "full")
    assert load_head(tmp_path / "full").draft_ids is None


def put(name: str, value: Tensor) -> Edit:
    return lambda tensors, metadata: tensors.update({name: value})


NAN = torch.full((12,), float("nan"))
TENSORS: list[tuple[Edit, str]] = [
    (lambda tensors, metadata: tensors.pop("norm.weight"), "no tensor 'norm.weight'"),
    (lambda tensors, metadata: tensors.pop("midlayer.self_attn.q_proj.weight"), "no tensor 'midlayer.self_attn.q_proj"),
    (put("embed_tokens.weight", torch.zeros(20, 12)), "unknown tensor 'embed_tokens.weight'"),
    (put("fc.bias", torch.zeros(12)), "unknown tensor 'fc.bias'"),
    (put("fc.weight", torch.zeros(12, 24)), r"'fc.weight' has shape \(12, 24\), the configuration asks for \(12, 36\)"),
    (put("lm_head.weight", torch.zeros(20, 12)), r"'lm_head.weight' has shape \(20, 12\).*\(5, 12\)"),
    (put("norm.weight", NAN), "'norm.weight' holds NaN"),
    (put("norm.weight", torch.full((12,), float("inf"))), "'norm.weight' holds NaN or infinite"),
]


@pytest.mark.parametrize(("edit", "message"), TENSORS, ids=[message[:30] for _, message in TENSORS])
def test_tensors_are_exactly_the_expected_ones(tmp_path: Path, edit: Edit, message: str) -> None:
    path = edited(tmp_path, reduced(), edit)
    with pytest.raises(ModelFileError, match=message) as error:
        load_head(path)
    assert str(path) in str(error.value)


MAPS: list[tuple[Edit, str]] = [
    (lambda tensors, metadata: tensors.pop("d2t"), "guesses 5 of 20 tokens but has no map 'd2t'"),
    (put("d2t", torch.zeros(5, dtype=torch.int64)), "not an ascending map"),
    (put("d2t", torch.tensor([0, 1, 0, 6, 15])), "not an ascending map"),
    (put("d2t", torch.tensor([0, 1, 1, 6, 16])), "not an ascending map"),
    (put("d2t", torch.tensor([-1, 1, 1, 6, 15])), "not an ascending map"),
    (put("d2t", torch.tensor([0, 1, 1, 6])), r"'d2t' has shape \(4,\), not \(5,\)"),
    (put("d2t", torch.tensor([[0, 1, 1, 6, 15]])), r"'d2t' has shape \(1, 5\)"),
]


@pytest.mark.parametrize(("edit", "message"), MAPS, ids=range(len(MAPS)))
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_reduced_vocabulary_needs_a_valid_map(tmp_path: Path, method: str, edit: Edit, message: str) -> None:
    """heads.md section 4, items 8 and 9: a map that was never filled would make garbage that looks like drafting."""
    network = tiny_head(method, draft_vocab_size=len(IDS))
    network.draft_ids = torch.tensor(IDS)
    with pytest.raises(ModelFileError, match=message):
        load_head(edited(tmp_path, network, edit))


def test_a_full_vocabulary_may_come_with_zeros_and_with_no_other_map(tmp_path: Path) -> None:
    zeros, ones = torch.zeros(20, dtype=torch.int64), torch.ones(20, dtype=torch.int64)
    assert load_head(edited(tmp_path, tiny_head("eagle3"), put("d2t", zeros))).draft_ids is None
    with pytest.raises(ModelFileError, match="guesses all 20 tokens, but its map 'd2t' moves some"):
        load_head(edited(tmp_path, tiny_head("eagle3"), put("d2t", ones)))


def replaced(old: str, new: str) -> Edit:
    def edit(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        assert old in metadata["outrider.head"]
        metadata["outrider.head"] = metadata["outrider.head"].replace(old, new)

    return edit


CONFIGS: list[tuple[Edit, str]] = [
    (lambda tensors, metadata: metadata.pop("outrider.head"), "not a head file of Outrider; import others with"),
    (replaced('"hidden_size":12', '"hidden_size":0'), "configuration field 'hidden_size'"),
    (replaced('"fc_norm":false', '"fc_norm":false,"fc_nrom":true'), "configuration field 'fc_nrom'"),
    (replaced('"fc_norm":false', '"fc_norm":true'), "no tensor 'fc_norm.0.weight'"),
    (replaced('"draft_vocab_size":5', '"draft_vocab_size":21'), "draft vocabulary 21 is larger than the target's 20"),
    (replaced("{", "["), "cannot read the head"),
]


@pytest.mark.parametrize(("edit", "message"), CONFIGS, ids=range(len(CONFIGS)))
def test_configurations_are_checked(tmp_path: Path, edit: Edit, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_head(edited(tmp_path, reduced(), edit))


def test_a_head_of_another_method_says_whose_it_is(tmp_path: Path) -> None:
    save_head(tmp_path / "head", tiny_head("eagle"))
    with pytest.raises(ModelFileError, match="is a head for --drafter eagle, not eagle3"):
        load_head(tmp_path / "head", "eagle3")
    assert load_head(tmp_path / "head").config.method == "eagle"
    with pytest.raises(UnknownNameError, match="eagel"):
        load_head(edited(tmp_path, tiny_head("eagle"), replaced('"method":"eagle"', '"method":"eagel"')))


@pytest.mark.parametrize("content", [b"", b"no tensors", bytes(100), b"\xff" * 64])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "head").write_bytes(content)
    with pytest.raises(ModelFileError, match="cannot read the head"):
        load_head(tmp_path / "head")


def test_a_cut_file_and_a_missing_one(tmp_path: Path) -> None:
    save_head(tmp_path / "head", reduced())
    whole = (tmp_path / "head").read_bytes()
    for size in (10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match="cannot read the head"):
            load_head(tmp_path / "cut")
    with pytest.raises(ModelFileError, match="cannot read the head"):
        load_head(tmp_path / "missing")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head"
    save_head(path, tiny_head("eagle"))
    before = path.read_bytes()

    def full(tensors: object, target: Path, metadata: object = None) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("outrider.heads.file.save_file", full)
    with pytest.raises(RunError, match=r"cannot write .*No space left"):
        save_head(path, reduced())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_appears_only_when_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "head", []

    def spying(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str] | None = None) -> None:
        assert Path(target) != path
        save_file(tensors, target, metadata)
        seen.append(path.exists())

    monkeypatch.setattr("outrider.heads.file.save_file", spying)
    save_head(path, reduced())
    assert seen == [False]
    assert load_head(path).config.draft_vocab_size == 5
