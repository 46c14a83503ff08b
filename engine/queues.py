"""The requests of one engine that run and that wait, and their places in the workers' batch."""

from bisect import insort_left, insort_right
from collections import deque

from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.request import Request
from pdkv.wire.types import RequestKey


def _priority(request: Request) -> int:
    """Lower is more urgent."""
    return request.submit.priority


class Queues:
    """Who runs, who waits, and who has a place in the workers' batch."""

    def __init__(self, kv: KVCacheManager, max_num_seqs: int) -> None:
        self.waiting: deque[Request] = deque()  # by priority, then preempted ones, then in order of arrival
        self.running: list[Request] = []  # by priority, then in the order in which they began
        self.needs_step = False  # something became schedulable outside a plan
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._num_places_taken = 0
        self._left: list[RequestKey] = []  # requests that leave the workers' batch with the next plan

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs and nobody waits: nothing that comes free is of use to anyone yet."""
        return not (self.running or self.waiting)

    @property
    def has_place(self) -> bool:
        """Whether the workers' batch takes another request."""
        return self._num_places_taken < self._max_num_seqs

    def add(self, request: Request) -> None:
        """Queue a new request: by priority (lower first), then in order of arrival."""
        insort_right(self.waiting, request, key=_priority)

    def run(self, request: Request) -> None:
        """The request is one of the running from now on, behind its equals."""
        insort_right(self.running, request, key=_priority)

    def join_workers(self, request: Request) -> None:
        """The request has a place in the workers' batch from now on."""
        if not request.in_worker:
            request.in_worker = True
            self._num_places_taken += 1

    def leave_workers(self, request: Request) -> None:
        """The request is in the workers' batch no longer."""
        if request.in_worker:
            request.in_worker = False
            self._num_places_taken -= 1
            self._left.append(request.key)

    def take_left(self) -> list[RequestKey]:
        """Requests that left the workers' batch since the last call."""
        left, self._left = self._left, []
        return left

    def remove(self, request: Request) -> None:
        """The request ends: it leaves its queue, its blocks and its place."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._give_back(request)

    def send_back(self, request: Request) -> None:
        """The request, in neither queue now, starts again from the waiting, before others of its priority."""
        self._give_back(request)
        request.restart()
        insort_left(self.waiting, request, key=_priority)
        self.needs_step = True

    def check_integrity(self) -> None:
        """Raise AssertionError where a queue is out of order, or places in the workers' batch are miscounted."""
        for queue in (self.waiting, self.running):
            priorities = [_priority(request) for request in queue]
            assert priorities == sorted(priorities), priorities
        assert self._num_places_taken == sum(request.in_worker for request in self.running)

    def _give_back(self, request: Request) -> None:
        if self._kv.free(request):
            self.needs_step = True
        self.leave_workers(request)
