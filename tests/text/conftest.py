"""Tokenizers shared by the text tests, built once."""

from __future__ import annotations

import pytest
import tiny_tokenizers

from outrider.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return tiny_tokenizers.byte_level()


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece", "sentencepiece_no_prefix"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return {
        "byte_level": tiny_tokenizers.byte_level,
        "sentencepiece": tiny_tokenizers.sentencepiece,
        "sentencepiece_no_prefix": lambda: tiny_tokenizers.sentencepiece(False),
    }[request.param]()
