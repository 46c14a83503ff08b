"""Stored KV that has terms: what is found when its time is over, what is copied on which terms, whose room it takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from store_rig import KINDS_HERE, Engine, order, random_kv, scattered, store_here, view
from store_servers import PATIENT, SERVERS, SharedServer
from traffic import wait_until_true

from pdkv.connectors.base import RequestView, TransferKey
from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.worker import TAIL_TTL_S
from pdkv.errors import KVNotFound, StoreFull
from pdkv.kv_store.base import Buffer, Item, KVStore
from pdkv.kv_store.host_segment import PAGE_BYTES
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.redis_store import RedisStore
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.terms import Terms
from pdkv.kv_store.tiers import TieredStore
from pdkv.testing import VirtualClock
from pdkv.wire.kv import KVTerms
from pdkv.wire.tiers import CacheOrder

NUM_TOKENS = 256
NUM_VALUES = 4
TTL_S = 3600
NOW = 1_800_000_000.0
TERMS = KVTerms(owner=7, ttl_s=TTL_S)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(clock: VirtualClock) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make_engine(store: KVStore, **arguments: object) -> Engine:
        made.append(Engine(store, f"e{len(made)}", unix_time=clock.now, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make_engine
    for engine in made:
        engine.scheduler.shutdown()
        for worker in engine.workers:
            worker.shutdown()


@pytest.fixture(params=KINDS_HERE)
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock) -> Iterator[KVStore]:
    """A store of each kind without a server. Those that end values by themselves do so by the test's clock."""
    with store_here(request.param, tmp_path, clock.now) as opened:
        yield opened


@pytest.fixture(params=SERVERS)
def served(request: pytest.FixtureRequest, clock: VirtualClock, shared_server: SharedServer) -> Iterator[KVStore]:
    """A store of each kind with one."""
    url = shared_server(request.param).url
    with RedisStore(url, unix_time=clock.now) if request.param == "redis" else open_store(url, PATIENT) as opened:
        yield opened


def asking(name: str, **fields: object) -> RequestView:
    return view(name, **({"num_tokens": NUM_TOKENS + 1, "salt": "s", "kv_terms": TERMS} | fields))  # type: ignore[arg-type]


def save(engine: Engine, **fields: object) -> torch.Tensor:
    """Compute a prompt and store it; its KV."""
    kv, blocks = random_kv(NUM_TOKENS), scattered(NUM_TOKENS, engine.block_size)
    engine.fill(blocks, kv)
    request = asking(f"save-{engine.step_id}", **fields)
    outcomes = [engine.save(request, blocks, stop, start=stop - 128) for stop in range(128, NUM_TOKENS + 1, 128)]
    assert all(outcome is not None and not outcome.code for outcome in outcomes), outcomes
    return kv


def keys_of(engine: Engine, **fields: object) -> list[bytes]:
    cut = engine.connectors[0].cut
    values = cut.whole_values(asking("x", **fields).block_keys, 0, NUM_TOKENS)
    return [value.key + suffix for value in values for suffix in cut.suffixes]


def loads_all(engine: Engine, kv: torch.Tensor) -> bool:
    """Whether all of the prompt is found and is right; nothing else comes."""
    request, blocks = asking(f"load-{engine.step_id}"), scattered(NUM_TOKENS, engine.block_size, start=7)
    found = engine.ask(request)
    outcome = engine.load(request, blocks, found) if found else None
    if outcome is None or outcome.code:
        assert outcome is None or (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 0, 0)
        return False
    assert torch.equal(engine.tokens(blocks, NUM_TOKENS), kv)
    return True


# --- every store --------------------------------------------------------------------------------------------------


def check_ends(store: KVStore, make: MakeEngine, clock: VirtualClock) -> None:
    """A value is used for its time to live and not a second longer; the next save puts a new one in its place."""
    kv = save(make(store))
    clock.advance(TTL_S - 1)
    assert loads_all(make(store), kv)
    clock.advance(1)
    engine = make(store)
    assert not loads_all(engine, kv)
    save(engine)
    clock.advance(TTL_S - 1)
    for reader in (engine, make(store)):
        assert loads_all(reader, kv)
    clock.advance(1)
    assert not loads_all(make(store), kv)


def test_a_value_is_used_for_its_time_to_live_also_where_the_store_knows_nothing_of_ends(
    store: KVStore, make: MakeEngine, clock: VirtualClock
) -> None:
    check_ends(store, make, clock)


def test_a_value_on_a_server_is_used_for_its_time_to_live(
    served: KVStore, make: MakeEngine, clock: VirtualClock
) -> None:
    check_ends(served, make, clock)


def test_what_is_found_to_be_over_is_deleted_where_the_store_did_not_know(
    store: KVStore, make: MakeEngine, clock: VirtualClock
) -> None:
    save(make(store))
    engine = make(store)
    clock.advance(TTL_S)
    assert not loads_all(engine, torch.empty(0))
    assert store.contains(keys_of(engine)) == [False] * NUM_VALUES
    assert store.count_damaged() == 0


def test_what_lies_behind_what_is_over_is_written_anew_though_nobody_has_looked_at_it(
    store: KVStore, make: MakeEngine, clock: VirtualClock
) -> None:
    """A value at a time: after the first one the load has failed, and the others are still in a store of files."""
    one_by_one = {"staging_bytes": "1", "io_threads": "1"}
    kv = save(make(store))
    clock.advance(TTL_S)
    engine = make(store, **one_by_one)
    assert not loads_all(engine, kv)
    save(engine)
    for reader in (engine, make(store, **one_by_one)):
        assert loads_all(reader, kv)


def test_the_end_of_a_signed_value_is_signed(
    store: KVStore, make: MakeEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    """Who may write to the store and does not know the secret makes no value live longer: it counts as damaged."""
    (tmp_path / "secret").write_text("a secret, long enough\n")
    (tmp_path / "secret").chmod(0o600)
    signed = {"sign": "true", "sign_key_file": f"{tmp_path}/secret"}
    engine = make(store, **signed)
    kv = save(engine)
    clock.advance(TTL_S - 1)
    assert loads_all(make(store, **signed), kv)
    [first, *_] = keys_of(engine)
    value = memoryview(bytearray(64 * 3 * 2 * 4 * 4 * 4 + ENVELOPE_BYTES))
    assert store.get([first], [value]) == [True]
    value[-16:-8] = bytes(8)
    store.delete([first])
    store.put([(first, value)])
    request, reader = asking("forged"), make(store, **signed)
    outcome = reader.load(request, scattered(NUM_TOKENS, 16), reader.ask(request))
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 0, 1)


# --- what goes with what ------------------------------------------------------------------------------------------


class Told(MemoryStore):
    """Memory that remembers on which terms it was asked."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.terms: dict[bytes, Terms] = {}
        self.plain: list[bytes] = []

    def put(self, items: Sequence[Item]) -> None:
        self.plain.extend(key for key, _ in items)
        super().put_on_terms(items, {})

    def put_on_terms(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        self.terms |= terms
        MemoryStore.put_on_terms(self, items, {})


def test_values_and_tails_of_a_request_are_stored_on_its_terms_and_others_on_none(make: MakeEngine) -> None:
    with Told() as told:
        engine = make(told)
        terms = KVTerms(owner=7, ttl_s=60, quota_bytes=1 << 30)
        request = asking("t", kv="handoff", num_tokens=71, kv_terms=terms)
        engine.hand_off(request, scattered(71, 16), 70)
        assert set(told.terms.values()) == {Terms(int(NOW) + 60, 7, 1 << 30)}
        assert (len(told.terms), told.plain) == (2, [])  # a value, and a tail of 6 tokens
        save(engine, kv_terms=None)
        assert set(told.plain) == {*keys_of(engine)} - {*told.terms}


@pytest.mark.parametrize("ttl_s", [None, 10 * TAIL_TTL_S])
def test_a_tail_goes_by_itself_however_long_the_content_stays(
    make: MakeEngine, clock: VirtualClock, ttl_s: int | None
) -> None:
    """What its engine, which is gone, did not delete. What is read beside it is not taken to end with it."""
    with Told() as told:
        terms = None if ttl_s is None else KVTerms(owner=7, ttl_s=ttl_s)
        handoff = make(told).hand_off(asking("t", kv="handoff", num_tokens=71, kv_terms=terms), scattered(71, 16), 70)
        assert [end for _, (end, _, _) in told.terms.items()][-1] == int(NOW) + TAIL_TTL_S
        decode = make(told)
        wanted = asking("t", kv="await_peer", num_tokens=71, handoff=handoff, kv_ready=True, kv_terms=terms)
        assert not decode.load(wanted, scattered(71, 16), 70).code
        clock.advance(TAIL_TTL_S)
        assert decode.load(wanted, scattered(71, 16), 70).num_tokens == 64
        keys = decode.scheduler._cut.whole_keys(wanted.block_keys, 0, 64)
        assert not decode.scheduler.lookups.ended(keys, clock.now())


def test_a_quota_without_a_time_to_live_leaves_values_as_they_were(make: MakeEngine) -> None:
    values = []
    for terms in (None, KVTerms(owner=7, quota_bytes=1 << 30)):
        with Told() as told:
            engine = make(told)
            save(engine, kv_terms=terms)
            out = [memoryview(bytearray(64 * 3 * 2 * 4 * 4 * 4 + ENVELOPE_BYTES)) for _ in range(NUM_VALUES)]
            assert told.get(keys_of(engine), out) == [True] * NUM_VALUES
            values.append(list(map(bytes, out)))
    assert values[0] == values[1]


@pytest.fixture
def tiers(tmp_path: Path, clock: VirtualClock) -> Iterator[TieredStore]:
    """Host memory in front of files."""
    with TieredStore(
        [HostStore(tmp_path / "kv", StoreOptions(capacity=4 << 20), clock.now), open_store(f"file://{tmp_path}/files")]
    ) as store:
        yield store


def host_of(tiers: TieredStore) -> HostStore:
    host = tiers.tiers[0].store
    assert isinstance(host, HostStore)
    return host


VALUE_BYTES = -(-(64 * 3 * 2 * 4 * 4 * 4 + ENVELOPE_BYTES) // PAGE_BYTES) * PAGE_BYTES  # of host memory


def test_a_load_from_a_lower_tier_brings_values_up_with_their_end_within_the_quota(
    tiers: TieredStore, make: MakeEngine, clock: VirtualClock
) -> None:
    lower, host = tiers.tiers[1].store, host_of(tiers)
    kv = save(make(lower))
    clock.advance(100)
    engine = make(tiers)
    request = asking("load", kv_terms=KVTerms(owner=7, ttl_s=TTL_S, quota_bytes=2 * VALUE_BYTES))
    blocks = scattered(NUM_TOKENS, 16)
    assert engine.ask(request) == NUM_TOKENS
    assert not engine.load(request, blocks, NUM_TOKENS).code
    assert torch.equal(engine.tokens(blocks, NUM_TOKENS), kv)
    assert host.terms_of(keys_of(engine)) == {
        key: Terms(int(NOW) + TTL_S, 7, 2 * VALUE_BYTES) for key in keys_of(engine)[:2]
    }
    assert host.count_held().owned == {7: 2 * VALUE_BYTES}


def test_what_a_waiting_request_will_load_is_brought_near_on_its_terms(tiers: TieredStore, make: MakeEngine) -> None:
    save(make(tiers.tiers[1].store))
    engine = make(tiers)
    others, request = view("o", num_tokens=65, salt="o"), asking("wait")
    news = {"waiting_keys": [others.block_keys, request.block_keys], "waiting_terms": [None, TERMS]}
    while not (ahead := engine.step(**news).ahead):
        engine.woken.acquire(timeout=0.01)  # look-ups ahead wake nobody
    assert [order.kv_terms for order in ahead] == [TERMS]
    assert not engine.wait(ahead[0].key).code
    assert host_of(tiers).terms_of(keys_of(engine)) == dict.fromkeys(keys_of(engine), Terms(int(NOW) + TTL_S, 7))


def test_what_an_operator_prefetches_is_brought_near_on_the_terms_of_the_order(
    tiers: TieredStore, make: MakeEngine
) -> None:
    save(make(tiers.tiers[1].store))
    engine = make(tiers)
    terms = msgspec.structs.replace(TERMS, quota_bytes=VALUE_BYTES)
    engine.scheduler.tiers.order(
        CacheOrder(order_id="o", action="prefetch", keys=list(asking("x").block_keys), kv_terms=terms)
    )
    engine.step()
    key = TransferKey("o", 0)
    while key not in (results := engine.worker.get_finished()).finished_sending:
        assert engine.woken.acquire(timeout=20)
    assert results.finished_sending[key].code == ""
    assert host_of(tiers).count_held().owned == {7: VALUE_BYTES}


def test_what_is_over_below_is_not_brought_near(tiers: TieredStore, make: MakeEngine, clock: VirtualClock) -> None:
    save(make(tiers.tiers[1].store))
    clock.advance(TTL_S)
    engine = make(tiers)
    request = asking("load")
    outcome = engine.load(request, scattered(NUM_TOKENS, 16), engine.ask(request))
    assert (outcome.code, outcome.num_expired, outcome.num_damaged) == (KVNotFound.code, NUM_VALUES, 0)
    assert len(host_of(tiers).own or ()) == 0


def test_a_value_that_one_quota_has_no_room_for_fails_its_save_and_no_other(
    make: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with HostStore(tmp_path / "kv", StoreOptions(capacity=4 << 20)) as host:
        engine = make(host)
        kv, blocks = random_kv(NUM_TOKENS), scattered(NUM_TOKENS, 16)
        engine.fill(blocks, kv)
        for number in range(3):
            small = asking(f"small-{number}", salt="small", kv_terms=KVTerms(owner=7, quota_bytes=1))
            outcome = engine.save(small, blocks, 128)
            assert outcome is not None
            assert outcome.code == StoreFull.code
            assert engine.ask(asking(f"again-{number}", salt="small")) == 0
            if not number:
                save(engine, kv_terms=KVTerms(owner=8, ttl_s=TTL_S, quota_bytes=1 << 30))
        assert loads_all(engine, kv)
    assert caplog.text.count("KV is not saved (store_full: host memory: ") == 1


def test_ranks_add_up_what_they_have_found_to_be_over(make: MakeEngine, clock: VirtualClock) -> None:
    with MemoryStore("ranks", unix_time=lambda: NOW) as store:
        save(make(store, tp=2))
        clock.advance(TTL_S)
        engine = make(store, tp=2)
        request = asking("load")
        engine.start_load(request, scattered(NUM_TOKENS, 16), engine.ask(request))
        while (outcomes := engine.reported(request.transfer_key)) is None:
            assert engine.woken.acquire(timeout=20)
            engine.collect()
        assert [outcome.num_expired for outcome in outcomes] == [NUM_VALUES, NUM_VALUES]


def test_a_clock_before_its_epoch_ends_values_and_nothing_else(make: MakeEngine, clock: VirtualClock) -> None:
    clock.advance(-1e9 - NOW)
    with MemoryStore("epoch", unix_time=clock.now) as store:
        save(make(store), kv_terms=KVTerms(owner=7, ttl_s=1))
        clock.advance(1e9 + NOW)
        assert not loads_all(make(store), torch.empty(0))


class Unclean(KVStore):
    """Has values that it cannot delete."""

    def __init__(self, inner: KVStore) -> None:
        self._inner = inner

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.contains(keys)

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        return self._inner.get(keys, out)

    def put(self, items: Sequence[Item]) -> None:
        self._inner.put(items)

    def delete(self, keys: Sequence[bytes]) -> None:
        raise StoreFull("read only")

    def close(self) -> None:
        return


def test_what_cannot_be_deleted_is_a_miss_all_the_same(make: MakeEngine, clock: VirtualClock) -> None:
    with MemoryStore("unclean") as memory:
        store = Unclean(memory)
        save(make(store))
        clock.advance(TTL_S)
        assert not loads_all(make(store), torch.empty(0))


# --- several tiers and engines ----------------------------------------------------------------------------------------


def test_a_value_that_is_over_in_a_near_tier_leaves_the_new_one_behind_it_alone(
    make: MakeEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    """Files know nothing of ends. Each host has one for itself in front of the one that they share."""
    first, second = (
        make(TieredStore([open_store(f"file://{tmp_path}/{name}"), open_store(f"file://{tmp_path}/shared")]))
        for name in "ab"
    )
    save(first)
    assert loads_all(second, save(make(open_store(f"file://{tmp_path}/other"))))  # it has a copy of its own now
    clock.advance(TTL_S)
    assert not loads_all(first, torch.empty(0))
    kv = save(first)
    copies = first.connectors[0].store._backfill  # type: ignore[attr-defined]
    wait_until_true(lambda: not (any(copies._offered.values()) or copies._is_busy), "all is copied to the tier behind")
    assert loads_all(second, kv)
    assert loads_all(first, kv)


@pytest.mark.parametrize("kind", ["file", "tiers", "host", "memory"])
def test_what_a_hand_off_finds_in_the_pool_is_stored_anew_when_the_stored_value_is_over(
    make: MakeEngine, clock: VirtualClock, tmp_path: Path, kind: str
) -> None:
    """Decode reads what prefill says that it has stored."""
    with store_here(kind, tmp_path, clock.now) as store:
        prefill, decode = make(store), make(store)
        prefill.scheduler.update_peers([decode.card()])
        decode.scheduler.update_peers([prefill.card()])
        kv, blocks = random_kv(NUM_TOKENS), scattered(NUM_TOKENS, 16)
        prefill.fill(blocks, kv)
        for number in range(3):
            handoff = prefill.hand_off(asking(f"t{number}", kv="handoff"), blocks, NUM_TOKENS)
            request = asking(f"t{number}", kv="await_peer", handoff=handoff, kv_ready=True)
            assert decode.ask(request) == NUM_TOKENS
            assert not decode.load(request, scattered(NUM_TOKENS, 16, start=7), NUM_TOKENS).code
            clock.advance(TTL_S)


def test_what_was_loaded_and_is_handed_off_after_its_end_is_stored_anew(
    make: MakeEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    with store_here("file", tmp_path, clock.now) as store:
        kv = save(make(store))
        prefill, decode = make(store), make(store)
        assert loads_all(prefill, kv)
        clock.advance(TTL_S)
        handoff = prefill.hand_off(asking("t", kv="handoff"), scattered(NUM_TOKENS, 16, start=7), NUM_TOKENS)
        request = asking("t", kv="await_peer", handoff=handoff, kv_ready=True)
        assert not decode.load(request, scattered(NUM_TOKENS, 16), decode.ask(request)).code


def test_a_value_without_an_end_is_not_used_where_values_have_one(make: MakeEngine, clock: VirtualClock) -> None:
    """It is of an engine that is older than ends, and ignored the terms."""
    with MemoryStore("older", unix_time=clock.now) as store:
        kv = save(make(store), kv_terms=None)
        assert not loads_all(make(store), kv)
        assert store.contains(keys_of(make(store))) == [False] * NUM_VALUES


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_a_memory_says_on_which_terms_it_keeps_values(clock: VirtualClock, tmp_path: Path, kind: str) -> None:
    with store_here(kind, tmp_path, clock.now) as store:
        terms = {b"a": Terms(int(NOW) + 5, 7, 1 << 20), b"b": Terms(0, 8)}
        store.put_on_terms([(key, memoryview(b"value")) for key in (b"a", b"b", b"c")], terms)
        told = store.terms_of([b"a", b"b", b"c", b"d"])
        assert told.keys() == terms.keys()
        assert [(of.expires_at, of.owner) for of in told.values()] == [
            (of.expires_at, of.owner) for of in terms.values()
        ]


def test_a_value_that_is_moved_keeps_its_end_and_its_owner(
    make: MakeEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    """Host memory tells them of what leaves it; a file has no more than the end, so that the order tells the owner."""
    host = HostStore(tmp_path / "kv", StoreOptions(capacity=64 << 20), clock.now)
    engine = make(TieredStore([host, open_store(f"file://{tmp_path}/files")]))
    kv, keys = save(engine), list(asking("x").block_keys)
    num_bytes = host.count_held().owned
    assert list(num_bytes) == [TERMS.owner]
    assert order(engine, "move", keys, source="host", tier="file")["1-file"].num_values == NUM_VALUES
    assert host.count_held().owned == {}
    moved = order(engine, "move", keys, source="file", tier="host", kv_terms=TERMS)["0-host"]
    assert moved.num_values == NUM_VALUES
    assert host.count_held().owned == num_bytes
    assert {terms.expires_at for terms in host.terms_of(keys_of(engine)).values()} == {NOW + TTL_S}
    clock.advance(TTL_S - 1)
    assert loads_all(make(engine.connectors[0].store), kv)
    clock.advance(1)
    assert not loads_all(make(engine.connectors[0].store), kv)
