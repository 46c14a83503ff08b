"""Who is next in the queue: priorities, shares of tenants, and requests of one tenant."""

import random
from collections import Counter
from typing import Any

from pdkv.router.admission.fair_queue import FairQueue, Turns


def push(queue: FairQueue[Any], item: Any, *, tenant: str = "a", turns: Turns | None = None, **values: Any) -> Any:
    return queue.push(item, tenant=tenant, turns=turns or Turns(), **({"priority": 0, "cost": 10} | values))


def drain(queue: FairQueue[Any]) -> list[Any]:
    return [queue.pop() for _ in range(len(queue))]


def test_equals_are_taken_in_the_order_in_which_they_came() -> None:
    queue: FairQueue[int] = FairQueue()
    for i in range(50):
        push(queue, i)
    assert drain(queue) == list(range(50))
    assert not queue


def test_a_lower_priority_number_goes_first_whatever_its_tenant_had() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("late", 5), ("normal", 0), ("urgent", -3), ("urgent too", -3)):
        push(queue, name, priority=priority)
    assert queue.best_priority == -3
    assert drain(queue) == ["urgent", "urgent too", "normal", "late"]
    assert queue.best_priority is None


def test_tenants_that_always_wait_get_tokens_by_their_weights() -> None:
    """Whatever their requests cost and however many of them wait."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    weights, costs = {"a": 1.0, "b": 2.0, "c": 5.0}, {"a": 10, "b": 1000, "c": 200}
    rng, served = random.Random(0), Counter[str]()
    for tenant, weight in weights.items():
        for _ in range(3 if tenant == "b" else 40):
            push(queue, (tenant, costs[tenant]), tenant=tenant, cost=costs[tenant], weight=weight)
    for _ in range(20_000):
        tenant, cost = queue.pop()
        served[tenant] += cost
        costs[tenant] = rng.choice([cost, costs[tenant]])
        push(queue, (tenant, costs[tenant]), tenant=tenant, cost=costs[tenant], weight=weights[tenant])
    shares = {tenant: served[tenant] / weight for tenant, weight in weights.items()}
    assert max(shares.values()) <= 1.01 * min(shares.values())


def test_who_was_idle_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        push(queue, "a", tenant="a")
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        push(queue, "b", tenant="b")
    first = Counter(queue.pop() for _ in range(20))
    assert abs(first["a"] - first["b"]) <= 2


def test_many_choices_of_one_request_do_not_hold_up_the_requests_behind_it() -> None:
    queue: FairQueue[str] = FairQueue()
    big = Turns()
    for _ in range(128):
        push(queue, "big", turns=big, cost=1000)
    for i in range(8):
        push(queue, f"small {i}", cost=100)
    order = drain(queue)
    assert {f"small {i}" for i in range(8)} == set(order[:8])


def test_many_choices_get_their_share_of_an_unending_stream_of_small_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    big = Turns()
    for _ in range(10):
        push(queue, "big", turns=big, cost=1000)
    taken = Counter[str]()
    for _ in range(400):  # one comes for each that is taken: 40,000 tokens
        push(queue, "small", cost=100)
        taken[queue.pop()] += 1
        if taken["big"] == 10:
            break
    assert taken["big"] == 10


def test_a_long_request_neither_holds_short_ones_up_nor_waits_for_ever_for_them() -> None:
    queue: FairQueue[str] = FairQueue()
    push(queue, "long", cost=5000)
    num_short = 0
    for _ in range(1000):
        push(queue, "short", cost=100)
        if queue.pop() == "long":
            break
        num_short += 1
    assert 45 <= num_short <= 51  # its own cost's worth


def test_a_low_priority_that_waited_long_owes_newcomers_nothing_and_is_owed_nothing() -> None:
    """Virtual times are those of one priority: what passed it while others were more urgent is forgotten."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        push(queue, "patient", tenant="patient", priority=9)
    for _ in range(500):
        push(queue, "urgent", tenant="urgent", priority=0, cost=10_000)
        assert queue.pop() == "urgent"
    for _ in range(20):
        push(queue, "urgent", tenant="urgent", priority=9)
    first = Counter(queue.pop() for _ in range(20))
    assert abs(first["patient"] - first["urgent"]) <= 2


def test_what_leaves_is_gone_at_once_and_does_not_pile_up() -> None:
    queue: FairQueue[object] = FairQueue()
    kept = [push(queue, "kept") for _ in range(3)]
    for _ in range(10_000):
        waiting = push(queue, object())
        queue.remove(waiting)
        queue.remove(waiting)
        assert waiting.item is None
    assert len(queue) == 3
    assert len(kept[0].flow.heap) < 50
    assert drain(queue) == ["kept"] * 3
    queue.remove(kept[0])
    assert len(queue) == 0


def test_random_histories_lose_nothing_and_keep_count() -> None:
    rng = random.Random(1)
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, Any] = {}
    for number in range(5000):
        what = rng.random()
        if what < 0.5 or not waiting:
            waiting[number] = push(
                queue, number, tenant=rng.choice("abc"), priority=rng.randrange(3), cost=rng.randrange(1, 5000)
            )
        elif what < 0.8:
            best = queue.best_priority
            taken = queue.pop()
            assert waiting.pop(taken).priority == best
        else:
            queue.remove(waiting.pop(rng.choice(list(waiting))))
        assert len(queue) == len(waiting)
    assert sorted(drain(queue)) == sorted(waiting)
    assert queue._classes == {}


class Counted(int):
    """A priority that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_priorities_that_nobody_else_has_cost_their_logarithm() -> None:
    """Clients choose them: 10,000 that wait must not be looked through for each that begins."""
    Counted.num_compared = 0
    queue: FairQueue[int] = FairQueue()
    priorities = random.Random(0).sample(range(1_000_000), 3000)
    for priority in priorities:
        push(queue, priority, priority=Counted(priority))
        assert queue.best_priority is not None
    taken = []
    while queue:
        assert queue.best_priority is not None
        taken.append(queue.pop())
    assert taken == sorted(priorities)
    assert Counted.num_compared < 3000 * 50


def test_priorities_that_come_and_go_behind_another_do_not_pile_up() -> None:
    queue: FairQueue[int] = FairQueue()
    push(queue, 0, priority=0)
    for priority in range(1, 10_000):
        queue.remove(push(queue, priority, priority=priority))
        queue.remove(push(queue, priority, priority=7))
    assert len(queue._priorities) < 50
    push(queue, 7, priority=7)
    assert drain(queue) == [0, 7]
    assert (queue.best_priority, queue._priorities) == (None, [])


def test_a_tenant_that_is_held_back_keeps_its_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "b1"):
        push(queue, name, tenant=name[0], cost=10 if name[0] == "a" else 100)
    assert queue.has_next({"a"})
    assert not queue.has_next({"a", "b"})
    assert queue.pop({"a"}) == "b1"
    assert not queue.has_next({"a"})
    push(queue, "b2", tenant="b")
    assert drain(queue) == ["a1", "a2", "b2"]
    assert not queue.has_next()


def test_items_with_deadlines_share_their_places_by_them_and_pass_no_other() -> None:
    queue: FairQueue[str] = FairQueue()
    handles = {}
    for name, deadline in (
        ("late", 9.0),
        ("none", None),
        ("soon", 1.0),
        ("none too", None),
        ("gone", 0.5),
        ("mid", 5.0),
    ):
        handles[name] = push(queue, name, deadline=deadline)
    push(queue, "other", tenant="b", deadline=0.1)
    queue.remove(handles["gone"])
    order = drain(queue)
    assert [name for name in order if name != "other"] == ["soon", "none", "mid", "none too", "late"]
    assert order.index("other") == 1, "between tenants, no deadline counts"


def test_requests_of_one_fairness_id_take_turns_as_one() -> None:
    queue: FairQueue[str] = FairQueue()
    shared = Turns()
    push(queue, "first")
    gone = [push(queue, "gone", turns=shared) for _ in range(50)]
    for waiting in gone:
        queue.remove(waiting)
    for _ in range(4):
        push(queue, "many", turns=shared)
    push(queue, "one")
    assert drain(queue) == ["first", "many", "one", "many", "many", "many"]


def test_deadlines_of_one_fairness_id_pass_no_other_s() -> None:
    queue: FairQueue[str] = FairQueue()
    user = Turns(is_shared=True)
    push(queue, "other", deadline=9.0)
    for number in range(3):
        push(queue, f"user's {number}", turns=user, deadline=3.0 - number)
    assert drain(queue) == ["other", "user's 2", "user's 1", "user's 0"]


def test_deadlines_that_are_taken_or_removed_do_not_pile_up() -> None:
    queue: FairQueue[int] = FairQueue()
    rng, live, shared = random.Random(0), {}, Turns(is_shared=True)
    for i in range(3000):
        turns = rng.choice([shared, Turns()])
        live[i] = push(queue, i, turns=turns, deadline=rng.choice([None, rng.random()]))
        if len(live) > 20:
            queue.remove(live.pop(rng.choice(list(live)))) if rng.random() < 0.5 else live.pop(queue.pop())
    [flow] = queue._classes[0].flows.values()
    assert len(queue) == len(live)
    assert max(len(flow.heap), len(flow.deadlines), len(shared.deadlines)) <= 2 * len(live) + 18
    assert set(drain(queue)) == set(live)
