"""NIXL pushes whose layers go out one by one, while the step that computes them runs."""

from collections.abc import Iterator
from typing import Any

import pytest
from nixl_engines import Engine, closing, view
from nixl_rig import needs_nixl
from traffic import wait_until_true

from pdkv.connectors.base import ScheduledRange, SchedulerView, TransferKey
from pdkv.connectors.nixl.receiver import _GRACE_S
from pdkv.testing import VirtualClock

pytestmark = needs_nixl

NUM_TOKENS = 200
DIRECT = {"gather_below": "0"}
GATHERED = {"path": "ucx", "gather_below": str(1 << 30), "gather_min_pieces": "1"}


@pytest.fixture(name="make")
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("pdkv.connectors.peer.push_worker.MIN_GROUP_BYTES", 1)
    with closing() as make:
        yield make


def begin_step(engine: Engine, ticket: bytes | None, block_ids: list[int]) -> Any:
    """A step that computes all of `t` begins."""
    request = view("t", kv="handoff", num_tokens=NUM_TOKENS + 1, ticket=ticket)
    engine.step_id += 1
    news = SchedulerView(engine.step_id, [ScheduledRange(request, 0, NUM_TOKENS, [block_ids])], [], [], [], [], [])
    meta = engine.scheduler.build_connector_meta(news)
    for worker in engine.workers:
        worker.start_load_kv(meta)
    return meta


def compute(engine: Engine, meta: Any, kv: list[Any], layers: range) -> None:
    """These layers of the pools are as in `kv` now."""
    for layer in layers:
        for worker, pool, content in zip(engine.workers, engine.pools, kv, strict=True):
            pool[:, layer] = content[:, layer]
            worker.save_kv_layer(layer, pool, meta)


@pytest.mark.parametrize(
    ("options", "prefill_shape"),
    [
        ({}, {}),
        ({"path": "ucx", **DIRECT}, {}),
        (GATHERED, {}),
        ({}, {"tp": 2}),
        ({}, {"block_size": 32}),
        ({"path": "ucx", **DIRECT}, {"tp": 2}),
        ({"path": "ucx", **DIRECT}, {"block_size": 32}),
    ],
)  # fmt: skip
def test_every_layer_arrives(make: Any, options: dict[str, str], prefill_shape: dict[str, int]) -> None:
    common = {"options": {"mode": "push", **options}}
    prefill, decode = make(Engine, "p", **common, **prefill_shape), make(Engine, "d", **common)
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    theirs, ours = list(range(0, 2 * NUM_TOKENS // 16, 2))[:13], list(range(20, 33))
    prefill.fill_seeded(theirs, NUM_TOKENS, 1)
    content = [kv.clone() for kv in prefill.pools]
    for pool in prefill.pools:
        pool.zero_()
    ticket = decode.load(view("t", kv="await_peer", num_tokens=NUM_TOKENS + 1), ours)
    meta = begin_step(prefill, ticket, theirs)
    num_layers = prefill.layout.num_layers
    compute(prefill, meta, content, range(num_layers - 1))
    for worker in prefill.workers:
        wait_until_true(lambda worker=worker: worker.num_open_jobs == 1, "the other layers are out")  # type: ignore[misc]
    assert not any(worker.get_finished() for worker in prefill.workers)  # its blocks are held
    assert not decode.workers[0].get_finished()
    compute(prefill, meta, content, range(num_layers - 1, num_layers))
    assert decode.ended("t").code == ""
    assert decode.wrong_tokens(ours, 0, NUM_TOKENS, 1) == []
    assert [outcome.code for outcome in prefill.outcomes("t", part=1)] == [""] * prefill.tp


def test_a_receiver_that_gives_up_in_the_middle_ends_the_rest(make: Any) -> None:
    """F1: what is computed afterwards is not read any more."""
    options, clock = {"mode": "push", "transfer_timeout_s": "60"}, VirtualClock()
    prefill, decode = make(Engine, "p", options=options), make(Engine, "d", options=options, clock=clock)
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    blocks = list(range(13))
    prefill.fill_seeded(blocks, NUM_TOKENS, 1)
    content = [kv.clone() for kv in prefill.pools]
    ticket = decode.load(view("t", kv="await_peer", num_tokens=NUM_TOKENS + 1), blocks)
    meta = begin_step(prefill, ticket, blocks)
    compute(prefill, meta, content, range(1))
    sender = prefill.workers[0]
    wait_until_true(lambda: sender.num_open_jobs < prefill.layout.num_layers, "the first layer is out")
    decode.workers[0].cancel(TransferKey("t", 1), "receive")
    assert decode.ended("t").code == "transfer_cancelled"
    before = decode.pools[0].clone()
    compute(prefill, meta, content, range(1, prefill.layout.num_layers))
    wait_until_true(lambda: decode.workers[0]._receiver._early, "an offer is here")
    clock.advance(2 * _GRACE_S)
    assert prefill.ended("t", part=1).code == "kv_not_found"
    assert sender.num_open_jobs == 0
    assert bool((decode.pools[0] == before).all())
