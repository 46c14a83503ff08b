"""A model's tokens as the library that matches grammars sees them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pdkv.errors import ConfigError
from pdkv.grammar.library import load_xgrammar
from pdkv.text.tokenizer import Tokenizer

WORD_BITS = 32
"""Tokens per word of a bitmask."""


class _Packed(msgspec.Struct, frozen=True):
    info: str
    special_ids: list[int]
    stop_token_ids: list[int]


class Vocabulary:
    """Every token's bytes, and which tokens no answer's text is made of. Immutable, shared by all grammars."""

    def __init__(self, info: Any, *, special_ids: frozenset[int], stop_token_ids: Sequence[int]) -> None:
        """Args:
        info: an `xgrammar.TokenizerInfo` of the model's vocabulary.
        special_ids: tokens that are left out of answers.
        """
        self.info = info
        self.size = int(info.vocab_size)
        self.num_words = -(-self.size // WORD_BITS)
        self.stop_token_ids = frozenset(stop_token_ids)
        self.padding = frozenset(map(int, info.special_token_ids)) - self.stop_token_ids
        self.special = special_ids - self.stop_token_ids
        self.all = self._words_without(frozenset())  # each (num_words,)
        self.not_special = self._words_without(self.special)
        self.not_stop = self._words_without(self.stop_token_ids)
        self.stop = self.all & ~self.not_stop

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, stop_token_ids: Sequence[int]) -> "Vocabulary":
        """Read a model directory's tokenizer; up to a second for 130,000 tokens.

        Args:
            vocab_size: of the model's logits; ids that the tokenizer lacks are never allowed.
            stop_token_ids: tokens that may follow a complete answer, and no other place.

        Raises:
            ConfigError: xgrammar is not installed, the directory has no usable tokenizer, or there is no stop token.
        """
        if not stop_token_ids:
            raise ConfigError(f"{model_dir}: structured outputs need an end-of-sequence token, and the model has none")
        xgr = load_xgrammar()
        tokenizer = Tokenizer.from_dir(model_dir)
        ids = tokenizer.ids_by_text()
        encoded = [""] * vocab_size
        for text, token_id in ids.items():
            if token_id < vocab_size:
                encoded[token_id] = text
        known = xgr.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_json())
        info = xgr.TokenizerInfo(
            encoded,
            vocab_type=xgr.TokenizerInfo._detect_vocab_type_from_vocab(ids) or known["vocab_type"],
            vocab_size=vocab_size,
            stop_token_ids=list(stop_token_ids),
            add_prefix_space=known["add_prefix_space"],
        )
        special_ids = frozenset(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        return cls(info, special_ids=special_ids, stop_token_ids=stop_token_ids)

    def to_bytes(self) -> bytes:
        """For `from_bytes` in another process."""
        packed = _Packed(str(self.info.serialize_json()), sorted(self.special), sorted(self.stop_token_ids))
        return msgspec.msgpack.encode(packed)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Vocabulary":
        """What `to_bytes` gave elsewhere. Unlike `load`, it lets other Python threads run meanwhile."""
        packed = msgspec.msgpack.decode(data, type=_Packed)
        info = load_xgrammar().TokenizerInfo.deserialize_json(packed.info)
        return cls(info, special_ids=frozenset(packed.special_ids), stop_token_ids=packed.stop_token_ids)

    def _words_without(self, token_ids: frozenset[int]) -> torch.Tensor:
        """(num_words,) int32 with a bit for every token but these."""
        bits = np.zeros(self.num_words * WORD_BITS, np.uint8)
        bits[: self.size] = 1
        bits[list(token_ids)] = 0
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
