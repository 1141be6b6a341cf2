"""What ``auto`` stands for: the head that ships for the target if it fits, else n-grams; never a failed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outrider
from engine.tiny_engines import build_engine
from heads.tiny_heads import head_file
from outrider.config import EngineConfig
from outrider.drafters import shipped
from outrider.drafters.shipped import all_default_drafters, shipped_head
from outrider.engine.build import refusal_of
from outrider.errors import IllegalCombinationError, ModelFileError, UnknownNameError
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Regime

TARGET = ToyModel(vocab_size=12, order=2, seed=3)
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


HYBRID = "hybrid:(ngram@chain:3)+(eagle3@chain:2)"


def ship(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    head_target: ToyModel = TARGET,
    key: str = "mine",
    defaults: tuple[str, ...] = ("eagle3",),
) -> Path:
    """An index with an EAGLE-3 head for the target with ``key``; every target here has the key 'mine'."""
    path = head_file(folder / "eagle3.safetensors", "eagle3", head_target, range(1, 12, 2), seed=5)
    entry = {"model": "tiny", "heads": {"eagle3": path.name}, "default": list(defaults)}
    (folder / "index.json").write_text(json.dumps({key: entry}), encoding="utf-8")
    monkeypatch.setattr(shipped, "_folder", lambda: folder)
    monkeypatch.setattr(shipped, "fingerprint", lambda target: "mine")
    return path


def test_the_head_that_ships_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ship(monkeypatch, tmp_path)
    engine = build_engine("auto", target=TARGET)
    assert engine.describe()["drafter"] == "eagle3"
    assert shipped_head("eagle3", TARGET) == path
    assert shipped_head("medusa", TARGET) is None
    result = engine.generate([3, 4, 5], PARAMS)
    assert {source for record in result.records for source in record.sources[1:]} == {"eagle3"}
    assert result.tokens == engine.plain().generate([3, 4, 5], PARAMS).tokens


def test_without_one_it_is_n_grams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_engine("auto", target=TARGET).describe()["drafter"] == "ngram"
    ship(monkeypatch, tmp_path, key="another")
    assert build_engine("auto", target=TARGET).describe()["drafter"] == "ngram"


def test_a_head_that_does_not_fit_stops_only_who_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key may be shared by a model whose tokenizer or vocabulary was changed."""
    ship(monkeypatch, tmp_path, ToyModel(vocab_size=14, order=2, seed=3))
    engine = build_engine("auto", target=TARGET)
    assert engine.describe()["drafter"] == "ngram"
    assert engine.generate([3, 4], PARAMS).tokens == engine.plain().generate([3, 4], PARAMS).tokens
    with pytest.raises(IllegalCombinationError, match="vocabulary 14"):
        build_engine("eagle3", target=TARGET)


def test_options_that_the_first_default_cannot_take_choose_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both members of the hybrid have a shape of their own, so none can be given beside it."""
    ship(monkeypatch, tmp_path, defaults=(HYBRID, "eagle3"))
    assert build_engine("auto", target=TARGET).describe()["drafter"] == HYBRID
    assert build_engine("auto", "widths:2,1", target=TARGET).describe()["drafter"] == "eagle3"
    assert refusal_of(EngineConfig(shape="widths:2,1"), Regime.SAMPLED) is None


def test_a_default_makes_as_many_guesses_as_a_cheap_pass_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(monkeypatch, tmp_path, defaults=("hybrid:(ngram@chain:{guesses})+(eagle3@chain:{guesses})",))
    monkeypatch.setattr(ToyModel, "cheap_rows", 4)
    assert build_engine("auto", target=TARGET).describe()["drafter"] == HYBRID.replace("chain:2", "chain:3")
    assert refusal_of(EngineConfig(), Regime.SAMPLED) is None


def test_a_default_that_serves_one_regime_only_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn guesses of two sources are nothing that traversal verification is exact for; greedy ones are."""
    ship(monkeypatch, tmp_path, defaults=(HYBRID, "eagle3"))
    engine = build_engine("auto", target=TARGET, verifier="traversal")
    assert engine.describe()["drafter"] == "eagle3"
    sampled = PARAMS.model_copy(update={"temperature": 1.0})
    assert len(engine.generate([3, 4], sampled).tokens) == 16


def test_a_damaged_installation_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ship(monkeypatch, tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelFileError, match="cannot read the head"):
        build_engine("auto", target=TARGET)


def test_before_loading_only_what_no_default_can_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = EngineConfig(proposal=ProposalKind.IID, shape="chain:2")
    monkeypatch.setattr(shipped, "_folder", lambda: tmp_path)
    assert all_default_drafters() == ()
    assert isinstance(refusal_of(drawn, Regime.SAMPLED), IllegalCombinationError)
    ship(monkeypatch, tmp_path)
    assert all_default_drafters() == ("eagle3",)
    assert refusal_of(drawn, Regime.SAMPLED) is None
    assert isinstance(refusal_of(EngineConfig(shape="no-such-shape"), Regime.SAMPLED), UnknownNameError)
    engine = build_engine("auto", "chain:2", ProposalKind.IID, target=TARGET)
    assert engine.describe()["drafter"] == "eagle3"
    sampled = PARAMS.model_copy(update={"temperature": 1.0})
    assert engine.generate([3, 4], sampled).stats.num_draft_tokens > 0


def test_after_loading_the_regime_that_was_asked_for_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that ships for some other target makes the early check pass; this target has none that can draw."""
    ship(monkeypatch, tmp_path, key="another")
    with pytest.raises(IllegalCombinationError, match="'ngram' has no distribution"):
        outrider.load("toy", proposal="iid", shape="chain:2", regime=Regime.SAMPLED)
