"""Masks of a step's rows: behind the output, behind each draft, and nowhere else; who has none is held."""

from collections.abc import Sequence

import numpy as np
from held_grammars import HeldStore

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.batch import PersistentBatch
from pdkv.engine.worker.drafts import DrawRows
from pdkv.engine.worker.masks import GrammarMasks, StepMasks
from pdkv.engine.worker.ranks.masks import RankMasks, pack
from pdkv.sampling.params import SamplingParams

EOS, PROMPT, NUM_WORDS = 1, [5, 6, 7], 3


class Batch:
    """A batch whose requests draw in every step."""

    def __init__(self, *late: bool) -> None:
        is_late = iter(late)
        self.store = HeldStore(NUM_WORDS, lambda: next(is_late, False))
        self.shared: list[StepMasks] = []
        self.masks = GrammarMasks(self.store, [EOS], self.shared.append)
        self.follower = RankMasks(lambda: pack(self.shared.pop(0)))
        self.batch = PersistentBatch(8, 64, 16)
        self.slots: list[int] = []

    def add(self, output: Sequence[int] = (), *, grammar: int | None = 0, stops: tuple[int, ...] = ()) -> None:
        key = (f"r{len(self.slots)}", 0)
        params = SamplingParams(stop_token_ids=stops)
        new = NewRequest(key, 0, PROMPT, list(output), params, [[0, 1, 2, 3]], grammar)
        self.slots.append(self.batch.add(new))
        for masks in (self.masks, self.follower):
            masks.add(self.slots[-1], new)

    def rows(self) -> DrawRows:
        counts = 1 + self.batch.num_drafts[self.slots]
        starts = np.cumsum(counts) - counts
        slots = np.repeat(self.slots, counts)
        behind = np.arange(counts.sum()) - np.repeat(starts, counts)
        known = self.batch.num_tokens[slots] + behind
        return DrawRows(np.arange(len(counts)), starts, np.arange(counts.sum()), slots, known)

    def take(self) -> tuple[list[int], list[int]]:
        """Rows with a mask, and requests that are left out: the same on another rank."""
        rows = self.rows()
        taken, other = self.masks.take(rows, self.batch), self.follower.take(rows, self.batch)
        assert taken.late == other.late
        assert (taken.masks is None) == (other.masks is None)
        if taken.masks is None or other.masks is None:
            return [], taken.late
        assert taken.masks.bits.equal(other.masks.bits)
        assert taken.masks.bits.shape == (len(taken.masks.rows), NUM_WORDS)
        assert taken.masks.rows.tolist() == other.masks.rows.tolist()
        return taken.masks.rows.tolist(), taken.late

    def draw(self, *tokens: int, drafts: Sequence[int] = ()) -> None:
        """One token of each request; -1: none. Then each proposes `drafts`."""
        rows, drawn = self.rows(), np.array(tokens)
        at, is_drawn = rows.starts, drawn >= 0
        all_tokens = np.zeros(len(rows.rows), np.int64)
        all_tokens[at] = drawn
        self.batch.append_tokens(rows.slots[at][is_drawn], rows.num_tokens[at][is_drawn], drawn[is_drawn])
        for slot in np.array(self.slots)[is_drawn]:
            self.batch.propose(np.array([slot]), np.array([len(drafts)]), np.array([drafts], np.int64))
        self.masks.accept(rows, all_tokens, is_drawn.astype(np.int64), self.batch)


def test_rows_without_a_grammar_have_no_mask() -> None:
    batch = Batch()
    batch.add(grammar=None)
    assert batch.take() == ([], [])
    batch.add()
    batch.add(grammar=None)
    assert batch.take() == ([1], [])


def test_an_answer_is_followed_to_its_end() -> None:
    """What is drawn behind that is thrown away."""
    batch = Batch()
    batch.add([8, 9])
    batch.add(stops=(20,))
    batch.draw(10, 11)
    assert batch.store.answers == {("r0", 0): [8, 9, 10], ("r1", 0): [11]}
    batch.draw(EOS, 20)
    assert batch.store.answers == {("r0", 0): [8, 9, 10], ("r1", 0): [11]}
    assert batch.take() == ([], [])
    batch.masks.remove(batch.slots[0])
    batch.masks.remove(batch.slots[0])
    assert list(batch.store.answers) == [("r1", 0)]


def test_a_row_behind_drafts_has_a_mask_up_to_one_that_ends_the_answer() -> None:
    batch = Batch()
    batch.add()
    batch.add(grammar=None)
    batch.draw(8, 9, drafts=[10, EOS, 11])
    assert batch.take() == ([0, 1], [])  # behind the output and behind 10


def test_who_is_late_is_held_until_a_plan_says_otherwise() -> None:
    batch = Batch(True, False, False)
    batch.add()
    batch.add()
    assert batch.take() == ([1], [0])
    batch.draw(-1, 8)
    assert batch.store.answers["r0", 0] == []
    batch.store.bring()
    assert batch.take() == ([1], [0])  # a step that was planned before that was known
    batch.masks.resume([batch.slots[0]])
    assert batch.take() == ([0, 1], [])
