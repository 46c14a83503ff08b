"""Values that are read straight into their blocks: whole ones, and nothing of any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late_step import LateStep
from store_rig import NUM_BLOCKS, Engine, prefill, scattered, view

from pdkv.connectors.store.pieces import Slot
from pdkv.connectors.store.values import SealedValues
from pdkv.connectors.transfer.units import UnitPool
from pdkv.errors import TransferCancelled, TransferError
from pdkv.kernels.streams import HostStreams
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.host_segment import key_of
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.tiers import TieredStore
from pdkv.launch.host_memory import _Segment

NUM_TOKENS = 200  # three whole values and a tail, whose last unit is partly filled


@pytest.fixture(
    params=["host://{}/segments?capacity=64MiB", "file://{}/values", "host://{}/s?capacity=64MiB,file://{}/v"]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    with open_store(request.param.replace("{}", str(tmp_path))) as store:
        yield store


class Pair:
    """An engine that has handed a prompt off, and one that loads it."""

    def __init__(self, store: KVStore, **options: Any) -> None:
        self.producer, self.reader = Engine(store, "p"), Engine(store, "d", **options)
        self.kv, self.handoff = prefill(self.producer, NUM_TOKENS)

    def load(self, num_hit: int = 0) -> tuple[str, list[int]]:
        """The code of the load's outcome, and its blocks."""
        request = view(
            "t", kv="await_peer", num_tokens=NUM_TOKENS + 1, handoff=self.handoff, kv_ready=True,
            num_local_hit=num_hit, salt="0",
        )  # fmt: skip
        blocks = scattered(NUM_TOKENS, self.reader.block_size, start=3)
        assert self.reader.ask(request, num_hit) == NUM_TOKENS - num_hit
        return self.reader.load(request, blocks, NUM_TOKENS - num_hit).code, blocks


@pytest.fixture
def pair(store: KVStore) -> Iterator[Pair]:
    pair = Pair(store)
    yield pair
    for engine in (pair.producer, pair.reader):
        engine.close()


@pytest.fixture
def scatters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of units of which a copy was made."""
    made: list[int] = []
    scatter = UnitPool.scatter

    def note(pool: UnitPool, units: Any, part: Any, source: Any) -> None:
        made.append(units.size)
        scatter(pool, units, part, source)

    monkeypatch.setattr(UnitPool, "scatter", note)
    return made


def test_a_hand_off_is_loaded_without_a_copy(pair: Pair, scatters: list[int]) -> None:
    code, blocks = pair.load()
    assert code == ""
    assert scatters == []
    assert torch.equal(pair.reader.tokens(blocks, NUM_TOKENS), pair.kv)
    others = [block for block in range(NUM_BLOCKS) if block not in blocks]
    assert bool((pair.reader.pools[0][others] == -1).all())


def test_a_value_that_begins_in_the_readers_own_hit_is_copied(pair: Pair, scatters: list[int]) -> None:
    code, blocks = pair.load(num_hit=96)
    assert code == ""
    assert scatters == [2], "the second half of the second value"
    got = pair.reader.tokens(blocks, NUM_TOKENS)
    assert torch.equal(got[96:], pair.kv[96:])
    assert bool((got[:96] == -1).all())


@pytest.mark.parametrize("block_size", [16, 32])
def test_what_lies_in_small_pieces_is_copied(
    store: KVStore, scatters: list[int], block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block_size == 16:
        monkeypatch.setattr("pdkv.connectors.transfer.units.LEAST_PLACE_BYTES", 1 << 20)
    pair = Pair(store, block_size=block_size)
    code, blocks = pair.load()
    assert code == ""
    assert sum(scatters) == 13
    assert torch.equal(pair.reader.tokens(blocks, NUM_TOKENS), pair.kv)
    for engine in (pair.producer, pair.reader):
        engine.close()


def test_what_the_first_tier_has_lost_comes_from_the_next_one(pair: Pair, store: KVStore, scatters: list[int]) -> None:
    first, *others = store.parts().values()
    if not others:
        pytest.skip("it has no tiers")
    first.discard(None)
    code, blocks = pair.load()
    assert code == ""
    assert sum(scatters) == 13
    assert torch.equal(pair.reader.tokens(blocks, NUM_TOKENS), pair.kv)


def test_nothing_is_written_before_the_step_of_who_had_the_blocks_has_ended(pair: Pair) -> None:
    step = pair.reader.earlier_steps = LateStep()
    request = view("t", kv="await_peer", num_tokens=NUM_TOKENS + 1, handoff=pair.handoff, kv_ready=True, salt="0")
    blocks = scattered(NUM_TOKENS, 16, start=3)
    assert pair.reader.ask(request) == NUM_TOKENS
    pair.reader.start_load(request, blocks, NUM_TOKENS)
    step.wait_asked()
    assert bool((pair.reader.pools[0] == -1).all())
    step.end()
    assert pair.reader.wait(request.transfer_key).code == ""
    assert torch.equal(pair.reader.tokens(blocks, NUM_TOKENS), pair.kv)


def test_a_load_that_was_given_up_is_not_read_once_more(
    pair: Pair, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = view("t", kv="await_peer", num_tokens=NUM_TOKENS + 1, handoff=pair.handoff, kv_ready=True, salt="0")

    def give_up(keys: Any, *_: Any) -> list[bool]:
        pair.reader.worker.cancel(request.transfer_key, "receive")
        return [False] * len(keys)

    monkeypatch.setattr(store, "read_scattered", give_up)
    monkeypatch.setattr(store, "read_on_terms", lambda *_: pytest.fail("it is"))
    assert pair.reader.ask(request) == NUM_TOKENS
    pair.reader.start_load(request, scattered(NUM_TOKENS, 16, start=3), NUM_TOKENS)
    assert pair.reader.wait(request.transfer_key).code == TransferCancelled.code
    assert pair.reader.worker.num_unexpected_errors == 0


def test_whatever_ends_it_no_part_of_a_value_is_left(
    pair: Pair, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody expects, when all but the last envelope has come."""
    read = store.read_scattered

    def fail(keys: Any, out: Any, *rest: Any) -> list[bool]:
        read(keys, out, *rest)
        assert any(any(piece) for piece in out[0].buffers)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(store, "read_scattered", fail)
    code, blocks = pair.load()
    assert code == TransferError.code
    got = pair.reader.tokens(blocks, NUM_TOKENS)
    assert bool(((got == 0) | (got == -1)).all())
    assert bool((got[:16] == 0).all())


@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_device_copies_whole_values_out_of_page_locked_memory_which_is_unlocked_with_its_segment(
    has_tiers: bool, tmp_path: Path, scatters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []

    def lock(memory: Any) -> Any:
        locked.append(memory.nbytes)
        return lambda: locked.append(-memory.nbytes)

    monkeypatch.setattr(HostStreams, "lock_pages", lambda streams, memory: lock(memory))
    lent: list[bytes] = []
    lend = SealedValues.lend

    def noted(values: SealedValues, slot: Slot) -> Any:
        found = lend(values, slot)
        lent.extend([slot.key] if found is not None else [])
        return found

    monkeypatch.setattr(SealedValues, "lend", noted)
    segment = _Segment(tmp_path, "d.0", 64 << 20)
    host = open_store(f"host://{tmp_path}?segment=d")
    assert isinstance(host, HostStore)
    with TieredStore([host, MemoryStore("below-locked")]) if has_tiers else host as store:
        pair = Pair(store)
        for worker in pair.reader.workers:
            worker._pool.on_cpu = False
        code, blocks = pair.load()
        assert code == ""
        assert len(lent) == len(scatters) == 4  # the tail, too
        assert torch.equal(pair.reader.tokens(blocks, NUM_TOKENS), pair.kv)
        hits, again = host._num_hits, store.lend(lent[0])
        assert again is not None
        assert host._num_hits == hits  # it is not read yet
        assert again.is_there()
        assert host._num_hits == hits + 1
        assert not isinstance(store, TieredStore) or store.tiers[0].num_hits == hits + 1
        assert host.own is not None
        own, found = host.own.segment, host.own.find(key_of(lent[0]), is_use=False)
        for engine in (pair.producer, pair.reader):
            engine.close()
    assert locked == [locked[0], -locked[0]]  # once
    assert found is not None
    assert own.view(found) is None
    segment.close()
