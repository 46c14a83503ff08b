"""Stores that fail, hang or lose values: typed errors within deadlines, nobody else waits, nothing leaks."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest
import torch
from store_rig import WAIT_S, Engine, FaultyStore, MakeEngine, prefill, random_kv, scattered, view
from traffic import wait_until_true

from pdkv.connectors.base import ASK_AGAIN, NO_MATCH, RequestView
from pdkv.connectors.transfer.staging import StagingBuffers
from pdkv.errors import KVNotFound, StoreUnavailable, TransferCancelled, TransferTimeout
from pdkv.kernels.streams import HOST
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.tiers import TieredStore
from pdkv.testing import VirtualClock
from pdkv.wire.reports import ConnectorStats

# --- lookups ------------------------------------------------------------------------------------------------------


def test_a_question_never_waits_for_the_store(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 128)
    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    store.hold("contains")
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == ASK_AGAIN
    store.wait_held("contains")
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == ASK_AGAIN
    store.let_go("contains")
    assert engine.ask(request) == 128


def test_a_lookup_that_is_not_answered_in_time_is_a_miss_for_all(
    store: FaultyStore, make: MakeEngine, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F7: one deadline, whoever waits; with a store that does not answer, the next ones do not wait at all."""
    prefill(make("p"), 128)
    engine = make("o", clock=clock)
    lookups = engine.scheduler.lookups
    store.hold("contains")
    request = view("u", num_tokens=200, salt="0")
    with caplog.at_level(logging.WARNING):
        ask_too_long(engine, request, clock)
    assert "no answer to a lookup within 60 s" in caplog.text
    first, *others = [view(f"v{i}", num_tokens=200, salt=f"v{i}") for i in range(3)]
    assert engine.scheduler.get_num_new_matched_tokens(first, 0) == ASK_AGAIN
    assert [engine.ask(other) for other in others] == [0, 0]
    ask_too_long(engine, first, clock)
    assert (lookups.num_timeouts, lookups.num_refused) == (2, 2)
    store.let_go("contains")
    wait_until_true(lambda: engine.ask(request) == 128, "the late answer corrects what was a miss")
    assert store.count("contains") <= 2 * 12


def ask_too_long(engine: Engine, request: RequestView, clock: VirtualClock) -> None:
    """Ask until the deadline, which the store lets pass."""
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == ASK_AGAIN
    clock.until_waiting()
    clock.advance(60)
    assert engine.ask(request) == 0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_what_a_store_did_and_did_not_do_is_counted(store: FaultyStore, make: MakeEngine, clock: VirtualClock) -> None:
    """On both sides; a transfer that was cancelled has not failed, and what moved nothing is no transfer."""
    source = make("p")
    prefill(source, 128)
    saved = source.worker.get_stats()[""]
    assert (saved.saves, saved.failed_saves, saved.loads) == (1, 0, 0)
    assert saved.saved_bytes >= 128 * source.layout.token_bytes
    store.failing["put"] = StoreUnavailable("refused")
    kv, blocks = random_kv(64, 7), scattered(64, 16)
    source.fill(blocks, kv)
    failed = source.save(view("f", num_tokens=65, salt="f"), blocks, 64)
    assert failed is not None
    assert failed.code == StoreUnavailable.code
    after = source.worker.get_stats()[""]
    assert after.save_seconds >= saved.save_seconds > 0
    assert _without_times(after) == msgspec.structs.replace(_without_times(saved), failed_saves=1)

    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    assert not engine.load(request, scattered(128, 16), 128).code
    loaded = engine.worker.get_stats()[""]
    assert (loaded.loads, loaded.failed_loads, loaded.saves) == (1, 0, 0)
    assert loaded.loaded_bytes == saved.saved_bytes
    again = view("v", num_tokens=200, salt="0")
    engine.scheduler.update_state_after_alloc(again, [scattered(128, 16)], 128)
    store.failing["get"] = StoreUnavailable("refused")
    engine.step()
    assert engine.wait(again.transfer_key).code == StoreUnavailable.code
    assert engine.worker.get_stats()[""].failed_loads == 1
    store.failing.clear()
    store.hold("get")
    third = view("w", num_tokens=200, salt="0")
    engine.start_load(third, scattered(128, 16), 128)
    store.wait_held("get")
    engine.worker.cancel(third.transfer_key, "receive")
    store.let_go("get")
    assert engine.wait(third.transfer_key).code == TransferCancelled.code
    assert engine.worker.get_stats()[""].failed_loads == 1

    assert engine.scheduler.get_stats()[""].failed_lookups == 0
    other = make("i", clock=clock)
    store.hold("contains")
    ask_too_long(other, view("x", num_tokens=200, salt="x"), clock)
    late = other.scheduler.get_stats()[""]
    assert (late.failed_lookups, late.timeouts) == (1, 1)
    store.let_go("contains")


def _without_times(stats: ConnectorStats) -> ConnectorStats:
    return msgspec.structs.replace(stats, save_seconds=0.0, hidden_save_seconds=0.0)


def test_hits_and_failures_of_a_stores_tiers_are_counted(store: FaultyStore) -> None:
    with (
        TieredStore([store, MemoryStore("second-tier")], retry_after_s=1000) as tiers,
        closing(Engine(tiers, "p")) as engine,
    ):
        prefill(engine, 64)
        store.failing["get"] = StoreUnavailable("refused")
        request = view("u", num_tokens=65, salt="0")
        assert engine.ask(request) == 64
        assert not engine.load(request, scattered(64, 16), 64).code
        stats = engine.worker.get_stats()
        assert stats["0-faulty"].tier_failures == 2  # the read, and the copy of what the other one had
        assert stats["1-memory"].tier_hits == 1


def test_a_store_that_is_down_is_a_miss_and_told_once(
    store: FaultyStore, make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    prefill(make("p"), 128)
    engine = make("o")
    store.failing["contains"] = StoreUnavailable("refused")
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            assert engine.ask(view(f"u{i}", num_tokens=200, salt=f"s{i}")) == 0
    assert engine.scheduler.lookups.num_failed + engine.scheduler.lookups.num_refused == 5
    assert caplog.text.count("store_unavailable") == 1
    store.failing.clear()
    assert engine.ask(view("v", num_tokens=200, salt="0")) == 128


def test_a_lookup_costs_the_same_however_much_is_stored(store: FaultyStore, make: MakeEngine) -> None:
    counts = []
    for num_others in (0, 2000):
        store.inner.put([(b"%d" % i, memoryview(b"x")) for i in range(num_others)])
        before = store.count("contains")
        make("o").ask(view(f"u{num_others}", num_tokens=1000, salt=str(num_others)))
        counts.append(store.count("contains") - before)
    assert counts == [15, 15]


def test_waiting_requests_are_looked_up_ahead(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 128)
    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    store.hold("contains")
    engine.step(waiting_keys=[request.block_keys])
    store.wait_held("contains")
    engine.step(waiting_keys=[request.block_keys])
    store.let_go("contains")
    assert engine.ask(request) == 128
    assert store.count("contains") == 3  # the values of one question


def test_a_hand_off_is_waited_for_and_refused_as_its_source_says(make: MakeEngine) -> None:
    source, decode = make("p"), make("d")
    _, handoff = prefill(source, 100)
    match = decode.scheduler.get_num_new_matched_tokens
    fields = {"kv": "await_peer", "num_tokens": 101, "salt": "0"}
    assert match(view("t", **fields), 0) == ASK_AGAIN
    assert match(view("t", **fields, kv_ready=False), 0) == NO_MATCH
    decode.scheduler.update_peers([source.card()])
    assert match(view("t", **fields, handoff=handoff), 0) == ASK_AGAIN
    assert match(view("t", **fields, handoff=handoff, kv_ready=False), 0) == NO_MATCH
    assert match(view("t", **fields, handoff=handoff, kv_ready=True), 0).num_tokens == 100


def test_what_a_dead_prefill_had_saved_is_found_without_its_word(make: MakeEngine) -> None:
    """F5."""
    _, handoff = prefill(make("p"), 100)
    decode = make("d")
    decode.scheduler.update_peers([])
    assert decode.ask(view("t", kv="await_peer", num_tokens=101, handoff=handoff, salt="0")) == 100
    assert decode.ask(view("u", kv="await_peer", num_tokens=101, handoff=handoff, salt="0")) == 64, "no tail of u's"


def test_a_peer_that_cuts_otherwise_is_refused_with_both_values(
    make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    source = make("p", layer_groups="3")
    _, handoff = prefill(source, 100)
    decode = make("d", tokens_per_value="32")
    decode.scheduler.update_peers([source.card(), decode.card()])
    assert "tokens_per_value=64, kv_shards=1, layer_groups=3" in caplog.text
    assert "tokens_per_value=32, kv_shards=1, layer_groups=1" in caplog.text
    request = view("t", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True, salt="0")
    assert decode.ask(request) == 0


# --- loads --------------------------------------------------------------------------------------------------------


def test_a_load_of_what_is_gone_fails_and_is_not_believed_again(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 128)
    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    store.inner.delete(list(store.inner._shelf._values))
    assert engine.load(request, scattered(128, 16), 128).code == KVNotFound.code
    assert bool((engine.pools[0] == -1).all()), "nothing was written"
    assert engine.ask(request) == 0


def test_values_of_another_size_are_a_miss(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 128)
    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    key = next(iter(store.inner._shelf._values))
    store.inner.delete([key])
    store.inner.put([(key, memoryview(b"truncated"))])
    assert engine.load(request, scattered(128, 16), 128).code == KVNotFound.code


def test_a_failing_store_fails_the_load_with_its_code(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 128)
    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    store.failing["get"] = StoreUnavailable("gone")
    assert engine.load(request, scattered(128, 16), 128).code == StoreUnavailable.code


def test_loads_behind_one_that_hangs_end_at_their_deadline(
    store: FaultyStore, make: MakeEngine, clock: VirtualClock
) -> None:
    """F7."""
    prefill(make("p"), 128)
    engine = make("o", io_threads="1", clock=clock)
    requests = [view(f"u{i}", num_tokens=200, salt="0") for i in range(3)]
    assert engine.ask(requests[0]) == 128
    store.hold("get")
    engine.start_load(requests[0], scattered(128, 16), 128)
    store.wait_held("get")  # by its only thread
    for request in requests[1:]:
        engine.start_load(request, scattered(128, 16), 128)
    clock.advance(60)
    engine.collect()
    hung, *others = (engine.reported(request.transfer_key) for request in requests)
    assert hung is None, "the store still has its buffer"
    assert [outcomes and outcomes[0].code for outcomes in others] == [TransferTimeout.code] * 2
    store.let_go("get")
    assert engine.wait(requests[0].transfer_key).code == TransferTimeout.code
    assert bool((engine.pools[0] == -1).all())


def test_a_cancelled_load_writes_nothing_more(store: FaultyStore, make: MakeEngine) -> None:
    """F4: its blocks come out of quarantine with this answer."""
    prefill(make("p"), 128)
    engine, request = make("o"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    store.hold("get")
    engine.start_load(request, scattered(128, 16), 128)
    store.wait_held("get")
    engine.worker.cancel(request.transfer_key, "receive")
    engine.collect()
    assert engine.reported(request.transfer_key) is None
    store.let_go("get")
    assert engine.wait(request.transfer_key).code == TransferCancelled.code
    assert bool((engine.pools[0] == -1).all())


def test_more_than_a_buffer_is_loaded_buffer_by_buffer(make: MakeEngine) -> None:
    kv, handoff = prefill(make("p", staging_bytes="1", layer_groups="2"), 300)
    decode = make("d", staging_bytes="30000", layer_groups="2", block_size=32)
    request = view("t", kv="await_peer", num_tokens=301, handoff=handoff, kv_ready=True, salt="0")
    assert not decode.load(request, scattered(300, 32), 300).code
    assert torch.equal(decode.tokens(scattered(300, 32), 300), kv)


def test_who_finds_no_staging_buffer_waits_for_a_bounded_time() -> None:
    """F7."""
    buffers = StagingBuffers(1, 64, HOST)
    with buffers.take(WAIT_S):
        with pytest.raises(TransferTimeout), buffers.take(0.01):
            pass
        assert buffers.num_free == 0
    with buffers.take(WAIT_S) as buffer:
        assert buffer.nbytes == 64
    assert buffers.num_free == buffers.count == 1


# --- layerwise ----------------------------------------------------------------------------------------------------


def test_layers_are_waited_for_group_by_group(store: FaultyStore, make: MakeEngine) -> None:
    kv, _ = prefill(make("p", load="layerwise"), 128)
    engine, request = make("o", load="layerwise", io_threads="1"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    assert engine.scheduler.get_num_new_matched_tokens(request, 0).mode == "layerwise"
    meta = engine.start_load(request, scattered(128, 16), 128, layerwise=True)
    assert meta.needs_layer_hooks
    for layer in range(3):
        engine.worker.wait_for_layer_load(layer)
        got = engine.tokens(scattered(128, 16), 128)
        assert torch.equal(got[:, : layer + 1], kv[:, : layer + 1])
    engine.worker.wait_for_save()
    engine.collect()
    outcomes = engine.reported(request.transfer_key)
    assert outcomes is not None, "it is reported with its own step"
    assert not outcomes[0].code


def test_a_forward_pass_waits_for_a_bounded_time(store: FaultyStore, make: MakeEngine, clock: VirtualClock) -> None:
    prefill(make("p", load="layerwise"), 128)
    engine = make("o", load="layerwise", transfer_timeout_s="3600", clock=clock)
    request = view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    store.hold("get")
    engine.start_load(request, scattered(128, 16), 128, layerwise=True)
    store.wait_held("get")
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(engine.forward)
        wait_until_true(lambda: not engine.worker._compute.is_running, "it waits for a layer")
        clock.advance(60)
        step.result(WAIT_S)
    assert engine.reported(request.transfer_key) is None, "the store still has its buffer"
    store.let_go("get")
    assert engine.wait(request.transfer_key).code == TransferTimeout.code
    assert bool((engine.pools[0] == -1).all())


def test_a_layerwise_load_that_fails_lets_the_forward_pass_go_on(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p", load="layerwise"), 128)
    engine, request = make("o", load="layerwise", layer_timeout_s="60"), view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    store.failing["get"] = StoreUnavailable("gone")
    engine.start_load(request, scattered(128, 16), 128, layerwise=True)
    engine.forward()
    assert engine.wait(request.transfer_key).code == StoreUnavailable.code


def test_a_load_outside_the_batch_is_not_waited_for(store: FaultyStore, make: MakeEngine) -> None:
    _, handoff = prefill(make("p", load="layerwise"), 128)
    engine = make("o", load="layerwise")
    request = view("t", kv="await_peer", num_tokens=129, handoff=handoff, kv_ready=True, salt="0")
    store.hold("get")
    assert not engine.start_load(request, scattered(128, 16), 128).needs_layer_hooks
    engine.forward()
    store.let_go("get")
    assert not engine.wait(request.transfer_key).code


# --- saves --------------------------------------------------------------------------------------------------------


def test_a_failed_save_fails_its_hand_off_and_is_told_once_per_burst(
    store: FaultyStore, make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """F10, F13."""
    engine = make("p")
    store.failing["put"] = StoreUnavailable("gone")
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b", "c"):
            request = view(name, kv="handoff", num_tokens=101)
            (hold,) = engine.confirm(request, scattered(100, 16), 100, last=True).holds
            assert engine.wait(hold.key).code == engine.wait(request.transfer_key).code == StoreUnavailable.code
    assert caplog.text.count("KV is not saved") == 1
    store.failing.clear()
    with caplog.at_level(logging.WARNING):
        prefill(engine, 100)
    assert caplog.text.count("KV is saved again") == 1


def test_a_save_that_failed_while_the_prompt_was_computed_fails_the_rest(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p")
    request = view("a", kv="handoff", num_tokens=201)
    store.failing["put"] = StoreUnavailable("gone")
    (first,) = engine.confirm(request, scattered(200, 16), 64).holds
    assert engine.wait(first.key).code == StoreUnavailable.code
    assert engine.wait(request.transfer_key).code == StoreUnavailable.code
    store.failing.clear()
    (second,) = engine.confirm(request, scattered(200, 16), 200, start=64, last=True).holds
    assert engine.wait(second.key).code == StoreUnavailable.code
    assert not engine.worker._transfers


def test_queued_saves_of_a_request_that_is_given_up_end_at_once(store: FaultyStore, make: MakeEngine) -> None:
    """F3."""
    engine = make("p")
    store.hold("put")
    engine.confirm(view("other", num_tokens=65, salt="other"), scattered(64, 16), 64)
    store.wait_held("put")
    request = view("a", kv="handoff", num_tokens=101)
    (hold,) = engine.confirm(request, scattered(100, 16), 100, last=True).holds
    engine.worker.cancel(request.transfer_key, "send")
    assert engine.wait(hold.key).code == engine.wait(request.transfer_key).code == TransferCancelled.code
    store.let_go("put")
    assert engine.worker.num_failed_saves == 0, "nothing was wrong with the store"


def test_saves_do_not_delay_loads(store: FaultyStore, make: MakeEngine) -> None:
    """F7: a store that takes nothing can still give."""
    kv, _ = prefill(make("p"), 128)
    engine = make("o")
    store.hold("put")
    for i in range(8):
        engine.confirm(view(f"s{i}", num_tokens=65, salt=f"s{i}"), scattered(64, 16), 64)
    store.wait_held("put")
    request = view("u", num_tokens=200, salt="0")
    assert engine.ask(request) == 128
    assert not engine.load(request, scattered(128, 16), 128).code
    assert torch.equal(engine.tokens(scattered(128, 16), 128), kv)
    store.let_go("put")


def test_a_hundred_transfers_at_once_leave_nothing_behind(store: FaultyStore, make: MakeEngine) -> None:
    source, engine = make("p"), make("o", block_size=32)
    kvs = {}
    for i in range(20):
        kvs[i], _ = prefill(source, 64 + i, transfer_id=f"t{i}", seed=i)
    requests = [view(f"u{i}", num_tokens=100, salt=str(i % 20)) for i in range(100)]
    for request in requests:
        assert engine.ask(request) == 64
        engine.scheduler.update_state_after_alloc(request, [[int(request.transfer_id[1:]) % 20 * 2, 41]], 64)
    engine.step()
    codes = {engine.wait(request.transfer_key).code for request in requests}
    assert codes == {""}
    for i in range(20):
        assert torch.equal(engine.tokens([i * 2], 32), kvs[i][:32])
    assert engine.worker.num_open_jobs == 0
    assert not engine.worker._transfers
