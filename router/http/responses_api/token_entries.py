"""Finds the tokens whose logprobs belong to a message: those of its text, not those of tags, calls and reasoning."""

from collections.abc import Sequence

from pdkv.router.http.answer.choice import ShownLogprob
from pdkv.router.http.answer.logprobs import chat_logprobs
from pdkv.router.http.read.ascii_json import ascii_json
from pdkv.text import Tokenizer


class TokenEntries:
    """Tokens whose text has not appeared yet, each with its entry of `logprobs` as JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[tuple[bytes, bytes]] = []  # (the token's text, its entry)

    def add(self, logprobs: Sequence[ShownLogprob]) -> None:
        """Add the next tokens."""
        entries = chat_logprobs(logprobs, self._tokenizer)["content"]
        for shown, entry in zip(logprobs, entries, strict=True):
            self._waiting.append((self._tokenizer.token_bytes(shown.token_id), ascii_json(entry)))

    def drop(self) -> None:
        """Drop all tokens so far: they belong to no message."""
        self._waiting.clear()

    def take(self, text: str) -> list[bytes]:
        """The entries of the tokens that a message's text is made of; tokens before them are dropped for good.

        Parsers hold spaces back, so spaces at the ends may come from tokens already taken or still to come. If the text
        is not found, because it replaces invalid UTF-8, the result is all entries.
        """
        if not self._waiting:
            return []
        data = b"".join([piece for piece, _ in self._waiting])
        wanted = text.encode()
        begin = data.rfind(wanted)
        if begin < 0:
            wanted = wanted.strip()
            begin = data.rfind(wanted) if wanted else -1
        end = begin + len(wanted) if begin >= 0 else len(data)
        taken: list[bytes] = []
        at = 0
        for number, (piece, entry) in enumerate(self._waiting):
            if at >= end:
                del self._waiting[:number]
                return taken
            at += len(piece)
            if at > begin:
                taken.append(entry)
        self._waiting.clear()
        return taken
