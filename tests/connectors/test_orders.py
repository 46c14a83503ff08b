"""Connectors on a recorded device: every record, wait and synchronize on the way of KV is missed where it is removed.

`StreamStepDone.wait` stands beside `wait_on_stream` in a gather: it is there for who gives up, which
test_step_done.py shows; in a load it is missed, as here.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from digests_in_torch import use_digests_in_torch
from nixl_engines import Engine as NixlEngine
from nixl_engines import awaiting, closing
from nixl_engines import view as nixl_view
from nixl_rig import needs_nixl
from push_rig import make_layout
from recorded_streams import RecordedStreams, check_every_call, use_recorded
from store_rig import engines, random_kv, scattered
from store_rig import view as store_view

from pdkv.connectors.peer.source_digests import DigestOrder, SourceDigests
from pdkv.connectors.step_done import ON_HOST, StepDone, make_step_done
from pdkv.connectors.store.pieces import Slot
from pdkv.connectors.store.values import SealedValues
from pdkv.connectors.transfer.digest import PoolDigests, Tokens
from pdkv.connectors.transfer.digest_table import DigestTable, table_bytes
from pdkv.kernels import streams
from pdkv.kernels.digest import Digests
from pdkv.wire.kv import KVTerms

HOST = streams.HOST
GATHERED = {"mode": "pull", "path": "ucx", "gather_below": str(1 << 30), "gather_min_pieces": "1"}
BESIDE = [("synchronize", "StreamStepDone.wait")]


def queued_step(recorded: RecordedStreams) -> StepDone:
    """The end of what `compute` has been given so far."""
    step = make_step_done(torch.device("cpu"))
    with recorded.compute.on():
        step.record()
    return step


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    use_digests_in_torch(monkeypatch)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """What is made meanwhile lies in host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "HOST", HOST)
        yield


def test_a_store_is_given_what_the_step_has_computed() -> None:
    kv, blocks = random_kv(128), scattered(128, 16)

    def save(recorded: RecordedStreams) -> bool:
        with engines() as (_, make):
            source = make("p")
            with recorded.compute.on():
                source.fill(blocks, kv)
            source.earlier_steps = queued_step(recorded)
            saved = source.save(store_view("t", num_tokens=129), blocks, 128)
            with on_host():
                reader, request = make("d"), store_view("u", num_tokens=129)
                assert saved is not None
                if saved.code or reader.ask(request) != 128 or reader.load(request, blocks, 128).code:
                    return False
                return torch.equal(reader.tokens(blocks, 128), kv)

    check_every_call(save, but=BESIDE)


def test_a_stores_checksums_are_of_what_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are made, the copies have come: never before their event."""
    kv, blocks, seen = random_kv(128), scattered(128, 16), list[bytes]()
    put = SealedValues.put

    def sees(values: SealedValues, slots: Sequence[Slot], terms: KVTerms | None, *, for_others: bool) -> None:
        seen.extend(slot.body.tobytes() for slot in slots)
        put(values, slots, terms, for_others=for_others)

    monkeypatch.setattr(SealedValues, "put", sees)

    def save(recorded: RecordedStreams | None) -> list[bytes]:
        seen.clear()
        with engines() as (_, make):
            source = make("p")
            if recorded is None:
                source.fill(blocks, kv)
            else:
                with recorded.compute.on():
                    source.fill(blocks, kv)
                source.earlier_steps = queued_step(recorded)
            source.save(store_view("t", num_tokens=129), blocks, 128)
        return list(seen)

    expected = save(None)
    assert expected
    check_every_call(lambda recorded: save(recorded) == expected, but=BESIDE)


@needs_nixl
def test_what_a_peer_gathers_is_what_the_step_has_computed() -> None:
    theirs, ours = list(range(0, 14, 2)), list(range(20, 27))

    def gather(recorded: RecordedStreams) -> bool:
        with closing() as make:
            prefill = make(NixlEngine, "p", options=GATHERED, kv_checksum="off", own_pool=False)
            with on_host():
                decode = make(NixlEngine, "d", options=GATHERED, kv_checksum="off")
            prefill.meet(decode.card)
            decode.meet(prefill.card)
            with recorded.compute.on():
                prefill.fill_seeded(theirs, 100, 1)
            prefill.earlier_steps = queued_step(recorded)
            prefill.step()
            decode.load(awaiting(prefill.hand_off("t", theirs, 100)), ours)
            return not decode.ended("t").code and not decode.wrong_tokens(ours, 0, 100, 1)

    check_every_call(gather, but=BESIDE)


@needs_nixl
def test_what_is_offered_is_what_the_step_has_computed() -> None:
    """A peer reads what is offered at once."""
    theirs, ours = list(range(0, 14, 2)), list(range(20, 27))

    def push(recorded: RecordedStreams) -> bool:
        with closing() as make:
            prefill = make(NixlEngine, "p", options={"mode": "push"}, kv_checksum="off", own_pool=False)
            with on_host():
                decode = make(NixlEngine, "d", options={"mode": "push"}, kv_checksum="off")
            prefill.meet(decode.card)
            decode.meet(prefill.card)
            ticket = decode.load(nixl_view("t", kv="await_peer", num_tokens=101), ours)
            with recorded.compute.on():
                prefill.fill_seeded(theirs, 100, 1)
            prefill.earlier_steps = queued_step(recorded)
            prefill.push("t", ticket, theirs, 0, 100, last=True)
            return not decode.ended("t").code and not decode.wrong_tokens(ours, 0, 100, 1)

    check_every_call(push)


def test_digests_are_of_what_the_step_has_computed() -> None:
    layout, blocks = make_layout(), [3, 1]
    values = torch.randn(4, layout.num_layers, 2, layout.num_kv_heads, 16, layout.head_size)
    units, generations = np.array(blocks), np.ones(2, dtype=np.int64)

    def digests_of(recorded: RecordedStreams) -> Digests:
        pool = torch.zeros_like(values)
        with recorded.compute.on():
            pool.copy_(values)
        step = queued_step(recorded)
        heads = layout.num_kv_heads
        source = SourceDigests(
            PoolDigests(pool, layout), DigestTable(memoryview(bytearray(table_bytes(4, heads))), 4, heads)
        )
        source.make([DigestOrder(blocks, generations.tobytes(), 0, 32)], step)
        source.close()
        return source.table.read(units, generations).digests

    with pytest.MonkeyPatch.context() as patch:
        expected = digests_of(use_recorded(patch))
    assert len(np.unique(expected)) == expected.size
    check_every_call(lambda recorded: np.array_equal(digests_of(recorded), expected))


def test_a_device_is_asked_once_for_the_digests_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, recorded = make_layout(), use_recorded(monkeypatch)
    pool = PoolDigests(torch.randn(5, layout.num_layers, 2, layout.num_kv_heads, 16, layout.head_size), layout)
    heads, units, generations = layout.num_kv_heads, np.array([3, 1, 2]), np.array([1, 1, 7])
    source = SourceDigests(pool, DigestTable(memoryview(bytearray(table_bytes(5, heads))), 5, heads))
    named = [([3, 1], [1, 1], 32), ([2], [6], 16), ([2], [7], 16), ([2], [7], 5)]  # one unit as it was, and with fewer
    orders = [DigestOrder(blocks, np.array(of, dtype=np.int64).tobytes(), 0, stop) for blocks, of, stop in named]
    source.make(orders, ON_HOST)
    source.close()
    assert [call.function for call in recorded.calls if call.kind == "synchronize"] == ["PoolDigests._device_digests"]
    rows, whole = source.table.read(units, generations), np.full(3, 16)
    assert rows.counts.tolist() == whole.tolist()
    assert np.array_equal(rows.digests, pool.digests(Tokens(units, np.zeros_like(units), whole), pool.whole))


def test_what_a_store_gave_lies_over_what_the_step_before_wrote() -> None:
    kv, blocks = random_kv(128), scattered(128, 16)

    def load(recorded: RecordedStreams) -> bool:
        with engines() as (_, make):
            with on_host():
                source = make("p")
                source.fill(blocks, kv)
                source.save(store_view("t", num_tokens=129), blocks, 128)
            reader, request = make("d"), store_view("u", num_tokens=129)
            with recorded.compute.on():
                reader.pools[0].fill_(-2.0)  # whoever had the blocks before
            reader.earlier_steps = queued_step(recorded)
            assert reader.ask(request) == 128
            if reader.load(request, blocks, 128).code:
                return False
            with recorded.compute.on():
                read = reader.pools[0].clone()
            recorded.finish()
            reader.pools[0][:] = read
            return torch.equal(reader.tokens(blocks, 128), kv)

    check_every_call(load)


@needs_nixl
@pytest.mark.parametrize("options", [{"mode": "push", "path": "ucx"}, GATHERED], ids=["pushed", "gathered"])
def test_what_a_peer_gave_lies_over_what_the_step_before_wrote(options: dict[str, str]) -> None:
    theirs, ours = list(range(0, 14, 2)), list(range(20, 27))

    def load(recorded: RecordedStreams) -> bool:
        with closing() as make:
            with on_host():
                prefill = make(NixlEngine, "p", options=options, kv_checksum="off")
            decode = make(NixlEngine, "d", options=options, kv_checksum="off", own_pool=False)
            prefill.meet(decode.card)
            decode.meet(prefill.card)
            prefill.fill_seeded(theirs, 100, 1)
            kv = decode.pools[0]
            with recorded.compute.on():
                kv.fill_(-2.0)
            decode.earlier_steps = queued_step(recorded)
            if options is GATHERED:
                decode.load(awaiting(prefill.hand_off("t", theirs, 100)), ours)
            else:
                ticket = decode.load(nixl_view("t", kv="await_peer", num_tokens=101), ours)
                prefill.push("t", ticket, theirs, 0, 100, last=True)
            if decode.ended("t").code:
                return False
            with recorded.compute.on():
                read = kv.clone()
            recorded.finish()
            kv[:] = read
            return not decode.wrong_tokens(ours, 0, 100, 1)

    check_every_call(load)
