"""Values that went away, or are not what was saved: how far a load comes, who is told, and what is believed later."""

import logging
import os
import random
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from damage import KnownStore
from no_threads import no_threads
from store_rig import Engine, FaultyStore, MakeEngine, prefill, random_kv, scattered, view

from pdkv.base.log_limit import LogLimit
from pdkv.connectors.base import RequestView, TransferResults
from pdkv.connectors.store import lookup as store_lookup
from pdkv.connectors.store import values as store_values
from pdkv.connectors.store import worker as store_worker
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.errors import ConfigError, KVNotFound, ServerBusy, StoreUnavailable
from pdkv.kv_store.base import Buffer
from pdkv.kv_store.registry import open_store
from pdkv.testing import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def keys_of(engine: Engine, part: int = 0, num_tokens: int = 256, salt: str = "0") -> list[bytes]:
    cut = engine.connectors[0].cut
    block_keys = view("x", num_tokens=num_tokens + 1, salt=salt).block_keys
    return [value.key + cut.suffixes[part] for value in cut.whole_values(block_keys, 0, num_tokens)]


def flip(store: FaultyStore, key: bytes) -> None:
    value = store.inner._shelf._values[key]
    value[len(value) // 2] ^= 1


REQUEST: dict[str, object] = {"num_tokens": 257, "salt": "0"}


def local(name: str = "u", **fields: object) -> RequestView:
    return view(name, **(REQUEST | fields))  # type: ignore[arg-type]


# --- how far a load comes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["1", "1000000"], ids=["a value a job", "one job"])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(("gap", "part"), [(0, 0), (1, 2), (2, 1), (3, 2)])
def test_a_load_comes_as_far_as_the_first_value_that_lacks_a_part(
    store: FaultyStore, make: MakeEngine, gap: int, part: int, layerwise: bool, staging: str
) -> None:
    """B1."""
    options = {"layer_groups": "3", "load": "layerwise" if layerwise else "async", "staging_bytes": staging}
    kv, _ = prefill(make("p", **options), 256)
    engine, request, blocks = make("o", **options), local(), scattered(256, 16)
    assert engine.ask(request) == 256
    store.inner.delete([keys_of(engine, part)[gap]])
    engine.start_load(request, blocks, 256, layerwise=layerwise)
    if layerwise:
        engine.forward()  # waits for all that comes
        outcomes = engine.reported(request.transfer_key)
        assert outcomes is not None, "it is reported with its own step, or nothing of it could be used"
        outcome = outcomes[0]
    else:
        outcome = engine.wait(request.transfer_key)
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 64 * gap, 0)
    assert torch.equal(engine.tokens(blocks, 256)[: 64 * gap], kv[: 64 * gap])
    assert engine.ask(local("v"), 0) == 64 * gap, "what came is still believed, what did not is not"


def test_a_load_behind_a_hit_counts_from_the_hit(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p"), 256)
    for gap, expected in ((0, 0), (1, 32), (2, 96)):
        engine = make(f"o{gap}", block_size=32)
        request = local(f"u{gap}", num_local_hit=32)
        assert engine.ask(request, 32) == 224
        store.inner.delete([keys_of(engine)[gap]])
        outcome = engine.load(request, scattered(256, 32), 224)
        assert (outcome.code, outcome.num_tokens) == (KVNotFound.code, expected)
        prefill(make(f"p{gap}"), 256, transfer_id=f"again{gap}")


def test_what_a_save_that_was_cancelled_may_have_stored_is_looked_up_again(
    store: FaultyStore, make: MakeEngine
) -> None:
    """Decode may load a prompt, and its lease end, before prefill has reported the save."""
    engine, request = make("p"), local("a", kv="handoff")
    assert engine.ask(local("u")) == 0, "a miss is believed for a while"
    store.hold("put")
    (hold,) = engine.confirm(request, scattered(256, 16), 256, last=True).holds
    store.wait_held("put")
    with closing(Engine(store.inner, "other")) as other:
        prefill(other, 256)  # as the save that is held will, if it still may
        engine.worker.cancel(request.transfer_key, "send")
        store.let_go("put")
        assert engine.wait(hold.key).code
        assert engine.ask(local("v")) == 256


def test_a_store_that_fails_midway_leaves_what_came_before(make: MakeEngine, store: FaultyStore) -> None:
    kv, _ = prefill(make("p"), 256)
    engine, request, blocks = make("o", staging_bytes="1", io_threads="1"), local(), scattered(256, 16)
    assert engine.ask(request) == 256
    store.hold("get")
    engine.start_load(request, blocks, 256)
    store.wait_held("get")
    gate = store._gates["get"]
    store.hold("get")  # the next one waits at a gate of its own
    gate.set()
    store.wait_held("get")
    store.failing["get"] = StoreUnavailable("gone")
    store.let_go("get")
    outcome = engine.wait(request.transfer_key)
    assert (outcome.code, outcome.num_tokens) == (StoreUnavailable.code, 64)
    assert torch.equal(engine.tokens(blocks, 64), kv[:64])


def test_a_damaged_tail_costs_the_tail(make: MakeEngine, store: FaultyStore) -> None:
    kv, handoff = prefill(make("p"), 100)
    (tail,) = set(store.inner._shelf._values) - set(keys_of(make("x"), num_tokens=64))
    flip(store, tail)
    decode = make("d")
    request = view("t", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True, salt="0")
    assert decode.ask(request) == 100
    outcome = decode.load(request, scattered(100, 16), 100)
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 64, 1)
    assert torch.equal(decode.tokens(scattered(100, 16), 64), kv[:64])
    assert tail not in store.inner._shelf._values


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_come_as_far_as_the_one_that_came_least_far(store: FaultyStore, make: MakeEngine, tp: int) -> None:
    prefill(make("p", tp=tp), 256)
    engine, request = make("o", tp=tp), local()
    assert engine.ask(request) == 256
    flip(store, keys_of(engine, tp - 1)[2])
    flip(store, keys_of(engine, 0)[3])
    engine.scheduler.update_state_after_alloc(request, [scattered(256, 16)], 256)
    engine.step()
    aggregator = TransferAggregator(tp)
    merged: TransferResults | None = None
    while not merged:
        assert engine.woken.acquire(timeout=20)
        merged = aggregator.add([worker.get_finished() for worker in engine.workers])
    outcome = merged.failed_receiving[request.transfer_key]
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 128, 2)


# --- damaged values -----------------------------------------------------------------------------------------------


def test_a_value_that_is_replaced_meanwhile_is_used(store: FaultyStore, make: MakeEngine) -> None:
    """Another engine has found the damage first."""
    kv, _ = prefill(make("p"), 256)
    engine, request, blocks = make("o"), local(), scattered(256, 16)
    assert engine.ask(request) == 256
    key = keys_of(engine)[1]
    flip(store, key)
    read = store.inner.get
    num_reads = 0

    def get(keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            flip(store, key)
        return read(keys, out)

    store.inner.get = get  # type: ignore[method-assign]
    outcome = engine.load(request, blocks, 256)
    assert (outcome.code, outcome.num_damaged) == ("", 1)
    assert torch.equal(engine.tokens(blocks, 256), kv)
    assert store.count("delete") == 0


def test_a_value_that_comes_between_two_looks_is_used_and_was_no_damage(store: FaultyStore, make: MakeEngine) -> None:
    kv, _ = prefill(make("p"), 256)
    engine, request, blocks = make("o"), local(), scattered(256, 16)
    assert engine.ask(request) == 256
    key = keys_of(engine)[1]
    value = store.inner._shelf._values[key].copy()
    store.inner.delete([key])
    store.hold("contains")
    engine.start_load(request, blocks, 256)
    store.wait_held("contains")
    store.inner.put([(key, memoryview(value))])
    store.let_go("contains")
    outcome = engine.wait(request.transfer_key)
    assert (outcome.code, outcome.num_damaged) == ("", 0)
    assert torch.equal(engine.tokens(blocks, 256), kv)


def test_damage_that_cannot_be_deleted_is_asked_for_again_after_a_while_only(
    store: FaultyStore, make: MakeEngine, clock: VirtualClock
) -> None:
    prefill(make("p"), 256)
    engine = make("o", clock=clock)
    assert engine.ask(local()) == 256
    flip(store, keys_of(engine)[2])
    store.failing["delete"] = StoreUnavailable("read only")
    outcome = engine.load(local(), scattered(256, 16), 256)
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 128, 1)
    num_gets = store.count("get")
    for seconds in (0, store_lookup.BARRED_S / 2):
        clock.advance(seconds)
        assert engine.ask(local(f"v{seconds}")) == 128
        assert engine.ask(local(f"w{seconds}", salt="0", num_tokens=200)) == 128
    assert store.count("get") == num_gets
    clock.advance(store_lookup.BARRED_S)
    assert engine.ask(local("later")) == 256, "once in a while it is tried"
    assert engine.load(local("later"), scattered(256, 16), 256).num_tokens == 128


def test_damage_that_could_not_be_deleted_goes_with_the_next_save(store: FaultyStore, make: MakeEngine) -> None:
    """A store leaves a key that exists as it is."""
    kv, _ = prefill(make("p"), 256)
    engine, blocks = make("o"), scattered(256, 16)
    assert engine.ask(local()) == 256
    flip(store, keys_of(engine)[2])
    store.failing["delete"] = StoreUnavailable("not now")
    assert engine.load(local(), blocks, 256).num_tokens == 128
    store.failing.clear()
    engine.fill(blocks, kv)
    engine.save(view("s", num_tokens=257, salt="0"), blocks, 256, start=128)
    assert store.calls[-2:] == [("delete", 2), ("put", 2)], "what lies behind it, too: nobody has looked at it"
    engine.pools[0].fill_(-1)
    assert engine.ask(local("v")) == 256
    outcome = engine.load(local("v"), blocks, 256)
    assert (outcome.code, outcome.num_damaged) == ("", 0)
    assert torch.equal(engine.tokens(blocks, 256), kv)


class Guessing(FaultyStore):
    """Asks key by key, and takes it that who has the last one has all."""

    @property
    def asks_key_by_key(self) -> bool:
        return True

    def count_prefixes(self, chains: Sequence[Sequence[bytes]]) -> list[int]:
        exact = super().count_prefixes(chains)
        return [len(chain) if self.contains(chain)[-1] else count for chain, count in zip(chains, exact, strict=True)]


def test_a_gap_that_nobody_has_seen_is_computed_and_stored(make: MakeEngine) -> None:
    """By a load and a save: the store is not asked for every key."""
    store = Guessing()
    writer, engine = Engine(store, "p", layer_groups="3"), Engine(store, "o", layer_groups="3")
    kv, _ = prefill(writer, 256)
    blocks = scattered(256, 16)
    lost = keys_of(engine)[2]
    store.inner.delete([lost])
    assert engine.ask(local()) == 256
    outcome = engine.load(local(), blocks, 256)
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (KVNotFound.code, 128, 0)
    engine.fill(blocks, kv)
    engine.save(view("s", num_tokens=257, salt="0"), blocks, 256, start=128)
    assert store.inner.contains([lost]) == [True]
    engine.pools[0].fill_(-1)
    assert engine.ask(local("v")) == 256
    assert not engine.load(local("v"), blocks, 256).code
    assert torch.equal(engine.tokens(blocks, 256), kv)
    for each in (writer, engine):
        each.close()


@pytest.mark.parametrize(("kind", "at_once"), [(FaultyStore, 1), (Guessing, 8)], ids=["batches", "key_by_key"])
def test_a_store_that_is_asked_key_by_key_is_asked_for_eight_values_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: type[FaultyStore], at_once: int
) -> None:
    """F65: whatever the size of a value. One at a time, a load took as many times the way to the store."""
    monkeypatch.setattr(store_worker, "_STAGING_BYTES", 1)
    store = kind()
    writer, engine = Engine(store, "p"), Engine(store, "o")
    prefill(writer, 512)
    store.calls.clear()
    assert engine.ask(local(num_tokens=513)) == 512
    assert not engine.load(local(num_tokens=513), scattered(512, 16), 512).code
    assert {count for method, count in store.calls if method == "get"} == {at_once}
    for each in (writer, engine):
        each.close()


def test_lookups_that_wait_together_are_answered_each_by_its_own() -> None:
    """Those of prompts, and those of windows, for which each key is asked for."""
    store = Guessing()
    lookups = KeyLookups(store, [b"-0", b"-1"], lambda: None, timeout_s=20.0)
    chains = [[b"%d-%d" % (prompt, number) for number in range(4)] for prompt in range(3)]
    for suffix in (b"-0", b"-1"):
        store.put([(key + suffix, memoryview(b"x")) for key in [*chains[0], *chains[1][:1], chains[2][3]]])
    store.hold("contains")
    assert lookups.num_found([b"first"]) is None
    store.wait_held("contains")
    assert [lookups.num_found(chain) for chain in chains[:2]] == [None, None]
    assert lookups.look_up(chains[2]) is None
    store.let_go("contains")
    while lookups.look_up(chains[2]) is None:
        threading.Event().wait(0.001)
    assert [lookups.num_found(chain) for chain in chains[:2]] == [4, 1]
    assert lookups.look_up(chains[2]) == [False, False, False, True]
    lookups.close()


def test_where_the_last_value_lacks_a_part_each_is_asked_for() -> None:
    store = Guessing()
    lookups = KeyLookups(store, [b"-0", b"-1"], lambda: None, timeout_s=20.0)
    keys = [b"%d" % number for number in range(4)]
    store.put([(key + b"-0", memoryview(b"x")) for key in keys])
    store.put([(key + b"-1", memoryview(b"x")) for key in keys[:2]])
    while (num_found := lookups.num_found(keys)) is None:
        threading.Event().wait(0.001)
    assert num_found == 2
    lookups.close()


def test_lookups_for_which_there_is_one_thread_only_leave_none() -> None:
    with no_threads(but=1), pytest.raises(ServerBusy, match="no thread for pdkv-lookup-deadline"):
        KeyLookups(FaultyStore(), [b""], lambda: None, timeout_s=1.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pdkv-lookup")]


def test_what_is_barred_is_bounded() -> None:
    lookups = KeyLookups(FaultyStore(), [b""], lambda: None, timeout_s=1.0)
    for number in range(store_lookup.MAX_BARRED_KEYS + 100):
        lookups.bar([b"%d" % number])
    assert len(lookups._barred) == store_lookup.MAX_BARRED_KEYS
    lookups.close()


def test_a_burst_is_told_once(make: MakeEngine, store: FaultyStore, caplog: pytest.LogCaptureFixture) -> None:
    prefill(make("p"), 256)
    engine = make("o", staging_bytes="1")
    for index in range(4):
        assert engine.ask(local(f"u{index}")) == 256
        flip(store, keys_of(engine)[index])
        with caplog.at_level(logging.WARNING):
            assert engine.load(local(f"u{index}"), scattered(256, 16), 256).num_damaged == 1
        prefill(make(f"p{index}"), 256, transfer_id=f"t{index}")
        engine.scheduler.lookups.add([key[:16] for key in keys_of(engine)])
    assert caplog.text.count("damaged or forged") == 1
    assert "1 stored values were" in caplog.text
    engine.worker._values._log_limit = LogLimit(store_values.QUIET_S)  # the interval is over
    assert engine.ask(local("last")) == 256
    flip(store, keys_of(engine)[0])
    with caplog.at_level(logging.WARNING):
        engine.load(local("last"), scattered(256, 16), 256)
    assert "4 stored values were" in caplog.text, "the ones in between are in the next line"


def test_damage_that_a_store_finds_by_itself_is_counted_too(tmp_path: Path) -> None:
    """A file's header, its CRC, its length: the store answers with a miss and removes it."""
    with KnownStore(open_store(f"file://{tmp_path}/values")) as store:
        writer, reader = Engine(store, "p"), Engine(store, "o")
        rng = random.Random(5)
        for number in range(20):
            name = str(number)
            writer.fill(scattered(128, 16), random_kv(128, number))
            assert writer.save(view(f"s{name}", num_tokens=129, salt=name), scattered(128, 16), 128)
            (path, *_) = (tmp_path / "values").iterdir()
            data = bytearray(path.read_bytes())
            if number % 2:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            else:
                del data[rng.randrange(len(data)) :]
            path.write_bytes(data)
            request = view(f"u{name}", num_tokens=129, salt=name)
            assert reader.ask(request) == 128
            outcome = reader.load(request, scattered(128, 16), 128)
            assert (outcome.code, outcome.num_damaged) == (KVNotFound.code, 1)
            store.delete(list(store.saved))
        for engine in (writer, reader):
            engine.close()


def test_tiers_whose_fast_one_is_damaged_answer_from_neither_and_heal(tmp_path: Path) -> None:
    with KnownStore(open_store(f"memory://{tmp_path.name},file://{tmp_path}/values")) as store:
        writer, reader = Engine(store, "p"), Engine(store, "o")
        kv = random_kv(128)
        writer.fill(scattered(128, 16), kv)
        request = view("s", num_tokens=129)
        writer.save(request, scattered(128, 16), 128)
        fast = store.inner.tiers[0].store  # type: ignore[attr-defined]
        key = next(iter(store.saved))
        fast._shelf._values[key][7] ^= 4
        assert reader.ask(view("u", num_tokens=129)) == 128
        assert reader.load(view("u", num_tokens=129), scattered(128, 16), 128).num_damaged == 1
        reader.fill(scattered(128, 16), kv)
        assert reader.save(view("v", num_tokens=129), scattered(128, 16), 128)
        assert reader.ask(view("w", num_tokens=129)) == 128
        assert not reader.load(view("w", num_tokens=129), scattered(128, 16), 128).code
        assert torch.equal(reader.tokens(scattered(128, 16), 128), kv)
        for engine in (writer, reader):
            engine.close()


def test_what_was_known_long_ago_is_looked_up_again(store: FaultyStore, make: MakeEngine, clock: VirtualClock) -> None:
    """B1: a store that evicts, or forgets after ttl_s, costs no transfer for nothing again and again."""
    prefill(make("p"), 256)
    engine = make("o", clock=clock)
    assert engine.ask(local()) == 256
    num_asked = store.count("contains")
    assert engine.ask(local("v")) == 256
    assert store.count("contains") == num_asked, "known"
    store.inner.delete(list(store.inner._shelf._values))
    clock.advance(31)
    assert engine.ask(local("w")) == 0
    assert store.count("get") == 0


def test_what_was_evicted_is_saved_again_by_who_still_has_it(
    store: FaultyStore, make: MakeEngine, clock: VirtualClock
) -> None:
    """Nobody writes what is known to be stored; after a while it is looked for first."""
    engine, blocks, kv = make("p", clock=clock), scattered(128, 16), random_kv(128)
    engine.fill(blocks, kv)
    engine.save(view("a", num_tokens=129), blocks, 128)
    clock.advance(31)
    num_puts = store.count("put")
    engine.save(view("b", num_tokens=129), blocks, 128)
    assert store.count("put") == num_puts, "it is there"
    store.inner.delete(list(store.inner._shelf._values)[:1])
    assert engine.save(view("c", num_tokens=129), blocks, 128) is None, "it was seen a moment ago"
    clock.advance(31)
    engine.save(view("d", num_tokens=129), blocks, 128)
    assert store.count("put") == num_puts + 1
    assert make("o").ask(view("u", num_tokens=200, salt="")) == 128


# --- signatures ---------------------------------------------------------------------------------------------------


def test_engines_that_sign_otherwise_refuse_each_others_hand_offs(
    make: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never an error: the prompt is computed."""
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    (tmp_path / "key").chmod(0o600)
    signed = {"sign": "true", "sign_key_file": f"{tmp_path}/key"}
    source, decode = make("p", **signed), make("d")
    _, handoff = prefill(source, 100)
    decode.scheduler.update_peers([source.card()])
    assert "engine p stores KV as Cut(" in caplog.text
    assert b"0123456789" not in source.card().rank_blobs[0]
    assert "0123456789" not in caplog.text
    request = view("t", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True, salt="0")
    assert decode.ask(request) == 0
    again = make("e", **signed)
    again.scheduler.update_peers([source.card()])
    assert again.ask(request) == 100


def test_the_secret_comes_out_of_the_environment_too(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKV_STORE_SIGN_KEY", "0123456789abcdef")
    prefill(make("p", sign="true"), 128)
    assert make("o", sign="true").ask(local()) == 128
    assert make("q").ask(local()) == 0


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [
        (
            0o644,
            b"0123456789abcdef",
            "only its owner may have access to a secret: .* mode 0644; chown it to user .* chmod it to 0600",
        ),
        (0o620, b"0123456789abcdef", "mode 0620"),
        (0o600, b"short\n", "at least 16 bytes, got 5"),
        (0o600, b"x" * 5000, "more than 4096 bytes"),
        (0o600, None, "No such file"),
    ],
)
def test_a_secret_that_is_none_is_refused(
    make: MakeEngine, tmp_path: Path, mode: int, content: bytes | None, message: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        make("p", sign="true", sign_key_file=str(path))


def test_a_secret_is_asked_for_by_name(make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDKV_STORE_SIGN_KEY", raising=False)
    with pytest.raises(ConfigError, match="sign_key_file=PATH or the environment variable PDKV_STORE_SIGN_KEY"):
        make("p", sign="true")
    with pytest.raises(ConfigError, match="needs sign=true"):
        make("p", sign_key_file="/nowhere")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="the file of a secret must be a regular file"):
        make("p", sign="true", sign_key_file=f"{tmp_path}/pipe")


def test_values_without_an_envelope_are_never_read(store: FaultyStore, make: MakeEngine) -> None:
    """What an older version has stored lies under keys that nobody asks for; its engines are refused."""
    engine = make("p")
    prefill(engine, 128)
    old = msgspec.msgpack.encode((64, 1, 1))  # how an older version says how it cuts
    decode = make("d")
    decode.scheduler.update_peers([msgspec.structs.replace(engine.card(), rank_blobs=[old])])
    source = view("t", kv="handoff", num_tokens=129, salt="0")
    handoff = msgspec.structs.replace(engine.handoff(source, 128), payload=old)
    request = view("t", kv="await_peer", num_tokens=129, handoff=handoff, kv_ready=True, salt="0")
    assert decode.ask(request) == 0
