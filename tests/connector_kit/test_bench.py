"""`pd connector bench`: rows are complete, pieces are those of the plan, and what is compared has moved the bytes."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import numpy as np
import pytest

from pdkv.cli.main import main
from pdkv.connector_kit.bench import measure as measure_module
from pdkv.connector_kit.bench import plan as plans
from pdkv.connector_kit.bench.aged_pools import PATTERNS
from pdkv.connector_kit.bench.bare import BARE_SIDE, BareSide, BareTransport, Bytes, bare_of
from pdkv.connector_kit.bench.effects import measure_push_tail, measure_slowdown
from pdkv.connector_kit.bench.measure import Row, _row, measure, measure_in_turns, planned_pieces
from pdkv.connector_kit.bench.plan import LAYOUTS, parse_layout
from pdkv.connector_kit.bench.transfer import BenchWorld, TimedTransfer, Timing
from pdkv.connector_kit.bench.turns import Spread, take_turns
from pdkv.connector_kit.bench.yardsticks import Bare
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import NotApplicable, Violation
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.registry import CONNECTORS, load_connector
from pdkv.connectors.transfer.planning import as_ids, run_starts
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.errors import ConfigError
from pdkv.wire.kv import ChecksumMode

SMALL = "2x2x16"
WANTED = [
    "connector", "tokens", "bytes", "pieces", "rounds", "ms", "gb_s", "memcpy_gb_s", "ratio_to_memcpy", "raw_gb_s",
    "ratio_to_raw", "per_piece_gb_s", "ratio_to_per_piece", "producer_step_ms", "consumer_step_ms",
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
        value = built[name]
        if isinstance(value, dict):
            check_spread(Spread(**value))
        else:
            assert isinstance(value, str) or value > 0, name


def check_spread(spread: Spread) -> None:
    assert isfinite(spread.high)
    assert 0 < spread.low <= spread.median <= spread.high


def test_a_spread_is_the_median_and_its_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of(iter([1.0, 3.0])).median == 2.0


def test_what_is_compared_takes_turns_and_each_comes_first_at_times() -> None:
    order: list[str] = []

    def note(name: str) -> int:
        order.append(name)
        return len(order)

    took = take_turns({name: partial(note, name) for name in ("transfer", "memcpy", "raw")}, 2)
    assert order == ["transfer", "memcpy", "raw", "memcpy", "raw", "transfer", "raw", "transfer", "memcpy"]
    assert took == {"transfer": [6, 8], "memcpy": [4, 9], "raw": [5, 7]}  # the first round does not count


def test_ratios_are_those_of_the_same_round() -> None:
    """A slow phase of the machine slows both: the ratio of the medians would be another one."""
    timings = [Timing(seconds, 0.0, 2e-3, 4e-3, None) for seconds in (1.0, 10.0, 2.0)]
    yardsticks = {"memcpy": [0.5, 5.0, 1.0], "raw": [0.9, 5.0, 1.0], "per_piece": [1.0, 10.0, 2.0]}
    row = _row(plan_of("shared_memory"), "aged", 40, 10**9, 3, timings, yardsticks)
    assert row.ratio_to_memcpy == Spread(0.5, 0.5, 0.5)
    assert row.ratio_to_raw == Spread(0.5, 0.5, 0.7)
    assert row.ratio_to_per_piece == Spread(1.0, 1.0, 1.0)
    assert row.ms.median == 2000.0
    assert row.gb_s == Spread.of([1.0, 0.1, 0.5])
    assert (row.producer_step_ms.median, row.consumer_step_ms.median) == (2.0, 4.0)
    assert row.save_gb_s is None
    assert _row(plan_of("shared_memory"), "aged", 40, 1, 3, timings, {"memcpy": [1.0] * 3}).raw_gb_s is None


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


@pytest.mark.parametrize("mode", ["off", "on"])
def test_transfers_are_measured_with_and_without_digests(mode: ChecksumMode) -> None:
    plan = plan_of("memory", options={"mode": "push"}, kv_checksum=mode)
    with plans.open_setting(plan) as setting, BenchWorld(setting, plan.producer, plan.consumer) as world:
        assert {engine.card.kv_checksum for engine in world.engines.values()} == {mode}
        TimedTransfer(world, 40).measure(compare=True)


def test_transfers_with_digests_take_turns_with_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    measure_one = TimedTransfer.measure

    def measured(transfer: TimedTransfer, **arguments: Any) -> Timing:
        modes.append(transfer.world.setting.kv_checksum)
        seconds = 3.0 if modes[-1] == "on" else 2.0
        return measure_one(transfer, **arguments)._replace(transfer_s=seconds, scheduler_s=0.0)

    monkeypatch.setattr(TimedTransfer, "measure", measured)
    plan = plan_of("memory", options={"mode": "push"}, repeats=2)
    took = measure_in_turns({"with": replace(plan, kv_checksum="on"), "without": replace(plan, kv_checksum="off")}, 40)
    assert modes == ["on", "off", "on", "off", "off", "on", "on", "off"]  # compared, warm, and two rounds
    assert took == {"with": [3000.0] * 2, "without": [2000.0] * 2}
    assert Spread.of_ratios(*took.values()) == Spread(1.5, 1.5, 1.5)


def test_ranks_and_block_sizes_may_differ() -> None:
    for arguments in ({"tp_pair": (1, 2)}, {"tp_pair": (2, 1)}, {"block_sizes": (16, 32)}):
        rows = measure(plan_of("shared_memory", patterns=["aged"], **arguments))
        check_row(rows[0])


def test_pieces_are_those_that_the_shared_plan_merges() -> None:
    shape = parse_layout(SMALL)
    source, target = [4, 5, 6, 9], [7, 8, 2, 3]
    assert planned_pieces(shape, shape, 64, source, target) == run_starts(as_ids(source), as_ids(target)).size == 3
    assert planned_pieces(shape, shape, 20, source, target) == 1  # two blocks, side by side on both sides
    assert planned_pieces(shape, shape, 64, source, source) == 2


def test_pieces_of_unequal_peers_are_counted_by_layer_head_and_segment() -> None:
    whole, halves = parse_layout(SMALL), parse_layout(SMALL, tp=2)
    assert planned_pieces(whole, halves, 64, [0] * 4, [0] * 4) == 4 * 2 * 2 * 2  # blocks, layers, K and V, ranks
    large = replace(whole, block_size=32)
    assert planned_pieces(whole, large, 64, [0] * 4, [0] * 2) == 4 * 2 * 2 * 2  # segments, layers, K and V, heads
    assert plans.store_values(plan_of("store", tp_pair=(1, 2)), {"load": "layerwise"}) == (64, 4)  # 2 groups, 2 shards


def test_rows_count_the_pieces_of_the_tables_that_were_used() -> None:
    aged, contiguous = measure(plan_of("shared_memory", tokens=[160]))
    assert contiguous.pieces == 1
    assert 1 < aged.pieces <= 10


def pool_of(pattern: str, num_blocks: int) -> BlockPool:
    return PATTERNS[pattern](parse_layout(SMALL).layout(), num_blocks, LocalBlockTable(num_blocks), 1)


def test_an_aged_pool_scatters_and_a_fresh_one_does_not() -> None:
    aged, fresh = pool_of("aged", 512), pool_of("contiguous", 512)
    taken = aged.allocate(300)
    assert taken is not None
    assert len(set(taken)) == 300
    assert run_starts(as_ids(taken)).size > 100
    first, second = fresh.allocate(100), fresh.allocate(100)
    assert first is not None
    assert second is not None
    assert run_starts(as_ids(first), as_ids(second)).size == 1
    aged.release(taken, Holder.ACTIVE)
    assert aged.num_available == 512


def test_contiguous_requests_go_round_the_pool() -> None:
    pool = pool_of("contiguous", 10)
    first = pool.allocate(4)
    assert first is not None
    pool.release(first, Holder.ACTIVE)
    assert pool.allocate(4) == [4, 5, 6, 7]
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(3) is None


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
    plan = plan_of("memory", options={"mode": "push"})
    tails = measure_push_tail(plan, 64, step_counts=(1, 2), pace=6400.0)
    assert [(tail.steps, tail.tokens, tail.rounds) for tail in tails] == [(1, 64, 1), (2, 64, 1)]
    for tail in tails:
        for spread in (tail.tail_ms, tail.bare_ms, tail.ratio_to_allowed):
            check_spread(spread)
        assert tail.ratio_to_allowed.median == pytest.approx(tail.tail_ms.median / (0.25 * tail.bare_ms.median + 2.0))
    with pytest.raises(NotApplicable):
        measure_push_tail(plan_of("memory"), 64)


def test_a_third_party_names_its_bare_transport() -> None:
    class Own:
        bare_transport = "somewhere:Bare"

    assert bare_of("theirs:Own", Own, {}) == "somewhere:Bare"
    assert bare_of("theirs:Own", object, {}) is None
    target = CONNECTORS.target("store")
    assert "Redis" in str(bare_of(target, load_connector("store"), {"url": "unix:///x,file:///y"}))


def test_an_option_says_which_bare_transport_lies_below() -> None:
    def bare(name: str, **options: str) -> str:
        target = CONNECTORS.target(name)
        return str(bare_of(target, object, options)).rpartition(":")[2]

    assert bare("p2p") == bare("p2p", sockets="unix") == "UnixMessage"
    assert bare("p2p", sockets="tcp") == "TcpMessage"
    assert bare("nixl") == bare("nixl", path="arena") == "SharedMapping"
    assert bare("nixl", path="ucx") == "NixlRead"


@pytest.mark.parametrize(
    "name", ["bare:SharedMapping", "bare:LocalCopy", "bare_socket:UnixMessage", "bare_socket:TcpMessage"]
)
def test_all_of_the_bytes_arrive_where_they_belong(name: str, tmp_path: Path) -> None:
    """Both sides in one process: what the reader has is compared."""
    size, piece = 1 << 14, 1 << 11
    spec = p.BareSpec(BARE_SIDE, "", size, piece, size, 2 * size, {"directory": str(tmp_path)})
    kind = resolve_name(f"pdkv.connector_kit.bench.{name}")
    source, reader = kind(spec), kind(spec)
    try:
        reader.connect(source.offer())
        sent = np.random.default_rng(1).integers(0, 255, 2 * size, dtype=np.uint8)
        memory(source if "bare_socket" in name else reader, "_source")[:] = sent
        for turn, in_pieces in enumerate((False, True)):
            source.turn = reader.turn = turn
            got = memory(reader, "_target")[turn * size :][:size]
            got[:] = 0
            sending = threading.Thread(target=source.send, args=(in_pieces, 10.0))
            sending.start()
            reader.fetch(in_pieces, 10.0)
            sending.join(10.0)
            expected = sent[turn * size :][:size].copy()
            if in_pieces:
                for first, to in zip(reader.source_offsets, reader.target_offsets, strict=True):
                    expected[to : to + piece] = sent[turn * size + first :][:piece]
            assert np.array_equal(got, expected)
    finally:
        reader.close()
        source.close()


def memory(transport: BareTransport, name: str) -> Bytes:
    found: Bytes = getattr(transport, "_region" if hasattr(transport, "_region") else name)
    return found


def test_what_a_store_keeps_of_a_measurement_is_bounded() -> None:
    store, storage = CONNECTORS.target("store"), CONNECTORS.target("shared_storage")
    assert "ttl_s" in plans.bounded(store, {"url": "redis://localhost"})
    assert plans.bounded(store, {"url": "file:///x", "capacity": "1MiB"})["capacity"] == "1MiB"
    assert "capacity" in plans.bounded(storage, {"path": "/x"})
    assert not plans.bounded(CONNECTORS.target("nixl"), {})


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


def test_the_command_draws_a_plot_beside_memcpy_and_bare(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    command = ["connector", "bench", "shared_memory", "--model-layout", "small", "--tokens", "40", "80"]
    assert main([*command, "--repeats", "2", "--no-throttle", "--plot", str(plot)]) == 0
    text = plot.read_text()
    for label in (
        "memcpy",
        "shared_memory, aged",
        "shared_memory, contiguous",
        "bare, in one piece",
        "bare, per piece",
    ):
        assert f"<!-- {label} -->" in text


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_module, "open_setting", None)
    command = ["connector", "bench", "shared_memory", "--plot"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert main([*command, "plot.png"]) == 2
    assert "pdkv[plot]" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main([*command, str(tmp_path / "plot.docx")]) == 2
    assert ".docx" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "nowhere" / "plot.png")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_command_measures_the_tail_of_a_push_only(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["connector", "bench", "memory", "--model-layout", "tiny", "--tail", "--tokens", "32", "--repeats", "1"]
    assert main([*command, "--connector-config", "mode=push"]) == 0
    text = capsys.readouterr().out
    assert "32 tokens in 1 step:" in text
    assert "32 tokens in 4 steps:" in text
    assert main([*command, "--connector-config", "mode=push", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [tail["steps"] for tail in document["tails"]] == [1, 4]
    assert main(command) == 2
    assert "does not push" in capsys.readouterr().err
    assert main([*command, "--plot", "plot.png"]) == 2
    assert "--plot" in capsys.readouterr().err


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--tp-pair", "2"], ["--tokens", "0"], ["--model-layout", "huge"], ["--connector-config", "x=1"]):
        assert main(["connector", "bench", "shared_memory", *wrong]) == 2
    assert "huge" in capsys.readouterr().err


def test_bare_transports_move_all_bytes_whole_and_in_pieces(tmp_path: Path) -> None:
    plan = plan_of("shared_memory")
    with plans.open_setting(plan) as setting:
        for name in ("bare:LocalCopy", "bare:SharedMapping", "bare:FileRead", "bare_socket:UnixMessage",
                     "bare_socket:TcpMessage"):  # fmt: skip
            target = f"pdkv.connector_kit.bench.{name}"
            spec = p.BareSpec(BARE_SIDE, target, 1 << 16, 1 << 12, 1 << 14, 1 << 18, {"directory": str(tmp_path)})
            with Bare(setting.zygote, spec) as bare:
                assert bare.seconds(in_pieces=False) > 0
                assert bare.seconds(in_pieces=True) > 0
    assert not list(tmp_path.iterdir())
    assert set(PATTERNS) == {"aged", "contiguous"}


def test_ctrl_c_within_a_move_is_no_other_error(tmp_path: Path) -> None:
    """The hosts owe answers then: they are ended without a question."""
    with plans.open_setting(plan_of("shared_memory")) as setting:
        spec = p.BareSpec(
            BARE_SIDE, "pdkv.connector_kit.bench.bare:LocalCopy", 1 << 16, 1 << 12, 1 << 14, 1 << 18,
            {"directory": str(tmp_path)},
        )  # fmt: skip

        def interrupted() -> None:
            with Bare(setting.zygote, spec) as bare:
                bare._reader.send("bare", BareSide.move, False, 5.0)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
