"""Push while the step that computes the KV still runs: batches of a step, layer groups, and what arrives of them."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from push_rig import PushEngine, full_kv, make_layout, view
from traffic import wait_until_true

from pdkv.connectors.base import (
    ConfirmedRange,
    ConnectorConfig,
    RequestView,
    ScheduledRange,
    SchedulerView,
    TransferKey,
)
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushScheduler, PushTicket
from pdkv.connectors.peer.push_worker import Incoming, PieceRange, layer_groups
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.block_runs import pack_blocks
from pdkv.errors import TransferError

LAYERS = 4
LAYOUT = make_layout(num_layers=LAYERS)
SOURCE, TARGET = [9, 3, 1], [0, 1, 2]
NUM_TOKENS = 40

Engines = Callable[..., PushEngine]


@pytest.fixture(name="make_engine")
def engines(monkeypatch: pytest.MonkeyPatch, keep: Callable[..., Any]) -> Engines:
    """Engines that send each layer by itself."""
    monkeypatch.setattr("pdkv.connectors.peer.push_worker.MIN_GROUP_BYTES", 1)

    def make(name: str, tp: int = 1, block_size: int = 16) -> PushEngine:
        layout = make_layout(tp, block_size, num_layers=LAYERS)
        return keep(PushEngine(P2PConnector, name, tp=tp, layout=layout))

    return make


def pair(make_engine: Engines, **prefill: Any) -> tuple[PushEngine, PushEngine]:
    sender, decode = make_engine("p", **prefill), make_engine("d")
    sender.meet(decode.card)
    decode.meet(sender.card)
    return sender, decode


class Step:
    """A step of prefill that computes tokens [start, stop) of `t` and can be stopped between two layers."""

    def __init__(self, engine: PushEngine, request: RequestView, start: int, stop: int) -> None:
        self.engine = engine
        self.kv = full_kv(stop, engine.layout, seed=1)
        scheduled = ScheduledRange(request, start, stop, [SOURCE])
        confirmed = [ConfirmedRange(request, 0, start, [SOURCE], False)] if start else []
        engine.step_id += 1
        news = SchedulerView(engine.step_id, [scheduled], confirmed, (), (), (), ())
        self.meta = engine.scheduler.build_connector_meta(news)
        assert self.meta.needs_layer_hooks
        for worker in engine.workers:
            worker.start_load_kv(self.meta)
        self.start, self.next_layer = start, 0

    def compute(self, num_layers: int) -> None:
        """The next layers are in their blocks."""
        for layer in range(self.next_layer, self.next_layer + num_layers):
            part = torch.full_like(self.kv, -1)
            part[:, : layer + 1] = self.kv[:, : layer + 1]
            self.engine.fill(SOURCE, part, self.start)
            for worker, pool in zip(self.engine.workers, self.engine.pools, strict=True):
                worker.wait_for_layer_load(layer)
                worker.save_kv_layer(layer, pool, self.meta)
        self.next_layer += num_layers

    def end(self) -> None:
        self.compute(LAYERS - self.next_layer)
        for worker in self.engine.workers:
            worker.wait_for_save()


def hand_off(engine: PushEngine, request: RequestView) -> None:
    engine.give(request, SOURCE, NUM_TOKENS)


@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"block_size": 32}])
def test_the_reader_has_everything_before_the_hand_off(make_engine: Engines, shape: dict[str, int]) -> None:
    prefill, decode = pair(make_engine, **shape)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), TARGET)
    request = view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket)
    step = Step(prefill, request, 0, NUM_TOKENS)
    step.end()
    assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
    decode.check(TARGET, step.kv)
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == ""
    assert not prefill.unread  # the transfer's end is told when there is a hand-off that it can be told of
    hand_off(prefill, request)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == ""


def test_blocks_are_held_until_the_last_group_is_out(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), TARGET)
    step = Step(prefill, view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket), 0, NUM_TOKENS)
    assert [(hold.key, list(hold.block_ids)) for hold in step.meta.holds] == [(TransferKey("t", 1, part=1), SOURCE)]
    step.compute(LAYERS - 1)
    wait_until_true(lambda: prefill.workers[0].num_open_jobs == 1, "what is computed is out")
    assert not prefill.unread
    assert not decode.unread
    step.end()
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == ""
    assert decode.outcome("receiving", TransferKey("t", 1)).code == ""


def test_chunks_go_each_in_its_own_step(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), TARGET)
    request = view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket)
    Step(prefill, request, 0, 20).end()  # token 16 to 19: their block is not full
    step = Step(prefill, request, 20, NUM_TOKENS)
    step.start = 0  # the rig writes all of it
    assert [(send.start, send.stop, send.during_step) for send in step.meta.sends] == [(16, NUM_TOKENS, True)]
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == ""
    prefill.fill(SOURCE, step.kv)
    step.end()
    assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
    decode.check(TARGET, step.kv, 16)
    hand_off(prefill, request)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == ""


@pytest.mark.parametrize("by", ["cancel", "abort", "peer"])
def test_what_ends_in_the_middle_of_a_step_lets_go_at_once(make_engine: Engines, by: str) -> None:
    """F1: the layers that are still to come are never sent, and nothing waits for them."""
    prefill, decode = pair(make_engine)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), TARGET)
    step = Step(prefill, view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket), 0, NUM_TOKENS)
    step.compute(2)
    wait_until_true(lambda: prefill.workers[0].num_open_jobs == 2, "what is computed is out")
    if by == "cancel":
        prefill.cancel(TransferKey("t", 1), "send")
    elif by == "abort":
        prefill.step(aborted=[TransferKey("t", 1)])
    else:
        prefill.meet()
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == (
        "peer_gone" if by == "peer" else "transfer_cancelled"
    )
    assert prefill.outcome("sending", TransferKey("t", 1)).code
    assert prefill.workers[0].num_open_jobs == 0
    step.end()
    decode.cancel(TransferKey("t", 1), "receive")
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_cancelled"
    assert all((pool[TARGET][:, 2:] == -1).all() for pool in decode.pools)


def test_a_receiver_that_gives_up_in_the_middle_ends_the_rest(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), TARGET)
    step = Step(prefill, view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket), 0, NUM_TOKENS)
    step.compute(1)
    wait_until_true(lambda: prefill.workers[0].num_open_jobs == 3, "what is computed is out")
    decode.cancel(TransferKey("t", 1), "receive")
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_cancelled"
    before = decode.pools[0].clone()
    step.end()
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == "kv_not_found"
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "kv_not_found"
    assert torch.equal(decode.pools[0], before)


class Sender:
    """A scheduler side on its own."""

    def __init__(self) -> None:
        config = ConnectorConfig(engine="p", epoch="1", layout=LAYOUT, num_blocks=8, model="m")
        self.scheduler = PushScheduler(config, PeerCards(config))
        ticket = msgspec.msgpack.encode(PushTicket("d", "1", "t", 1, 0, NUM_TOKENS, b""))
        self.request = view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket)

    def step(
        self,
        *scheduled: tuple[int, int],
        confirmed: Sequence[tuple[int, int]] = (),
        last: bool = False,
        num_local_hit: int = 0,
        may_be_void: bool = False,
        **news: Any,
    ) -> PushMetadata:
        request = view(
            "t", kv="handoff", num_tokens=NUM_TOKENS, ticket=self.request.ticket, num_local_hit=num_local_hit
        )
        fields: dict[str, Any] = dict.fromkeys(("preempted", "finished", "aborted", "waiting_keys"), ())
        return self.scheduler.build_connector_meta(SchedulerView(
            step_id=0,
            scheduled=[ScheduledRange(request, a, b, [SOURCE], may_be_void) for a, b in scheduled],
            confirmed=[ConfirmedRange(request, a, b, [SOURCE], last) for a, b in confirmed],
            **(fields | news),
        ))  # fmt: skip


def sends(meta: PushMetadata) -> list[tuple[int, int, bool]]:
    return [(send.start, send.stop, send.during_step) for send in meta.sends]


def test_a_late_ticket_gets_what_is_confirmed_and_what_this_step_computes() -> None:
    assert sends(Sender().step((32, NUM_TOKENS), confirmed=[(0, 32)])) == [(0, 32, False), (32, NUM_TOKENS, True)]


def test_a_ticket_behind_the_end_gets_everything_at_once_and_the_transfer_is_complete() -> None:
    meta = Sender().step(confirmed=[(0, NUM_TOKENS)], last=True)
    assert sends(meta) == [(0, NUM_TOKENS, False)]
    assert meta.completed == [TransferKey("t", 1)]
    assert not meta.needs_layer_hooks


def test_a_transfer_is_complete_once_and_only_with_the_hand_off() -> None:
    sender = Sender()
    assert sender.step((0, NUM_TOKENS)).completed == []
    meta = sender.step(confirmed=[(0, NUM_TOKENS)], last=True)
    assert (sends(meta), meta.completed) == ([], [TransferKey("t", 1)])
    assert sender.step(confirmed=[(0, NUM_TOKENS)], last=True).completed == []


def test_nothing_is_sent_behind_what_may_come_to_nothing() -> None:
    """A layerwise load of tokens [0, 16) runs in the same step: if it fails, what is behind it is wrong."""
    sender = Sender()
    assert sends(sender.step((16, 32), may_be_void=True)) == []
    assert sends(sender.step((32, NUM_TOKENS), may_be_void=True)) == []
    assert sends(sender.step(confirmed=[(0, NUM_TOKENS)], last=True)) == [(0, NUM_TOKENS, False)]


def test_a_local_hit_is_valid() -> None:
    assert sends(Sender().step((16, NUM_TOKENS), num_local_hit=16)) == [(0, NUM_TOKENS, True)]


def make_incoming() -> Incoming:
    return Incoming(PushTicket("d", "1", "t", 1, 0, NUM_TOKENS, pack_blocks(TARGET)), LAYOUT, ON_HOST)


@pytest.mark.parametrize("order", [range(LAYERS), reversed(range(LAYERS)), [2, 0, 3, 1]])
def test_a_transfer_is_in_with_the_last_group_whichever_that_is(order: Any) -> None:
    incoming = make_incoming()
    heads = LAYOUT.num_kv_heads
    pieces = [PieceRange(layer, 1, 0, heads, *tokens) for layer in order for tokens in ((0, 32), (32, NUM_TOKENS))]
    for number, piece in enumerate(pieces, 1):
        incoming.check_range(piece)
        assert incoming.arrived(piece, 10) == (number == len(pieces))
        assert incoming.arrived(piece, 10) == (number == len(pieces))  # once more
    assert incoming.num_bytes == 10 * len(pieces)


@pytest.mark.parametrize(
    "piece",
    [
        PieceRange(-1, 1, 0, 1, 0, 16), PieceRange(3, 2, 0, 1, 0, 16), PieceRange(0, 0, 0, 1, 0, 16),
        PieceRange(0, 1, 4, 1, 0, 16), PieceRange(0, 1, 0, 1, 0, 41), PieceRange(0, 1, 0, 1, 16, 16),
        PieceRange(0, 1, 0, 1, 8, 16), PieceRange(0, 1, 0, 1, 0, 24),
    ],
)  # fmt: skip
def test_what_is_not_wanted_is_refused(piece: PieceRange) -> None:
    """F17."""
    with pytest.raises(TransferError):
        make_incoming().check_range(piece)


def test_groups_are_few_and_large_and_the_last_one_is_small() -> None:
    mib = 1 << 20
    assert layer_groups(16, mib) == [range(16)]
    assert layer_groups(16, 4 * mib) == [range(8), range(8, 16)]
    sizes = [len(group) for group in layer_groups(32, 256 * mib)]
    assert sizes == [4, 4, 4, 4, 4, 4, 4, 2, 1, 1]
    for num_layers in (1, 2, 5, 61):
        groups = layer_groups(num_layers, 1 << 30)
        assert [layer for group in groups for layer in group] == list(range(num_layers))
