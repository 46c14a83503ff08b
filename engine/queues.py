"""The running and the waiting requests of one engine, and their places in the workers' batch."""

from bisect import insort_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from heapq import merge
from itertools import count, islice
from typing import Literal

from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.request import Request
from pdkv.wire.types import RequestKey


def _priority(request: Request) -> int:
    """Lower is more urgent."""
    return request.submit.priority


Lane = Literal["ticket", "handoff", "other"]
LANES: Sequence[Lane] = ("ticket", "handoff", "other")
"""Lanes of waiting requests: with a ticket, others that will be handed off, all others."""

_Lane = OrderedDict[RequestKey, tuple[int, Request]]  # with the number of a request's place among its equals


class Waiting(Collection[Request]):
    """Waiting requests by priority; within a priority preempted ones first, then by arrival, and those with a ticket in
    the order of their tickets. Adding, removing and looking at the first few of a lane cost the same however many wait.
    """

    def __init__(self) -> None:
        self._levels: dict[int, dict[Lane, _Lane]] = {}  # by priority
        self._lane_of: dict[RequestKey, _Lane] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[Request]:
        return self._iterate(LANES)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.key in self._lane_of

    def first(self, most: int, lanes: Sequence[Lane] = LANES) -> list[Request]:
        """The first requests of these lanes in order, at most `most`."""
        return list(islice(self._iterate(lanes), most))

    def add(self, request: Request, *, number: int = 0, before_equals: bool = False) -> None:
        """Queue a request in its lane, behind its equals or before them; `number`: the number of its former place."""
        name: Lane = "ticket" if request.ticket is not None else "handoff" if request.kv == "handoff" else "other"
        lane = self._levels.setdefault(_priority(request), {each: OrderedDict() for each in LANES})[name]
        number = number or next(self._numbers) * (-1 if before_equals else 1)
        lane[request.key], self._lane_of[request.key] = (number, request), lane
        lane.move_to_end(request.key, last=not before_equals)

    def remove(self, request: Request) -> int:
        """Remove a request that no longer waits. Returns the number of its place."""
        return self._lane_of.pop(request.key).pop(request.key)[0]

    def got_ticket(self, request: Request) -> None:
        """Note that the request has a ticket from now on, whether it waits or not."""
        if request in self:
            self.add(request, number=self.remove(request))

    def _iterate(self, lanes: Sequence[Lane]) -> Iterator[Request]:
        for priority, level in sorted(self._levels.items()):
            yield from (request for _, request in merge(*(level[lane].values() for lane in lanes)))
            if not any(level.values()):
                del self._levels[priority]


class Queues:
    """The running and waiting requests, and which of them have a place in the workers' batch."""

    def __init__(self, kv: KVCacheManager, max_num_seqs: int) -> None:
        self.waiting = Waiting()
        self.running: list[Request] = []  # by priority, then in the order in which they began
        self.needs_step = False  # something became schedulable outside a plan
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._num_places_taken = 0
        self._left: list[RequestKey] = []  # requests that leave the workers' batch with the next plan

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits, so that freed resources are of no use yet."""
        return not (self.running or self.waiting)

    @property
    def has_place(self) -> bool:
        """Whether the workers' batch has room for another request."""
        return self._num_places_taken < self._max_num_seqs

    def run(self, request: Request) -> None:
        """Add the request to the running ones, after those of equal priority."""
        insort_right(self.running, request, key=_priority)

    def join_workers(self, request: Request) -> None:
        """Give the request a place in the workers' batch."""
        if not request.in_worker:
            request.in_worker = True
            self._num_places_taken += 1

    def leave_workers(self, request: Request) -> None:
        """Give up the request's place in the workers' batch."""
        if request.in_worker:
            request.in_worker = False
            self._num_places_taken -= 1
            self._left.append(request.key)

    def take_left(self) -> list[RequestKey]:
        """Requests that left the workers' batch since the last call."""
        left, self._left = self._left, []
        return left

    def remove(self, request: Request) -> None:
        """Remove a request that ends from its queue, its blocks and its place."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
        self._give_back(request)

    def send_back(self, request: Request) -> None:
        """Send a request that is in neither queue now back to the waiting ones, before others of its priority."""
        self._give_back(request)
        request.restart()
        self.waiting.add(request, before_equals=True)
        self.needs_step = True

    def check_integrity(self) -> None:
        """Raise AssertionError if a queue is out of order, or places in the workers' batch are miscounted."""
        for queue in (self.waiting, self.running):
            priorities = [_priority(request) for request in queue]
            assert priorities == sorted(priorities), priorities
        assert self._num_places_taken == sum(request.in_worker for request in self.running)

    def _give_back(self, request: Request) -> None:
        if self._kv.free(request):
            self.needs_step = True
        self.leave_workers(request)
