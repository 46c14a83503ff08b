"""Where one answer stands in its grammar: a function of the answer's tokens, and of nothing else."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pdkv.grammar.library import load_xgrammar
from pdkv.grammar.match_time import MatchTime
from pdkv.grammar.vocabulary import WORD_BITS, Vocabulary


class Matcher:
    """Follows one answer token by token. Not thread-safe: it belongs to one slot.

    Behind a stop token, stop tokens alone are allowed.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        *,
        allows_special: bool,
        time: MatchTime,
        grammar: int = 0,
    ) -> None:
        """Args:
        matcher: an `xgrammar.GrammarMatcher` at the beginning.
        allows_special: whether tokens that are left out of answers may match the text that they stand for.
        time: where what it takes is counted.
        grammar: the number under which it is.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._known = vocabulary.all if allows_special else vocabulary.not_special
        self._never = vocabulary.padding if allows_special else vocabulary.padding | vocabulary.special
        self._num_behind = 0  # tokens behind the first stop token
        self._time = time
        self._grammar = grammar

    @property
    def is_filled_alone(self) -> bool:
        """Whether `fill_all` calls `fill`: it has ended, or its time is taken by itself."""
        return self._time.is_exact or bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changes, where the grammar does not allow it."""
        if self._matcher.is_terminated():
            self._num_behind += token_id in self._vocabulary.stop_token_ids
            return token_id in self._vocabulary.stop_token_ids
        if token_id in self._never or not 0 <= token_id < self._vocabulary.size:
            return False
        began = self._time.clock()
        is_accepted = bool(self._matcher.accept_token(token_id))
        self._time.spend(self._grammar, self._time.clock() - began, int(is_accepted))
        return is_accepted

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, no more than were accepted."""
        behind = min(count, self._num_behind)
        self._num_behind -= behind
        if count > behind:
            self._matcher.rollback(count - behind)

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Say which tokens may come next.

        Args:
            bitmask: (n, ceil(vocab / 32)) int32 on the CPU; its row `row` is overwritten. Bit i % 32 of word i // 32
                stands for token i.
        """
        words = bitmask[row]
        if self._matcher.is_terminated():
            words.copy_(self._vocabulary.stop)
            return
        began = self._time.clock()
        self._matcher.fill_next_token_bitmask(bitmask, row)
        self._time.spend(self._grammar, self._time.clock() - began)
        words &= self._known

    @staticmethod
    def fill_all(matchers: Sequence["Matcher"], bitmask: torch.Tensor) -> None:
        """As `fill` for each of them and its row, in fewer calls. Their time is counted in one place."""
        together = list[int]()
        for row, matcher in enumerate(matchers):
            if matcher.is_filled_alone:
                matcher.fill(bitmask, row)
            else:
                together.append(row)
        if not together:
            return
        time = matchers[together[0]]._time
        began = time.clock()
        handles = [matchers[row]._matcher for row in together]
        _batch_matcher().batch_fill_next_token_bitmask(handles, bitmask, together)
        time.spend(None, time.clock() - began)
        _keep_known(matchers, together, bitmask)

    def forced(self, limit: int) -> list[int]:
        """The tokens that have to come next, at most `limit`: each is the only one allowed. None behind the end."""
        tokens: list[int] = []
        while len(tokens) < limit and not self._matcher.is_terminated():
            token_id = _only_token(self._mask())
            if token_id is None or not self.accept(token_id):
                break
            tokens.append(token_id)
        self.rollback(len(tokens))
        return tokens

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow but stop tokens."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        return not bool((self._mask() & self._vocabulary.not_stop).any())

    def _mask(self) -> torch.Tensor:
        """(num_words,) of the tokens allowed next."""
        mask = torch.empty((1, self._vocabulary.num_words), dtype=torch.int32)
        self.fill(mask, 0)
        return mask[0]


@cache
def _batch_matcher() -> Any:
    """Has no state of its own."""
    return load_xgrammar().BatchGrammarMatcher(max_threads=1)


def _keep_known(matchers: Sequence[Matcher], rows: Sequence[int], bitmask: torch.Tensor) -> None:
    """Take out the tokens that no matcher may allow. Those of most steps take out the same ones."""
    known = matchers[rows[0]]._known
    if len(rows) == len(matchers) and all(matcher._known is known for matcher in matchers):
        bitmask[: len(rows)] &= known
        return
    for row in rows:
        bitmask[row] &= matchers[row]._known


def _only_token(mask: torch.Tensor) -> int | None:
    """The token of a mask that allows just one."""
    [indices] = mask.numpy().nonzero()
    if len(indices) != 1:
        return None
    word = int(mask[indices[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return int(indices[0]) * WORD_BITS + word.bit_length() - 1
