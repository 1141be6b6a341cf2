"""Between the tokens of two tokenizers: what a draft model with another vocabulary needs."""

from __future__ import annotations

from outrider.text.tokenizer import Tokenizer


class Translator:
    """Translates token sequences of a target into a draft model's and back."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.target = target
        self.draft = draft
