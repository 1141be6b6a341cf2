"""What is refused, and that the refusal names it: unknown, missing, misshapen, never filled, contradicting, unsafe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.formats import public_files as files
from outrider.errors import (
    IllegalCombinationError,
    InvalidOptionError,
    ModelFileError,
    OutriderError,
    UnknownNameError,
    UnsupportedModelError,
)
from outrider.heads.formats.base import Network, TargetFacts
from outrider.heads.formats.raw import open_raw
from outrider.heads.formats.registry import detect, head_format

Layout = Callable[[], tuple[files.Tensors, files.Config]]
Change = Callable[[files.Tensors, files.Config], object]


def read(
    folder: Path, layout: Layout, change: Change, target: TargetFacts | None = None, name: str | None = None
) -> Network:
    tensors, config = layout()
    change(tensors, config)
    files.write(folder, tensors, config)
    raw = open_raw(folder)
    chosen = detect(folder, raw) if name is None else head_format(name)
    return chosen.read(raw, target or files.target_facts())


def nan(tensors: files.Tensors, _: files.Config) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


def moved(tensors: files.Tensors, _: files.Config) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def descending(tensors: files.Tensors, _: files.Config) -> None:
    tensors["d2t"] = tensors["d2t"].flip(0)


MAPS: dict[str, tuple[Change, str]] = {
    "zeros": (lambda t, _: t["d2t"].zero_(), "'d2t' is all zeros: it was never filled"),
    "no t2d": (lambda t, _: t.pop("t2d"), "no map 't2d'"),
    "no d2t": (lambda t, _: t.pop("d2t"), "no map 'd2t'"),
    "t2d of another head": (moved, "choose different tokens"),
    "not ascending": (descending, "not an ascending map"),
    "float map": (lambda t, _: t.update(d2t=t["d2t"].float()), "'d2t' must hold integers"),
    "integer t2d": (lambda t, _: t.update(t2d=t["t2d"].long()), "'t2d' booleans"),
    "short map": (lambda t, _: t.update(d2t=t["d2t"][:-1].clone()), r"must be \[12\] and \[40\]"),
    "larger than the target": (lambda t, c: c.update(vocab_size=10), "larger than the target's 10"),
}


@pytest.mark.parametrize("case", MAPS)
def test_vocabulary_maps(case: str, tmp_path: Path) -> None:
    change, message = MAPS[case]
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, files.eagle3, change, files.target_facts(vocab_size=10) if "larger" in case else None)


def test_zeros_are_the_map_of_a_full_vocabulary(tmp_path: Path) -> None:
    full: Layout = lambda: files.eagle3(draft=files.V)  # noqa: E731 - a layout like the others
    zeros = torch.zeros(files.V, dtype=torch.int64)
    network = read(tmp_path / "a", full, lambda t, _: t.update(d2t=zeros, t2d=torch.ones(files.V, dtype=torch.bool)))
    assert network.draft_ids is None
    with pytest.raises(ModelFileError, match="maps a full vocabulary"):
        read(tmp_path / "b", full, lambda t, _: t.update(d2t=zeros + 1))
    with pytest.raises(ModelFileError, match="'t2d' has shape"):
        read(tmp_path / "c", full, lambda t, _: t.update(t2d=torch.ones(3, dtype=torch.bool)))


EAGLE3: dict[str, tuple[Change, type[OutriderError], str]] = {
    "unknown flag": (lambda _, c: c.update(new_norm=True), ModelFileError, "unknown field 'new_norm'"),
    "unknown inner flag": (lambda _, c: c.update(eagle_config={"x": 1}), ModelFileError, "unknown field 'x'"),
    "sliding window": (lambda _, c: c.update(sliding_window=512), UnsupportedModelError, "sliding_window = 512"),
    "partial rotary": (lambda _, c: c.update(partial_rotary_factor=0.5), UnsupportedModelError, "partial_rotary"),
    "two layers": (lambda _, c: c.update(num_hidden_layers=2), UnsupportedModelError, "num_hidden_layers = 2"),
    "gelu": (lambda _, c: c.update(hidden_act="gelu"), UnsupportedModelError, "hidden_act = 'gelu'"),
    "one feature": (
        lambda _, c: c.update(eagle_config={"use_aux_hidden_state": False}),
        UnsupportedModelError,
        "last hidden state only",
    ),
    "extra tensor": (lambda t, _: t.update(stray=files.random(2)), ModelFileError, "unknown tensor 'stray'"),
    "missing tensor": (lambda t, _: t.pop("norm.weight"), ModelFileError, "no tensor 'norm.weight'"),
    "integer weights": (
        lambda t, _: t.update({"norm.weight": torch.ones(files.H, dtype=torch.int64)}),
        ModelFileError,
        "'norm.weight' is int64",
    ),
    "nan": (nan, ModelFileError, "'fc.weight' holds NaN"),
    "shape": (
        lambda t, _: t.update({"midlayer.mlp.up_proj.weight": files.random(3, files.H)}),
        ModelFileError,
        "'midlayer.mlp.up_proj.weight' has shape",
    ),
    "vector": (
        lambda t, _: t.update({"midlayer.self_attn.o_proj.weight": files.random(3)}),
        ModelFileError,
        "must be a matrix",
    ),
    "draft size": (lambda _, c: c.update(draft_vocab_size=13), ModelFileError, "draft_vocab_size = 13"),
    "hidden size": (lambda _, c: c.update(hidden_size=32), ModelFileError, "hidden_size = 32"),
    "key heads": (lambda _, c: c.update(num_key_value_heads=4), ModelFileError, "num_key_value_heads = 4"),
    "heads": (lambda _, c: c.update(num_attention_heads=3), ModelFileError, "are no 3 heads"),
    "no heads": (lambda _, c: c.pop("num_attention_heads"), ModelFileError, "cannot tell it"),
    "target's width": (lambda _, c: c.update(target_hidden_size=8), ModelFileError, "target_hidden_size = 8"),
    "unsaid norm": (lambda _, c: c.update(fc_norm=True), ModelFileError, "fc_norm is True, but its norm is not"),
    "unused norm": (
        lambda t, _: t.update({"input_norm.weight": files.random(3 * files.H)}),
        ModelFileError,
        "norm_before_fc is False, but its norm is among",
    ),
    "two features named": (
        lambda _, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2]),
        ModelFileError,
        "reads 3 hidden states, 2 are named",
    ),
    "another width": (
        lambda t, _: t.update({"fc.weight": files.random(files.H, 3 * files.H + 1)}),
        UnsupportedModelError,
        "hidden size is another",
    ),
    "rotary": (
        lambda _, c: c.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        UnsupportedModelError,
        "rope scaling 'dynamic'",
    ),
    "layer beyond the target": (
        lambda _, c: c.update(eagle_aux_hidden_state_layer_ids=[2, 5, 10]),
        IllegalCombinationError,
        "input of block 10",
    ),
    "random embedding": (
        lambda t, _: t.update({"embed_tokens.weight": files.random(files.V, files.H, seed=9)}),
        ModelFileError,
        "is not the embedding of 'tiny'",
    ),
    "embedding's shape": (
        lambda t, c: (t.update({"embed_tokens.weight": files.random(files.V, 3)}), c.pop("vocab_size")),
        ModelFileError,
        "'embed_tokens.weight' has shape",
    ),
}


def test_fields_that_change_nothing_are_not_held_against_a_file(tmp_path: Path) -> None:
    """Qwen2's window that is not used; what transformers writes beside the fields of a layer."""
    extra = {"sliding_window": 131072, "use_sliding_window": False, "has_no_defaults_at_init": False, "prefix": None}
    read(tmp_path / "a", files.eagle3, lambda _, c: c.update(extra))
    with pytest.raises(UnsupportedModelError, match="sliding_window = 131072"):
        read(tmp_path / "b", files.eagle3, lambda _, c: c.update(sliding_window=131072, use_sliding_window=None))
    with pytest.raises(UnsupportedModelError, match="use_sliding_window = True"):
        read(tmp_path / "c", files.eagle3, lambda _, c: c.update(use_sliding_window=True))


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3(case: str, tmp_path: Path) -> None:
    change, error, message = EAGLE3[case]
    with pytest.raises(error, match=message):
        read(tmp_path, files.eagle3, change)


def other_speculator(_: files.Tensors, config: files.Config) -> None:
    config["speculators_model_type"] = "dflash"


OTHERS: dict[str, tuple[Layout, Change, type[OutriderError], str]] = {
    "sglang norm_output": (
        files.sglang,
        lambda _, c: c.update(norm_output=True),
        UnsupportedModelError,
        "norm_output = True means 'a norm before lm_head' to SpecForge",
    ),
    "speculators without residual flag": (
        files.speculators,
        lambda _, c: c.pop("norm_before_residual"),
        ModelFileError,
        "lacks 'norm_before_residual', whose default differs",
    ),
    "speculators unknown": (
        files.speculators,
        lambda _, c: c.update(markov_rank=4),
        ModelFileError,
        "unknown field 'markov_rank'",
    ),
    "speculators layer": (
        files.speculators,
        lambda _, c: c["transformer_layer_config"].update(new=1),
        ModelFileError,
        "unknown field 'new'",
    ),
    "speculators serving": (
        files.speculators,
        lambda _, c: c["speculators_config"].update(new=1),
        ModelFileError,
        "unknown field 'new'",
    ),
    "speculators kind": (files.speculators, other_speculator, UnsupportedModelError, "of kind 'dflash'"),
    "speculators algorithm": (
        files.speculators,
        lambda _, c: c["speculators_config"].update(algorithm="mtp"),
        ModelFileError,
        "algorithm = 'mtp'",
    ),
    "qwen layer": (
        files.speculators,
        lambda _, c: c["transformer_layer_config"].update(model_type="gemma3"),
        UnsupportedModelError,
        "of type 'gemma3'",
    ),
    "mtp layers": (
        files.mtp,
        lambda _, c: c.update(num_nextn_predict_layers=2),
        ModelFileError,
        "num_nextn_predict_layers = 2",
    ),
    "mtp attention": (
        files.mtp,
        lambda _, c: c["transformer_layer_config"].update(layer_types=["linear_attention"]),
        UnsupportedModelError,
        "other attention",
    ),
    "mtp with query norms": (
        files.mtp,
        lambda t, _: t.update({"mtp_layers.0.self_attn.q_norm.weight": files.random(4)}),
        ModelFileError,
        "unknown tensor 'mtp_layers.0.self_attn.q_norm.weight'",
    ),
    "peagle": (files.peagle, lambda t, c: None, UnsupportedModelError, "complete P-EAGLE head, but Outrider has no"),
    "peagle incomplete": (files.peagle, lambda t, c: t.pop("mask_hidden"), ModelFileError, "no tensor 'mask_hidden'"),
    "peagle layers": (
        files.peagle,
        lambda _, c: c["transformer_layer_config"].update(num_hidden_layers=4),
        ModelFileError,
        "num_hidden_layers = 4, the tensors say 2",
    ),
    "peagle mask": (files.peagle, lambda _, c: c.update(mask_token_id=99), ModelFileError, "mask_token_id 99"),
    "peagle stray": (files.peagle, lambda t, _: t.update(stray=files.random(2)), ModelFileError, "'stray'"),
    "peagle map": (files.peagle, lambda t, _: t["d2t"].zero_(), ModelFileError, "never filled"),
    "eagle bias": (
        files.eagle,
        lambda _, c: c.update(bias=False),
        ModelFileError,
        "bias = False, the tensors say True",
    ),
    "eagle norm": (
        files.eagle,
        lambda t, _: t.update({"layers.0.input_layernorm.weight": files.random(files.H)}),
        ModelFileError,
        "unknown tensor 'layers.0.input_layernorm.weight'",
    ),
    "eagle output": (
        files.eagle,
        lambda t, _: t.update({"lm_head.weight": files.random(files.V, files.H, seed=8)}),
        ModelFileError,
        "is not the output matrix of 'tiny'",
    ),
    "eagle fc": (
        files.eagle,
        lambda t, _: t.update({"fc.weight": files.random(files.H, files.H)}),
        UnsupportedModelError,
        "reads 16 inputs, EAGLE's 32",
    ),
    "medusa layers": (
        files.medusa,
        lambda _, c: c.update(medusa_num_layers=3),
        ModelFileError,
        "medusa_num_layers = 3, the tensors say 1",
    ),
    "medusa hole": (
        files.medusa,
        lambda t, _: t.pop("1.0.linear.bias"),
        ModelFileError,
        "no tensor '1.0.linear.bias'",
    ),
    "medusa without first": (files.medusa, lambda t, _: t.pop("0.0.linear.weight"), ModelFileError, "no first block"),
    "medusa stray": (files.medusa, lambda t, _: t.update(stray=files.random(2)), ModelFileError, "'stray'"),
    "vllm biases dropped": (
        files.vllm_medusa,
        lambda _, c: c.pop("medusa_fc_bias"),
        ModelFileError,
        "medusa_fc_bias is False, but there are biases",
    ),
    "vllm no map": (files.vllm_medusa, lambda t, _: t.pop("token_map"), ModelFileError, "no map 'token_map'"),
    "vllm map repeats": (
        files.vllm_medusa,
        lambda t, _: t["token_map"].fill_(3),
        ModelFileError,
        "'token_map' repeats a token",
    ),
    "vllm float map": (
        files.vllm_medusa,
        lambda t, _: t.update(token_map=t["token_map"].float()),
        ModelFileError,
        "'token_map' is float32",
    ),
    "vllm heads": (files.vllm_medusa, lambda _, c: c.update(num_heads=5), ModelFileError, "num_heads = 5"),
    "vllm shared": (
        files.vllm_medusa,
        lambda _, c: c.update(original_lm_head=True),
        ModelFileError,
        "original_lm_head is true, but there are 3",
    ),
    "hydra prefix": (
        files.hydra,
        lambda _, c: c.update(hydra_head_arch="prefix-mlp"),
        UnsupportedModelError,
        "variant 'prefix-mlp'",
    ),
    "hydra offset": (
        files.hydra,
        lambda _, c: c.update(hidden_state_offset=1),
        UnsupportedModelError,
        "hidden_state_offset must be 0",
    ),
    "hydra ungrounded": (
        files.hydra,
        lambda _, c: c.update(grounded_heads=False),
        UnsupportedModelError,
        "grounded_heads is false",
    ),
    "hydra heads": (files.hydra, lambda _, c: c.update(hydra_num_heads=4), ModelFileError, "hydra_num_heads = 4"),
    "hydra embedding": (
        files.hydra,
        lambda t, _: t.update({"input_embed_fn.weight": files.random(files.V, files.H, seed=8)}),
        ModelFileError,
        "is not the embedding of 'tiny'",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_layouts(case: str, tmp_path: Path) -> None:
    layout, change, error, message = OTHERS[case]
    with pytest.raises(error, match=message):
        read(tmp_path, layout, change)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"vocab_size": 41}, "vocabulary 40, 'tiny' has 41"), ({"hidden_size": 8}, "hidden size 16, 'tiny' has 8")],
)
@pytest.mark.parametrize("layout", [files.eagle3, files.eagle, files.medusa, files.hydra, files.mtp, files.vllm_medusa])
def test_another_target(layout: Layout, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(IllegalCombinationError, match=message):
        read(tmp_path, layout, lambda t, _: t.pop("embed_tokens.weight", None), files.target_facts(**changed))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (files.eagle3, "does not name the target's layers; name the model that the head is for: --target"),
        (lambda: files.medusa(own=False), "has no output matrices, nor says its vocabulary"),
    ],
)
def test_what_only_a_target_can_tell(layout: Layout, message: str, tmp_path: Path) -> None:
    tensors, config = layout()
    raw = open_raw(files.write(tmp_path, tensors, config))
    with pytest.raises(InvalidOptionError, match=message):
        detect(tmp_path, raw).read(raw, None)


def test_explicit_layers_need_no_target(tmp_path: Path) -> None:
    tensors, config = files.sglang()
    raw = open_raw(files.write(tmp_path, tensors, config))
    network = detect(tmp_path, raw).read(raw, None)
    assert network.config.features == (2, 5, 7)
    assert network.config.target == ""


class _Trap:
    """Unpickled carelessly, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_with_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    torch.save({"0.0.linear.weight": _Trap(f"touch {victim}")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelFileError, match="needs more than tensors"):
        open_raw(tmp_path)
    assert not victim.exists()


def test_files_that_are_no_head(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no head at"):
        open_raw(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match="has no weights"):
        open_raw(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelFileError, match="is no weight file"):
        open_raw(tmp_path / "notes.txt")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ModelFileError, match="is truncated"):
        open_raw(tmp_path)
    files.write(tmp_path, {"a": files.random(2)}, None)
    with pytest.raises(ModelFileError, match="looks like no head format"):
        detect(tmp_path)
    with pytest.raises(UnknownNameError, match=r"unknown head format 'eagel' .*did you mean 'eagle'"):
        head_format("eagel")


def test_only_some_formats_are_written(tmp_path: Path) -> None:
    network = read(tmp_path / "a", files.eagle3, lambda t, c: None)
    with pytest.raises(InvalidOptionError, match="can be read, not written"):
        head_format("hydra").write(network, tmp_path / "b", files.target_facts(), torch.bfloat16)
    with pytest.raises(IllegalCombinationError, match="holds heads of medusa, not eagle3"):
        head_format("vllm-medusa").write(network, tmp_path / "b", files.target_facts(), torch.bfloat16)
    with pytest.raises(InvalidOptionError, match="name the model"):
        head_format("speculators").write(network, tmp_path / "b", None, torch.bfloat16)
    other = files.target_facts(fingerprint="e" * 24)
    with pytest.raises(IllegalCombinationError, match="was trained on a model with fingerprint"):
        head_format("eagle3").write(network, tmp_path / "b", other, torch.bfloat16)
