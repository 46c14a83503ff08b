"""Operators' orders about what a store holds: found, cleared, pinned and brought nearer, on all ranks."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from store_rig import KEYS, WAIT_S, Engine, FaultyStore, MakeEngine, chain, find, order, prefill, scattered, view

from pdkv.connectors.base import SchedulerView, TransferKey, TransferOutcome, TransferResults
from pdkv.connectors.store.orders import MAX_ORDERS, longest_hit, name_of
from pdkv.errors import MalformedMessage, ServerBusy, StoreUnavailable, StoreUnsupported, TransferTimeout
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.tiers import TieredStore
from pdkv.wire.kv import KVGroup
from pdkv.wire.tiers import CacheAnswer, CacheOrder


@pytest.fixture(name="tiers")
def two_tiers(tmp_path: Path) -> Iterator[TieredStore]:
    host = HostStore(tmp_path / "host", StoreOptions(capacity=2 << 20))
    with TieredStore([host, FileStore(tmp_path / "files")]) as store:
        yield store


@pytest.fixture(name="engine")
def one_engine(tiers: TieredStore) -> Iterator[Engine]:
    engine = Engine(tiers)
    yield engine
    engine.close()


def test_an_answer_of_ranks_that_cannot_be_read_is_a_failed_one(engine: Engine) -> None:
    tiers = engine.scheduler.tiers
    for note, said in (((b"no answer",), [("store", MalformedMessage.code)]), ((), [])):
        tiers.order(CacheOrder(order_id="o", action="lookup", keys=KEYS, tier="store"))
        (asked,) = tiers.take_new()
        ended = {name_of(asked): TransferOutcome(notes=note)}
        assert tiers.settle(TransferResults(ended, {}, {}, {})) == (TransferResults({}, {}, {}, {}), [asked])
        (answer,) = tiers.take_answers()
        assert [(tier.tier, tier.code) for tier in answer.tiers] == said


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prompt_is_found_and_cleared_tier_by_tier(tiers: TieredStore, tp: int) -> None:
    with closing(Engine(tiers, tp=tp)) as engine:
        prefill(engine, 250)  # three values and a tail
        assert find(engine) == {"0-host": (192, 3 * tp), "1-file": (192, 3 * tp)}
        assert find(engine, keys=KEYS[:5], tier="file") == {"1-file": (64, tp)}
        assert find(engine, keys=chain(16, "other"), tier="0-host") == {"0-host": (0, 0)}
        assert order(engine, "clear", keys=KEYS[:8], tier="host")["0-host"].num_values == 2 * tp
        assert find(engine) == {"0-host": (0, tp), "1-file": (192, 3 * tp)}, "behind a gap nothing is of use"
        assert order(engine, "prefetch")["0-host"].num_tokens == 192
        assert find(engine)["0-host"] == (192, 3 * tp)
        last_part = engine.connectors[0].cut.suffixes[-1]  # the last rank's
        tiers.delete([KEYS[7] + last_part])
        assert find(engine, tier="file") == {"1-file": (64, 3 * tp - 1)}, "what one rank lacks none has"
        assert order(engine, "clear")["1-file"].num_values == 3 * tp - 1
        assert find(engine) == {"0-host": (0, 0), "1-file": (0, 0)}


def test_what_is_cleared_is_neither_believed_nor_told_any_more(engine: Engine) -> None:
    prefill(engine, 192)
    asked = view("u", num_tokens=193, salt="0")
    assert engine.ask(asked) == 192
    engine.scheduler.tiers.take_events()
    order(engine, "clear")
    assert [key for events in engine.scheduler.tiers.take_events() for key in events.removed] == KEYS[3::4]
    assert engine.ask(asked) == 0
    prefill(engine, 192, transfer_id="again")
    assert engine.ask(view("w", num_tokens=193, salt="0")) == 192


def test_all_of_host_memory_is_cleared_and_no_store_of_others(engine: Engine) -> None:
    prefill(engine, 192)
    answers = order(engine, "clear", keys=None)
    assert answers["0-host"].num_values == 3
    assert answers["1-file"].code == StoreUnsupported.code
    assert "cannot be emptied: others may use it" in answers["1-file"].problem
    assert find(engine) == {"0-host": (0, 0), "1-file": (192, 3)}


def test_pins_are_of_host_memory(engine: Engine) -> None:
    prefill(engine, 192)
    answers = order(engine, "pin", ttl_s=60.0)
    assert (answers["0-host"].num_tokens, answers["0-host"].num_values) == (192, 3)
    assert answers["1-file"].code == StoreUnsupported.code
    assert order(engine, "unpin", keys=None, tier="host")["0-host"].num_values == 3
    assert order(engine, "unpin", tier="host")["0-host"].num_values == 0


def test_a_group_with_a_window_needs_what_the_next_token_sees(tiers: TieredStore) -> None:
    groups = (KVGroup((0, 2)), KVGroup((1, 3), window=20))
    with closing(Engine(tiers, groups=groups)) as engine:
        cut = engine.connectors[0].cut
        full = {value.key for value in cut.whole_values(KEYS, 0, 256)}
        seen = {value.key for value in cut.values_to_load(KEYS, 0, 128, windowed=True)}
        assert longest_hit(cut, KEYS, full) == 0
        assert longest_hit(cut, KEYS, full | seen) == 128
        assert longest_hit(cut, KEYS, seen) == 0
        assert find(engine) == {"0-host": (0, 0), "1-file": (0, 0)}


def test_a_tier_that_fails_or_comes_too_late_says_so(make: MakeEngine, store: FaultyStore) -> None:
    engine = make()
    store.failing["contains"] = StoreUnavailable("gone")
    (answer,) = order(engine, "lookup").values()
    assert (answer.tier, answer.code, answer.problem) == ("0-faulty", StoreUnavailable.code, "gone")
    (answer,) = order(engine, "lookup", timeout_s=0.0).values()
    assert answer.code == TransferTimeout.code
    store.failing["contains"] = ValueError("a defect")  # type: ignore[assignment]
    (answer,) = order(engine, "lookup").values()
    assert (answer.code, answer.problem) == ("internal_error", "ValueError: a defect")
    (answer,) = order(engine, "prefetch").values()
    assert answer.code == StoreUnsupported.code
    assert order(engine, "lookup", tier="host") == {}


def test_too_many_orders_are_refused_and_the_others_answered(make: MakeEngine, store: FaultyStore) -> None:
    engine = make()
    store.hold("contains")
    for number in range(MAX_ORDERS + 2):
        engine.scheduler.tiers.order(CacheOrder(order_id=f"{number}", action="lookup", keys=KEYS))
        if number == 0:
            engine.worker.start_load_kv(engine.scheduler.build_connector_meta(SchedulerView(0, [], [], [], [], [], [])))
            store.wait_held("contains")
    engine.worker.start_load_kv(engine.scheduler.build_connector_meta(SchedulerView(0, [], [], [], [], [], [])))
    store.let_go("contains")
    answers: list[CacheAnswer] = []
    while len(answers) < MAX_ORDERS + 2:
        engine.scheduler.resolve_results(engine.worker.get_finished())
        new = engine.scheduler.tiers.take_answers()
        answers += new
        assert new or engine.woken.acquire(timeout=WAIT_S)
    refused = [answer.order_id for answer in answers if answer.tiers[0].code]
    assert refused == [str(MAX_ORDERS + 1)]
    assert {a.tiers[0].code for a in answers} == {"", ServerBusy.code}


def test_an_order_whose_store_hangs_holds_up_no_load_and_no_save(make: MakeEngine, store: FaultyStore) -> None:
    engine = make()
    kv, _ = prefill(engine, 192)
    store.hold("delete")
    engine.scheduler.tiers.order(CacheOrder(order_id="o", action="clear", keys=KEYS))
    engine.step()
    store.wait_held("delete")
    prefill(engine, 192, transfer_id="u", seed=1)
    request, blocks = view("v", num_tokens=193, salt="0"), scattered(192, engine.block_size, start=7)
    assert engine.ask(request) == 192
    assert not engine.load(request, blocks, 192).code
    assert torch.equal(engine.tokens(blocks, 192), kv)
    assert engine.reported(TransferKey("o", 0)) is None
    store.let_go("delete")
    ended = {TransferKey("o", 0): engine.wait(TransferKey("o", 0))}
    engine.scheduler.resolve_results(TransferResults(ended, {}, {}, {}))
    (answer,) = engine.scheduler.tiers.take_answers()
    assert [(tier.code, tier.num_values) for tier in answer.tiers] == [("", 3)]
