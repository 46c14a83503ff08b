"""Bytes that many requests hold together: who waits for room, and for how long."""

import asyncio
import random

import pytest

from pdkv.errors import ServerBusy
from pdkv.router.http.server.budget import SMALL_BYTES, ByteBudget, Held

KIB, MIB = 1 << 10, 1 << 20
LIMIT, LARGEST = 16 * MIB, 4 * MIB


def budget() -> ByteBudget:
    return ByteBudget(LIMIT, "bytes", largest=LARGEST, unread=2 * MIB)


async def fill(bodies: ByteBudget, upto: int = 8 * MIB) -> Held:
    """Take all that large requests may have but for the exempt one."""
    held = Held()
    await bodies.wait(held, upto)
    assert not held.is_exempt
    return held


def waits(bodies: ByteBudget, held: Held, size: int) -> "asyncio.Task[None]":
    return asyncio.ensure_future(bodies.wait(held, size))


async def turns() -> None:
    """Until whoever may go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_finds_no_room_waits_in_order() -> None:
    bodies = budget()
    first, exempt, second, third = await fill(bodies), Held(), Held(), Held()
    await bodies.wait(exempt, MIB)
    assert exempt.is_exempt, "one at a time may be above the bound"
    later = [waits(bodies, second, 7 * MIB), waits(bodies, third, MIB)]
    await turns()
    assert (bodies.num_waiting, bodies.held) == (2, 9 * MIB)
    assert not bodies.try_take(Held(), SMALL_BYTES + 1), "nobody passes those that wait"
    bodies.give(exempt)
    await turns()
    assert [task.done() for task in later] == [True, False]
    assert second.is_exempt
    bodies.give(first)
    await turns()
    assert later[1].done()
    assert not third.is_exempt
    for held in (second, third):
        bodies.give(held)
    assert (bodies.num_waiting, bodies.held) == (0, 0)


async def test_small_ones_do_not_wait_behind_large_ones_and_do_not_fill_their_room() -> None:
    bodies = budget()
    large = [await fill(bodies), Held(), Held()]
    await bodies.wait(large[1], MIB)
    waiting = waits(bodies, large[2], MIB)
    small = [Held() for _ in range(2 * MIB // SMALL_BYTES)]
    for held in small:
        assert bodies.try_take(held, SMALL_BYTES), "an eighth is theirs"
    one_more = Held()
    assert not bodies.try_take(one_more, 1)
    last = waits(bodies, one_more, 1)
    bodies.give(small.pop())
    await turns()
    assert last.done()
    assert not waiting.done()
    bodies.give(large[1])
    await turns()
    assert waiting.done()
    for held in (*large, *small, one_more):
        bodies.give(held)
    assert bodies.held == 0


async def test_a_key_holds_as_much_as_it_leaves_free_and_another_has_its_turn_before_what_waits() -> None:
    bodies = budget()
    exempt, own, further, more, others, others_next = (Held(key) for key in ("", "a", "a", "a", "b", "b"))
    assert bodies.try_take(own, 4 * MIB)
    tasks = [waits(bodies, exempt, LARGEST * 2), waits(bodies, further, MIB), waits(bodies, more, MIB)]
    await turns()
    assert exempt.is_exempt
    assert [task.done() for task in tasks] == [True, False, False], "half is left free, for other keys"
    assert bodies.try_take(others, MIB)
    tasks.append(waits(bodies, others_next, 4 * MIB))
    await turns()
    assert not tasks[3].done()
    bodies.give(own)
    await turns()
    assert [task.done() for task in tasks[1:]] == [True, True, False]
    bodies.give(further)
    bodies.give(more)
    await turns()
    assert not tasks[3].done(), "it would have five of the eight"
    bodies.give(others)
    await tasks[3]
    for held in (exempt, others_next):
        bodies.give(held)
    assert (bodies.num_waiting, bodies.held) == (0, 0)


async def test_requests_that_wait_for_each_others_bytes_all_come_to_their_end() -> None:
    """Each takes its bytes piece by piece, and lets go when it has all: too much is asked for, and the bound holds."""
    rng = random.Random(5)

    async def request(bodies: ByteBudget, size: int) -> None:
        held = Held()
        try:
            while held.size < size:
                piece = min(rng.choice([1, 4 * KIB, 256 * KIB]) or 1, size - held.size)
                if not bodies.try_take(held, piece):
                    await bodies.wait(held, piece)
                assert bodies.held <= LIMIT
                await asyncio.sleep(0)
        finally:
            bodies.give(held)

    bodies = budget()
    sizes = [rng.choice([KIB, 60 * KIB, MIB, LARGEST]) for _ in range(60)]
    tasks = [asyncio.ensure_future(request(bodies, size)) for size in sizes]
    await turns()
    for task in tasks[::7]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result for result in results if result is not None and not isinstance(result, asyncio.CancelledError)] == []
    assert (bodies.num_waiting, bodies.held) == (0, 0)


async def test_who_gives_up_keeps_nobody_waiting() -> None:
    bodies = budget()
    full, exempt, first, second = await fill(bodies, 6 * MIB), Held(), Held(), Held()
    await bodies.wait(exempt, 3 * MIB)
    tasks = [waits(bodies, first, 3 * MIB), waits(bodies, second, MIB)]
    await turns()
    assert bodies.num_waiting == 2
    tasks[0].cancel()
    await turns()
    assert tasks[1].done()
    for held in (full, exempt, first, second):
        bodies.give(held)
    assert bodies.held == 0


async def test_a_turn_that_comes_while_its_request_gives_up_is_given_back() -> None:
    bodies = budget()
    full, exempt, held = await fill(bodies), Held(), Held()
    await bodies.wait(exempt, MIB)
    task = waits(bodies, held, MIB)
    await turns()
    bodies.give(full)
    task.cancel()
    await turns()
    assert task.cancelled()
    bodies.give(held)
    bodies.give(exempt)
    assert bodies.held == 0


async def test_what_is_here_already_counts_and_is_bounded_too() -> None:
    bodies = budget()
    full, exempt = await fill(bodies), Held()
    await bodies.wait(exempt, MIB)
    waiting = [asyncio.ensure_future(bodies.wait(Held(), MIB, unread=MIB)) for _ in range(2)]
    await turns()
    assert bodies.held == 11 * MIB
    with pytest.raises(ServerBusy, match=f"bytes of all requests together exceed {LIMIT} bytes"):
        await bodies.wait(Held(), MIB, unread=1)
    for task in waiting:
        task.cancel()
    await turns()
    assert bodies.held == 9 * MIB
    bodies.give(full)
    bodies.give(exempt)


async def test_room_that_another_thread_gives_wakes_who_waits() -> None:
    bodies = budget()
    full, exempt, held = await fill(bodies), Held(), Held()
    await bodies.wait(exempt, MIB)
    task = waits(bodies, held, MIB)
    await turns()
    await asyncio.to_thread(bodies.give, full)
    await task
    bodies.give(held)
    bodies.give(exempt)
    assert bodies.held == 0
