"""What a connector is shown of a step: what it observes and nothing else, without copies of block tables."""

from itertools import pairwise

import pytest
from state_machine.standin_store import STAND_IN_STORE, StandInStoreScheduler

from pdkv.connectors.base import OBSERVES_NOTHING, BlockIds, KVConnectorMetadata, Observed, SchedulerView, Shown
from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import make_core, run, submit
from pdkv.wire.kv import KVTerms

PROMPT = list(range(100, 122))  # 6 blocks of 4


def observed(
    monkeypatch: pytest.MonkeyPatch, observes: Observed, max_num_seqs: int = 8, **options: str
) -> tuple[EngineCore, list[SchedulerView]]:
    """An engine whose connector observes that, and all views that it is shown."""
    views: list[SchedulerView] = []
    build = StandInStoreScheduler.build_connector_meta

    def seen(self: StandInStoreScheduler, view: SchedulerView) -> KVConnectorMetadata:
        views.append(view)
        return build(self, view)

    monkeypatch.setattr(StandInStoreScheduler, "observes", observes)
    monkeypatch.setattr(StandInStoreScheduler, "build_connector_meta", seen)
    options = {"fabric": f"views-{observes}", "mode": "store", **options}
    return make_core(
        connector=STAND_IN_STORE, options=options, num_blocks=64, limits=SchedulerLimits(max_num_seqs, 256)
    ), views


@pytest.mark.parametrize(
    ("shown", "told"), [(Shown.NONE, set()), (Shown.HANDOFFS, {"h"}), (Shown.OTHERS, {"l"}), (Shown.ALL, {"h", "l"})]
)
def test_steps_are_shown_of_the_requests_that_are_observed(
    monkeypatch: pytest.MonkeyPatch, shown: Shown, told: set[str]
) -> None:
    core, views = observed(monkeypatch, Observed(scheduled=shown))
    core.handle("r", submit(PROMPT, request_id="l"), 0.0)
    core.handle("r", submit([2 * t for t in PROMPT], request_id="h", until="first_token", kv="handoff"), 0.0)
    run(core)
    assert {item.request.request_id for view in views for item in view.scheduled} == told
    assert {item.request.request_id for view in views for item in view.confirmed} == {"h", "l"}


@pytest.mark.parametrize(("shown", "told"), [(Shown.NONE, set()), (Shown.HANDOFFS, {"h"}), (Shown.ALL, {"h", "l"})])
def test_confirmed_tokens_are_shown_of_the_requests_that_are_observed(
    monkeypatch: pytest.MonkeyPatch, shown: Shown, told: set[str]
) -> None:
    core, views = observed(monkeypatch, Observed(scheduled=Shown.NONE, confirmed=shown, waiting_keys=False))
    core.handle("r", submit(PROMPT, request_id="l"), 0.0)
    core.handle("r", submit([2 * t for t in PROMPT], request_id="h", until="first_token", kv="handoff"), 0.0)
    run(core)
    assert {item.request.request_id for view in views for item in view.confirmed} == told
    assert not any(view.scheduled or view.waiting_keys for view in views)


@pytest.mark.parametrize(
    ("observes", "told"),
    [
        (Observed(confirmed_tokens=1), [(0, 22), (22, 24), (24, 28), (28, 32)]),  # a block has 4
        (Observed(confirmed_tokens=8), [(0, 22), (22, 24), (24, 32)]),
        (Observed(confirmed_tokens=24), [(0, 24)]),
    ],
)
def test_confirmed_tokens_are_shown_in_as_large_parts_as_the_connector_wants(
    monkeypatch: pytest.MonkeyPatch, observes: Observed, told: list[tuple[int, int]]
) -> None:
    core, views = observed(monkeypatch, observes, fabric=f"parts-{observes}")
    core.handle("r", submit(PROMPT, max_tokens=14), 0.0)
    run(core)
    assert [(item.start, item.stop) for view in views for item in view.confirmed] == told


def test_a_requests_terms_are_shown_while_it_waits_and_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = KVTerms(owner=7, ttl_s=60)
    core, views = observed(monkeypatch, Observed())
    core.handle("r", submit(PROMPT, request_id="t", kv_terms=terms), 0.0)
    core.handle("r", submit([2 * t for t in PROMPT], request_id="n"), 0.0)
    run(core)
    shown = {item.request.request_id: item.request.kv_terms for view in views for item in view.confirmed}
    assert shown == {"t": terms, "n": None}


def test_terms_of_waiting_requests_are_shown_in_their_order_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terms = KVTerms(owner=7, ttl_s=60)
    core, views = observed(monkeypatch, Observed(), max_num_seqs=1, fabric="waiting-terms")
    for number, kv_terms in enumerate((None, None, terms)):
        core.handle("r", submit([t + number for t in PROMPT], request_id=f"{number}", kv_terms=kv_terms), 0.0)
    run(core)
    shown = [(len(view.waiting_keys), list(view.waiting_terms)) for view in views]
    assert (2, [None, terms]) in shown
    assert (0, []) in shown
    assert all(len(terms) in (0, num_keys) for num_keys, terms in shown)


def test_a_hand_off_is_shown_at_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    core, views = observed(monkeypatch, Observed(confirmed_tokens=1000, confirmed_steps=1000))
    core.handle("r", submit(PROMPT, until="first_token", kv="handoff"), 0.0)
    core.step(0.0)
    core.step(0.0)
    assert [(item.start, item.stop, item.last) for view in views for item in view.confirmed] == [(0, 22, True)]


@pytest.mark.parametrize("steps", [1, 3])
def test_what_decodes_confirm_in_several_steps_is_shown_together(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    observes = Observed(Shown.NONE, confirmed_steps=steps)
    core, views = observed(monkeypatch, observes)
    for i in range(3):
        core.handle("r", submit([t + 30 * i for t in PROMPT[: 20 - i]], request_id=f"{i}", max_tokens=40), 0.0)
    for _ in range(12):
        core.step(0.0)
    shown = [view.step_id for view in views if view.confirmed]
    assert min(b - a for a, b in pairwise(shown[1:])) == steps
    told = {i: [] for i in ("0", "1", "2")}
    for view in views:
        for item in view.confirmed:
            told[item.request.request_id].append((item.start, item.stop))
    for ranges in told.values():
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    run(core)
    assert not core.external.has_news


def test_the_end_of_a_request_tells_what_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    core, views = observed(monkeypatch, Observed(Shown.NONE, confirmed_steps=1000))
    core.handle("r", submit(PROMPT, max_tokens=8), 0.0)
    core.handle("r", submit([2 * t for t in PROMPT], request_id="b", max_tokens=8), 0.0)
    core.step(0.0)
    core.step(0.0)
    views.clear()
    for _ in range(4):
        core.step(0.0)
    assert not any(view.confirmed for view in views)
    core.router_left("r")
    run(core)
    assert not any(view.confirmed for view in views)  # given up: their blocks may have other owners

    core.router_joined("r", "2")
    core.handle("r", submit(PROMPT, request_id="c", max_tokens=9), 0.0)
    views.clear()
    run(core)
    assert [(item.start, item.stop) for view in views for item in view.confirmed] == [(0, 22), (22, 28)]
    assert next(view for view in views if view.finished).confirmed


def test_a_layerwise_load_is_shown_in_the_step_that_it_begins_in(monkeypatch: pytest.MonkeyPatch) -> None:
    core, views = observed(monkeypatch, Observed(scheduled=Shown.LAYERWISE_LOADS), load="layerwise")
    core.handle("r", submit(PROMPT, request_id="writer"), 0.0)
    run(core)
    core.scheduler.kv.pool.allocate(core.scheduler.kv.pool.num_available)  # its blocks have another owner
    assert not any(view.scheduled for view in views)
    reader, views = observed(monkeypatch, Observed(scheduled=Shown.LAYERWISE_LOADS), load="layerwise")
    reader.handle("r", submit([7, 8, 9], request_id="other"), 0.0)
    reader.handle("r", submit(PROMPT, request_id="reader"), 0.0)
    run(reader)
    assert [(r.request.request_id, r.start) for view in views for r in view.scheduled] == [("reader", 20)]


def test_what_is_shown_of_a_block_table_stays_as_it_was() -> None:
    table = [5, 3, 9]
    shown = BlockIds(table)
    table += [1, 2]
    assert list(shown) == [5, 3, 9] == shown
    assert len(shown) == 3
    assert (shown[0], shown[-1], shown[1:], shown[::-1], shown[-2:9]) == (5, 9, [3, 9], [9, 3, 5], [3, 9])
    with pytest.raises(IndexError):
        shown[3]


def test_what_two_connectors_observe_together() -> None:
    push = Observed(Shown.HANDOFFS, Shown.HANDOFFS, waiting_keys=False)
    store = Observed(scheduled=Shown.LAYERWISE_LOADS)
    assert OBSERVES_NOTHING | push == push
    assert push | store == Observed(Shown.HANDOFFS | Shown.LAYERWISE_LOADS, Shown.ALL, waiting_keys=True)
    coarse = store._replace(confirmed_tokens=64, confirmed_steps=4)
    assert (OBSERVES_NOTHING | coarse) == coarse
    assert (push | coarse)[3:] == (1, 4)  # hand-offs never wait
    assert (coarse | store._replace(confirmed_tokens=48))[3:] == (16, 1)
