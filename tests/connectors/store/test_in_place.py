"""Values that are read straight into their blocks: whole ones, and nothing of any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from store_rig import NUM_BLOCKS, Engine, prefill, scattered, view

from pdkv.connectors.transfer.units import UnitPool
from pdkv.errors import StoreUnavailable, TransferError
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.registry import open_store

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
        self.num_scattered = 0

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


def test_a_store_that_fails_so_is_asked_the_other_way(
    pair: Pair, store: KVStore, scatters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> list[bool]:
        raise StoreUnavailable("refused")

    monkeypatch.setattr(store, "read_scattered", fail)
    code, blocks = pair.load()
    assert code == ""
    assert sum(scatters) == 13
    assert torch.equal(pair.reader.tokens(blocks, NUM_TOKENS), pair.kv)


def test_whatever_ends_it_no_part_of_a_value_is_left(
    pair: Pair, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody expects, when all but the last envelope has come."""
    read = store.read_scattered

    def fail(keys: Any, out: Any, *rest: Any) -> list[bool]:
        read(keys, out, *rest)
        assert any(any(piece) for piece in out[0])
        raise RuntimeError("out of luck")

    monkeypatch.setattr(store, "read_scattered", fail)
    code, blocks = pair.load()
    assert code == TransferError.code
    got = pair.reader.tokens(blocks, NUM_TOKENS)
    assert bool(((got == 0) | (got == -1)).all())
    assert bool((got[:16] == 0).all())
