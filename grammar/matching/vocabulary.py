"""A model's tokens as the library that matches grammars sees them."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError, ModelError
from pdkv.text.tokenizer import Tokenizer

WORD_BITS = 32
"""Tokens per word of a mask."""


class Vocabulary:
    """Every token's bytes, and the tokens that are never in an answer's text. Immutable, shared by all grammars."""

    def __init__(
        self, library: Any, tokens: Sequence[bytes], special_ids: frozenset[int], stops: Sequence[int]
    ) -> None:
        """Use `load`.

        Args:
            library: the module `llguidance`.
            tokens: bytes by id; an empty one is never allowed.
            special_ids: tokens that are left out of answers.
        """
        self.library = library
        self.size = len(tokens)
        self.stop_token_ids = frozenset(stops)
        self.stop_bits = bits_of(self.stop_token_ids)
        # What the library takes for special matches no text: for tags, stop tokens alone are.
        self._plain = _tokenizer(library, tokens, special_ids | self.stop_token_ids, stops)
        self._tagged = self._plain
        if not special_ids <= self.stop_token_ids:
            self._tagged = _tokenizer(library, tokens, self.stop_token_ids, stops)

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, stop_token_ids: Sequence[int]) -> "Vocabulary":
        """Read a model directory's tokenizer; a second for 130,000 tokens.

        Args:
            vocab_size: size of the model's logits; ids that the tokenizer lacks are never allowed.
            stop_token_ids: tokens that may only follow a complete answer.

        Raises:
            ConfigError: llguidance is not installed, the directory has no usable tokenizer, or there is no stop token.
        """
        if not stop_token_ids:
            raise ConfigError(f"{model_dir}: structured outputs need an end-of-sequence token, but the model has none")
        try:
            library = importlib.import_module("llguidance")
        except ImportError as error:
            raise ConfigError(f"structured outputs need llguidance: pip install 'pdkv[grammar]' ({error})") from error
        try:
            tokenizer = Tokenizer.from_dir(model_dir)
        except ModelError as error:
            raise ConfigError(f"structured outputs need a tokenizer: {error}") from error
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special_ids = frozenset(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        return cls(library, tokens, special_ids, stop_token_ids)

    def tokenizer(self, *, tagged: bool) -> Any:
        """An `llguidance.LLTokenizer`; `tagged`: special tokens match the text that they stand for."""
        return self._tagged if tagged else self._plain


class _Tokens:
    """The tokens in the form that the library takes them in."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Would be asked for the tokens of a text that is forced, but each grammar says `no_forcing`."""
        raise NotImplementedError


def _tokenizer(library: Any, tokens: Sequence[bytes], special_ids: frozenset[int], stops: Sequence[int]) -> Any:
    wrapped = _Tokens(tokens, sorted(special_ids), stops[0])
    return library.LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=sorted(set(stops)))


def bits_of(token_ids: Iterable[int]) -> list[tuple[int, int]]:
    """The word of a mask and the bit in it that stand for each token."""
    return [(token_id // WORD_BITS, 1 << token_id % WORD_BITS) for token_id in token_ids]


def add_bits(words: memoryview, bits: Iterable[tuple[int, int]]) -> None:
    """Allow those tokens in a mask."""
    for word, bit in bits:
        words[word] |= bit
