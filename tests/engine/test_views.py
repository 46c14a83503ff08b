"""What a connector is shown of a step: what it observes and nothing else, without copies of block tables."""

import pytest
from engines import make_core, run, submit

from pdkv.connectors.base import (
    OBSERVES_NOTHING,
    BlockIds,
    KVConnectorMetadata,
    Observed,
    SchedulerView,
    Shown,
)
from pdkv.connectors.memory.store import MemoryStoreScheduler
from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits

PROMPT = list(range(100, 122))  # 6 blocks of 4


def observed(
    monkeypatch: pytest.MonkeyPatch, observes: Observed, **options: str
) -> tuple[EngineCore, list[SchedulerView]]:
    """An engine whose connector observes that, and all views that it is shown."""
    views: list[SchedulerView] = []
    build = MemoryStoreScheduler.build_connector_meta

    def seen(self: MemoryStoreScheduler, view: SchedulerView) -> KVConnectorMetadata:
        views.append(view)
        return build(self, view)

    monkeypatch.setattr(MemoryStoreScheduler, "observes", observes)
    monkeypatch.setattr(MemoryStoreScheduler, "build_connector_meta", seen)
    options = {"fabric": f"views-{observes}", "mode": "store", **options}
    return make_core(options=options, num_blocks=64, limits=SchedulerLimits(8, 256)), views


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (Shown.NONE, set()),
        (Shown.HANDOFFS, {"h"}),
        (Shown.OTHERS, {"l"}),
        (Shown.ALL, {"h", "l"}),
    ],
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
