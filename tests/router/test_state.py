"""Engines as the router sees them: loads, breakers, marks, compatibility, legal orders."""

from pathlib import Path
from typing import Any

import pytest
from scripted_engine import make_card

from pdkv.errors import IncompatiblePeers
from pdkv.router.books import Books, Entry
from pdkv.router.policies import Side
from pdkv.router.state import BREAKER_FAILURES, BREAKER_OPEN_S, ORDERS, PAIR_MARK_S, Fleet
from pdkv.wire.messages import BlockCounts, KVLayout, LoadReport
from pdkv.wire.refusal_note import RefusalNote

BLOCKS = BlockCounts(total=10, free=4, cached=3, active=2, leased=1, quarantined=0)


def make_fleet(kind: str = "pull") -> Fleet:
    fleet = Fleet()
    for role in ("prefill", "decode"):
        for i in range(2):
            fleet.add(f"{role}-{i}", role)
            fleet.came_up(f"{role}-{i}", make_card(f"{role}-{i}", role, kind))
    return fleet


def names(fleet: Fleet, side: Side, now: float = 0.0, **options: Any) -> list[str]:
    return [e.name for e in fleet.candidates(side, now, **options)]


def test_load_is_tokens_to_compute_for_prefill_and_tokens_of_kv_for_decode() -> None:
    fleet = make_fleet()
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("any-0", "any")):
        engine = fleet.engines.get(name) or fleet.add(name, role)
        Entry(engine.books, prefill_tokens=3000, kv_tokens=500).enter()
    assert fleet.engines["prefill-0"].view("prefill").load == 3000
    assert fleet.engines["decode-0"].view("decode").load == 500
    assert fleet.engines["any-0"].view("prefill").load == fleet.engines["any-0"].view("decode").load == 3500


def test_an_engine_that_comes_back_begins_with_empty_books() -> None:
    """And what is struck from those of its predecessor later does not touch them."""
    fleet = make_fleet()
    entry = Entry(fleet.engines["prefill-0"].books, prefill_tokens=100, kv_tokens=0)
    entry.enter()
    fleet.went_down("prefill-0")
    fleet.came_up("prefill-0", make_card("prefill-0", "prefill", epoch="e1"))
    entry.strike()
    assert fleet.engines["prefill-0"].books == Books()


def test_description_is_the_topology_entry() -> None:
    fleet = make_fleet()
    engine = fleet.engines["decode-0"]
    assert engine.describe()["blocks"] == {
        "total": 100, "free": 100, "cached": 0, "active": 0, "leased": 0, "quarantined": 0,
    }  # fmt: skip
    engine.load = LoadReport(waiting=1, running=2, blocks=BLOCKS)
    assert engine.describe() == {
        "name": "decode-0",
        "role": "decode",
        "pid": 1,
        "ranks": [],
        "state": "ready",
        "reason": None,
        "suspect": False,
        "silent_for_s": 0.0,
        "busy_s": 0.0,
        "waiting": 1,
        "running": 2,
        "blocks": {"total": 10, "free": 4, "cached": 3, "active": 2, "leased": 1, "quarantined": 0},
        "connector_problem": None,
    }
    fleet.went_down("decode-0")
    assert (engine.describe()["state"], engine.describe()["pid"], engine.load) == ("dead", None, None)


def test_dead_engine_is_no_candidate_until_it_is_back() -> None:
    fleet = make_fleet()
    fleet.went_down("decode-0")
    assert names(fleet, "decode") == ["decode-1"]
    assert [card.engine for card in fleet.cards()] == ["prefill-0", "prefill-1", "decode-1"]
    fleet.came_up("decode-0", make_card("decode-0", "decode", epoch="e1"))
    assert names(fleet, "decode") == ["decode-0", "decode-1"]


def test_breaker_opens_after_failures_in_a_row_and_closes_with_a_success() -> None:
    fleet = make_fleet()
    engine = fleet.engines["prefill-0"]
    for _ in range(BREAKER_FAILURES - 1):
        engine.failed(now=0.0)
    assert names(fleet, "prefill") == ["prefill-0", "prefill-1"]
    engine.failed(now=0.0)
    assert names(fleet, "prefill") == ["prefill-1"]
    assert names(fleet, "prefill", now=BREAKER_OPEN_S) == ["prefill-0", "prefill-1"]
    engine.failed(now=BREAKER_OPEN_S)  # the probe failed: open again at once
    assert names(fleet, "prefill", now=BREAKER_OPEN_S + 1) == ["prefill-1"]
    engine.succeeded()
    assert names(fleet, "prefill", now=BREAKER_OPEN_S + 1) == ["prefill-0", "prefill-1"]


def test_breakers_fail_open_when_all_are_open() -> None:
    fleet = make_fleet()
    for name in ("prefill-0", "prefill-1"):
        for _ in range(BREAKER_FAILURES):
            fleet.engines[name].failed(now=0.0)
    assert names(fleet, "prefill") == ["prefill-0", "prefill-1"]


def test_unwanted_engines_are_left_out_if_others_are_left() -> None:
    fleet = make_fleet()
    assert names(fleet, "prefill", without=("prefill-0",)) == ["prefill-1"]
    assert names(fleet, "prefill", without=("prefill-0", "prefill-1")) == ["prefill-0", "prefill-1"]


def test_marks_end_by_time_and_with_either_engine() -> None:
    fleet = make_fleet()
    fleet.mark("prefill-0", "decode-0", now=0.0)
    fleet.mark("prefill-1", "decode-0", now=1.0)
    assert fleet.marked_pairs(PAIR_MARK_S) == {("prefill-1", "decode-0")}
    fleet.went_down("decode-0")
    assert fleet.marked_pairs(PAIR_MARK_S) == frozenset()


def test_complete_once_stays_true() -> None:
    fleet = Fleet()
    fleet.add("prefill-0", "prefill")
    fleet.add("decode-0", "decode")
    fleet.came_up("prefill-0", make_card("prefill-0", "prefill"))
    assert not fleet.complete_once
    fleet.came_up("decode-0", make_card("decode-0", "decode"))
    fleet.went_down("decode-0")
    assert fleet.complete_once


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "other"}, "prefill-0 has model m, decode-0 has other"),
        ({"hash_block_size": 32}, "prefill-0 has hash block size 16, decode-0 has 32"),
        ({"connector": "tcp"}, "prefill-0 has connector pull, decode-0 has tcp"),
        ({"layout": KVLayout(2, 1, 8, 16, "float32", 4)}, "has KV layout layers=1.*has layers=2"),
    ],
)
def test_incompatible_engine_stays_out_with_both_values_said(changes: dict[str, Any], says: str) -> None:
    fleet = Fleet()
    fleet.add("prefill-0", "prefill")
    fleet.add("decode-0", "decode")
    fleet.came_up("prefill-0", make_card("prefill-0", "prefill"))
    with pytest.raises(IncompatiblePeers, match=says):
        fleet.came_up("decode-0", make_card("decode-0", "decode", **changes))
    assert not fleet.is_ready("decode-0")


def test_another_model_stays_out_even_when_no_engine_of_the_first_one_is_left() -> None:
    """And a router that starts later is told which one that was."""
    fleet = make_fleet()
    for name in fleet.engines:
        fleet.went_down(name)
    later = Fleet(identity="m")
    later.add("decode-0", "decode")
    for refusing in (fleet, later):
        with pytest.raises(
            IncompatiblePeers, match="decode-0 has model other, but the deployment started with model m"
        ):
            refusing.came_up("decode-0", make_card("decode-0", "decode", model="other"))
        engine = refusing.engines["decode-0"].describe()
        assert (engine["state"], engine["pid"]) == ("refused", None)
        assert engine["reason"] == "decode-0 has model other, but the deployment started with model m"
        assert refusing.candidates("decode", 0.0) == []
        refusing.came_up("decode-0", make_card("decode-0", "decode"))
        engine = refusing.engines["decode-0"].describe()
        assert (engine["state"], engine["reason"]) == ("ready", None)


def test_what_the_launcher_says_about_an_engine_is_shown_while_it_is_not_ready(tmp_path: Path) -> None:
    note = RefusalNote(tmp_path / "decode-0.refused")
    fleet = Fleet()
    engine = fleet.add("decode-0", "decode", note)
    assert (engine.describe()["state"], engine.describe()["reason"]) == ("starting", None)
    note.write("x" * 5000)
    assert (engine.describe()["state"], engine.describe()["reason"]) == ("refused", "x" * 4096)
    fleet.came_up("decode-0", make_card("decode-0", "decode"))
    assert engine.describe()["state"] == "ready"
    fleet.went_down("decode-0")
    note.clear()
    assert (engine.describe()["state"], engine.describe()["reason"]) == ("dead", None)


def test_unequal_block_sizes_are_compatible() -> None:
    fleet = make_fleet()
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_size=8, block_size=32, dtype="float32", dtype_bytes=4)
    fleet.came_up("decode-0", make_card("decode-0", "decode", layout=layout))
    assert fleet.is_ready("decode-0")


@pytest.mark.parametrize(("kind", "order"), [("pull", "prefill_first"), ("push", "needs_peer_first")])
def test_order_is_the_first_preferred_one_that_both_cards_allow(kind: str, order: str) -> None:
    assert make_fleet(kind).order("prefill-0", "decode-0", ORDERS) == order
    assert make_fleet(kind).order("prefill-0", "decode-0", ("decode_first",)) == "decode_first"


def test_illegal_order_is_refused() -> None:
    with pytest.raises(IncompatiblePeers, match=r"prefill-0 allows .*the router takes one of \['concurrent'\]"):
        make_fleet("pull").order("prefill-0", "decode-0", ("concurrent",))
