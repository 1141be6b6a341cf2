"""Which file ``head`` names, and files whose contents cannot be a head's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file

from engine.tiny_engines import build_engine, distance, engine_law, letters_tokenizer
from heads.tiny_heads import head_file
from outrider.drafters.base import DraftParts
from outrider.drafters.head_options import open_head
from outrider.errors import InvalidOptionError, ModelFileError
from outrider.heads.build import new_config
from outrider.heads.file import HEAD_FILE
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind

TARGET = ToyModel(vocab_size=12, order=2, seed=3)
PARTS = DraftParts(TARGET)


def test_a_directory_with_a_head_stands_for_its_file(tmp_path: Path) -> None:
    """What 'outrider convert SRC DIRECTORY' writes can be given as it is."""
    path = head_file(tmp_path / "head" / HEAD_FILE, "eagle3", TARGET, range(1, 12, 2), seed=5)
    named, found = (open_head("eagle3", str(place), PARTS) for place in (path, path.parent))
    assert torch.equal(named.state_dict()["fc.weight"], found.state_dict()["fc.weight"])


@pytest.mark.parametrize("head", ["nothing-here", ".", "~no-such-user/head", "a" * 300, "a\0b", ""])
def test_names_of_no_file_are_refused_in_a_sentence(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOptionError, match="no head file"):
        open_head("eagle3", head, PARTS)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    path = head_file(tmp_path / "head", "eagle3", TARGET)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int8)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ModelFileError, match=r"'norm\.weight' holds int8"):
        open_head("eagle3", str(path), PARTS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads"), ({"head_dim": 5}, "must be even")],
)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_layers_that_cannot_be(method: str, fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        new_config(method, TARGET, **fields)


def test_an_eagle_file_with_two_features_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = head_file(tmp_path / "head", "eagle", TARGET)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    changed = {name: text.replace('["final"]', '["final",1]') for name, text in metadata.items()}
    assert changed != metadata
    save_file(tensors, path, metadata=changed)
    with pytest.raises(ModelFileError, match="configuration field 'features"):
        open_head("eagle", str(path), PARTS)


# -- requests that leave no token of the draft vocabulary -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(ProposalKind.IID, "chain:2"), (ProposalKind.WITHOUT_REPLACEMENT, "widths:2,1"), (ProposalKind.IID, "widths:2")],
)
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_draft_vocabulary_of_forbidden_tokens_keeps_the_law(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, kind: ProposalKind, shape: str
) -> None:
    """``min_tokens`` forbids every token that the head knows: it guesses something else, at the target's law."""
    target = ToyModel(4, order=1, sharpness=0.9, seed=10)
    tokenizer = letters_tokenizer(4, with_end=False)
    path = head_file(tmp_path / "head", method, target, [0, 2], seed=3)
    engine = build_engine(f"{method}:{path}", shape, kind, "multi_step", target=target, tokenizer=tokenizer)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=3, min_tokens=3, stop_token_ids=[0, 2])
    found, _ = engine_law(monkeypatch, engine, [0, 1], params)
    expected, _ = engine_law(monkeypatch, engine.plain(), [0, 1], params)
    assert len(expected) == 8
    assert not {0, 2} & {token for tokens in expected for token in tokens[:3]}
    assert distance(found, expected) < 1e-12


def test_guesses_without_a_known_token_are_drawn_from_what_they_carry(tmp_path: Path) -> None:
    """Before, such a row was NaN and the draw ran out of the vocabulary."""
    path = head_file(tmp_path / "head", "eagle3", TARGET, [1, 3], seed=2)
    engine = build_engine(f"eagle3:{path}", "chain:3", ProposalKind.IID)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=8, min_tokens=8, stop_token_ids=[1, 3])
    result = engine.generate([5, 6], params)
    assert len(result.tokens) == 8
    assert not {1, 3} & set(result.tokens)
    assert result.stats.num_draft_tokens > 0
