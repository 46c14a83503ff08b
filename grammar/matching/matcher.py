"""The state of one answer in its grammar: a function of the answer's tokens alone."""

import ctypes
import re
from copy import copy
from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.grammar.matching.vocabulary import Vocabulary, add_bits
from pdkv.sampling.shape import Grammar

_LIMITS = {"step_max_items": 20_000, "max_items_in_row": 2_000, "verbose_errors": False}
"""The limit of the library's work for one mask. Most schemas need some dozens of items, one of 1,000 optional
properties needs between 1,000 and 5,000, and takes 5 ms. The worst-case cost is limited elsewhere, by the clock.
"""


class Matcher:
    """Follows one answer token by token. Not thread-safe: it belongs to one slot.

    After a stop token, only stop tokens are allowed.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        """Starts at the beginning of an answer.

        Raises:
            InvalidRequest: the grammar is wrong, too large, or nothing can match it.
        """
        self._vocabulary = vocabulary
        library = vocabulary.library
        tokenizer = vocabulary.tokenizer(tagged=grammar.kind == "tags")
        limits = library.LLParserLimits(**_LIMITS)
        self._matcher: Any = library.LLMatcher(tokenizer, grammar.text, log_level=0, limits=limits)
        self._num_behind = 0  # tokens behind the text: stop tokens
        self._check()

    def copy(self) -> "Matcher":
        """A copy in the same state, much cheaper than preparing the grammar again."""
        made = copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, without a change, if the grammar does not allow it.

        Raises:
            InvalidRequest: as in `fill`.
        """
        if token_id in self._vocabulary.stop_token_ids:
            is_accepted = bool(self._num_behind or self._matcher.is_accepting())
            self._num_behind += is_accepted
            return is_accepted
        if self._num_behind or not 0 <= token_id < self._vocabulary.size:
            return False
        is_accepted = bool(self._matcher.try_consume_tokens([token_id]))
        self._check()
        return is_accepted

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, no more than were accepted."""
        behind = min(count, self._num_behind)
        self._num_behind -= behind
        if count > behind:
            self._matcher.rollback(count - behind)
            self._check()

    def fill(self, words: memoryview) -> None:
        """Write the mask of the tokens that may come next.

        Args:
            words: (num_words,) of format "I"; is overwritten. Bit i % 32 of word i // 32 stands for token i.

        Raises:
            InvalidRequest: the grammar needs more work for it than is allowed.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(words))
        if self._num_behind:
            ctypes.memset(address, 0, words.nbytes)
            add_bits(words, self._vocabulary.stop_bits)
            return
        self._matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(_reason(self._matcher.get_error()), param="structured_outputs")


def _reason(error: str) -> str:
    """The library's message without positions in the generated grammar and without its internals."""
    first = error.partition("\n")[0]
    if "NoExtension" in first:
        return "no text matches the grammar"
    if "panic" in first:
        return "the library that matches grammars fails at it"
    if "TooComplex" in first or "limit" in first:
        return f"the grammar is too complex to match: {clip(first)}"
    detail = next((line for line in error.splitlines() if line.startswith("error: ")), "")
    return clip(re.sub(r"^(?:at )?\d+\(\d+\): ", "", first)) + detail.replace("error:", "")
