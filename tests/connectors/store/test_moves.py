"""A prompt's values go from one tier into another: sound ones alone, and whatever fails, each is somewhere."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, count
from pathlib import Path

import pytest
from damage import KnownStore, damage
from store_rig import KEYS, WAIT_S, Engine, FaultyStore, find, order, prefill, random_kv, scattered, view
from store_servers import RedisServer
from traffic import wait_until_true

from pdkv.connectors.base import ConfirmedRange
from pdkv.connectors.store.orders import values_of
from pdkv.errors import StoreFull, StoreTimeout, StoreUnavailable, StoreUnsupported, TransferTimeout
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.host_segment import key_of
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.redis_store import RedisStore
from pdkv.kv_store.terms import Terms
from pdkv.kv_store.tiers import TieredStore
from pdkv.testing import VirtualClock
from pdkv.wire.kv import KVGroup

HOST_BYTES = 2 << 20
ONE_VALUE = {"staging_bytes": "1"}
"""Options: a buffer has room for one value."""


@pytest.fixture
def host(tmp_path: Path) -> HostStore:
    return HostStore(tmp_path / "host", StoreOptions(capacity=HOST_BYTES))


@pytest.fixture
def lower() -> Iterator[FaultyStore]:
    store = FaultyStore()
    yield store
    store.inner.close()


@pytest.fixture
def engine(host: HostStore, lower: FaultyStore) -> Iterator[Engine]:
    """Its values go one by one. The other tier takes all, too."""
    with TieredStore([host, lower]) as tiers:
        engine = Engine(tiers, **ONE_VALUE)
        yield engine
        engine.close()


def keys_of(engine: Engine, num_tokens: int = 256, salt: str = "0") -> list[bytes]:
    """What all ranks write of a prompt."""
    block_keys = view("x", num_tokens=num_tokens + 1, salt=salt).block_keys
    cuts = [connector.cut for connector in engine.connectors]
    return [key for cut in cuts for value in values_of(cut, block_keys) for key in cut.own_keys(value)]


def there(store: KVStore, keys: Sequence[bytes]) -> list[bytes]:
    return list(compress(keys, store.contains(keys)))


# --- where values are afterwards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ONE_VALUE, {"codec": "fp8"}], ids=["whole", "one by one", "coded"])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_moved_is_in_the_one_tier_and_not_in_the_other(
    host: HostStore, tmp_path: Path, tp: int, options: dict[str, str]
) -> None:
    with TieredStore([host, FileStore(tmp_path / "files")]) as tiers:
        engine = Engine(tiers, tp=tp, **options)
        kv, _ = prefill(engine, 250)  # three values and a tail
        order(engine, "clear", tier="file")
        moved = order(engine, "move", source="host", tier="file")
        assert {name: (tier.num_tokens, tier.num_values, tier.code) for name, tier in moved.items()} == {
            "1-file": (192, 3 * tp, "")
        }
        assert find(engine) == {"0-host": (0, 0), "1-file": (192, 3 * tp)}
        assert order(engine, "move", source="host", tier="file")["1-file"].num_values == 0, "there is no more of it"
        assert order(engine, "move", source="1-file", tier="0-host")["0-host"].num_values == 3 * tp
        assert find(engine) == {"0-host": (192, 3 * tp), "1-file": (0, 0)}
        request, blocks = view("u", num_tokens=193, salt="0"), scattered(192, 16, start=7)
        assert engine.ask(request) == 192
        assert not engine.load(request, blocks, 192).code
        close_to = 0.06 if options.get("codec") else 0.0  # of numbers from 0 to 1
        assert (engine.tokens(blocks, 192) - kv[:192]).abs().max() <= close_to
        engine.close()


def test_what_both_have_leaves_the_one(engine: Engine, lower: FaultyStore) -> None:
    prefill(engine, 192)
    num_put = lower.count("put")
    assert order(engine, "move", source="host", tier="faulty")["1-faulty"].num_values == 3
    assert find(engine) == {"0-host": (0, 0), "1-faulty": (192, 3)}
    assert lower.count("put") == num_put


def test_a_copy_stays_where_it_was(engine: Engine, lower: FaultyStore) -> None:
    prefill(engine, 192)
    lower.inner.delete(keys_of(engine))
    moved = order(engine, "move", source="host", tier="faulty", copy=True)["1-faulty"]
    assert (moved.num_tokens, moved.num_values) == (192, 3)
    assert find(engine) == {"0-host": (192, 3), "1-faulty": (192, 3)}


def test_values_of_all_groups_are_moved(host: HostStore, lower: FaultyStore) -> None:
    with TieredStore([host, lower]) as tiers:
        engine = Engine(tiers, groups=(KVGroup((0, 2)), KVGroup((1, 3), window=20)))
        request, blocks = view("t", num_tokens=257, salt="0"), scattered(256, 16)
        for stop in (128, 256):
            meta = engine.step(confirmed=[ConfirmedRange(request, stop - 128, stop, [blocks, blocks], False)])
            assert not any(engine.wait(hold.key).code for hold in meta.holds)
        found = find(engine)
        num_values = found["0-host"][1]
        wait_until_true(lambda: find(engine)["1-faulty"] == found["0-host"], "all is copied behind the saver")
        assert found["0-host"][0] == 256
        assert num_values > 4, "four of the group without a window, and blocks of the other one"
        assert order(engine, "move", source="host", tier="faulty")["1-faulty"].num_values == num_values
        assert find(engine) == {"0-host": (0, 0), "1-faulty": (256, num_values)}
        engine.close()


def test_each_engine_moves_what_it_has_written(host: HostStore, lower: FaultyStore, tmp_path: Path) -> None:
    others = HostStore(tmp_path / "host", StoreOptions(capacity=HOST_BYTES))
    with TieredStore([host, lower]) as first, TieredStore([others, lower]) as second:
        one, other = Engine(first), Engine(second, "f")
        prefill(one, 192)
        lower.inner.delete(keys_of(one))
        assert find(other)["0-host"] == (192, 3)
        assert order(other, "move", source="host", tier="faulty")["1-faulty"].num_values == 0
        assert find(other) == {"0-host": (192, 3), "1-faulty": (0, 0)}
        assert order(one, "move", source="host", tier="faulty")["1-faulty"].num_values == 3
        assert find(other) == {"0-host": (0, 0), "1-faulty": (192, 3)}
        one.close()
        other.close()


def test_a_pin_goes_with_its_value_and_stays_with_what_is_copied(engine: Engine) -> None:
    prefill(engine, 192)
    for copy, num_pins in ((True, 3), (False, 0)):
        order(engine, "pin", tier="host")
        order(engine, "move", source="host", tier="faulty", copy=copy)
        assert order(engine, "unpin", tier="host")["0-host"].num_values == num_pins
    order(engine, "move", source="faulty", tier="host")
    assert order(engine, "unpin", tier="host")["0-host"].num_values == 0


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_value_is_not_moved_but_counted_and_deleted(host: HostStore) -> None:
    known = KnownStore(MemoryStore(None))
    with TieredStore([host, known]) as tiers:
        engine = Engine(tiers)
        prefill(engine, 192)
        keys = keys_of(engine, 192)
        host.discard(None)
        damage(known, keys[1], "flip", random.Random(0))
        moved = order(engine, "move", source="known", tier="host")["0-host"]
        assert (moved.num_tokens, moved.num_values) == (64, 2), "behind a gap nothing is of use"
        assert there(host, keys) == [keys[0], keys[2]]
        assert there(known, keys) == []
        assert engine.worker.get_stats()[""].damaged_values == 1
        engine.close()


def test_a_sound_value_takes_the_place_of_a_damaged_one(host: HostStore) -> None:
    """Else the only sound one would go."""
    known = KnownStore(MemoryStore(None))
    with TieredStore([host, known]) as tiers:
        engine = Engine(tiers)
        prefill(engine, 192)
        keys = keys_of(engine, 192)
        sound = known.saved[keys[1]]
        damage(known, keys[1], "flip", random.Random(0))
        assert order(engine, "move", source="host", tier="known")["1-known"].num_values == 3
        assert there(host, keys) == []
        value = memoryview(bytearray(len(sound)))
        assert known.get([keys[1]], [value]) == [True]
        assert value == sound
        assert engine.worker.get_stats()[""].damaged_values == 1
        engine.close()


class Garbling(KnownStore):
    """Keeps something else than what it is given."""

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        super().put(items)
        for key, _ in items:
            damage(self, key, "flip", random.Random(0))


def test_what_comes_back_damaged_from_where_it_was_put_stays(host: HostStore) -> None:
    known = Garbling(MemoryStore(None))
    with TieredStore([host, known]) as tiers:
        engine = Engine(tiers)
        prefill(engine, 192)
        keys = keys_of(engine, 192)
        known.discard(keys)
        moved = order(engine, "move", source="host", tier="garbling")["1-garbling"]
        assert (moved.num_tokens, moved.num_values, moved.code) == (0, 0, "")
        assert (there(host, keys), there(known, keys)) == (keys, [])
        assert engine.worker.get_stats()[""].damaged_values == 3
        engine.close()


# --- what fails on the way --------------------------------------------------------------------------------------------


class Dying(FaultyStore):
    """Fails for good with one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left: float = float("inf")

    def _enter(self, method: str, num_keys: int) -> None:
        super()._enter(method, num_keys)
        self.num_left -= 1
        if self.num_left < 0:
            raise StoreUnavailable("it died")


@pytest.mark.parametrize("source", ["host", "dying"])
def test_whichever_call_fails_each_value_is_somewhere(tmp_path: Path, source: str) -> None:
    """The other tier's calls fail from the first one on, from the second one on, and so forth, until none is left."""
    is_over = False
    for num_calls in count():
        host, lower = HostStore(tmp_path / f"{num_calls}", StoreOptions(capacity=HOST_BYTES)), Dying()
        with TieredStore([host, lower]) as tiers:
            engine = Engine(tiers, **ONE_VALUE)
            prefill(engine, 192)
            keys = keys_of(engine, 192)
            (lower if source == "host" else host).discard(keys)
            lower.num_left = num_calls
            (moved,) = order(engine, "move", source=source, tier="dying" if source == "host" else "host").values()
            found = [there(host, keys), there(lower.inner, keys)]
            assert {*found[0], *found[1]} == set(keys)
            is_over = not moved.code
            assert is_over or moved.code == StoreUnavailable.code
            assert is_over or source == "dying" or len(found[0]) in (0, 3), "all goes, or nothing"
            engine.close()
        lower.inner.close()
        if is_over:
            break
    assert num_calls > 6
    assert (moved.num_tokens, moved.num_values) == (192, 3)


class DiesWhilePut(RedisStore):
    """Its server is killed before the second value is put."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.url)
        self._server = server
        self.num_puts = 0

    def put_on_terms(self, items: Sequence[tuple[bytes, Buffer]], terms: Mapping[bytes, Terms]) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self._server.kill()
        super().put_on_terms(items, terms)


def test_a_server_that_is_killed_in_the_middle_of_a_move_costs_nothing(host: HostStore) -> None:
    with RedisServer() as server:
        with TieredStore([host]) as tiers:
            engine = Engine(tiers)
            prefill(engine, 192)
            engine.close()
        with HostStore(host._directory.path, StoreOptions()) as again:
            lower = DiesWhilePut(server)
            with TieredStore([again, lower]) as tiers:
                engine = Engine(tiers, **ONE_VALUE)
                moved = order(engine, "move", source="host", tier="1-dieswhileput")["1-dieswhileput"]
                assert moved.code == StoreUnavailable.code
                assert lower.num_puts == 2
                assert find(engine, tier="host") == {"0-host": (192, 3)}
                server.start()
                assert order(engine, "move", source="host", tier="1-dieswhileput")["1-dieswhileput"].num_values == 3
                assert find(engine) == {"0-host": (0, 0), "1-dieswhileput": (192, 3)}
                engine.close()


def test_what_has_no_room_stays_where_it_is(tmp_path: Path) -> None:
    """What comes last takes the places of what came first, which must not have left the source by then."""
    host, lower = HostStore(tmp_path / "small", StoreOptions(capacity=1 << 20)), FaultyStore()
    with TieredStore([host, lower]) as tiers:
        engine = Engine(tiers, layer_groups="3", **ONE_VALUE)
        num_tokens = 512  # 24 parts of values, for 16 pages
        blocks = scattered(num_tokens, 16)
        engine.fill(blocks, random_kv(num_tokens))
        request = view("t", num_tokens=num_tokens + 1, salt="0")
        for stop in range(128, num_tokens + 1, 128):
            assert engine.save(request, blocks, stop, start=stop - 128) is not None
            saved = keys_of(engine, stop)
            wait_until_true(lambda: len(there(lower, saved)) == len(saved), "it is below")  # noqa: B023
        keys = keys_of(engine, num_tokens)
        host.discard(None)
        (moved,) = order(engine, "move", request.block_keys, source="faulty", tier="host").values()
        assert (moved.num_values, moved.code) == (16, "")
        assert len(there(host, keys)) == 16
        assert sorted([*there(host, keys), *there(lower, keys)]) == sorted(keys)
        engine.close()
    lower.inner.close()


def test_a_full_destination_says_so(engine: Engine, lower: FaultyStore) -> None:
    prefill(engine, 192)
    lower.inner.delete(keys_of(engine))
    lower.failing["put"] = StoreFull("no room")
    moved = order(engine, "move", source="host", tier="faulty")["1-faulty"]
    assert (moved.code, moved.problem) == (StoreFull.code, "no room")
    assert find(engine) == {"0-host": (192, 3), "1-faulty": (0, 0)}


def test_behind_the_deadline_nothing_leaves(
    host: HostStore, lower: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes with the last value that is put."""
    clock = VirtualClock()
    with TieredStore([host, lower]) as tiers:
        engine = Engine(tiers, clock=clock, **ONE_VALUE)
        prefill(engine, 192)
        lower.inner.delete(keys_of(engine))
        num_put, put = lower.count("put"), lower.put

        def put_late(items: Sequence[tuple[bytes, Buffer]]) -> None:
            put(items)
            clock.advance(3600.0 * (lower.count("put") - num_put == 3))

        monkeypatch.setattr(lower, "put", put_late)
        moved = order(engine, "move", KEYS[:12], source="host", tier="faulty")["1-faulty"]
        assert (moved.code, moved.problem) == (TransferTimeout.code, "all values were copied, but not removed in time")
        assert find(engine) == {"0-host": (192, 3), "1-faulty": (192, 3)}
        engine.close()


@pytest.mark.parametrize("source", ["host", "faulty"])
@pytest.mark.parametrize("held", ["put", "delete"])
def test_a_copy_under_way_neither_brings_back_nor_takes_what_is_moved(
    host: HostStore, lower: FaultyStore, source: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that gets what is used again hangs, when it is put or when it is taken back: until then nothing leaves."""
    with TieredStore([host, lower], write=["all", "second-use"]) as tiers:
        engine = Engine(tiers)
        prefill(engine, 64)
        keys = keys_of(engine, 64)
        lower.hold("put")
        request = view("u", num_tokens=65, salt="0")
        assert engine.ask(request) == 64
        assert not engine.load(request, scattered(64, 16, start=7), 64).code
        lower.wait_held("put")
        if held == "delete":
            order(engine, "clear", tier="faulty")
            lower.hold("delete")
            lower.let_go("put")
            lower.wait_held("delete")
        else:
            lower.inner.put([(keys[0], value_of(host, keys[0]))])
        destination = "faulty" if source == "host" else "host"
        still = tiers.still
        with monkeypatch.context() as impatient:
            impatient.setattr(tiers, "still", lambda timeout_s: still(0.0))
            (moved,) = order(engine, "move", source=source, tier=destination).values()
        assert (moved.code, moved.problem) == (StoreTimeout.code, "a copy between tiers has not ended in time")
        assert there(host, keys) == keys
        lower.let_go(held)
        with still(WAIT_S):
            pass
        (moved,) = order(engine, "move", source=source, tier=destination).values()
        assert not moved.code
        with still(WAIT_S):
            assert (there(host, keys), there(lower.inner, keys)) == (([], keys) if source == "host" else (keys, []))
        engine.close()


def test_what_was_moved_up_goes_down_again_with_its_next_use(host: HostStore, lower: FaultyStore) -> None:
    """It is not believed to be where it was."""
    with TieredStore([host, lower], write=["all", "second-use"]) as tiers:
        engine = Engine(tiers)
        prefill(engine, 64)
        for name in ("u", "w"):
            lower.hold("put")
            request = view(name, num_tokens=65, salt="0")
            assert engine.ask(request) == 64
            assert not engine.load(request, scattered(64, 16, start=7), 64).code
            lower.wait_held("put")
            lower.let_go("put")
            with tiers.still(WAIT_S):
                pass
            assert order(engine, "move", source="faulty", tier="host")["0-host"].num_values == 1
        engine.close()


def test_what_makes_room_for_what_is_moved_goes_down_by_its_policy(tmp_path: Path, lower: FaultyStore) -> None:
    host = HostStore(tmp_path / "small", StoreOptions(capacity=1 << 20))
    with TieredStore([host, lower], write=["all", "evicted"]) as tiers:
        engine = Engine(tiers, layer_groups="3")
        source = Engine(lower, "s", layer_groups="3")
        for one, seed in ((engine, 1), (source, 0)):  # 12 parts each, for 16 pages
            prefill(one, 256, transfer_id=f"t{seed}", seed=seed)
        num_put = lower.count("put")
        assert order(engine, "move", source="faulty", tier="host")["0-host"].num_values == 12
        wait_until_true(lambda: lower.count("put") > num_put, "what is about to go is put below")
        source.close()
        engine.close()


def value_of(store: HostStore, key: bytes) -> memoryview:
    """What lies under a key."""
    own = store.own
    assert own is not None
    found = own.find(key_of(key))
    assert found is not None
    value = memoryview(bytearray(found.size))
    assert store.get([key], [value]) == [True]
    return value


@pytest.mark.parametrize(
    ("source", "tier", "message"),
    [
        ("host", "0-host", "from 'host' and tier '0-host' name the same tier: expected two"),
        ("host", "memory", "tier 'memory' names 1-memory and 2-memory: one tier was expected"),
        ("memory", "host", "from 'memory' names 1-memory and 2-memory: one tier was expected"),
    ],
)
def test_names_that_are_not_of_two_tiers_are_refused(host: HostStore, source: str, tier: str, message: str) -> None:
    with TieredStore([host, MemoryStore("m1"), MemoryStore("m2")]) as tiers:
        engine = Engine(tiers)
        prefill(engine, 192)
        for answer in order(engine, "move", source=source, tier=tier).values():
            assert (answer.code, answer.problem) == (StoreUnsupported.code, message)
        assert find(engine) == dict.fromkeys(tiers.parts(), (192, 3))
        engine.close()


def test_a_store_that_lacks_one_of_the_tiers_has_no_part_in_it(engine: Engine) -> None:
    assert order(engine, "move", source="tape", tier="host") == {}
    assert order(engine, "move", source="host", tier="tape") == {}
