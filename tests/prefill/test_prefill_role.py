"""Leases: granted with the hand-off, ended once, capped, and never for ever (F3, F13 of the lease side)."""

import msgspec
from state_machine.standin_store import STAND_IN_STORE, store_of

from pdkv.config import HandoffConfig
from pdkv.connectors.base import TransferKey
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.connectors.peer.push_scheduler import PushScheduler, PushTicket
from pdkv.connectors.transfer.block_runs import pack_blocks, unpack_blocks
from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.worker.executor import Ended
from pdkv.errors import PeerGone
from pdkv.prefill.role import PrefillRole
from pdkv.testing.engine import at_rest, make_core, of_type, run, submit
from pdkv.wire.messages import Finished, HandedOff, KVReady, KVTicket, Release, Submit, Tokens

PROMPT = list(range(100, 110))


def hand_off(prompt: list[int], request_id: str = "a", max_tokens: int = 4) -> Submit:
    return submit(prompt, request_id=request_id, max_tokens=max_tokens, until="first_token", kv="handoff")


def leases(core: EngineCore) -> int:
    assert isinstance(core.prefill, PrefillRole)
    return len(core.prefill.leases)


def ticket_of(reader: str, number: int) -> KVTicket:
    """For the KV of "a"."""
    ticket = PushTicket(reader, f"{reader}.0", "t-a", 0, 0, 10, pack_blocks([0, 1, 2]))
    return KVTicket("a", 0, msgspec.msgpack.encode(ticket), number)


def test_the_first_token_and_the_hand_off_leave_together_and_the_blocks_are_leased() -> None:
    core = make_core(options={"fabric": "lease-1"})
    core.handle("r", hand_off(PROMPT), 0.0)
    messages = run(core)
    (handed,) = of_type(messages, HandedOff)
    assert len(of_type(messages, Tokens)) == 1
    assert (handed.handoff.num_tokens, handed.handoff.engine, handed.handoff.transfer_id) == (10, "e0", "t-a")
    blocks = unpack_blocks(handed.handoff.payload)
    assert blocks is not None
    assert len(blocks[0]) == 3
    assert core.scheduler.kv.pool.counts().leased == 3


def test_a_release_ends_the_lease_and_a_second_one_changes_nothing() -> None:
    core = make_core(options={"fabric": "lease-2"})
    core.handle("r", hand_off(PROMPT), 0.0)
    run(core)
    for _ in range(2):
        core.handle("r", Release("t-a", 0), 0.0)
    run(core)
    assert at_rest(core)


def test_a_ticket_for_a_lease_that_is_over_is_answered_at_once() -> None:
    """A decode engine that takes over late would wait for its load's deadline."""
    core = make_core(options={"fabric": "lease-late", "mode": "push"})
    core.handle("r", hand_off(PROMPT), 0.0)
    run(core)
    core.handle("r", Release("t-a", 0), 0.0)
    core.handle("r", KVTicket("a", 0, b"where"), 0.0)
    assert of_type(run(core), KVReady) == [KVReady("a", 0, ok=False, code="kv_not_found", ticket=0)]
    assert at_rest(core)


def test_how_a_killed_reader_s_sending_ended_is_not_told_to_the_next_reader() -> None:
    """Its failure is known in the worker, and not here yet, when the next one's ticket comes (F13)."""
    fabric = MemoryFabric(manual=True)
    MemoryFabric.bind("lease-anew", fabric)
    core = make_core(options={"fabric": "lease-anew", "mode": "push"})
    core.handle("r", hand_off(PROMPT), 0.0)
    run(core)
    core.handle("r", ticket_of("e8", 0), 0.0)
    core.step(1.0)
    (first,) = fabric.under_way
    worker = core.executor.worker  # type: ignore[attr-defined]
    worker.stop_sending(TransferKey("t-a", 0), PeerGone("e8 is gone"))
    core.handle("r", ticket_of("e9", 1), 0.0)
    core.settle(Ended(worker.get_finished()))
    core.step(1.0)
    assert of_type(run(core), KVReady) == []
    assert leases(core) == 1
    assert [op for op in fabric.under_way if op is not first], "it goes to the other one"
    MemoryFabric.unbind("lease-anew")


def test_a_release_of_another_attempt_ends_nothing() -> None:
    core = make_core(options={"fabric": "lease-3"})
    core.handle("r", hand_off(PROMPT), 0.0)
    run(core)
    core.handle("r", Release("t-a", 1), 0.0)
    assert leases(core) == 1


def test_a_lease_that_nobody_fetches_expires() -> None:
    handoff = HandoffConfig(connector="memory", kv_load_timeout_s=5.0, lease_timeout_s=10.0)
    core = make_core(options={"fabric": "lease-4"}, handoff=handoff)
    core.handle("r", hand_off(PROMPT), 0.0)
    run(core, 1.0)
    deadline = core.next_deadline()
    assert deadline == 11.0
    core.step(deadline)
    run(core, deadline)
    assert at_rest(core)


def test_a_first_token_that_ends_the_request_leaves_no_lease() -> None:
    core = make_core(options={"fabric": "lease-5"})
    core.handle("r", hand_off(PROMPT, max_tokens=1), 0.0)
    messages = run(core)
    assert of_type(messages, HandedOff) == []
    assert len(of_type(messages, Finished)) == 1
    assert at_rest(core)


def test_prefills_queue_while_leases_fill_their_share_and_go_on_with_a_release() -> None:
    core = make_core(options={"fabric": "lease-6"}, num_blocks=16)  # at most 8 leased
    for i in range(4):  # 3 blocks each
        core.handle("r", hand_off([100 * i + j for j in range(1, 11)], request_id=str(i)), 0.0)
    assert len(of_type(run(core), HandedOff)) == 2
    assert not core.has_work  # it sleeps until something is released
    core.handle("r", Release("t-0", 0), 0.0)
    assert len(of_type(run(core), HandedOff)) == 1


def test_a_request_whose_receiver_waits_passes_the_cap() -> None:
    """Or the two pools would wait for each other."""
    core = make_core(options={"fabric": "lease-7", "mode": "push"}, num_blocks=16)
    for i in range(3):
        core.handle("r", hand_off([100 * i + j for j in range(1, 11)], request_id=str(i)), 0.0)
    assert len(of_type(run(core), HandedOff)) == 2
    ticket = msgspec.msgpack.encode(PushTicket("e9", "e9.0", "t-9", 0, 0, 10, pack_blocks([0, 1, 2])))
    core.handle("r", msgspec.structs.replace(hand_off(list(range(500, 510)), "9"), ticket=ticket), 0.0)
    handed = [m for m in run(core) if isinstance(m, HandedOff)]
    assert [m.request_id for m in handed] == ["9"]


def test_a_router_that_leaves_takes_its_leases_along() -> None:
    core = make_core(options={"fabric": "lease-8"})
    core.handle("r", hand_off(PROMPT), 0.0)
    run(core)
    core.router_left("r")
    run(core)
    assert at_rest(core)


def test_a_big_prompt_that_the_cap_holds_back_is_not_passed_by_small_ones_for_ever() -> None:
    core = make_core(options={"fabric": "lease-9"}, num_blocks=16)  # at most 8 leased
    for name, length in (("0", 10), ("1", 10), ("big", 26), ("2", 10), ("3", 10)):  # 3, 3, 7, 3, 3 blocks
        first = 100 + 50 * len(core.requests)
        core.handle("r", hand_off([first + j for j in range(length)], request_id=name), 0.0)
    order: list[str] = []
    for released in ("", "0", "1", "big"):
        core.handle("r", Release(f"t-{released}", 0), 0.0)
        order += [m.request_id for m in run(core) if isinstance(m, HandedOff)]
    assert order == ["0", "1", "big", "2", "3"]


def test_a_store_drops_the_tail_with_the_release_and_not_before() -> None:
    store = store_of(MemoryFabric.named("lease-10"))
    core = make_core(connector=STAND_IN_STORE, options={"fabric": "lease-10", "mode": "store"})
    core.handle("r", hand_off(PROMPT), 0.0)
    assert KVReady("a", 0, ok=True, ticket=0) in run(core)
    assert TransferKey("t-a", 0) in store
    core.handle("r", Release("t-a", 0), 0.0)
    run(core)
    assert TransferKey("t-a", 0) not in store
    assert at_rest(core)
    assert leases(core) == 0


def test_a_push_whose_first_token_was_the_last_is_forgotten() -> None:
    core = make_core(options={"fabric": "lease-11", "mode": "push"}, limits=SchedulerLimits(8, 4))
    ticket = msgspec.msgpack.encode(PushTicket("e9", "e9.0", "t-a", 0, 0, 10, pack_blocks([0, 1, 2])))
    core.handle("r", msgspec.structs.replace(hand_off(PROMPT, max_tokens=1), ticket=ticket), 0.0)
    run(core)
    core.step(1.0)  # which is not made for that alone: nothing is under way
    scheduler = core.external.connector
    assert isinstance(scheduler, PushScheduler)
    assert not scheduler._sending
    assert at_rest(core)
