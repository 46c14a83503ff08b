"""KV pools that size themselves: what each engine of a launch may take of the host's memory."""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import make_hf_model

from pdkv.assemble.engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig, TiersConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.errors import ConfigError, ModelError
from pdkv.host import memory_limits
from pdkv.host.huge_pages import can_share_huge_pages
from pdkv.host.memory_limits import LEAST_POOL_BYTES, MemoryBound
from pdkv.host.processor import flags
from pdkv.kernels.compiled import isa
from pdkv.launch import plan
from pdkv.launch.devices import keep_devices
from pdkv.launch.plan import check_memory, place_on_hardware
from pdkv.launch.specs import EngineSpec
from pdkv.models.config import load_model_config
from pdkv.testing.engine import make_core, run, submit

GIB = 1 << 30
NO_TIERS = TiersConfig()


@pytest.fixture
def gibs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is available: its only element."""
    available = [36.0]
    bound = memory_limits.MAX_RESERVE_BYTES
    monkeypatch.setattr(
        memory_limits, "available_memory", lambda: MemoryBound(int(available[0] * GIB) + bound, "MemAvailable")
    )
    return available


def engine(name: str, **fields: Any) -> EngineSpec:
    values: dict[str, Any] = {"model": Path("/none"), "device": "cpu", **fields}
    return EngineSpec(
        name=name, role="any", epoch="1", config=EngineConfig(**values), handoff=HandoffConfig(), connector=NO_PLAN,
        endpoint="", num_engines=1,
    )  # fmt: skip


def shares(specs: list[EngineSpec], tiers: TiersConfig = NO_TIERS, **others: Any) -> dict[str, float]:
    placed = place_on_hardware(specs, tiers, **others)
    return {spec.name: spec.config.host_kv_bytes / GIB for spec in placed}


def test_engines_share_a_quarter_of_what_is_left_beside_given_pools_and_tiers(gibs: list[float]) -> None:
    assert shares([engine("a")]) == {"a": 9.0}
    assert shares([engine("a"), engine("b"), engine("c")]) == {"a": 3.0, "b": 3.0, "c": 3.0}
    given = engine("given", kv_cache_memory=4 * GIB)
    assert shares([engine("a"), given]) == {"a": 8.0, "given": 4.0}
    assert shares([engine("a"), engine("b")], TiersConfig(kv_host_memory=2 * GIB)) == {"a": 4.0, "b": 4.0}
    assert shares([engine("a"), engine("gpu", device="cuda")][:1]) == {"a": 9.0}
    assert shares([engine("a", max_kv_cache_memory=GIB), engine("b")]) == {"a": 1.0, "b": 4.5}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of 2 GiB, for which 4 are set aside."""
    with (tmp_path / "model-1.safetensors").open("wb") as file:
        header = json.dumps({"x": {"dtype": "BF16", "shape": [GIB], "data_offsets": [0, 2 * GIB]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * GIB)
    return tmp_path


def test_weights_come_before_pools(gibs: list[float], weights: Path) -> None:
    apart = [engine(name, model=weights, cpu_linears="torch") for name in "ab"]
    assert shares(apart) == {"a": 3.5, "b": 3.5}


@pytest.mark.skipif(isa() is None or "amx_bf16" in flags(), reason="no compiled kernels for the weights")
@pytest.mark.skipif(not can_share_huge_pages(), reason="the kernel gives memfds no huge pages")
def test_weights_that_are_shared_count_once(gibs: list[float], weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = [engine(name, model=weights) for name in "ab"]
    assert shares(together) == {"a": 4.0, "b": 4.0}
    assert shares([together[0], engine("b", model=weights, dtype="bfloat16")]) == {"a": 3.5, "b": 3.5}
    assert shares([engine(name, model=weights, dtype="float16") for name in "ab"]) == {"a": 3.5, "b": 3.5}
    given = [engine("a", model=weights, kv_cache_memory=GIB)]
    assert shares([engine("b", model=weights)], running=given) == {"b": 9.0}, "they are in use already"
    monkeypatch.setattr(plan, "can_share_huge_pages", lambda: False)
    assert shares(together) == {"a": 3.5, "b": 3.5}


def test_on_a_small_host_each_has_what_an_engine_always_had(gibs: list[float]) -> None:
    gibs[0] = 3.0
    assert set(shares([engine(str(i)) for i in range(8)]).values()) == {LEAST_POOL_BYTES / GIB}
    config = EngineConfig(device="cpu")
    check_memory([(config, 8)])
    check_memory([(dataclasses.replace(config, max_kv_cache_memory=64 * GIB), 8)])
    with pytest.raises(ConfigError, match=r"17 KV pools of 256 MiB"):
        check_memory([(config, 17)])


def test_engines_that_are_added_leave_what_others_may_still_take(gibs: list[float]) -> None:
    running = place_on_hardware([engine("a"), engine("b", kv_cache_memory=GIB)], TiersConfig())
    assert running[0].config.host_kv_bytes == 35 * GIB // 4
    gibs[0] = 34.0
    assert shares([engine("c")], running=running) == {"c": (34 - 8.75) / 4}
    assert shares([engine("c")], running=running, num_promised_bytes=GIB) == {"c": (34 - 9.75) / 4}
    again = keep_devices(engine("a"), running[0])
    assert again.config == running[0].config, "an engine that is started again has the pool that it had"


def test_a_field_that_is_to_be_ignored_is_ignored_where_engines_get_their_memory(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mystery": 1}))
    with pytest.raises(ModelError, match="mystery"):
        place_on_hardware([engine("a", model=model)], NO_TIERS)
    place_on_hardware([engine("a", model=model, ignore_config_fields=("mystery",))], NO_TIERS)


def test_auto_is_a_word_for_it(tmp_path: Path) -> None:
    assert EngineConfig.parse({"kv_cache_memory": "auto"}).sizes_itself
    assert not EngineConfig.parse({"kv_cache_memory": "1GiB", "device": "cpu"}).sizes_itself
    with pytest.raises(ConfigError, match="a size such as 512MiB was expected, got 'most'"):
        EngineConfig.parse({"kv_cache_memory": "most"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1,024 positions; a token of KV takes 768 bytes."""
    return make_hf_model(tmp_path / "model", "llama", "float32")


@pytest.mark.parametrize(
    ("max_num_seqs", "max_bytes", "num_blocks"), [(5, GIB, 5 * 64), (500, 12 << 20, 1024)], ids=["useful", "bound"]
)
def test_a_pool_that_sizes_itself_holds_no_more_than_a_full_step_of_the_longest_requests(
    model: Path, max_num_seqs: int, max_bytes: int, num_blocks: int
) -> None:
    fields = {"max_num_seqs": max_num_seqs, "max_kv_cache_memory": max_bytes}
    config = EngineConfig(model=model, device="cpu", threads=1, **fields)
    executor = InProcessExecutor(load_model_config(model), config, max_num_batched_tokens=500)
    assert executor.num_blocks == num_blocks
    executor.shutdown()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["", "shared_memory", pytest.param("p2p", marks=pytest.mark.slow)])
def built(request: pytest.FixtureRequest, model: Path, gibs: list[float]) -> Iterator[Any]:
    """An engine with a pool of GiB that sized itself, and what it took to make it."""
    config = EngineConfig(model=model, device="cpu", threads=1, max_num_seqs=8192)
    handoff = HandoffConfig(connector=request.param) if request.param else None
    before = resident_bytes()
    core = build_engine(config, handoff, name="e", epoch="1")
    yield core, resident_bytes() - before
    core.shutdown()


def test_a_pool_that_sizes_itself_takes_the_memory_that_it_uses(built: Any) -> None:
    core, num_taken = built
    size_bytes = core.card.num_blocks * core.card.layout.block_bytes
    assert size_bytes > 5 * GIB
    assert num_taken < GIB
    core.handle("r", submit([5, 6, 7], max_tokens=2), 0.0)
    run(core)
    assert core.counters.computed == 3


ROOM = "the KV pool of 2 KiB has room for 1 requests of the longest length, 40 tokens, --max-num-seqs for 4"


def test_an_engine_says_what_its_pool_holds_and_once_that_requests_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    core = make_core(num_blocks=16, limits=SchedulerLimits(4, 64), max_model_len=40)
    for i in range(4):
        core.handle("r", submit([5 + i] * 20, request_id=str(i), max_tokens=12), 0.0)
    run(core)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "KV pool" in record.getMessage()]
    warning = f"requests wait for KV blocks: {ROOM}; a larger --kv-cache-memory lets more run at once"
    assert said == [("INFO", ROOM), ("WARNING", warning)]


def test_an_engine_whose_places_are_all_taken_says_nothing_of_its_pool(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(num_blocks=16, limits=SchedulerLimits(1, 64), max_model_len=40)
    for i in range(4):
        core.handle("r", submit([5 + i] * 20, request_id=str(i), max_tokens=12), 0.0)
    run(core)
    assert "--kv-cache-memory" not in caplog.text
