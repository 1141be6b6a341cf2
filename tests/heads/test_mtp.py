"""The MTP network: names, what it reads in which order, parity with a plain implementation, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.heads.cached import CachedHead
from outrider.heads.file import load_head, save_head
from outrider.heads.mtp import Mtp, MtpConfig

LAYER = "mtp_layers.0."


def config(**fields: object) -> MtpConfig:
    values = {
        "method": "mtp", "hidden_size": 12, "vocab_size": 20, "draft_vocab_size": 20, "features": ("final",),
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 16, "norm_eps": 1e-5,
        "rope_theta": 100.0,
    }  # fmt: skip
    return MtpConfig.model_validate(values | fields)


def head(**fields: object) -> Mtp:
    """Random numbers everywhere, the norms included."""
    network = Mtp(config(**fields))
    network.initialise(3)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 2 else 1.0))
    return network.eval().requires_grad_(False)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """One head's vector [dim], pair (i, i + dim / 2) turned by position * theta^(-2 i / dim)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * 100.0 ** (-2 * i / len(x)))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def plain(weights: dict[str, Tensor], tokens: Tensor, states: Tensor) -> Tensor:
    """The layer over a chain of pairs [n, H] at positions 0, 1, ..., written out loop by loop."""
    w = {name.removeprefix(LAYER).removesuffix(".weight"): tensor for name, tensor in weights.items()}
    z = []
    for token, state in zip(tokens, states, strict=True):
        e, h = rms(token, w["token_layernorm"]), rms(state, w["hidden_layernorm"])
        z.append(w["input_proj"][:, :12] @ e + w["input_proj"][:, 12:] @ h)
    out = []
    for t, residual in enumerate(z):
        mixed = torch.zeros(24)
        for one in range(4):
            query = rotated((w["self_attn.q_proj"] @ rms(residual, w["input_layernorm"]))[6 * one : 6 * one + 6], t)
            group = slice(6 * (one // 2), 6 * (one // 2) + 6)
            normed = [rms(z[s], w["input_layernorm"]) for s in range(t + 1)]
            scores = [query @ rotated((w["self_attn.k_proj"] @ n)[group], s) / 6**0.5 for s, n in enumerate(normed)]
            shares = torch.softmax(torch.stack(scores), 0)
            mixed[6 * one : 6 * one + 6] = sum(
                share * (w["self_attn.v_proj"] @ n)[group] for share, n in zip(shares, normed, strict=True)
            )
        x = residual + w["self_attn.o_proj"] @ mixed
        n = rms(x, w["post_attention_layernorm"])
        x = x + w["mlp.down_proj"] @ (F.silu(w["mlp.gate_proj"] @ n) * (w["mlp.up_proj"] @ n))
        out.append(rms(x, w["final_layernorm"]))
    return torch.stack(out)


def test_names_are_those_of_speculators_files() -> None:
    network = head()
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == network.expected()
    assert {name.removeprefix(LAYER).removesuffix(".weight") for name in network.expected()} == {
        "token_layernorm", "hidden_layernorm", "input_proj", "input_layernorm", "post_attention_layernorm",
        "final_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 1, 3]])
def test_parity_with_a_plain_implementation(sizes: list[int]) -> None:
    network = head()
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tokens, states = torch.randn(7, 12), torch.randn(7, 12)
    cached = CachedHead(network, torch.float32, torch.device("cpu"))
    cache, outputs, start = cached.new_cache(), [], 0
    for size in sizes:
        part = slice(start, start + size)
        outputs.append(cached.forward(cache, tokens[part], states[part], range(start, start + size)))
        cache.commit()
        start += size
    torch.testing.assert_close(torch.cat(outputs), plain(weights, tokens, states), rtol=1e-4, atol=1e-5)


def test_the_embedding_comes_first_and_inputs_are_named() -> None:
    """heads.md 4, item 27: an engine fed (hidden, drafter's hidden) where (embedding, hidden) belonged."""
    network = head()
    token, state = torch.randn(1, 12), torch.randn(1, 12)

    def output(token: Tensor, state: Tensor) -> Tensor:
        return network.step(token=token, state=state, attend=lambda q, k, v: torch.zeros_like(q))

    with pytest.raises(TypeError):
        network.step(token, state, attend=lambda q, k, v: q)  # type: ignore[misc]
    network.state_dict()[LAYER + "input_proj.weight"][:, 12:] = 0.0
    assert torch.equal(output(token, state), output(token, torch.randn(1, 12)))
    assert not torch.allclose(output(token, state), output(torch.randn(1, 12), state))


def test_the_normed_output_recurs_and_is_what_the_targets_rows_read() -> None:
    network = head()
    network.initialise(0)
    rows, final = torch.randn(20, 12), torch.randn(3, 12)
    assert network.needs_target_rows
    with pytest.raises(ValueError, match="call bind first"):
        network.logits(final)
    network.bind(rows)
    assert network.fuse({"final": final}) is final
    output = network.step(token=torch.randn(3, 12), state=final, attend=lambda q, k, v: q)
    torch.testing.assert_close(output.pow(2).mean(-1), torch.ones(3), rtol=0.05, atol=0)
    assert network.recur(output) is output
    torch.testing.assert_close(network.logits(output), output @ rows.T)
    assert not [name for name in network.state_dict() if "rows" in name]


def test_it_starts_with_the_targets_final_norm() -> None:
    network, weight = head(), torch.rand(12)
    network.initialise(1)
    network.adopt_final_norm(weight)
    state = network.state_dict()
    assert torch.equal(state[LAYER + "final_layernorm.weight"], weight)
    assert torch.equal(state[LAYER + "input_layernorm.weight"], torch.ones(12))
    again = head()
    again.initialise(1)
    assert torch.equal(again.state_dict()[LAYER + "input_proj.weight"], state[LAYER + "input_proj.weight"])


def test_the_file_keeps_it_and_is_strict(tmp_path: Path) -> None:
    network = head(draft_vocab_size=5)
    network.draft_ids = torch.tensor([1, 4, 5, 9, 19])
    path = tmp_path / "mtp.safetensors"
    save_head(path, network, dtype=torch.float32)
    again = load_head(path, "mtp")
    assert again.config == network.config
    assert again.draft_ids is not None
    assert again.draft_ids.tolist() == [1, 4, 5, 9, 19]
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in network.state_dict().items())
    with pytest.raises(ModelFileError, match="is a head for --drafter mtp, not eagle3"):
        load_head(path, "eagle3")


def test_two_hidden_states_are_refused() -> None:
    with pytest.raises(ValueError, match="features"):
        config(features=(1, "final"))
