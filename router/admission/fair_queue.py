"""Chooses the next item: by priority, then fairly between tenants by tokens, then fairly between one tenant's requests.

Between tenants it is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each has a virtual time that rises
by cost / weight for each item taken, and the tenant with the lowest is next. A tenant that was idle starts at the time
of the tenant served last, so that idleness earns nothing. The actual cost of a request is settled afterwards, as in
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Within a tenant each request is a flow of its
own, and the lowest finish tag is next (self-clocked fair queueing, Golestani, INFOCOM 1994): a short request overtakes
a long one that came a little earlier, and a long request waits for later ones up to its own cost at most.
"""

import heapq
import itertools
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Flow:
    """A tenant's place in one priority, while it has items waiting there."""

    __slots__ = ("clock", "deadlines", "heap", "num_waiting", "virtual")

    def __init__(self, virtual: float) -> None:
        self.virtual = virtual
        self.clock = 0.0  # cost of everything taken
        self.num_waiting = 0
        self.heap: list[tuple[tuple[float, int], int, Waiting[object]]] = []  # by place
        self.deadlines: list[tuple[float, int, Waiting[object]]] = []  # of items without a fairness id that have one


class Turns:
    """The share of one request, or of one fairness id, in its tenant's flow; its items wait one behind the other."""

    __slots__ = ("__weakref__", "deadlines", "flow", "is_shared", "tag")

    def __init__(self, *, is_shared: bool = False) -> None:
        """`is_shared`: of a fairness id."""
        self.is_shared = is_shared
        self.flow: Flow | None = None
        self.tag = 0.0
        self.deadlines: list[tuple[float, int, Waiting[object]]] = []  # of the items in its flow that have one


class Waiting(Generic[T]):
    """An item that waits; `item` is None once it has been taken or removed."""

    __slots__ = ("cost", "deadline", "deadlines", "flow", "item", "place", "priority", "turns", "weight")

    def __init__(
        self,
        item: T,
        priority: int,
        cost: float,
        weight: float,
        flow: Flow,
        turns: Turns,
        place: tuple[float, int],
        deadline: float | None,
    ) -> None:
        self.item: T | None = item
        self.priority = priority
        self.cost = cost
        self.weight = weight
        self.flow = flow
        self.turns = turns
        self.deadlines = turns.deadlines  # with which it shares its place
        self.place = place  # its tag, and a number that orders equal ones
        self.deadline = deadline


class _Class:
    """The queue of one priority."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}
        self.virtual = 0.0
        self.num_waiting = 0


class FairQueue(Generic[T]):
    """A fair queue. `push` and `pop` cost O(log waiting + tenants that wait), `remove` O(1), amortized.

    Taking the last item of a priority costs O(log priorities) more.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # a heap of priorities, some of which may be empty, but not the first
        self._numbers = itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def best_priority(self) -> int | None:
        """The most urgent priority in the queue; lower is more urgent."""
        return self._priorities[0] if self._priorities else None

    def push(
        self,
        item: T,
        *,
        tenant: str,
        turns: Turns,
        priority: int,
        cost: float,
        weight: float = 1.0,
        deadline: float | None = None,
    ) -> Waiting[T]:
        """Add an item. `cost` is in tokens; `turns` belong to its request. Items of one fairness id, or of a tenant's
        requests without any, that have a deadline share their places by it: they never pass those without.
        """
        assert cost > 0
        level = self._classes.get(priority)
        if level is None:
            level = self._classes[priority] = _Class()
            heapq.heappush(self._priorities, priority)
        flow = level.flows.get(tenant)
        if flow is None:
            flow = level.flows[tenant] = Flow(level.virtual)
        elif not flow.num_waiting:
            flow.virtual = max(flow.virtual, level.virtual)
        began = turns.tag if turns.flow is flow else 0.0
        if turns.flow is not flow:
            turns.deadlines = [] if turns.is_shared else flow.deadlines
        turns.flow, turns.tag = flow, max(flow.clock, began) + cost
        number = next(self._numbers)
        waiting = Waiting(item, priority, cost, weight, flow, turns, (turns.tag, number), deadline)
        heapq.heappush(flow.heap, (waiting.place, number, waiting))  # type: ignore[misc]
        if deadline is not None:
            heapq.heappush(turns.deadlines, (deadline, number, waiting))  # type: ignore[misc]
        flow.num_waiting += 1
        level.num_waiting += 1
        self._num_waiting += 1
        return waiting

    def has_next(self, held_back: Collection[str] = ()) -> bool:
        """Whether there is an item to `pop`: one of the most urgent priority whose tenant is not held back."""
        return any(True for _ in self._flows(held_back))

    def _flows(self, held_back: Collection[str]) -> Iterator[Flow]:
        flows = self._classes[self._priorities[0]].flows if self._priorities else {}
        return (flow for tenant, flow in flows.items() if flow.num_waiting and tenant not in held_back)

    def pop(self, held_back: Collection[str] = ()) -> T:
        """Take the next item; there must be one."""
        level = self._classes[self._priorities[0]]
        flow = min(self._flows(held_back), key=lambda f: f.virtual)
        waiting = self._next_of(flow)
        level.virtual = max(level.virtual, flow.virtual)
        flow.virtual += waiting.cost / waiting.weight
        flow.clock += waiting.cost
        item: T = waiting.item  # type: ignore[assignment]
        self._left(waiting)  # type: ignore[arg-type]
        return item

    def _next_of(self, flow: Flow) -> Waiting[object]:
        """Take the first place of a flow: by tag, and among those with a deadline, by that."""
        while True:
            waiting = heapq.heappop(flow.heap)[2]
            if waiting.item is not None:
                break
        if waiting.deadline is None:
            return waiting
        while waiting.deadlines[0][2].item is None:
            heapq.heappop(waiting.deadlines)
        urgent = heapq.heappop(waiting.deadlines)[2]
        if urgent is not waiting:  # the two change places
            waiting.place = urgent.place
            heapq.heappush(flow.heap, (waiting.place, next(self._numbers), waiting))
        return urgent

    def remove(self, waiting: Waiting[T]) -> None:
        """Remove an item that no longer waits. Idempotent, and harmless once the item has been taken."""
        if waiting.item is not None:
            if waiting.turns.flow is waiting.flow:
                waiting.turns.tag -= waiting.cost
            self._left(waiting)

    def settle(self, flow: Flow | None, num_tokens: float, weight: float) -> None:
        """Correct a request's cost, in the flow of its items, by the difference between actual and expected tokens."""
        if flow is not None:
            flow.virtual += num_tokens / weight

    def charge(self, tenant: str, priority: int, num_tokens: float, weight: float) -> None:
        """Charge a tenant for tokens that did not pass through this queue. If nothing waits, it costs nothing."""
        level = self._classes.get(priority)
        if level is not None:
            flow = level.flows.setdefault(tenant, Flow(level.virtual))
            flow.virtual = max(flow.virtual, level.virtual) + num_tokens / weight

    def _left(self, waiting: Waiting[T]) -> None:
        waiting.item = None
        del waiting.turns  # whose deadlines may still name it
        flow, level = waiting.flow, self._classes[waiting.priority]
        flow.num_waiting -= 1
        level.num_waiting -= 1
        self._num_waiting -= 1
        assert flow.num_waiting >= 0, "more items left a flow than were waiting in it"
        if not level.num_waiting:
            self._drop_class(waiting.priority)
        elif max(len(flow.heap), len(waiting.deadlines)) > 2 * flow.num_waiting + 16:  # removed items must not pile up
            flow.heap = [entry for entry in flow.heap if entry[2].item is not None]
            waiting.deadlines[:] = [entry for entry in waiting.deadlines if entry[2].item is not None]
            heapq.heapify(flow.heap)
            heapq.heapify(waiting.deadlines)

    def _drop_class(self, priority: int) -> None:
        del self._classes[priority]
        if len(self._priorities) > 2 * len(self._classes) + 16:  # clients choose the priorities: they must not pile up
            self._priorities = sorted(self._classes)
        while self._priorities and self._priorities[0] not in self._classes:
            heapq.heappop(self._priorities)
