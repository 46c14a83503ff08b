"""The masks that workers make, in memory shared with the engine.

A worker has its own rows; a row belongs to an answer from the answer's `Open` until the row's next one. The worker
alone writes there, the masks first and then the row's number, which stands for the answer and its tokens; a reader
checks the number before and after copying masks.
"""

import mmap

from pdkv.grammar.matching.messages import SlabShape
from pdkv.host.fence import fence


class Slab:
    """A view of the memory behind a file descriptor, which the caller owns."""

    def __init__(self, fd: int, shape: SlabShape) -> None:
        """The file is at least `size_bytes(shape)` long, and zero at first."""
        rows, workers = shape.rows_per_worker * shape.num_workers, shape.num_workers
        memory = memoryview(mmap.mmap(fd, size_bytes(shape)))
        num_numbers = 1 + 3 * workers + 2 * rows
        numbers = memory[: 8 * num_numbers].cast("q")
        self.waiting = numbers[:1]  # whether the engine wants a sign of each mask
        self.working, self.calls = numbers[1 : 1 + workers], numbers[1 + workers : 1 + 2 * workers]
        """For each worker: the number of its current grammar, plus one; and the number of switches."""
        self.pids = numbers[1 + 2 * workers : 1 + 3 * workers]
        self.numbers, self.counts = numbers[-2 * rows : -rows], numbers[-rows:]
        """For each row: which masks are ready, 0 for none; and how many, one more than the drafts that the grammar
        allows.
        """
        self._shape = shape
        self._words = memory[8 * num_numbers :].cast("I")

    def masks(self, row: int, start: int, stop: int) -> memoryview:
        """The 32-bit words of these masks of a row."""
        first = row * self._shape.masks_per_row
        return self._words[(first + start) * self._shape.num_words : (first + stop) * self._shape.num_words]

    def publish(self, row: int, count: int, number: int) -> None:
        """Note that the masks of a row are written."""
        self.counts[row] = count
        fence()
        self.numbers[row] = number
        fence()

    def copy(self, row: int, number: int) -> bytearray | None:
        """The words of a row's masks; None: they are not there (yet, or any more)."""
        if self.numbers[row] != number:
            return None
        fence()
        words = bytearray(self.masks(row, 0, min(self.counts[row], self._shape.masks_per_row)))
        fence()
        return words if self.numbers[row] == number else None

    def expect(self, is_waiting: bool) -> None:
        """Set whether the engine wants a signal for each mask from now on."""
        self.waiting[0] = is_waiting
        fence()

    def clear(self, worker: int) -> None:
        """Clear the rows of a worker that is gone: another one will write them again."""
        self.working[worker] = self.pids[worker] = 0
        for row in range(worker * self._shape.rows_per_worker, (worker + 1) * self._shape.rows_per_worker):
            self.numbers[row] = 0


def size_bytes(shape: SlabShape) -> int:
    """Bytes of the memory. Unwritten parts take none."""
    rows = shape.num_workers * shape.rows_per_worker
    return 8 * (1 + 3 * shape.num_workers + 2 * rows) + 4 * rows * shape.masks_per_row * shape.num_words
