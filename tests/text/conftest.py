"""Tokenizers of every kind that models use."""

import pytest
import small_tokenizers
import tokenizers

BACKENDS = {
    "byte_level": small_tokenizers.byte_level_backend,
    "byte_level_sequence": small_tokenizers.byte_level_sequence_backend,
    "byte_fallback": small_tokenizers.byte_fallback_backend,
    "metaspace": small_tokenizers.metaspace_backend,
    "words": small_tokenizers.word_backend,
}


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """One backend of each kind."""
    made: tokenizers.Tokenizer = BACKENDS[request.param]()
    return made


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    return small_tokenizers.byte_level_backend()


@pytest.fixture(scope="session")
def byte_fallback() -> tokenizers.Tokenizer:
    return small_tokenizers.byte_fallback_backend()
