"""The sizes and flags of one trained head: what its file says beside its tensors."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Feature = str | int
"""Name of a target hidden state: an integer is the input of that block, ``final`` the state after the final norm."""

Size = Annotated[int, Field(ge=1)]


class HeadConfig(BaseModel):
    """What all methods share; each method's subclass adds its own fields. Boolean fields are the spec's flags.

    Attributes:
        method: registered name.
        hidden_size, vocab_size: of the target.
        draft_vocab_size: tokens that the head can guess; the target's vocabulary size for all.
        features: hidden states that it reads, in the order in which it wants them.
        steps: heads (Medusa, Hydra) or unrolled steps in training (the others).
        target: ``models/fingerprint.py`` of the target that it was trained on; empty when not known.
        tokenizer: ``text/vocabulary.py`` hash of the target's tokenizer; empty when not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size
    features: tuple[Feature, ...]
    steps: Size = 1
    target: str = ""
    tokenizer: str = ""

    def symbols(self) -> dict[str, int]:
        """Sizes by the names that specs use: H, V, Vd, steps, and each subclass's own."""
        return {
            "H": self.hidden_size,
            "V": self.vocab_size,
            "Vd": self.draft_vocab_size,
            "steps": self.steps,
            "features": len(self.features),
        }

    def flags(self) -> dict[str, bool]:
        """Boolean fields by name, and ``reduced``: whether the draft vocabulary is a part of the target's."""
        found: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        flags = {name: value for name, value in found.items() if isinstance(value, bool)}
        return {**flags, "reduced": self.draft_vocab_size < self.vocab_size}


class AttentionConfig(HeadConfig):
    """A head with one transformer layer of its own.

    Attributes:
        num_heads, num_kv_heads, head_dim, intermediate_size: of the layer.
        norm_eps: of its norms.
        rope_theta, rope_scaling: its rotary embedding, as ``models/config.py:RopeConfig``.
        context_length: positions that the rotary embedding is meant for.
    """

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    intermediate_size: Size
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, object] = {}
    context_length: Size = 8192

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: the rotary embedding turns pairs")
        return self

    def symbols(self) -> dict[str, int]:
        return {
            **super().symbols(),
            "Q": self.num_heads * self.head_dim,
            "KV": self.num_kv_heads * self.head_dim,
            "I": self.intermediate_size,
        }
