"""The tokenizer of a model: ids <-> text, chat template, and which ids end a turn.

Wraps a ``tokenizers.Tokenizer`` whatever file it came from. Knows nothing of models; ids beyond ``vocab_size`` (padding
rows of a model's head) have no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as Backend

from outrider.errors import InvalidOptionError, ModelFileError, UnsupportedModelError
from outrider.text.gguf_tokenizer import TokenType, build_tokenizer, token_texts, token_types
from outrider.text.pieces import decoder_kinds, piece_bytes

END_OF_TURN_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
)
"""Control tokens that end an answer in the families served, added to the file's own end-of-sequence ids."""


class Tokenizer:
    """Ids <-> text. Immutable and safe to share between requests.

    Args:
        backend: the fast tokenizer.
        bos_id: beginning-of-sequence id, or ``None``.
        eos_ids: the file's own end ids; well-known end-of-turn control tokens are added.
        chat_template: a Jinja template as Hugging Face writes them, or ``None``.
        template_names: extra names that the template may use, such as ``bos_token``.
    """

    def __init__(
        self,
        backend: Backend,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_names: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        known = (backend.token_to_id(text) for text in END_OF_TURN_TEXTS)
        self.eos_ids = frozenset(eos_ids) | {i for i in known if i is not None and i in self.special_ids}
        self._template_names = dict(template_names or {})

    # -- construction ----------------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read a Hugging Face directory (``tokenizer.json`` or what converts to it). Runs no code of the directory.

        Raises:
            ModelFileError: when no tokenizer can be read there.
            UnsupportedModelError: when the tokenizer has no fast form.
        """
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises many kinds here, ImportError and KeyError among them
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise ModelFileError(f"no tokenizer can be read from {path}: {reason}") from None
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise UnsupportedModelError(f"the tokenizer in {path} has no fast form (tokenizer.json); convert it first")
        eos = [loaded.eos_token_id, *_generation_eos(Path(path))]
        template = loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        names = {k: v for k, v in loaded.special_tokens_map.items() if isinstance(v, str)}
        return cls(backend, loaded.bos_token_id, (i for i in eos if i is not None), template, names)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build from GGUF metadata (key -> plain Python value).

        Raises:
            ModelFileError, UnsupportedModelError: see ``gguf_tokenizer.build_tokenizer``.
        """
        backend = build_tokenizer(metadata)
        texts, types = token_texts(metadata), token_types(metadata)
        ids = {
            name: cast("int", metadata[key])
            for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
            if metadata.get(key := f"tokenizer.ggml.{name}_token_id") is not None
        }
        for name, index in ids.items():
            if not 0 <= index < len(texts):
                raise ModelFileError(f"the GGUF file's {name} token id {index} is outside its {len(texts)} tokens")
        # A file may mark its end token as a normal one; generation must still stop there and hide it.
        ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
        backend.add_special_tokens([texts[i] for i in ends if types[i] != TokenType.CONTROL])
        names = {"unknown": "unk_token", "padding": "pad_token"}
        template_names = {names.get(name, f"{name}_token"): texts[index] for name, index in ids.items()}
        template = cast("str | None", metadata.get("tokenizer.chat_template"))
        return cls(backend, ids.get("bos"), ends, template, template_names)

    def save(self, directory: Path) -> None:
        """Write what ``from_directory`` reads: ``tokenizer.json``, its configuration, and the end ids."""
        names = {**self._template_names, "tokenizer_class": "PreTrainedTokenizerFast"}
        config = {**names, "clean_up_tokenization_spaces": False}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (directory / "tokenizer.json").write_text(self.backend.to_str(pretty=False), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        generation = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)}
        (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")

    # -- text <-> ids ----------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised as such.

        Raises:
            InvalidOptionError: when ``text`` holds half of a surrogate pair (undecodable input), which no token spells.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidOptionError(
                "the text is not valid Unicode (undecodable bytes or a lone surrogate); give UTF-8"
            ) from None
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids without text are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it (``Ġthe``, ``▁the``, ``<0x0A>``); ``<id N>`` for a padding row."""
        text = self.backend.id_to_token(int(token))
        return f"<id {token}>" if text is None else text

    @cached_property
    def decoder_kinds(self) -> tuple[str, ...]:
        """Names of the decoder's steps: what ``pieces.piece_bytes`` reads a spelling by."""
        return decoder_kinds(self.backend)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text, a special token's name included; none for a padding row."""
        text = self.backend.id_to_token(int(token))
        return b"" if text is None else piece_bytes(text, self.decoder_kinds)

    def readable(self, token: int) -> str:
        """The token's own text for people: decoded, specials shown by name."""
        decoded = self.decode([token], skip_special_tokens=False)
        return self.token_text(token) if not decoded or "\ufffd" in decoded else decoded

    def vocabulary(self) -> dict[str, int]:
        """Every token's spelling -> id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(self.backend.to_str(pretty=False).encode()).hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the whole tokenizer: equal fingerprints tokenise every text alike."""
        return self._fingerprint

    # -- chat ------------------------------------------------------------------------------------------------

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text that the model's chat template makes of ``messages`` (sandboxed Jinja).

        Raises:
            InvalidOptionError: when there is no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidOptionError(
                "the model has no chat template, so a conversation cannot be written for it; give plain text instead"
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **self._template_names,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidOptionError(f"the model's chat template refuses these messages: {error}") from None
        text = rendered[0] if isinstance(rendered, tuple) else rendered
        return text if isinstance(text, str) else text[0]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of the rendered conversation. The template writes every special token itself, so none is added.

        Raises:
            InvalidOptionError: see ``render_chat``.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)


def _generation_eos(path: Path) -> list[int]:
    """End ids of ``generation_config.json``: chat models list their end-of-turn tokens there."""
    try:
        found = json.loads((path / "generation_config.json").read_text()).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{path / 'generation_config.json'} is not readable JSON: {error}") from None
    return [found] if isinstance(found, int) else [i for i in found or [] if isinstance(i, int)]
