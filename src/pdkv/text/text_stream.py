"""The text of one choice as its tokens arrive: detokenizer and stop strings together."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdkv.text.detokenizer import Detokenizer
from pdkv.text.stop_strings import StopAutomaton, StopStrings


class TextPiece(NamedTuple):
    """The text of some tokens."""

    text: str  # may be shown now
    num_tokens: int  # number of the tokens that belong to the output: those after a stop string do not
    stop: str | None  # the stop string that ended the text; nothing may be pushed after it


class TextStream:
    """Text and token count of one choice. A stop token is one of its tokens but, by default, not part of its text."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: StopAutomaton | Sequence[str] = (),
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        shows_stop: bool = False,
    ) -> None:
        """Args:
        stop: stop strings, or the automaton that the choices of a request share.
        min_tokens: tokens before which no stop string ends the text.
        stop_token_ids: all tokens that end this choice, including its end of sequence unless that is ignored.
        shows_stop: whether the stop string or token that ends the text is its last part.
        """
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop) if isinstance(stop, StopAutomaton) or stop else None
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset() if shows_stop else frozenset(stop_token_ids)
        self._shows_stop = shows_stop
        self.num_tokens = 0
        self.num_characters = 0
        """The text decoded so far, including the part held back for a stop string."""

    @property
    def has_stops(self) -> bool:
        """Whether a stop string may end the text, so that its tokens must be pushed as they arrive."""
        return self._stops is not None

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Add tokens; the text ends at the first stop string that is completed by token min_tokens or later."""
        if self._stops is None:
            return TextPiece(self._push_all(token_ids), len(token_ids), None)
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            if token_id in self._stop_token_ids:
                continue
            text = self._detokenizer.push(token_id)
            self.num_characters += len(text)
            if text:
                text, stop = self._stops.push(text, accept=self.num_tokens >= self._min_tokens)
                if stop is not None:
                    return TextPiece("".join([*pieces, text, self._shown(stop)]), count, stop)
            pieces.append(text)
        return TextPiece("".join(pieces), len(token_ids), None)

    def _push_all(self, token_ids: Sequence[int]) -> str:
        """Push tokens when there are no stop strings."""
        self.num_tokens += len(token_ids)
        ends, push = self._stop_token_ids, self._detokenizer.push
        if len(token_ids) == 1:
            text = push(token_ids[0]) if token_ids[0] not in ends else ""
        else:
            text = "".join([push(token_id) for token_id in token_ids if token_id not in ends])
        self.num_characters += len(text)
        return text

    def finish(self) -> TextPiece:
        """End the text without a stop string so far; returns the text held back, which may complete one."""
        text = self._detokenizer.flush()
        self.num_characters += len(text)
        if self._stops is None:
            return TextPiece(text, 0, None)
        shown, stop = self._stops.push(text, accept=self.num_tokens >= self._min_tokens)
        return TextPiece(shown + (self._stops.flush() if stop is None else self._shown(stop)), 0, stop)

    def _shown(self, stop: str) -> str:
        return stop if self._shows_stop else ""
