"""Declarations of heads: sizes, families of tensors, flags; and that every registered network keeps its own."""

from __future__ import annotations

import pytest

from outrider.errors import UnknownNameError
from outrider.heads.build import new_config, untrained_head
from outrider.heads.registry import NETWORKS, network_class
from outrider.heads.spec import HeadSpec, TensorSpec
from outrider.models.toy import ToyModel

SYMBOLS = {"H": 6, "steps": 3, "V": 50}


@pytest.mark.parametrize(
    ("term", "size"), [("H", 6), ("2*H", 12), ("7", 7), ("(steps+2)*H", 30), ("H*(1+steps)*2", 48), ("H+steps", 9)]
)
def test_terms(term: str, size: int) -> None:
    assert TensorSpec("x", (term,)).expand(SYMBOLS, {}) == {"x": (size,)}


def test_a_family_counts_and_its_shapes_may_count_with_it() -> None:
    found = TensorSpec("head.{steps}.weight", ("(steps+2)*H", "H")).expand(SYMBOLS, {})
    assert found == {f"head.{i}.weight": ((i + 2) * 6, 6) for i in range(3)}


def test_two_counters_make_every_pair() -> None:
    found = TensorSpec("{steps}.{blocks}.bias", ("H",)).expand({**SYMBOLS, "blocks": 2}, {})
    assert sorted(found) == [f"{i}.{j}.bias" for i in range(3) for j in range(2)]


def test_flags_add_and_remove() -> None:
    spec = HeadSpec(
        "x", (), 2, True, (TensorSpec("a", ("H",), "on"), TensorSpec("b", ("H",), "!on"), TensorSpec("c", ()))
    )
    assert sorted(spec.expected(SYMBOLS, {"on": True})) == ["a", "c"]
    assert sorted(spec.expected(SYMBOLS, {"on": False})) == ["b", "c"]


def test_an_unknown_symbol_or_flag_is_an_error() -> None:
    for tensor in (TensorSpec("a", ("Q",)), TensorSpec("a", ("H",), "off"), TensorSpec("{blocks}", ("H",))):
        with pytest.raises(KeyError):
            tensor.expand(SYMBOLS, {})


@pytest.mark.parametrize("method", NETWORKS)
def test_a_network_has_exactly_the_declared_tensors(method: str) -> None:
    network = untrained_head(method, ToyModel(vocab_size=12))
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == network.expected()
    assert network.spec.method == method
    assert network.spec.first_label >= 1
    assert len({one.name for one in network.spec.inputs}) == len(network.spec.inputs)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not network.training


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_recurrent_heads_know_one_token_more_than_the_features(method: str) -> None:
    spec = network_class(method).spec
    shifts = {one.name: one.shift for one in spec.inputs}
    assert (shifts["features"], shifts["token"], shifts["state"], spec.first_label) == (0, 1, 0, 2)
    assert spec.is_recurrent


def test_flags_of_a_configuration_are_its_booleans() -> None:
    config = new_config("eagle", ToyModel(vocab_size=12), draft_vocab_size=5, fc_bias=True)
    assert config.flags() == {"fc_bias": True, "qkv_bias": False, "para_norm": False, "reduced": True}
    assert config.symbols()["Vd"] == 5


def test_unknown_methods_are_named() -> None:
    with pytest.raises(UnknownNameError, match="eagel"):
        network_class("eagel")
