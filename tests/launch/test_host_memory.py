"""Segments that a launch keeps: who writes which, what outlives an engine, and what is given back."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdkv.config import EngineConfig, HandoffConfig, TiersConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.errors import ConfigError
from pdkv.host import memory_limits
from pdkv.host.held_file import HeldFile
from pdkv.host.memory_limits import MemoryBound
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.options import StoreOptions
from pdkv.launch import plan
from pdkv.launch.host_memory import HostMemory
from pdkv.launch.specs import EngineSpec

SIZE = 8 << 20
KEY, VALUE = b"key", memoryview(bytes(range(256)) * 1000)


def engine(name: str, tp: int = 1) -> EngineSpec:
    config = EngineConfig(tp=tp)
    return EngineSpec(
        name=name,
        role="any",
        epoch="",
        config=config,
        handoff=HandoffConfig(),
        connector=NO_PLAN,
        endpoint="",
        num_engines=1,
    )


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[HostMemory]:
    with HostMemory(tmp_path, SIZE) as memory:
        yield memory


def own_memfds() -> list[str]:
    paths = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(path) for path in paths if os.path.lexists(path) and "memfd:pdkv-" in os.readlink(path))


def addresses(memory: HostMemory) -> dict[str, HeldFile]:
    return {
        path.name: msgspec.json.decode(path.read_bytes(), type=HeldFile)
        for path in sorted(memory.directory.glob("*.memfd"))
    }


def store_of(memory: HostMemory, name: str) -> HostStore:
    return HostStore(memory.directory, StoreOptions(segment=name))


def test_each_rank_has_an_equal_part_and_a_successor_finds_what_was_written(memory: HostMemory) -> None:
    for spec in (engine("prefill-0"), engine("decode-0", tp=2), engine("decode-0", tp=2)):
        memory.keep(spec)
    assert [name.split("-")[:2] for name in addresses(memory)] == [
        ["decode", "0.0"],
        ["decode", "0.1"],
        ["prefill", "0.0"],
    ]
    sizes = [os.fstat(address.fd).st_size for address in addresses(memory).values()]
    assert sizes[0] == sizes[1] < sizes[2]
    assert SIZE // 2 < sizes[0] < SIZE < sizes[2]
    ranks = [store_of(memory, "decode-0") for _ in range(2)]
    ranks[1].put([(KEY, VALUE)])
    for rank in ranks:
        rank.close()
    again = [store_of(memory, "decode-0") for _ in range(2)]
    out = memoryview(bytearray(len(VALUE)))
    assert again[0].get([KEY], [out]) == [True]
    assert out == VALUE
    assert sorted(len(rank.own or ()) for rank in again) == [0, 1]
    for rank in again:
        rank.close()


def test_nobody_changes_a_segments_size_or_seals_it(memory: HostMemory) -> None:
    memory.keep(engine("prefill-0"))
    (address,) = addresses(memory).values()
    fd = address.open(os.O_RDWR)
    for size in (4096, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_an_engine_that_goes_for_good_takes_its_memory_with_it_also_from_who_reads_it(memory: HostMemory) -> None:
    for name in ("prefill-0", "decode-0"):
        memory.keep(engine(name))
    promised = memory.num_promised_bytes
    writer, reader = store_of(memory, "prefill-0"), store_of(memory, "decode-0")
    writer.put([(KEY, VALUE)])
    assert reader.contains([KEY]) == [True]
    assert 0 < promised - memory.num_promised_bytes < 2 * len(VALUE)
    (segment,) = reader._others.values()
    (kept,) = (address.fd for name, address in addresses(memory).items() if name.startswith("prefill"))
    writer.close()
    memory.give_back("prefill-0")
    memory.give_back("prefill-0")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)
    assert os.fstat(segment.fd).st_blocks == 0
    assert reader.contains([KEY]) == [False]
    assert not reader._others
    reader.close()


def test_nothing_is_left_when_the_launch_ends(tmp_path: Path) -> None:
    with HostMemory(tmp_path, SIZE) as memory:
        for name in ("prefill-0", "decode-0"):
            memory.keep(engine(name, tp=2))
        assert len(own_memfds()) == 4
    assert own_memfds() == []
    assert list(memory.directory.iterdir()) == []


def test_without_the_option_there_is_no_segment_and_no_directory(tmp_path: Path) -> None:
    with HostMemory(tmp_path, None) as memory:
        memory.keep(engine("prefill-0"))
        assert memory.num_promised_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_host_memory_counts_among_what_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(memory_limits, "available_memory", lambda: MemoryBound(20 * gib, "MemAvailable"))
    config, tiers = EngineConfig(device="cpu", kv_cache_memory=gib), TiersConfig(kv_host_memory=4 * gib)
    engines = [(config, 1), (config, 2)]
    plan.check_memory(engines, tiers)
    needed = (
        r"1 KV pool of 1\.0 GiB and 2 KV pools of 1\.0 GiB and 8\.0 GiB of host memory for each of 3 engines "
        r"\(--kv-cache-memory, --kv-host-memory\) need 27\.0 GiB of host memory, but only 19\.4 GiB can be used"
    )
    with pytest.raises(ConfigError, match=needed):
        plan.check_memory(engines, TiersConfig(kv_host_memory=8 * gib))
    with pytest.raises(ConfigError, match=r"and 7\.0 GiB already promised to others"):
        plan.check_memory(engines, tiers, num_promised_bytes=7 * gib)
    on_gpu = EngineConfig(device="cuda")
    with pytest.raises(ConfigError, match=r"^20\.0 GiB of host memory for each of 1 engines \(--kv-host-memory\)"):
        plan.check_memory([(on_gpu, 1), (on_gpu, 0)], TiersConfig(kv_host_memory=20 * gib))
