"""`pd connector bench`: rows are complete, pieces are those of the plan, and what is compared has moved the bytes."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdkv.cli.main import main
from pdkv.connector_kit.bench import plan as plans
from pdkv.connector_kit.bench.aged_pools import PATTERNS, AgedBooks, ContiguousBooks
from pdkv.connector_kit.bench.bare import BARE_SIDE, bare_of
from pdkv.connector_kit.bench.effects import measure_push_tail, measure_scheduler_cost, measure_slowdown
from pdkv.connector_kit.bench.layouts import LAYOUTS, parse_layout
from pdkv.connector_kit.bench.measure import Row, measure
from pdkv.connector_kit.bench.pieces import planned_pieces, stored_pieces
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer
from pdkv.connector_kit.bench.yardsticks import Bare
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import NotApplicable, Violation
from pdkv.connectors.registry import connector_target, load_connector
from pdkv.connectors.transfer.planning import merge_runs
from pdkv.errors import ConfigError

SMALL = "2x2x16"
WANTED = [
    "connector", "tokens", "bytes", "pieces", "gb_s", "memcpy_gb_s", "ratio_to_memcpy", "raw_gb_s", "ratio_to_raw",
    "per_piece_gb_s",
]  # fmt: skip


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("bench")) as zygote:
        yield zygote


@pytest.fixture(autouse=True)
def one_zygote(monkeypatch: pytest.MonkeyPatch, zygote: Zygote) -> None:
    """Its start takes longer than all that it is for."""
    monkeypatch.setattr(plans, "Zygote", lambda directory: nullcontext(zygote))


def plan_of(connector: str, **arguments: Any) -> plans.Plan:
    values: dict[str, Any] = {"options": {}, "layout": SMALL, "tokens": [40], "repeats": 1, "region_bytes": 1 << 20}
    return plans.make_plan(connector, **{**values, **arguments})


def check_row(row: Row) -> None:
    built = msgspec.to_builtins(row)
    for name in WANTED:
        assert isinstance(built[name], str) or (isfinite(built[name]) and built[name] > 0), name


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        ("shared_memory", {}),
        ("memory", {"mode": "pull"}),
        ("memory", {"mode": "push"}),
        ("store", {"url": "file://{directory}"}),
    ],
)
def test_each_kind_of_connector_has_complete_rows(connector: str, options: dict[str, str]) -> None:
    rows = measure(plan_of(connector, options=options))
    assert [row.pattern for row in rows] == ["aged", "contiguous"]
    for row in rows:
        check_row(row)
        assert row.bytes == 3 * parse_layout(SMALL).layout().block_bytes
        assert (row.save_gb_s is not None) == (connector == "store")


def test_ranks_and_block_sizes_may_differ() -> None:
    for arguments in ({"tp_pair": (1, 2)}, {"tp_pair": (2, 1)}, {"block_sizes": (16, 32)}):
        rows = measure(plan_of("shared_memory", patterns=["aged"], **arguments))
        check_row(rows[0])


def test_pieces_are_those_that_the_shared_plan_merges() -> None:
    shape = parse_layout(SMALL)
    source, target = [4, 5, 6, 9], [7, 8, 2, 3]
    assert planned_pieces(shape, shape, 64, source, target) == len(merge_runs(source, target)) == 3
    assert planned_pieces(shape, shape, 20, source, target) == 1  # two blocks, side by side on both sides
    assert planned_pieces(shape, shape, 64, source, source) == 2


def test_pieces_of_unequal_peers_are_counted_by_layer_head_and_segment() -> None:
    whole, halves = parse_layout(SMALL), parse_layout(SMALL, tp=2)
    assert planned_pieces(whole, halves, 64, [0] * 4, [0] * 4) == 4 * 2 * 2 * 2  # blocks, layers, K and V, ranks
    large = replace(whole, block_size=32)
    assert planned_pieces(whole, large, 64, [0] * 4, [0] * 2) == 4 * 2 * 2 * 2  # segments, layers, K and V, heads
    assert stored_pieces(65, 64, 3) == 6
    assert plans.store_values(plan_of("store", tp_pair=(1, 2)), {"load": "layerwise"}) == (64, 4)  # 2 groups, 2 shards


def test_rows_count_the_pieces_of_the_tables_that_were_used() -> None:
    aged, contiguous = measure(plan_of("shared_memory", tokens=[160]))
    assert contiguous.pieces == 1
    assert 1 < aged.pieces <= 10


def test_an_aged_pool_scatters_and_a_fresh_one_does_not() -> None:
    aged, fresh = AgedBooks(512, seed=1), ContiguousBooks(512, seed=1)
    taken = aged.allocate(300)
    assert len(set(taken)) == 300
    assert len(merge_runs(taken, taken)) > 100
    assert len(merge_runs(fresh.allocate(100), fresh.allocate(100))) == 1
    aged.release(taken)
    assert aged.num_held == 0


def test_contiguous_requests_go_round_the_pool() -> None:
    books = ContiguousBooks(10)
    first = books.allocate(4)
    books.release(first)
    assert books.allocate(4) == [4, 5, 6, 7]
    assert books.allocate(4) == [0, 1, 2, 3]
    with pytest.raises(AssertionError):
        books.allocate(3)


def test_a_load_that_brings_something_else_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's own: the reader's blocks are compared with the writer's."""
    plan = plan_of("shared_memory")
    with plans.open_setting(plan) as setting, BenchWorld(setting, plan.producer, plan.consumer) as world:
        world.scatter("aged")
        transfer = TimedTransfer(world, 40)
        transfer.measure(compare=True)
        monkeypatch.setattr(transfer.reader, "digest", lambda tokens: {0: 1})
        transfer._source_ids = [0, 1, 2]
        with pytest.raises((Violation, KeyError)):
            transfer._compare()


def test_prefill_steps_are_measured_beside_a_throttled_transport() -> None:
    for connector, options in (
        ("shared_memory", {}),
        ("store", {"url": "file://{directory}"}),
        ("memory", {"mode": "push"}),
    ):
        slowdown = measure_slowdown(plan_of(connector, options=options), chunk=32, num_steps=2, step_s=0.01, rounds=1)
        assert slowdown.idle_step_ms > 0
        assert slowdown.step_ms > 0
        assert slowdown.slowdown == pytest.approx(slowdown.step_ms / slowdown.idle_step_ms - 1)


def test_the_tail_of_a_push_is_measured_and_a_pull_has_none() -> None:
    tail = measure_push_tail(plan_of("memory", options={"mode": "push"}), 64, chunk=32, step_s=0.01, repeats=1)
    assert tail.tail_ms > 0
    assert tail.bare_ms > 0
    with pytest.raises(NotApplicable):
        measure_push_tail(plan_of("memory"), 64, repeats=1)


def test_the_schedulers_questions_are_measured_with_few_and_many_cached_blocks() -> None:
    few, many = measure_scheduler_cost(plan_of("shared_memory"), [4, 64], num_tokens=64, repeats=2)
    assert few.cached_blocks < many.cached_blocks
    for cost in (few, many):
        assert cost.handoff_us > 0
        assert cost.lookup_us is not None


def test_a_third_party_names_its_bare_transport() -> None:
    class Own:
        bare_transport = "somewhere:Bare"

    assert bare_of("theirs:Own", Own, {}) == "somewhere:Bare"
    assert bare_of("theirs:Own", object, {}) is None
    target = connector_target("store")
    assert "Redis" in str(bare_of(target, load_connector("store"), {"url": "unix:///x,file:///y"}))


def test_what_a_store_keeps_of_a_measurement_is_bounded() -> None:
    store, storage = connector_target("store"), connector_target("shared_storage")
    assert "ttl_s" in plans.bounded(store, {"url": "redis://localhost"})
    assert plans.bounded(store, {"url": "file:///x", "capacity": "1MiB"})["capacity"] == "1MiB"
    assert "capacity" in plans.bounded(storage, {"path": "/x"})
    assert not plans.bounded(connector_target("nixl"), {})


def test_layouts_have_names_or_numbers() -> None:
    assert set(LAYOUTS) == {"tiny", "small", "mid"}
    assert parse_layout("mid").layout().block_bytes == 512 * 1024
    assert parse_layout("2x4x8:float32", tp=2).layout().num_kv_heads == 2
    for text in ("large", "2x2", "0x2x16", "2x2x16:int8", "2x2x1"):
        with pytest.raises(ConfigError):
            parse_layout(text)


def test_the_command_prints_a_table_a_plot_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["connector", "bench", "shared_memory", "--model-layout", "small", "--tokens", "40", "--repeats", "1"]
    assert main([*command, "--no-throttle"]) == 0
    text = capsys.readouterr().out
    assert "aged" in text
    assert "full scale" in text
    assert main([*command, "--no-throttle", "--json", "--pattern", "aged"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["connector"] == "shared_memory"
    [row] = document["rows"]
    assert set(WANTED) <= set(row)


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--tp-pair", "2"], ["--tokens", "0"], ["--model-layout", "huge"], ["--connector-config", "x=1"]):
        assert main(["connector", "bench", "shared_memory", *wrong]) == 2
    assert "huge" in capsys.readouterr().err


def test_bare_transports_move_all_bytes_whole_and_in_pieces(tmp_path: Path) -> None:
    plan = plan_of("shared_memory")
    with plans.open_setting(plan) as setting:
        for name in ("LocalCopy", "SharedMapping", "FileRead"):
            target = f"pdkv.connector_kit.bench.bare:{name}"
            spec = p.OpenBare(BARE_SIDE, target, 1 << 16, 1 << 12, 1 << 14, 1 << 18, {"directory": str(tmp_path)})
            with Bare(setting.zygote, spec) as bare:
                assert bare.seconds(in_pieces=False) > 0
                assert bare.seconds(in_pieces=True) > 0
    assert not list(tmp_path.iterdir())
    assert set(PATTERNS) == {"aged", "contiguous"}


def test_ctrl_c_within_a_move_is_no_other_error(tmp_path: Path) -> None:
    """The hosts owe answers then: they are ended without a question."""
    with plans.open_setting(plan_of("shared_memory")) as setting:
        spec = p.OpenBare(
            BARE_SIDE, "pdkv.connector_kit.bench.bare:LocalCopy", 1 << 16, 1 << 12, 1 << 14, 1 << 18,
            {"directory": str(tmp_path)},
        )  # fmt: skip

        def interrupted() -> None:
            with Bare(setting.zygote, spec) as bare:
                bare._reader.send("bare", p.MoveBare(False, 5.0))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
