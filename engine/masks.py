"""What grammars allow in the rows of a step: a matcher per slot, replayed where a request joins, advanced by draws.

A matcher's state is a function of the output alone, so each rank has its own, and they agree.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from pdkv.engine.batch import IntArray, PersistentBatch
from pdkv.engine.drafts import DrawRows
from pdkv.engine.plan import NewRequest, StepFailure
from pdkv.engine.sampling.logit_processors import TokenMasks
from pdkv.errors import GrammarGivenUp, InvalidRequest
from pdkv.grammar.compiled import CompiledGrammar
from pdkv.grammar.match_time import MatchTime
from pdkv.grammar.matcher import Matcher
from pdkv.grammar.vocabulary import WORD_BITS
from pdkv.wire.messages import RequestKey


class GrammarMasks:
    """The grammars of the running batch. Requests without one cost nothing."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.failures: dict[RequestKey, StepFailure] = {}  # requests of the batch whose output their grammar refuses
        self._eos_token_ids = eos_token_ids
        self._grammars: dict[int, CompiledGrammar] = {}  # by number
        self._answers: dict[int, _Answer] = {}  # by slot
        self._time = MatchTime()
        self._bits = torch.empty((0, -(-vocab_size // WORD_BITS)), dtype=torch.int32)

    def learn(self, grammars: Mapping[int, CompiledGrammar], ended: Sequence[int]) -> None:
        """Take in grammars by their numbers, and forget others."""
        self._grammars.update(grammars)
        for number in ended:
            del self._grammars[number]
            self._time.forget(number)

    def add(self, slot: int, request: NewRequest) -> None:
        """A request joins the batch: go to the end of its output so far."""
        if request.grammar is None:
            return
        matcher = self._grammars[request.grammar].matcher(self._time, request.grammar)
        answer = _Answer(request, matcher, self._eos_token_ids)
        self._answers[slot] = answer
        self._go_on(answer, request.output_token_ids)

    def remove(self, slot: int) -> None:
        """Forget what `slot` holds. Idempotent."""
        answer = self._answers.pop(slot, None)
        if answer is not None:
            self.failures.pop(answer.key, None)

    def masks_in(self, slots: IntArray) -> bool:
        """Whether one of those slots has a grammar, which must have accepted the tokens before the next is drawn."""
        return bool(self._answers) and any(slot in self._answers for slot in slots.tolist())

    def fill(self, drawn: DrawRows, batch: PersistentBatch) -> TokenMasks | None:
        """Which tokens may be drawn, in those of the rows that have a grammar; None: in no row.

        A row behind a draft that the grammar refuses, or that ends the answer, has no mask: no draw of it is kept.
        """
        if not self._answers:
            return None
        self._bits = self._bits if len(self._bits) >= len(drawn.rows) else self._bits.new_empty(
            (len(drawn.rows), self._bits.shape[1])
        )  # fmt: skip
        has_drafts = len(drawn.rows) > len(drawn.requests)
        rows = self._fill_with_drafts(drawn, batch) if has_drafts else self._fill(drawn)
        return TokenMasks(np.array(rows, np.int64), self._bits[: len(rows)]) if rows else None

    def _fill(self, drawn: DrawRows) -> list[int]:
        """A row for each request. Returns those that have a mask."""
        rows, answers = list[int](), list[_Answer]()
        for row, slot in enumerate(drawn.slots.tolist()):
            answer = self._answers.get(slot)
            if answer is not None and not answer.is_over:
                rows.append(row)
                answers.append(answer)
        Matcher.fill_all([answer.matcher for answer in answers], self._bits)
        for i, answer in enumerate(answers):
            answer.add_own_stops(self._bits, i)
        return rows

    def _fill_with_drafts(self, drawn: DrawRows, batch: PersistentBatch) -> list[int]:
        """As `_fill`, with as many rows for a request as it has drafts, and one."""
        rows: list[int] = []
        for slot, start, stop in drawn.shares():
            answer = self._answers.get(slot)
            if answer is None or answer.is_over:
                continue
            known = int(drawn.num_tokens[start])
            drafts = batch.token_ids[slot, known : known + stop - start - 1].tolist()
            rows += range(start, start + answer.fill(self._bits, len(rows), drafts))
        return rows

    def accept(self, drawn: DrawRows, tokens: IntArray, counts: IntArray) -> None:
        """Go on behind what was drawn and kept: the first counts[i] of each request's rows of `tokens` (n,)."""
        if not self._answers:
            return
        for (slot, start, _), count in zip(drawn.shares(), counts.tolist(), strict=True):
            answer = self._answers.get(slot)
            if answer is not None:
                self._go_on(answer, tokens[start : start + count].tolist())
        for number, seconds in self._time.end_step():
            self._give_up(number, seconds)

    def _go_on(self, answer: "_Answer", token_ids: Sequence[int]) -> None:
        refused = answer.accept(token_ids)
        if refused is not None:
            text = f"the output's token {refused}, behind {answer.num_tokens} others, is none that its grammar allows"
            self.failures[answer.key] = StepFailure(InvalidRequest.code, text)

    def _give_up(self, grammar: int, seconds: float) -> None:
        """Fail all answers of a grammar that others wait for too long."""
        text = f"the grammar takes too long to match: its answers held the others up for {seconds:.2g} s"
        for answer in self._answers.values():
            if answer.grammar == grammar:
                self.failures.setdefault(answer.key, StepFailure(GrammarGivenUp.code, text))


class _Answer:
    """Where one request's output stands in its grammar."""

    def __init__(self, request: NewRequest, matcher: Matcher, eos_token_ids: Collection[int]) -> None:
        self.key = request.key
        self.grammar = request.grammar
        self.num_tokens = 0  # of the output that were accepted
        self.is_over = False  # it has ended, or is refused: what may still be drawn is thrown away
        self.matcher = matcher
        self._eos = _Tokens(eos_token_ids)
        self._own_stops = _Tokens(request.params.stop_token_ids)
        self._has_own_stops = bool(request.params.stop_token_ids)
        self._stops = {*eos_token_ids, *request.params.stop_token_ids}

    def fill(self, bits: torch.Tensor, row: int, drafts: Sequence[int]) -> int:
        """Fill the rows of `bits` (n, words) from `row` on: behind the output, and then behind one draft after another.

        Returns:
            How many were filled.
        """
        count = 0
        self._fill_row(bits, row)
        for draft in drafts:
            if draft in self._stops or not self.matcher.accept(draft):
                break
            count += 1
            self._fill_row(bits, row + count)
        if count:
            self.matcher.rollback(count)
        return count + 1

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Go on, up to a token that ends the answer. Returns the one that the grammar refuses, if it does."""
        for token_id in token_ids:
            if self.is_over:
                break
            if token_id in self._stops:
                self.is_over = True
            elif not self.matcher.accept(token_id):
                self.is_over = True
                return token_id
            self.num_tokens += 1
        return None

    def _fill_row(self, bits: torch.Tensor, row: int) -> None:
        self.matcher.fill(bits, row)
        self.add_own_stops(bits, row)

    def add_own_stops(self, bits: torch.Tensor, row: int) -> None:
        """Where the model may end the answer, the request's own stop tokens may, too."""
        if not self._has_own_stops:
            return
        words = bits[row].numpy()
        if (words[self._eos.words] & self._eos.bits).any():
            np.bitwise_or.at(words, self._own_stops.words, self._own_stops.bits)


class _Tokens:
    """Where the bits of some tokens are in a mask."""

    def __init__(self, token_ids: Collection[int]) -> None:
        ids = np.array(sorted(token_ids), np.int64)
        self.words = ids // WORD_BITS  # (n,)
        self.bits = (np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)).view(np.int32)  # (n,)
