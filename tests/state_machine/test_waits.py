"""No cycle of waits between prefill's leases, decode's blocks and the order of phases (docs/transfers.md)."""

import random

import pytest
from state_machine.defects import Pair
from state_machine.host import MULTI_PAIRS, PAIRS, Chooser, run_schedule
from state_machine.live import LiveWorld

from pdkv.wire.kv import Order

LIVE_PAIRS = [pair for pair in (*PAIRS, MULTI_PAIRS[1], MULTI_PAIRS[4]) if pair[0] != "store"]
NUM_SCHEDULES = 3


@pytest.mark.parametrize("pair", LIVE_PAIRS, ids="-".join)
def test_all_requests_end_although_no_time_passes(pair: Pair, thoroughness: float) -> None:
    for seed in range(max(int(NUM_SCHEDULES * thoroughness), 1)):
        rng = random.Random(seed)
        run_schedule(rng.randbytes(rng.randint(100, 400)), pair, LiveWorld)


def crossing(order: Order) -> LiveWorld:
    """Decode keeps blocks for the first of two prompts, each of which takes more than half of either pool, before
    prefill begins with the second one, which is more urgent.
    """
    world = LiveWorld(Chooser(bytes(32)), mode="push", order="concurrent")
    world.order = order
    prefill, decode = (world.engines[name] for name in ("e0", "e1"))
    world.ask(world.forward.prompt(0, 13, changed=False), 3)
    while decode.inbox:
        decode.core.handle("router", decode.inbox.popleft(), world.now)
    world.step(decode)
    assert decode.core.external.loads
    assert not prefill.core.requests
    world.ask(world.forward.prompt(1, 13, changed=False), 3, priority=-1)
    return world


def test_prefill_first_come_to_what_decode_has_no_room_for_is_a_cycle() -> None:
    world = crossing("concurrent")
    with pytest.raises(AssertionError, match="a cycle of waits"):
        world.drain()


def test_a_router_lets_prompts_wait_for_decode_where_pools_are_small() -> None:
    world = LiveWorld(Chooser(bytes(32)), mode="push", order="concurrent")
    assert world.order == "needs_peer_first"
    crossing(world.order).drain()
