"""Grammars over a vocabulary of bytes: which texts they accept, and texts that their masks lead to."""

from pathlib import Path

import numpy as np
import torch
from deployments import write_tokenizer

from pdkv.grammar.compiled import CompiledGrammar, serialize
from pdkv.grammar.compiling import Compiler
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary
from pdkv.text import Tokenizer

VOCAB_SIZE = 258
EOS = 1

_ENDING = {'"': 20.0, "]": 20.0, "}": 20.0, "\\": 0.3, " ": 0.3}


class ByteGrammars:
    """A compiler whose tokens are bytes."""

    def __init__(self, folder: Path) -> None:
        """Writes its tokenizer into `folder`."""
        write_tokenizer(folder)
        self._tokenizer = Tokenizer.from_dir(folder)
        self._vocabulary = Vocabulary.load(folder, VOCAB_SIZE, [EOS])
        self._compiler = Compiler(self._vocabulary)
        self._weights = np.array([self._weight(token_id) for token_id in range(VOCAB_SIZE)])
        self._bitmask = torch.empty((1, self._vocabulary.num_words), dtype=torch.int32)

    def _weight(self, token_id: int) -> float:
        """Walks shall come to an end, and seldom leave ASCII."""
        if token_id == EOS:
            return 60.0
        text = self._tokenizer.decode([token_id])
        return _ENDING.get(text, 1.0 if text.isascii() else 0.02)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest where the library refuses it."""
        return CompiledGrammar.from_bytes(serialize(self._compiler.compile(grammar), grammar), self._vocabulary)

    def accepts(self, compiled: CompiledGrammar, text: str) -> bool:
        """Whether the text is a whole answer."""
        matcher = compiled.matcher()
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return all(matcher.accept(token_id) for token_id in (*token_ids, EOS))

    def walk(self, compiled: CompiledGrammar, rng: np.random.Generator, limit: int) -> str | None:
        """An answer drawn from the masks; None if it has not ended within `limit` bytes, or its bytes are no text: a
        model whose tokens are bytes may write halves of surrogate pairs, which the library takes for characters.
        """
        matcher, token_ids = compiled.matcher(), []
        for _ in range(limit):
            matcher.fill(self._bitmask, 0)
            allowed = np.flatnonzero(np.unpackbits(self._bitmask.numpy().view(np.uint8), bitorder="little"))
            weights = self._weights[allowed]
            token_id = int(rng.choice(allowed, p=weights / weights.sum()))
            assert matcher.accept(token_id)
            if token_id == EOS:
                text = self._tokenizer.decode(token_ids)
                return None if "\ufffd" in text else text
            token_ids.append(token_id)
        return None
