"""Every public layout: read, written where it can be, read again; tensors and logits stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.formats import public_files as files
from heads.formats.head_outputs import logits_of
from outrider.heads.file import load_head, save_head
from outrider.heads.formats.base import Network
from outrider.heads.formats.raw import open_raw
from outrider.heads.formats.registry import FORMATS, detect, head_format

Layout = Callable[[], tuple[files.Tensors, files.Config]]

LAYOUTS: dict[str, tuple[str, str, str, Layout]] = {
    "eagle3": ("eagle3", "eagle3", "model.safetensors", files.eagle3),
    "eagle3 pickled": ("eagle3", "eagle3", "pytorch_model.bin", files.eagle3),
    "eagle3 full vocabulary": ("eagle3", "eagle3", "model.safetensors", lambda: files.eagle3(draft=files.V)),
    "sglang": ("sglang", "eagle3", "model.safetensors", files.sglang),
    "speculators eagle3": ("speculators", "eagle3", "model.safetensors", files.speculators),
    "speculators mtp": ("speculators", "mtp", "model.safetensors", files.mtp),
    "eagle": ("eagle", "eagle", "pytorch_model.bin", files.eagle),
    "eagle without bias": ("eagle", "eagle", "model.safetensors", lambda: files.eagle(bias=False)),
    "medusa": ("medusa", "medusa", "medusa_lm_head.pt", files.medusa),
    "medusa sharing": ("medusa", "medusa", "medusa_lm_head.safetensors", lambda: files.medusa(own=False, blocks=2)),
    "vllm-medusa": ("vllm-medusa", "medusa", "model.safetensors", files.vllm_medusa),
    "vllm-medusa full": ("vllm-medusa", "medusa", "model.safetensors", lambda: files.vllm_medusa(reduced=False)),
    "hydra": ("hydra", "hydra", "hydra_lm_head.pt", files.hydra),
}


def read(folder: Path, expected: str) -> Network:
    raw = open_raw(folder)
    found = detect(folder, raw)
    assert found.name == expected
    others = [name for name in FORMATS if name != "outrider" and head_format(name).detect(raw)]
    assert expected == "outrider" or others == [expected]
    return found.read(raw, files.target_facts())


def assert_equal(one: Network, other: Network) -> None:
    assert one.config.model_dump(exclude={"context_length"}) == other.config.model_dump(exclude={"context_length"})
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert (one.draft_ids is None) == (other.draft_ids is None)
    if one.draft_ids is not None:
        assert other.draft_ids is not None
        assert torch.equal(one.draft_ids, other.draft_ids)
    assert torch.equal(logits_of(one), logits_of(other))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_survives_our_file_and_every_format_that_holds_it(layout: str, tmp_path: Path) -> None:
    name, method, file, make = LAYOUTS[layout]
    tensors, config = make()
    network = read(files.write(tmp_path / "public", tensors, config, file), name)
    assert network.config.method == method
    assert network.config.target == "f" * 24
    save_head(tmp_path / "ours.safetensors", network)
    assert_equal(network, load_head(tmp_path / "ours.safetensors", method))
    for other in FORMATS:
        writer = head_format(other)
        if method not in writer.writes:
            continue
        folder = tmp_path / other
        folder.mkdir()
        writer.write(network, folder, files.target_facts(), torch.bfloat16)
        again = read(folder, other)
        back = again.config.model_copy(update={"steps": network.config.steps})
        again.config = back  # how many steps were trained is not stored by formats other than ours
        assert_equal(network, again)


def test_our_numbers_are_the_files_numbers(tmp_path: Path) -> None:
    tensors, config = files.eagle3()
    network = read(files.write(tmp_path, tensors, config), "eagle3")
    own = network.state_dict()
    assert all(torch.equal(own[name], tensors[name].float()) for name in own)
    assert set(own) == set(tensors) - {"d2t", "t2d"}
    assert network.draft_ids is not None
    assert torch.equal(network.draft_ids, files.DRAFT_IDS)
    assert network.config.features == (2, 5, 7)


def test_flags_and_positions_are_always_written(tmp_path: Path) -> None:
    tensors, config = files.eagle3()
    network = read(files.write(tmp_path / "a", tensors, config), "eagle3")
    for name in ("eagle3", "sglang", "speculators"):
        folder = tmp_path / name
        folder.mkdir()
        head_format(name).write(network, folder, files.target_facts(), torch.bfloat16)
        written = open_raw(folder)
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            assert written.config[flag] is False
        layer: Any = written.config.get("transformer_layer_config", written.config)
        assert layer["max_position_embeddings"] == 4096
        has_embedding = "embed_tokens.weight" in written.names
        assert has_embedding == (name != "sglang")


def test_eagle_3_1_flags(tmp_path: Path) -> None:
    tensors, config = files.eagle3()
    tensors |= {f"fc_norm.{index}.weight": files.random(files.H, seed=index) for index in range(3)}
    config |= {"fc_norm": True, "norm_output": True, "num_hidden_layers": 1, "eagle_config": None}
    config["eagle_aux_hidden_state_layer_ids"] = [2, 5, 7]
    network = read(files.write(tmp_path / "a", tensors, config), "eagle3")
    assert network.config.flags()["fc_norm"]
    assert network.config.flags()["norm_output"]
    head_format("speculators").write(network, tmp_path / "b", files.target_facts(), torch.bfloat16)
    assert read(tmp_path / "b", "speculators").config.flags() == network.config.flags()


def test_hass_norms_and_qwen_biases(tmp_path: Path) -> None:
    tensors, config = files.eagle(bias=False)
    tensors |= {f"{name}_layernorm.weight": files.random(files.H, seed=40) for name in ("embedding", "hidden_states")}
    tensors["layers.0.self_attn.q_proj.bias"] = files.random(files.HEADS * files.DIM)
    for name in ("k_proj", "v_proj"):
        tensors[f"layers.0.self_attn.{name}.bias"] = files.random(files.KV_HEADS * files.DIM)
    config |= {"add_para_norm": True, "attention_bias": True}
    network = read(files.write(tmp_path, tensors, config), "eagle")
    flags = network.config.flags()
    assert flags["para_norm"]
    assert flags["qkv_bias"]
    assert not flags["fc_bias"]


def test_nested_configuration_of_old_vllm(tmp_path: Path) -> None:
    tensors, config = files.eagle()
    del config["bias"]
    nested = {"model_type": "eagle", "model": config, "eagle_fc_bias": True, "truncated_vocab_size": files.V}
    tensors["lm_head.weight"] = files.random(files.V, files.H, seed=2)
    assert read(files.write(tmp_path, tensors, nested), "eagle").config.flags()["fc_bias"]


def test_whole_medusa_2_model(tmp_path: Path) -> None:
    heads, _ = files.medusa(heads=4)
    plain = read(files.write(tmp_path / "heads", heads, None, "medusa_lm_head.pt"), "medusa")
    whole = {f"medusa_head.{name}": tensor for name, tensor in heads.items()}
    whole |= {"model.norm.weight": files.random(files.H), "lm_head.weight": files.random(files.V, files.H)}
    config = {**files.LLAMA, "num_hidden_layers": 30, "medusa_num_heads": 5, "medusa_num_layers": 1, "anything": 1}
    found = read(files.write(tmp_path / "whole", whole, config), "medusa")
    assert_equal(plain, found)
    assert found.config.steps == 4


def test_speculators_medusa_shares_the_targets_output(tmp_path: Path) -> None:
    tensors, _ = files.vllm_medusa(heads=2, blocks=1, reduced=False)
    kept = {name: tensor for name, tensor in tensors.items() if name.endswith(".layers.0.weight")}
    spec = {
        "speculators_model_type": "medusa",
        "architectures": ["MedusaModel"],
        "medusa_hidden_size": files.H,
        "medusa_vocab_size": files.V,
        "truncated_vocab_size": files.VD,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "head_weight_decay": 0.8,
        "speculators_config": {"algorithm": "medusa"},
    }
    network = read(files.write(tmp_path, {**kept, **files.maps()}, spec), "speculators")
    assert network.needs_target_rows
    assert network.draft_ids is not None
    assert torch.equal(network.draft_ids, files.DRAFT_IDS)
    assert not network.state_dict()["1.0.linear.bias"].any()


def test_shared_medusa_for_vllm_carries_the_targets_rows(tmp_path: Path) -> None:
    tensors, config = files.medusa(own=False)
    network = read(files.write(tmp_path / "a", tensors, config, "medusa_lm_head.pt"), "medusa")
    head_format("vllm-medusa").write(network, tmp_path / "b", files.target_facts(), torch.bfloat16)
    raw = open_raw(tmp_path / "b")
    assert raw.config["original_lm_head"] is True
    assert raw.config["medusa_fc_bias"] is True
    assert torch.equal(raw.tensor("lm_heads.0.weight"), files.random(files.V, files.H, seed=2))


def test_token_map_rows_are_sorted_with_their_tokens(tmp_path: Path) -> None:
    tensors, config = files.vllm_medusa()
    network = read(files.write(tmp_path, tensors, config), "vllm-medusa")
    assert network.draft_ids is not None
    ours = network.state_dict()["1.2.weight"]
    for row, token in enumerate(network.draft_ids.tolist()):
        stored = tensors["token_map"].tolist().index(token)
        assert torch.equal(ours[row], tensors["lm_heads.1.weight"][stored].float())
