"""Values in two forms, and loads that take the coarser one, or nothing, where the network is too slow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from store_rig import Engine, prefill, random_kv, scattered, view

from pdkv.connectors.base import TransferKey
from pdkv.connectors.store.forms import PACE_VALID_S, Pace, choose_form
from pdkv.errors import ConfigError, TransferTimeout
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.kv_store.file_store import FileStore
from pdkv.testing import VirtualClock

NUM_TOKENS = 256
NUM_VALUES = 4


class ThrottledStore(KVStore):
    """Files behind a slow link: each byte that is read takes its time, of a virtual clock."""

    def __init__(self, inner: KVStore) -> None:
        self.inner = inner
        self.clock = VirtualClock()
        self.seconds_per_byte = 0.0
        self.reads: list[bytes] = []  # keys, in order

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        self.reads += keys
        self.clock.advance(self.seconds_per_byte * sum(map(len, out)))
        return self.inner.get(keys, out)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.contains(keys)

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.inner.put(items)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()


class Rig:
    """Engines on one throttled store; a buffer holds one value."""

    def __init__(self, path: Path) -> None:
        self.store = ThrottledStore(FileStore(str(path)))
        self.engines: list[Engine] = []

    def make(self, deadline_s: float | None = 30.0, **options: Any) -> Engine:
        if deadline_s is not None:
            options["codec_deadline_s"] = str(deadline_s)
        options = {"codec": "cachegen", "codec_level": "0", "staging_bytes": "1", "io_threads": "1", **options}
        self.engines.append(Engine(self.store, f"e{len(self.engines)}", clock=self.store.clock, **options))
        return self.engines[-1]

    def save(self, engine: Engine, salt: str = "s") -> torch.Tensor:
        kv, blocks = random_kv(NUM_TOKENS), scattered(NUM_TOKENS, 16)
        engine.fill(blocks, kv)
        request = view("save", num_tokens=NUM_TOKENS + 1, salt=salt)
        outcomes = [engine.save(request, blocks, stop, start=stop - 128) for stop in (128, 256)]
        assert not any(outcome.code for outcome in outcomes if outcome is not None)
        return kv

    def seconds_for_value(self, engine: Engine, seconds: float) -> None:
        """A whole value in its finest form takes so long from now on."""
        self.store.seconds_per_byte = seconds / engine.worker._capacity

    @property
    def forms(self) -> str:
        """Of the values that were read, in order: f or c."""
        return "".join("c" if key.endswith(b"\1") else "f" for key in self.store.reads)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    for engine in made.engines:
        assert engine.worker._image_staging.num_free == engine.worker._image_staging.count
        engine.close()
    made.store.close()


def load(engine: Engine, salt: str = "s") -> tuple[Any, torch.Tensor]:
    request = view("load", num_tokens=NUM_TOKENS + 1, salt=salt)
    assert engine.ask(request) == NUM_TOKENS
    engine.pools[0].fill_(-1.0)
    blocks = scattered(NUM_TOKENS, 16)
    return engine.load(request, blocks, NUM_TOKENS), engine.tokens(blocks, NUM_TOKENS)


@pytest.mark.parametrize(
    ("pace", "left_s", "expected"),
    [(None, -1.0, 0), (100.0, 10.0, 0), (100.0, 9.99, 1), (100.0, 5.0, 1), (100.0, 4.99, None), (1e9, 0.0, None)],
)
def test_the_finest_form_that_comes_in_time_is_read(pace: float | None, left_s: float, expected: int | None) -> None:
    assert choose_form([1000, 500], pace, left_s) == expected


def test_a_pace_follows_the_last_reads_and_is_forgotten() -> None:
    now = 0.0
    pace = Pace(lambda: now)
    assert pace.bytes_per_s is None
    pace.note(1000, 1.0)
    assert pace.bytes_per_s == 1000
    pace.note(0, 5.0)
    assert pace.bytes_per_s == 1000
    for _ in range(8):
        pace.note(100, 1.0)
    assert pace.bytes_per_s == pytest.approx(100, rel=0.05)
    pace.note(1, 0.001)
    assert pace.bytes_per_s == pytest.approx(100, rel=0.1), "a small read says little"
    now = PACE_VALID_S + 0.1
    assert pace.bytes_per_s is None


def test_in_time_all_values_are_fine(rig: Rig) -> None:
    kv = rig.save(rig.make())
    outcome, got = load(rig.make())
    assert not outcome.code
    assert rig.forms == "f" * NUM_VALUES
    assert (got - kv).abs().max() <= 0.15


def test_the_rest_comes_coarser_where_the_link_is_slow(rig: Rig) -> None:
    """Of a second, in which four fine values come, there is a little less: the last one is fine again."""
    kv = rig.save(rig.make(0.9))
    reader = rig.make(0.9)
    rig.seconds_for_value(reader, 0.25)
    outcome, got = load(reader)
    assert (outcome.code, rig.forms) == ("", "fccf")
    assert (got[:64] - kv[:64]).abs().max() <= 0.15
    assert (got - kv).abs().max() <= 0.7


def test_the_rest_is_computed_where_nothing_comes_in_time(rig: Rig) -> None:
    rig.save(rig.make(0.2))
    reader = rig.make(0.2)
    rig.seconds_for_value(reader, 0.3)
    outcome, got = load(reader)
    assert rig.forms == "f", "nothing was measured before"
    assert (outcome.code, outcome.num_tokens, outcome.num_damaged) == (TransferTimeout.code, 64, 0)
    assert bool((got[64:] == -1).all())
    again, _ = load(reader)
    assert rig.forms == "f", "known to be too slow: nothing was read"
    assert (again.code, again.num_tokens) == (TransferTimeout.code, 0)


def test_a_hand_off_comes_whatever_it_takes(rig: Rig) -> None:
    """And its tail of 9 tokens, of which both forms are deleted when it is over."""
    prefiller, decode = rig.make(0.1), rig.make(0.1)
    kv, handoff = prefill(prefiller, 201)
    rig.seconds_for_value(decode, 0.15)
    request = view("t", kv="await_peer", num_tokens=202, handoff=handoff, kv_ready=True, salt="0")
    assert decode.ask(request) == 201
    blocks = scattered(201, 16)
    assert not decode.load(request, blocks, 201).code
    assert rig.forms == "fccc"
    assert (decode.tokens(blocks, 201) - kv).abs().max() <= 0.7
    coarse = rig.store.reads[-1]
    tail = [coarse, coarse.removesuffix(b"\1")]
    assert rig.store.contains(tail) == [True, True]
    prefiller.step(finished=[TransferKey("t", 1)])
    while any(rig.store.contains(tail)):
        assert prefiller.woken.acquire(timeout=60)
        prefiller.collect()


def test_a_value_is_there_if_both_of_its_forms_are(rig: Rig) -> None:
    writer = rig.make()
    rig.save(writer)
    request = view("x", num_tokens=NUM_TOKENS + 1, salt="s")
    for suffix in writer.connectors[0].cut.suffixes:
        keys = [v.key + suffix for v in writer.connectors[0].cut.whole_values(request.block_keys, 0, NUM_TOKENS)]
        assert rig.store.contains(keys) == [True] * NUM_VALUES
        rig.store.delete(keys[2:3])
        assert rig.make().ask(request) == 128
        rig.save(rig.make())
        assert rig.make().ask(request) == NUM_TOKENS


def test_forms_are_found_by_engines_with_both_alone(rig: Rig) -> None:
    rig.save(rig.make())
    request = view("x", num_tokens=NUM_TOKENS + 1, salt="s")
    for level in ("0", "4"):
        assert rig.make(None, codec_level=level).ask(request) == 0
    assert rig.make(0.001, codec_level="0").ask(request) == NUM_TOKENS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int8", "codec_level": "0"}, "codec=int8 has no level coarser than 0"),
        ({"codec": "raw"}, "codec=raw has no level"),
        ({"codec_level": "4"}, "codec=cachegen has no level coarser than 4"),
        ({"load": "layerwise"}, "load=async"),
    ],
)
def test_a_deadline_needs_something_to_choose(rig: Rig, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rig.make(**options)
