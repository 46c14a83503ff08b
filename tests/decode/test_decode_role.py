"""Remote loads on the decode side: admission, tickets, the join with the first token, fallback, release."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from state_machine.standin_store import STAND_IN_STORE

from pdkv.config import HandoffConfig
from pdkv.connectors.base import TransferOutcome
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.connectors.peer.push_scheduler import PushTicket
from pdkv.connectors.transfer.block_runs import pack_blocks, unpack_blocks
from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import (
    Abort,
    Allocated,
    CacheCleared,
    Continue,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    KVReady,
    KVTicket,
    Loaded,
    Peers,
    Release,
    Submit,
)

PROMPT = list(range(100, 110))


class Pair:
    """A prefill and a decode engine on a fabric whose deliveries the test makes."""

    def __init__(
        self, name: str, *, mode: str = "pull", policy: str = "recompute", num_blocks: int = 16, **sizes: Any
    ) -> None:
        self.now = 1.0
        self.name = name
        self.fabric = MemoryFabric(manual=True, clock=lambda: self.now)
        MemoryFabric.bind(name, self.fabric)
        handoff = HandoffConfig(
            connector="memory",
            kv_load_timeout_s=5.0,
            lease_timeout_s=20.0,
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
        )
        options = {"fabric": name, "mode": mode}
        fields: dict[str, Any] = {
            "connector": STAND_IN_STORE if mode == "store" else "memory",
            "options": options,
            "handoff": handoff,
            **sizes,
        }
        self.prefill = make_core(name="p", num_blocks=num_blocks, **fields)
        self.decode = make_core(name="d", num_blocks=num_blocks, **fields)
        for core in (self.prefill, self.decode):
            core.handle("r", Peers([self.prefill.card, self.decode.card]), 0.0)
            self.run(core)

    def run(self, core: EngineCore) -> list[EngineToRouter]:
        """Steps until the engine sleeps."""
        return run(core, self.now)

    def hand_off(self, prompt: list[int], request_id: str = "a") -> tuple[KVHandoff, list[int]]:
        """Prefill a prompt; returns the hand-off and the first token."""
        self.prefill.handle("r", submit(prompt, request_id=request_id, until="first_token", kv="handoff"), self.now)
        messages = self.run(self.prefill)
        (handed,) = of_type(messages, HandedOff)
        return handed.handoff, output_of(messages, request_id)

    def deliver_all(self) -> None:
        """Everything under way arrives."""
        while self.fabric.under_way:
            self.fabric.deliver(0)
        for core in (self.prefill, self.decode):
            core.wake()


@pytest.fixture
def pull() -> Iterator[Pair]:
    yield Pair("decode-pull")
    MemoryFabric.unbind("decode-pull")


@pytest.fixture
def push() -> Iterator[Pair]:
    yield Pair("decode-push", mode="push")
    MemoryFabric.unbind("decode-push")


def await_peer(pair: Pair, prompt: list[int], request_id: str = "a", **fields: object) -> list[EngineToRouter]:
    pair.decode.handle("r", submit(prompt, request_id=request_id, kv="await_peer", **fields), pair.now)
    return pair.run(pair.decode)


def test_decode_computes_no_prompt_token_and_releases_the_lease(pull: Pair) -> None:
    handoff, first = pull.hand_off(PROMPT)
    assert of_type(await_peer(pull, PROMPT, output_token_ids=first, handoff=handoff), Loaded) == []
    pull.deliver_all()
    messages = pull.run(pull.decode)
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    (finished,) = of_type(messages, Finished)
    assert (finished.sources.remote, finished.sources.computed) == (10, 0)
    assert of_type(messages, Release) == [Release("t-a", 0)]
    pull.prefill.handle("r", Release("t-a", 0), pull.now)
    pull.run(pull.prefill)
    assert at_rest(pull.prefill)
    assert at_rest(pull.decode)


def test_only_what_is_missing_behind_the_own_hit_is_loaded(pull: Pair) -> None:
    handoff, first = pull.hand_off(PROMPT)
    await_peer(pull, PROMPT, output_token_ids=first, handoff=handoff)
    pull.deliver_all()
    pull.run(pull.decode)
    handoff, first = pull.hand_off(PROMPT, "b")
    await_peer(pull, PROMPT, "b", output_token_ids=first, handoff=handoff)
    pull.deliver_all()
    (finished,) = of_type(pull.run(pull.decode), Finished)
    assert (finished.sources.local_hit, finished.sources.remote) == (8, 2)


def test_a_stream_that_joins_behind_a_prompt_after_its_load_has_a_token_of_each_step(pull: Pair) -> None:
    handoff, first = pull.hand_off(PROMPT)
    pull.decode.scheduler.limits = SchedulerLimits(8, max_num_batched_tokens=8)
    await_peer(pull, PROMPT, output_token_ids=first, handoff=handoff)
    pull.decode.handle("r", submit(list(range(200, 240)), request_id="long", max_tokens=1), pull.now)
    pull.decode.step(pull.now)
    pull.deliver_all()
    plan = pull.decode.scheduler.schedule(pull.now)
    assert {share.key[0]: share.num_scheduled for share in plan.scheduled} == {"long": 7, "a": 1}


def test_a_load_that_fails_is_recomputed_loudly(pull: Pair) -> None:
    """F4, F13: the source was reused while it was read; what was read is refused and the prompt computed here."""
    handoff, first = pull.hand_off(PROMPT)
    await_peer(pull, PROMPT, output_token_ids=first, handoff=handoff)
    pull.prefill.handle("r", Release("t-a", 0), pull.now)
    pull.hand_off(list(range(200, 250)), "other")  # takes the blocks
    pull.deliver_all()
    messages = pull.run(pull.decode)
    (loaded,) = of_type(messages, Loaded)
    assert (loaded.ok, loaded.code) == (False, "stale_generation")
    (finished,) = of_type(messages, Finished)
    assert finished.sources.recomputed == 10
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert at_rest(pull.decode)


def test_under_the_policy_fail_the_request_fails_with_the_transfers_code() -> None:
    pair = Pair("decode-fail", policy="fail")
    handoff, first = pair.hand_off(PROMPT)
    await_peer(pair, PROMPT, output_token_ids=first, handoff=handoff)
    pair.prefill.handle("r", Release("t-a", 0), pair.now)
    pair.hand_off(list(range(200, 250)), "other")
    pair.deliver_all()
    (failed,) = of_type(pair.run(pair.decode), Failed)
    assert (failed.code, failed.retryable) == ("stale_generation", True)
    assert at_rest(pair.decode)
    MemoryFabric.unbind("decode-fail")


def test_a_load_that_never_arrives_ends_at_its_deadline_and_its_blocks_stay_in_quarantine(pull: Pair) -> None:
    """F1: blocks come back, but only when nothing can write them any more."""
    handoff, first = pull.hand_off(PROMPT)
    await_peer(pull, PROMPT, output_token_ids=first, handoff=handoff)
    pull.now += 5.0
    pull.decode.step(pull.now)
    assert pull.decode.scheduler.kv.pool.counts().quarantined == 3
    pull.deliver_all()  # the read, which is late now, and the confirmation of its cancel
    pull.run(pull.decode)
    assert at_rest(pull.decode)


def test_an_abort_while_the_load_is_under_way_quarantines(pull: Pair) -> None:
    handoff, first = pull.hand_off(PROMPT)
    await_peer(pull, PROMPT, output_token_ids=first, handoff=handoff)
    pull.decode.handle("r", Abort("a", 0), pull.now)
    assert pull.decode.scheduler.kv.pool.counts().quarantined == 3
    pull.run(pull.decode)
    pull.deliver_all()
    pull.run(pull.decode)
    assert at_rest(pull.decode)


def test_pushed_kv_enters_the_cache_with_the_first_token(push: Pair) -> None:
    """A push may be ahead of the end of prefill's last step, which may yet fail: then nobody finds the KV here."""
    (allocated,) = of_type(await_peer(push, PROMPT), Allocated)
    push.prefill.handle("r", submit(PROMPT, until="first_token", kv="handoff", ticket=allocated.ticket), push.now)
    first = output_of(push.run(push.prefill), "a")
    push.deliver_all()
    assert of_type(push.run(push.decode), Loaded)
    assert push.decode.scheduler.kv.pool.snapshot_events() == [CacheCleared()]
    push.decode.handle("r", Abort("a", 0), push.now)
    push.run(push.decode)
    assert push.decode.scheduler.kv.pool.counts().cached == 0
    await_peer(push, PROMPT, "b")
    push.decode.handle("r", KVReady("b", 0, False, "kv_not_found"), push.now)  # computed here
    push.run(push.decode)
    assert push.decode.scheduler.kv.pool.counts().cached == 3
    assert len(first) == 1


def test_push_starts_decoding_when_both_the_kv_and_the_token_are_in(push: Pair) -> None:
    messages = await_peer(push, PROMPT)
    (allocated,) = of_type(messages, Allocated)
    assert (allocated.start, allocated.stop) == (0, 10)
    assert allocated.ticket is not None
    push.prefill.handle("r", submit(PROMPT, until="first_token", kv="handoff"), push.now)
    first = output_of(push.run(push.prefill), "a")
    push.prefill.handle("r", KVTicket("a", 0, allocated.ticket), push.now)  # it comes after the prefill's end
    push.run(push.prefill)
    push.deliver_all()
    messages = push.run(push.decode)
    assert output_of(messages, "a") == []
    assert KVReady("a", 0, ok=True, ticket=0) in push.run(push.prefill)
    push.decode.handle("r", Continue("a", 0, first), push.now)
    messages += push.run(push.decode)
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert of_type(messages, Release) == [Release("t-a", 0)]
    assert not at_rest(push.prefill)  # until its reader has it for sure
    push.prefill.handle("r", Release("t-a", 0), push.now)
    push.run(push.prefill)
    assert at_rest(push.prefill)
    assert at_rest(push.decode)


def test_a_peer_that_says_never_makes_decode_compute_at_once(push: Pair) -> None:
    await_peer(push, PROMPT)
    push.decode.handle("r", KVReady("a", 0, ok=False, code="peer_gone"), push.now)
    messages = push.run(push.decode)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 4)
    push.deliver_all()
    push.run(push.decode)
    assert at_rest(push.decode)


def test_a_conditional_request_with_little_missing_is_declined_and_prefilled_here(pull: Pair) -> None:
    messages = await_peer(pull, PROMPT, conditional=True)
    assert Allocated("a", 0, 0, 0) in messages
    assert output_of(messages, "a") == expected_tokens(PROMPT, 4)


def test_loads_never_take_the_block_that_a_running_request_needs(push: Pair) -> None:
    """F11: several loads at once must not reserve more than there is; unstarted prefills get half the pool."""
    for i in range(4):
        await_peer(push, [200 * i + j for j in range(1, 14)], str(i))  # 4 blocks each, of 16
    assert len(push.decode.external.loads) == 2
    assert len(push.decode.scheduler.waiting) == 2


def test_hits_that_nobody_holds_yet_count_as_taken(push: Pair) -> None:
    """F11: they leave the free queue with the load, too."""
    cached = list(range(100, 125))
    push.decode.handle("r", submit(cached, request_id="warm", max_tokens=1), push.now)
    push.run(push.decode)
    for i in range(6):
        push.decode.handle("r", submit([200 + 20 * i], request_id=str(i), max_tokens=30), push.now)
    push.decode.step(push.now)
    push.decode.handle("r", submit(cached, kv="await_peer"), push.now)
    push.decode.step(push.now)  # 1 block to load behind a hit of 6, 10 available, 6 requests run
    assert not push.decode.external.loads


def test_a_prompt_that_is_here_as_a_whole_is_declined_and_still_answered(pull: Pair) -> None:
    prompt = PROMPT[:8]
    pull.decode.handle("r", submit(prompt, request_id="warm", max_tokens=1), pull.now)
    pull.run(pull.decode)
    messages = await_peer(pull, prompt, conditional=True)
    assert Allocated("a", 0, 0, 0) in messages
    assert output_of(messages, "a") == expected_tokens(prompt, 4)


def test_a_request_that_waits_for_memory_keeps_its_source(pull: Pair) -> None:
    """The lease bounds that wait; computing the prompt here would need the same memory."""
    handoff, first = pull.hand_off(PROMPT)
    pull.decode.handle("r", submit(list(range(300, 350)), request_id="big", max_tokens=13), pull.now)
    pull.decode.step(pull.now)
    pull.decode.handle("r", submit(PROMPT, kv="await_peer", output_token_ids=first, handoff=handoff), pull.now)
    pull.decode.step(pull.now)
    assert not pull.decode.external.loads
    pull.now += 6.0  # the deadline of a load is 5 s
    pull.run(pull.decode)
    pull.deliver_all()
    (finished,) = of_type(pull.run(pull.decode), Finished)
    assert (finished.sources.remote, finished.sources.recomputed) == (10, 0)


def test_a_cache_that_fails_a_request_whose_load_is_long_over_does_not_end_it() -> None:
    """After a preemption any cache may be asked; under the policy "fail" only the hand-off itself may fail."""
    pair = Pair("decode-late-miss", policy="fail")
    handoff, first = pair.hand_off(PROMPT)
    await_peer(pair, PROMPT, output_token_ids=first, handoff=handoff)
    pair.deliver_all()
    pair.decode.step(pair.now)
    (request,) = pair.decode.requests.values()
    assert request.kv == "local"
    pair.decode.take_messages(pair.now)
    assert pair.decode.decode.load_ended(request, False, TransferOutcome("stale_generation"))
    assert of_type([m for _, sent in pair.decode.take_messages(pair.now) for m in sent], Release) == []
    MemoryFabric.unbind("decode-late-miss")


# --- later attempts ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["pull", "store", "push"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """With a policy that leaves the lease to whoever tries again."""
    yield Pair(f"decode-again-{request.param}", mode=request.param, policy="fail")
    MemoryFabric.unbind(f"decode-again-{request.param}")


def bring_ticket(pair: Pair, messages: list[EngineToRouter]) -> None:
    """As the router does: a ticket goes to the lease, by the attempt that it was granted to."""
    for message in messages:
        if isinstance(message, Allocated) and message.ticket is not None:
            pair.prefill.handle("r", KVTicket("a", 0, message.ticket, 1), pair.now)
            pair.run(pair.prefill)


def read_again(pair: Pair, handoff: KVHandoff, first: list[int], attempt: int) -> list[EngineToRouter]:
    """A later attempt reads the hand-off; returns what decode says."""
    messages = await_peer(pair, PROMPT, attempt=attempt, output_token_ids=first, handoff=handoff)
    if pair.decode.external.loads:
        pair.decode.handle("r", KVReady("a", attempt, True), pair.now)
    bring_ticket(pair, messages)
    for _ in range(2):  # what was still on its way to a store is there only then
        pair.deliver_all()
        messages += pair.run(pair.decode)
    return messages


def expect_all_of_it(pair: Pair, messages: list[EngineToRouter], first: list[int]) -> None:
    """The right tokens, none of the prompt computed, and the lease ends."""
    assert first + output_of(messages, "a") == expected_tokens(PROMPT, 4)
    (finished,) = of_type(messages, Finished)
    assert (finished.sources.remote, finished.sources.computed) == (10, 0)
    assert of_type(messages, Release) == [Release("t-a", 0)]  # by the name that it was granted under
    pair.prefill.handle("r", Release("t-a", 0), pair.now)
    pair.run(pair.prefill)
    pair.deliver_all()
    pair.run(pair.prefill)
    assert at_rest(pair.prefill)
    assert at_rest(pair.decode)


def test_a_later_attempt_reads_what_an_earlier_one_computed(pair: Pair) -> None:
    handoff, first = pair.hand_off(PROMPT)
    pair.deliver_all()
    pair.run(pair.prefill)
    expect_all_of_it(pair, read_again(pair, handoff, first, 2), first)


def test_a_reader_that_gives_up_leaves_it_to_the_next_one(pair: Pair) -> None:
    """Whatever was under way for it: nothing of that counts for the next one, or ends its load or the lease."""
    handoff, first = pair.hand_off(PROMPT)
    pair.decode.handle("r", submit(PROMPT, kv="await_peer", output_token_ids=first, handoff=handoff), pair.now)
    bring_ticket(pair, pair.run(pair.decode))
    assert pair.fabric.under_way
    pair.decode.handle("r", Abort("a", 0), pair.now)
    assert of_type(pair.run(pair.decode), Release) == []
    expect_all_of_it(pair, read_again(pair, handoff, first, 1), first)


def test_a_load_that_fails_leaves_the_lease_to_the_next_attempt(pair: Pair) -> None:
    handoff, first = pair.hand_off(PROMPT)
    pair.deliver_all()
    pair.run(pair.prefill)
    pair.fabric.num_losses_due = 1
    messages = await_peer(pair, PROMPT, output_token_ids=first, handoff=handoff)
    pair.decode.handle("r", KVReady("a", 0, True), pair.now)
    bring_ticket(pair, messages)
    if pair.decode.external.loads:
        pair.deliver_all()
        pair.now += 6.0  # beyond kv_load_timeout_s
        pair.decode.expire(pair.now)
    messages = pair.run(pair.decode)
    if not of_type(messages, Failed):
        pytest.skip("this mode lost nothing")
    assert of_type(messages, Release) == []
    pair.deliver_all()
    pair.run(pair.decode)
    expect_all_of_it(pair, read_again(pair, handoff, first, 1), first)


def test_a_push_that_failed_is_sent_again_for_the_next_ticket(push: Pair) -> None:
    """Its end is told for the reader of the last ticket only, and the same ticket twice is sent once."""
    handoff, first = push.hand_off(PROMPT)
    lost = PushTicket("gone", "gone.0", "t-a", 1, 0, 10, pack_blocks([0, 1, 2]))
    push.prefill.handle("r", KVTicket("a", 0, msgspec.msgpack.encode(lost)), push.now)
    push.run(push.prefill)
    push.deliver_all()
    assert of_type(push.run(push.prefill), KVReady) == [KVReady("a", 0, False, "peer_gone", 0)]
    assert not at_rest(push.prefill)
    messages = await_peer(push, PROMPT, attempt=2, output_token_ids=first, handoff=handoff)
    bring_ticket(push, messages)
    bring_ticket(push, messages)
    push.deliver_all()
    assert of_type(push.run(push.prefill), KVReady) == [KVReady("a", 0, True, ticket=1)]
    bring_ticket(push, messages)
    push.deliver_all()
    assert of_type(push.run(push.prefill), KVReady) == []
    expect_all_of_it(push, messages + push.run(push.decode), first)


def test_a_hand_off_of_a_later_attempt_is_refused(pull: Pair) -> None:
    handoff, first = pull.hand_off(PROMPT)
    later = msgspec.structs.replace(handoff, attempt=3)
    (failed,) = of_type(await_peer(pull, PROMPT, attempt=2, output_token_ids=first, handoff=later), Failed)
    assert (failed.code, failed.param) == ("invalid_request_error", "handoff")


# --- hand-offs in parts ---------------------------------------------------------------------------------------------

LONG = list(range(100, 122))  # three chunks of at most eight tokens


@pytest.fixture
def parts() -> Iterator[Pair]:
    """A pair whose prefill engine computes eight tokens a step, with room for two requests of the longest length."""
    pair = Pair("decode-parts", max_model_len=28)
    pair.prefill.scheduler.limits = SchedulerLimits(8, max_num_batched_tokens=8)
    yield pair
    MemoryFabric.unbind("decode-parts")


def chunk(pair: Pair, *messages: Submit) -> list[EngineToRouter]:
    """One step of the prefill engine."""
    for message in messages:
        pair.prefill.handle("r", message, pair.now)
    pair.prefill.step(pair.now)
    return [m for _, sent in pair.prefill.take_messages(pair.now) for m in sent]


def first_part(pair: Pair, **fields: object) -> KVHandoff:
    """Compute the first chunk and have decode begin to read it."""
    (part,) = of_type(chunk(pair, submit(LONG, until="first_token", kv="handoff")), KVHandoff)
    await_peer(pair, LONG, handoff=part, **fields)
    return part


def finish(pair: Pair, *, reads: list[tuple[int, int]]) -> list[EngineToRouter]:
    """Compute the rest; decode reads these tokens after the hand-off, and answers. Nothing is left on either side."""
    sent = chunk(pair)
    while not (handed := of_type(sent, HandedOff)):
        sent += chunk(pair)
    first = output_of(sent, "a")
    pair.decode.handle("r", Continue("a", 0, first), pair.now)
    pair.decode.handle("r", handed[0].handoff, pair.now)
    pair.run(pair.decode)
    assert under_way(pair) == reads
    pair.deliver_all()
    messages = pair.run(pair.decode)
    assert first + output_of(messages, "a") == expected_tokens(LONG, 4)
    assert of_type(messages, Release) == [Release("t-a", 0)]
    pair.prefill.handle("r", Release("t-a", 0), pair.now)
    pair.run(pair.prefill)
    assert at_rest(pair.prefill)
    assert at_rest(pair.decode)
    return messages


def under_way(pair: Pair) -> list[tuple[int, int]]:
    """Tokens of the reads under way."""
    return [(each.load.start, each.load.stop) for each in pair.fabric.under_way]  # type: ignore[attr-defined]


def test_each_chunk_is_read_while_the_next_one_is_computed_and_only_the_last_one_behind_the_hand_off(
    parts: Pair,
) -> None:
    part = first_part(parts)
    assert (part.num_tokens, part.more) == (8, True)
    assert under_way(parts) == [(0, 8)]
    (part,) = of_type(chunk(parts), KVHandoff)  # the first one's read is not over
    assert part.start == 8
    named = unpack_blocks(part.payload)
    assert named is not None
    assert named.ids.tolist() == parts.prefill.requests["a", 0].block_tables[0][2:4]
    parts.decode.handle("r", part, parts.now)
    parts.run(parts.decode)
    assert under_way(parts) == [(0, 8), (8, 16)]
    parts.deliver_all()
    (finished,) = of_type(finish(parts, reads=[(16, 22)]), Finished)
    assert (finished.sources.remote, finished.sources.computed) == (22, 0)


@pytest.mark.parametrize("has_first", [True, False])
def test_parts_that_come_before_there_is_room_are_read_together_or_behind_the_hand_off(
    parts: Pair, has_first: bool
) -> None:
    (first,) = of_type(chunk(parts, submit(LONG, until="first_token", kv="handoff")), KVHandoff)
    (second,) = of_type(chunk(parts), KVHandoff)
    parts.decode.handle("r", submit(LONG, kv="await_peer", handoff=first if has_first else second), parts.now)
    if has_first:
        parts.decode.handle("r", second, parts.now)
    parts.run(parts.decode)
    assert under_way(parts) == ([(0, 16)] if has_first else [])
    parts.deliver_all()
    finish(parts, reads=[(16, 22)] if has_first else [(0, 22)])


def test_a_prompt_of_one_chunk_is_handed_off_at_once(parts: Pair) -> None:
    sent = chunk(parts, submit(LONG[:8], until="first_token", kv="handoff"))
    assert [type(m) for m in sent if isinstance(m, KVHandoff | HandedOff)] == [HandedOff]


def test_chunks_that_come_late_or_not_at_all_cost_no_deadline_before_the_hand_off(parts: Pair) -> None:
    first_part(parts)
    parts.deliver_all()
    parts.now += 9.0  # the deadline of a load is 5 s
    parts.run(parts.decode)
    (loaded,) = of_type(finish(parts, reads=[(8, 22)]), Loaded)
    assert loaded.ok


def test_a_part_that_its_source_has_lost_is_loaded_again_with_the_rest(parts: Pair) -> None:
    """The source preempts the prompt: its blocks are another's when they are read."""
    first_part(parts)
    parts.prefill.scheduler._preempt(parts.prefill.requests["a", 0])
    others = {f"b{i}": list(range(200 + 30 * i, 227 + 30 * i)) for i in range(3)}  # more than the pool holds
    for name, prompt in others.items():
        parts.prefill.handle("r", submit(prompt, request_id=name, max_tokens=1, priority=-1), parts.now)
    while any((name, 0) in parts.prefill.requests for name in others):
        chunk(parts)
    parts.deliver_all()
    assert of_type(parts.run(parts.decode), Loaded) == []
    (finished,) = of_type(finish(parts, reads=[(0, 22)]), Finished)
    assert (finished.sources.remote, finished.sources.recomputed) == (22, 0)


@pytest.mark.parametrize("has_arrived", [False, True])
def test_an_abort_between_two_parts_gives_all_blocks_back(parts: Pair, has_arrived: bool) -> None:
    part = first_part(parts)
    if has_arrived:
        parts.deliver_all()
        parts.run(parts.decode)
    parts.decode.handle("r", msgspec.structs.replace(part, num_tokens=16), parts.now)  # it is not read: the next is
    parts.decode.handle("r", Abort("a", 0), parts.now)
    assert parts.decode.scheduler.kv.pool.counts().quarantined == 6
    parts.run(parts.decode)
    parts.deliver_all()
    parts.run(parts.decode)
    assert at_rest(parts.decode)


def test_what_waits_for_memory_to_read_a_first_part_lets_others_pass(parts: Pair) -> None:
    for name in ("big", "bigger"):
        parts.decode.handle("r", submit(list(range(300, 320)), request_id=name, max_tokens=8), parts.now)
    parts.decode.step(parts.now)
    (part,) = of_type(chunk(parts, submit(LONG, until="first_token", kv="handoff")), KVHandoff)
    parts.decode.handle("r", submit(LONG, kv="await_peer", handoff=part), parts.now)
    parts.decode.handle("r", submit([7, 8, 9], request_id="small", max_tokens=1), parts.now)
    messages = parts.run(parts.decode)
    assert {m.request_id for m in of_type(messages, Finished)} == {"big", "bigger", "small"}
    assert under_way(parts) == [(0, 8)]  # once there was room
    parts.deliver_all()
    finish(parts, reads=[(8, 22)])


def test_a_first_part_leaves_room_for_the_longest_hand_off() -> None:
    """Else that waited for blocks kept for a prompt that waited, in prefill's pool, until the hand-off was read."""
    pair = Pair("decode-parts", max_model_len=44)
    try:
        pair.prefill.scheduler.limits = SchedulerLimits(8, max_num_batched_tokens=8)
        (part,) = of_type(chunk(pair, submit(LONG, until="first_token", kv="handoff")), KVHandoff)
        pair.decode.handle("r", submit(LONG, kv="await_peer", handoff=part), pair.now)
        pair.decode.step(pair.now)
        assert not pair.decode.external.loads
        finish(pair, reads=[(0, 22)])
    finally:
        MemoryFabric.unbind("decode-parts")


def test_a_hand_off_is_for_a_later_attempt_of_its_request_too(parts: Pair) -> None:
    part = first_part(parts, attempt=2)
    parts.deliver_all()
    parts.decode.handle("r", msgspec.structs.replace(part, num_tokens=22, more=False), parts.now)
    parts.run(parts.decode)
    parts.decode.handle("r", msgspec.structs.replace(part, num_tokens=16), parts.now)  # it is late, and says nothing
    (load,) = parts.decode.external.loads.values()
    assert (load.request.key, load.request.awaits_rest) == (("a", 2), False)


@pytest.mark.parametrize(
    "lie", [{"payload": b"\xff"}, {"engine": "other"}, {"num_tokens": 99}, {"payload": b""}, {"num_tokens": 1 << 40}]
)
def test_a_first_part_that_is_a_lie_costs_nothing_but_its_own_read(parts: Pair, lie: dict[str, Any]) -> None:
    (part,) = of_type(chunk(parts, submit(LONG, until="first_token", kv="handoff")), KVHandoff)
    await_peer(parts, LONG, handoff=msgspec.structs.replace(part, **lie))
    parts.deliver_all()
    assert of_type(parts.run(parts.decode), Loaded) == []
    finish(parts, reads=[(0, 22)])


@pytest.mark.parametrize("num_tokens", [8, 9, 16, 40])
def test_behind_a_first_part_a_hand_off_of_other_tokens_than_the_prompts_makes_no_wrong_output(
    parts: Pair, num_tokens: int
) -> None:
    first_part(parts)
    parts.deliver_all()
    sent = chunk(parts)
    while not (handed := of_type(sent, HandedOff)):
        sent += chunk(parts)
    first = output_of(sent, "a")
    parts.decode.handle("r", Continue("a", 0, first), parts.now)
    parts.decode.handle("r", msgspec.structs.replace(handed[0].handoff, num_tokens=num_tokens), parts.now)
    messages = parts.run(parts.decode)
    for _ in range(2):
        parts.deliver_all()
        messages += parts.run(parts.decode)
    assert first + output_of(messages, "a") == expected_tokens(LONG, 4)
    assert at_rest(parts.decode)
