"""NIXL pushes whose layers go out one by one, while the step that computes them runs."""

from collections.abc import Iterator
from typing import Any

import pytest
from nixl_engines import Engine, closing, view
from nixl_rig import needs_nixl
from traffic import wait_until_true

from pdkv.connectors.base import ScheduledRange, SchedulerView
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
    for rank in engine.ranks:
        rank.worker.start_load_kv(meta)
    return meta


def compute(engine: Engine, meta: Any, kv: list[Any], layers: range) -> None:
    """These layers of the pools are as in `kv` now."""
    for layer in layers:
        for rank, content in zip(engine.ranks, kv, strict=True):
            rank.kv[:, layer] = content[:, layer]
            rank.worker.save_kv_layer(layer, rank.kv, meta)


@pytest.mark.parametrize(
    ("options", "prefill_shape"),
    [
        ({}, {}),
        ({"path": "cma"}, {}),
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
    prefill.fill(theirs, NUM_TOKENS, 1)
    content = [rank.kv.clone() for rank in prefill.ranks]
    for rank in prefill.ranks:
        rank.kv.zero_()
    ticket = decode.load(view("t", kv="await_peer", num_tokens=NUM_TOKENS + 1), ours)
    meta = begin_step(prefill, ticket, theirs)
    num_layers = prefill.layout.num_layers
    compute(prefill, meta, content, range(num_layers - 1))
    for rank in prefill.ranks:
        wait_until_true(lambda worker=rank.worker: worker.num_open_jobs == 1, "the other layers are out")  # type: ignore[misc]
    assert not any(rank.worker.get_finished() for rank in prefill.ranks)  # its blocks are held
    assert not decode.ranks[0].worker.get_finished()
    compute(prefill, meta, content, range(num_layers - 1, num_layers))
    assert decode.outcome("t").code == ""
    assert decode.wrong_tokens(ours, 0, NUM_TOKENS, 1) == []
    assert [outcome.code for outcome in prefill.outcomes("t/1")] == [""] * len(prefill.ranks)


def test_a_receiver_that_gives_up_in_the_middle_ends_the_rest(make: Any) -> None:
    """F1: what is computed afterwards is not read any more."""
    options, clock = {"mode": "push", "transfer_timeout_s": "60"}, VirtualClock()
    prefill, decode = make(Engine, "p", options=options), make(Engine, "d", options=options, clock=clock)
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    blocks = list(range(13))
    prefill.fill(blocks, NUM_TOKENS, 1)
    content = [rank.kv.clone() for rank in prefill.ranks]
    ticket = decode.load(view("t", kv="await_peer", num_tokens=NUM_TOKENS + 1), blocks)
    meta = begin_step(prefill, ticket, blocks)
    compute(prefill, meta, content, range(1))
    sender = prefill.ranks[0].worker
    wait_until_true(lambda: sender.num_open_jobs < prefill.layout.num_layers, "the first layer is out")
    decode.ranks[0].worker.cancel(("t", 1), "receive")
    assert decode.outcome("t").code == "transfer_cancelled"
    before = decode.ranks[0].kv.clone()
    compute(prefill, meta, content, range(1, prefill.layout.num_layers))
    wait_until_true(lambda: decode.ranks[0].worker._receiver._early, "an offer is here")
    clock.advance(2 * _GRACE_S)
    assert prefill.outcome("t/1").code == "kv_not_found"
    assert sender.num_open_jobs == 0
    assert bool((decode.ranks[0].kv == before).all())
