"""Engines as the router sees them: loads, outliers, bad pairs, compatibility, legal orders."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_engine import make_card

from pdkv.errors import IncompatiblePeers
from pdkv.router.engines.books import CONTEXT_WEIGHT, Books, Entry
from pdkv.router.engines.candidate import Side
from pdkv.router.engines.fleet import ORDERS, Fleet, agreed_order
from pdkv.router.engines.outliers import HOLD_S
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import Beat
from pdkv.wire.refusal_note import RefusalNote
from pdkv.wire.reports import BlockCounts, LoadReport

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
    assert fleet.engines["any-0"].view("decode").load == 3500
    assert fleet.engines["any-0"].view("prefill").load == 3000 + 500 * CONTEXT_WEIGHT


def test_an_engine_that_comes_back_begins_with_empty_books() -> None:
    """And what is struck from those of its predecessor later does not touch them."""
    fleet = make_fleet()
    entry = Entry(fleet.engines["prefill-0"].books, prefill_tokens=100, kv_tokens=0)
    entry.enter()
    fleet.went_down("prefill-0", 0.0)
    fleet.came_up("prefill-0", make_card("prefill-0", "prefill", epoch="e1"))
    entry.strike()
    assert fleet.engines["prefill-0"].books == Books()


def test_description_is_the_topology_entry() -> None:
    fleet = make_fleet()
    engine = fleet.engines["decode-0"]
    assert engine.describe(0.0)["blocks"] == {
        "total": 100, "free": 100, "cached": 0, "active": 0, "leased": 0, "quarantined": 0,
    }  # fmt: skip
    engine.load = LoadReport(waiting=1, running=2, blocks=BLOCKS)
    expected = {
        "name": "decode-0",
        "role": "decode",
        "endpoint": "",
        "source": "launch",
        "pid": 1,
        "ranks": [],
        "state": "ready",
        "reason": None,
        "serves": True,
        "suspect": False,
        "suspicion": None,
        "ejected": False,
        "last_probe": None,
        "draining": False,
        "drained": False,
        "requests": 0,
        "silent_for_s": 0.0,
        "busy_s": 0.0,
        "predicted_s": 0.0,
        "waiting": 1,
        "running": 2,
        "blocks": {"total": 10, "free": 4, "cached": 3, "active": 2, "leased": 1, "quarantined": 0},
        "connector_problem": None,
    }
    assert engine.describe(0.0).items() >= expected.items()
    engine.draining = True
    assert not engine.describe(0.0)["serves"]
    engine.draining, engine.health.silent = False, True
    assert (engine.describe(0.0)["serves"], engine.describe(0.0)["suspect"]) == (False, True)
    fleet.went_down("decode-0", 0.0)
    assert (engine.describe(0.0)["state"], engine.describe(0.0)["pid"], engine.load) == ("dead", None, None)
    assert not engine.describe(0.0)["serves"]


def test_dead_engine_is_no_candidate_until_it_is_back() -> None:
    fleet = make_fleet()
    fleet.went_down("decode-0", 0.0)
    assert names(fleet, "decode") == ["decode-1"]
    assert [card.engine for card in fleet.cards()] == ["prefill-0", "prefill-1", "decode-1"]
    fleet.came_up("decode-0", make_card("decode-0", "decode", epoch="e1"))
    assert names(fleet, "decode") == ["decode-0", "decode-1"]


def eject(fleet: Fleet, *engines: str, now: float = 0.0) -> None:
    """They fail, and nothing else happens."""
    for _ in range(10):
        for name in engines:
            fleet.failed(name, now)


def test_an_ejected_engine_comes_last_and_gets_one_trial_after_its_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet()
    eject(fleet, "prefill-0")
    with monkeypatch.context() as patched:
        patched.setattr(fleet, "_compare", None)  # its failures need no comparison with its peers any more
        fleet.failed("prefill-0", 0.0)
    assert names(fleet, "prefill") == ["prefill-1"]
    assert names(fleet, "prefill", now=HOLD_S) == ["prefill-0", "prefill-1"]
    fleet.engines["prefill-0"].score.begin_trial(HOLD_S)
    assert names(fleet, "prefill", now=HOLD_S) == ["prefill-1"]
    fleet.succeeded("prefill-0", HOLD_S)
    assert names(fleet, "prefill", now=HOLD_S) == ["prefill-0", "prefill-1"]


@pytest.mark.parametrize(("ejected", "left"), [("0", "123"), ("01", "23"), ("012", "03"), ("0123", "0123")])
def test_at_most_half_of_a_role_is_left_out(ejected: str, left: str) -> None:
    """Those ejected first come back first. If all are ejected, all are as good."""
    fleet = Fleet()
    for i in "0123":
        fleet.add(f"any-{i}", "any")
        fleet.came_up(f"any-{i}", make_card(f"any-{i}", "any"))
    for now, i in enumerate(ejected):
        fleet.engines[f"any-{i}"].score.eject(float(now))
    assert sorted(name[-1] for name in names(fleet, "prefill", 4.0)) == list(left)


def test_at_most_half_of_a_large_role_is_left_out() -> None:
    fleet = Fleet()
    for i in range(40):
        fleet.add(f"any-{i}", "any")
        fleet.came_up(f"any-{i}", make_card(f"any-{i}", "any"))
    for i in range(1, 40):
        fleet.engines[f"any-{i}"].score.eject(0.0)
    fleet.tick()
    assert len(names(fleet, "prefill", 1.0, near=())) == 20


def test_draining_engines_have_no_place_among_those_with_little_load() -> None:
    fleet = make_fleet()
    engine = fleet.engines["prefill-0"]
    for engine.draining, left in ((True, ["prefill-1"]), (False, ["prefill-1", "prefill-0"])):
        fleet.look_at(engine)
        fleet.sides["prefill"].noticed("prefill-0")
        assert [e.name for e in fleet.sides["prefill"].by_load()] == left


def test_a_score_outlives_its_engine() -> None:
    """Router 20: an engine came up with a clean record, so that a crash loop never ended it."""
    fleet = make_fleet()
    eject(fleet, "decode-0")
    fleet.went_down("decode-0", 1.0)
    fleet.came_up("decode-0", make_card("decode-0", "decode", epoch="e1"))
    assert names(fleet, "decode", now=1.0) == ["decode-1"]
    assert fleet.engines["decode-0"].describe(1.0)["ejected"]


def test_suspects_come_behind_ejected_engines() -> None:
    fleet = make_fleet()
    eject(fleet, "prefill-0")
    fleet.engines["prefill-1"].health.beat(Beat("e0", 1.0, 0.01))
    assert names(fleet, "prefill") == ["prefill-0"]
    assert "should take 0.01 s" in fleet.engines["prefill-1"].describe(0.0)["suspicion"]


def test_unwanted_engines_are_left_out_if_others_are_left() -> None:
    fleet = make_fleet()
    assert names(fleet, "prefill", without=("prefill-0",)) == ["prefill-1"]
    assert names(fleet, "prefill", without=("prefill-0", "prefill-1")) == ["prefill-0", "prefill-1"]


def test_a_bad_decode_engine_marks_no_healthy_prefill() -> None:
    """Router 20. A pair that fails is passed over as a pair; an engine without any other comes last."""
    fleet = make_fleet()
    fleet.pairs.loaded("prefill-0", "decode-0", False, 0.0)
    assert names(fleet, "prefill") == ["prefill-0", "prefill-1"]
    assert names(fleet, "decode") == ["decode-0", "decode-1"]
    fleet.pairs.loaded("prefill-1", "decode-0", False, 0.0)
    assert names(fleet, "prefill") == ["prefill-0", "prefill-1"]
    assert names(fleet, "decode") == ["decode-1"]
    fleet.pairs.loaded("prefill-0", "decode-1", False, 0.0)
    assert names(fleet, "prefill") == ["prefill-1"]
    for _ in range(8):  # under way at the same time: one failure
        fleet.pairs.loaded("prefill-1", "decode-1", False, 0.0)
    assert names(fleet, "prefill") == ["prefill-0", "prefill-1"], "nothing else is left"
    assert fleet.pairs.avoided(1.0) is fleet.pairs.avoided(2.0), "asked for several times per request"
    assert fleet.pairs.avoided(HOLD_S) == frozenset()
    fleet.pairs.loaded("prefill-1", "decode-1", False, HOLD_S)
    assert fleet.pairs.avoided(2 * HOLD_S) == {("prefill-1", "decode-1")}, "for longer than the first time"
    fleet.pairs.loaded("prefill-1", "decode-1", True, 2 * HOLD_S)
    fleet.remove("decode-0")
    assert set(fleet.pairs) == {("prefill-0", "decode-1")}


def test_an_engine_without_another_partner_comes_last_when_its_pair_fails() -> None:
    fleet = make_fleet()
    fleet.went_down("decode-1", 0.0)
    fleet.pairs.loaded("prefill-0", "decode-0", False, 0.0)
    assert names(fleet, "prefill") == ["prefill-1"]


def test_complete_once_stays_true() -> None:
    fleet = Fleet()
    fleet.add("prefill-0", "prefill")
    fleet.add("decode-0", "decode")
    fleet.came_up("prefill-0", make_card("prefill-0", "prefill"))
    assert not fleet.complete_once
    fleet.came_up("decode-0", make_card("decode-0", "decode"))
    fleet.went_down("decode-0", 0.0)
    assert fleet.complete_once


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "other"}, "prefill-0 has model m, decode-0 has other"),
        ({"hash_block_size": 32}, "prefill-0 has hash block size 16, decode-0 has 32"),
        ({"connector": "tcp"}, "prefill-0 has connector pull, decode-0 has tcp"),
        ({"layout": KVLayout(2, 1, 8, 16, "float32", 4)}, "has KV layout layers=1.*has layers=2"),
        ({"layout": KVLayout(1, 1, 8, 16, "float8_e4m3fn", 1)}, "dtype=float32.*has .*dtype=float8_e4m3fn"),
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
        fleet.went_down(name, 0.0)
    later = Fleet(identity="m")
    later.add("decode-0", "decode")
    for refusing in (fleet, later):
        with pytest.raises(
            IncompatiblePeers, match="decode-0 has model other, but the deployment started with model m"
        ):
            refusing.came_up("decode-0", make_card("decode-0", "decode", model="other"))
        engine = refusing.engines["decode-0"].describe(0.0)
        assert (engine["state"], engine["pid"]) == ("refused", None)
        assert engine["reason"] == "decode-0 has model other, but the deployment started with model m"
        assert refusing.candidates("decode", 0.0) == []
        refusing.came_up("decode-0", make_card("decode-0", "decode"))
        engine = refusing.engines["decode-0"].describe(0.0)
        assert (engine["state"], engine["reason"]) == ("ready", None)


def test_what_the_launcher_says_about_an_engine_is_shown_while_it_is_not_ready(tmp_path: Path) -> None:
    note = RefusalNote(tmp_path / "decode-0.refused")
    fleet = Fleet()
    engine = fleet.add("decode-0", "decode", note)
    assert (engine.describe(0.0)["state"], engine.describe(0.0)["reason"]) == ("starting", None)
    note.write("x" * 5000)
    assert (engine.describe(0.0)["state"], engine.describe(0.0)["reason"]) == ("refused", "x" * 4096)
    fleet.came_up("decode-0", make_card("decode-0", "decode"))
    assert engine.describe(0.0)["state"] == "ready"
    fleet.went_down("decode-0", 0.0)
    note.clear()
    assert (engine.describe(0.0)["state"], engine.describe(0.0)["reason"]) == ("dead", None)


def test_unequal_block_sizes_are_compatible() -> None:
    fleet = make_fleet()
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_size=8, block_size=32, dtype="float32", dtype_bytes=4)
    fleet.came_up("decode-0", make_card("decode-0", "decode", layout=layout))
    assert fleet.is_ready("decode-0")


@pytest.mark.parametrize(("kind", "order"), [("pull", "prefill_first"), ("push", "needs_peer_first")])
def test_order_is_the_first_preferred_one_that_both_cards_allow(kind: str, order: str) -> None:
    assert make_fleet(kind).order("prefill-0", "decode-0", ORDERS) == order
    assert make_fleet(kind).order("prefill-0", "decode-0", ("decode_first",)) == "decode_first"


@pytest.mark.parametrize(("num_blocks", "order"), [(16, "concurrent"), (15, "needs_peer_first")])
def test_prompts_wait_for_their_peer_where_a_pool_does_not_hold_two(num_blocks: int, order: str) -> None:
    card = make_card("decode-0", "decode", "push")
    small = replace(card, num_blocks=num_blocks, max_model_len=8 * card.layout.block_size - 3)
    assert agreed_order(card, small, ("concurrent",)) == order
    assert agreed_order(small, card, ("concurrent",)) == order
    assert agreed_order(replace(small, orders=["concurrent"]), card, ("concurrent",)) == "concurrent"


def test_illegal_order_is_refused() -> None:
    with pytest.raises(IncompatiblePeers, match=r"prefill-0 allows .*the router takes one of \['concurrent'\]"):
        make_fleet("pull").order("prefill-0", "decode-0", ("concurrent",))


def test_connectors_of_different_versions_are_said_once_with_both(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    for name, version in (("prefill-0", 1), ("decode-0", 2), ("decode-1", 1)):
        fleet.add(name, name[:-2])
        fleet.came_up(name, make_card(name, name[:-2], wire_versions={"p2p": version}))
    gap = "no KV passes between decode-0 and prefill-0: connector p2p speaks version 2 and version 1"
    assert caplog.text.count(gap) == 1
    assert not fleet.can_hand_over("prefill-0", "decode-0")
    assert not fleet.can_hand_over("decode-0", "prefill-0")
    assert fleet.can_hand_over("prefill-0", "decode-1")


def test_platforms_whose_libraries_carry_kv_must_be_alike_up_to_the_second_dot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    for name, nixl in (("prefill-0", "1.5.0"), ("decode-0", "1.6.0"), ("decode-1", "1.5.2")):
        fleet.add(name, name[:-2])
        platform = {"NIXL": nixl, "torch": name}
        fleet.came_up(name, make_card(name, name[:-2], wire_versions={"nixl": 1}, platform=platform, alike=["NIXL"]))
    assert "no KV passes between decode-0 and prefill-0: NIXL is 1.6 and 1.5" in caplog.text
    able = [fleet.can_hand_over("prefill-0", name) for name in ("decode-0", "decode-1")]
    assert (able, fleet.engines["decode-0"].describe(0.0)["platform"]["NIXL"]) == ([False, True], "1.6.0")


def test_an_engine_that_shortens_the_service_is_named_with_both_lengths(caplog: pytest.LogCaptureFixture) -> None:
    fleet = make_fleet()
    for role, length in (("prefill", 8), ("decode", 1 << 20), ("decode", 16)):
        fleet.add(name := f"{role}-of-{length}", role)
        fleet.came_up(name, make_card(name, role, max_model_len=length))
    known = fleet.engines["decode-0"].card
    assert known is not None
    line = f"decode-of-16 takes at most 16 tokens a request, so the service does; before: {known.max_model_len}"
    assert [record.getMessage() for record in caplog.records] == [line]


def test_what_an_engine_has_probably_computed_does_not_wait_there_and_a_step_is_the_most_of_it() -> None:
    fleet = Fleet()
    fleet.add("prefill-0", "prefill")
    engine = fleet.came_up("prefill-0", make_card("prefill-0", "prefill", max_num_batched_tokens=1000))
    Entry(engine.books, 5000, 0).enter()
    engine.books.worked_since = 10.0
    assert engine.view("prefill", 11.0).load == 5000, "not measured"
    engine.token_s = 0.001
    assert [engine.view("prefill", at).load for at in (10.0, 10.5, 60.0)] == [5000, 4500, 4000]


def test_engines_of_unequal_speed_have_paces_and_nearly_equal_ones_have_none() -> None:
    fleet = Fleet()
    for i, token_s in enumerate((0.001, 0.0011, 0.003)):
        fleet.add(f"prefill-{i}", "prefill")
        fleet.came_up(f"prefill-{i}", make_card(f"prefill-{i}", "prefill"))
        for num in range(1, 20):
            fleet.speeds.worked(f"prefill-{i}", 100 * num, token_s * 100 * num, 1.0)
    fleet.review(1.5)
    assert [e.pace for e in fleet.engines.values()] == pytest.approx([1.0, 1.0, 3.0 / 1.1], rel=0.01)
    fleet.review(60.0)
    assert {e.pace for e in fleet.engines.values()} == {1.0}
