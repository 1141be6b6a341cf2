"""Text: tokenizers, incremental detokenisation and stop strings. Only text/, server/ and cli/ know that text exists."""
