"""Grammars over a vocabulary of bytes: which texts they accept, and texts that their masks lead to."""

from pathlib import Path

import numpy as np
from deployments import write_tokenizer
from numpy.typing import NDArray

from pdkv.grammar.matching.matcher import Matcher
from pdkv.grammar.matching.vocabulary import Vocabulary
from pdkv.sampling.shape import Grammar
from pdkv.text import Tokenizer

VOCAB_SIZE = 258
EOS = 1

_ENDING = {'"': 20.0, "]": 20.0, "}": 20.0, "\\": 0.3, " ": 0.3}


def allowed_by(matcher: Matcher, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that may come next; the words beside its mask are not written."""
    masks = np.full((3, -(-vocab_size // 32)), 0x55555555, np.uint32)
    matcher.fill(memoryview(masks[1]))
    assert (masks[[0, 2]] == 0x55555555).all(), "rows of others were written"
    return np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little"))


class ByteGrammars:
    """A vocabulary whose tokens are bytes."""

    def __init__(self, folder: Path) -> None:
        """Writes its tokenizer into `folder`."""
        write_tokenizer(folder)
        self._tokenizer = Tokenizer.from_dir(folder)
        self._vocabulary = Vocabulary.load(folder, VOCAB_SIZE, [EOS])
        self._weights = np.array([self._weight(token_id) for token_id in range(VOCAB_SIZE)])

    def _weight(self, token_id: int) -> float:
        """Walks shall come to an end, and seldom leave ASCII."""
        if token_id == EOS:
            return 60.0
        text = self._tokenizer.decode([token_id])
        return _ENDING.get(text, 1.0 if text.isascii() else 0.02)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Raises InvalidRequest where the library refuses the grammar."""
        return Matcher(grammar, self._vocabulary)

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest where the library refuses the grammar, or no text fulfils it."""
        allowed_by(self.matcher(grammar), VOCAB_SIZE)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether the text is a whole answer."""
        matcher = self.matcher(grammar)
        return all(matcher.accept(token_id) for token_id in (*self.encode(text), EOS))

    def encode(self, text: str) -> list[int]:
        """A token for each byte."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def walk(self, grammar: Grammar, rng: np.random.Generator, limit: int) -> str | None:
        """An answer drawn from the masks; None if it has not ended within `limit` bytes."""
        matcher, token_ids = self.matcher(grammar), list[int]()
        for _ in range(limit):
            allowed = allowed_by(matcher, VOCAB_SIZE)
            weights = self._weights[allowed]
            token_id = int(rng.choice(allowed, p=weights / weights.sum()))
            assert matcher.accept(token_id)
            if token_id == EOS:
                return self._tokenizer.decode(token_ids)
            token_ids.append(token_id)
        return None
