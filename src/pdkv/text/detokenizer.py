"""Incremental detokenizers: token by token to text, O(1) each, never half a character, equal to one full decode."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence


class Detokenizer(ABC):
    """The text of one growing token sequence: the pieces of `push` and of the last `flush`, joined."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """End the sequence: the text held back, with an incomplete character as U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """For byte-level vocabularies: each token is a fixed string of bytes, the text is their UTF-8."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """`token_bytes` holds every id; those of hidden tokens are empty."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # the decoder holds no beginning of a character

    def push(self, token_id: int) -> str:
        data = self._token_bytes[token_id]
        if self._is_whole and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """For every other vocabulary: decode the last shown tokens with and without the new ones, show the difference.

    A token's text depends on the preceding ones (a leading space, say), and a run of byte tokens is text only as a
    whole: it is held until a token of another kind follows.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        is_hidden: Callable[[int], bool],
        is_byte: Callable[[int], bool],
        hold_replacement: bool,
    ) -> None:
        """Args:
        decode: full decode of a token sequence.
        is_hidden: whether the token is left out of the text.
        is_byte: whether the token stands for one byte.
        hold_replacement: a text that ends with U+FFFD may be an incomplete character.
        """
        self._decode = decode
        self._is_hidden = is_hidden
        self._is_byte = is_byte
        self._hold_replacement = hold_replacement
        self._shown: list[int] = []  # the last tokens with output text
        self._shown_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if self._is_hidden(token_id):
            return ""
        self._held.append(token_id)
        return "" if self._is_byte(token_id) else self._show(final=False)

    def flush(self) -> str:
        return self._show(final=True) if self._held else ""

    def _show(self, *, final: bool) -> str:
        text = self._decode(self._shown + self._held)
        if self._hold_replacement and not final and text.endswith("\ufffd"):
            return ""
        new = text[len(self._shown_text) :]
        if new or not self._shown:
            self._shown, self._held = self._held, []
        else:  # tokens without text give no context to the next ones: keep the ones shown before them
            self._shown, self._held = self._shown + self._held, []
        self._shown_text = self._decode(self._shown)
        return new
