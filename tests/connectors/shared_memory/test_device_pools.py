"""Pools on devices: in which order two engines do things, and what becomes of a source that goes or does not fit."""

import logging
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import torch
from digests_in_torch import use_digests_in_torch
from recorded_streams import RecordedStreams, check_every_call, use_recorded
from shared_memory_rig import Engine, Engines, Gate, closing_engines, view
from traffic import wait_until_true
from twin_pools import use_twin_pools

from pdkv.connectors.arena.arena import ArenaAddress
from pdkv.connectors.base import NO_MATCH, ConfirmedRange, RequestView
from pdkv.connectors.step_done import make_step_done
from pdkv.connectors.transfer.digest import PoolDigests
from pdkv.wire.kv import ChecksumMode, KVHandoff

torch.set_num_threads(1)

SOURCE, OWN = [9, 3, 1], [0, 1, 2]
POISON = -77.0


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    use_digests_in_torch(monkeypatch)


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    use_twin_pools(monkeypatch)
    with closing_engines("cuda") as engines:
        yield engines


def hand_off(source: Engine) -> RequestView:
    return view("t", kv="await_peer", num_tokens=41, handoff=source.offer(SOURCE, 40))


def loads_behind_a_late_step(recorded: RecordedStreams, kv_checksum: ChecksumMode) -> bool:
    """Into blocks that a step of the reader still writes for whoever had them before."""
    with pytest.MonkeyPatch.context() as monkeypatch, closing_engines("cuda") as make:
        use_twin_pools(monkeypatch)
        prefill, decode = (make(name, kv_checksum=kv_checksum) for name in "pd")
        decode.meet(prefill.card)
        recorded.calls.clear()  # what was compiled
        kv = torch.randn(3, *prefill.kv.shape[1:])
        prefill.kv[SOURCE] = kv
        request = hand_off(prefill)
        decode.earlier_steps = make_step_done(decode.kv.device)
        with recorded.compute.on():
            decode.kv.index_fill_(0, torch.tensor(OWN), POISON)
            decode.earlier_steps.record()
        decode.start(request, OWN, 0)
        outcome = decode.loaded(request)
        arrived = decode.kv[OWN].clone()
        recorded.finish_all()  # what comes later must not write there
        return not outcome.code and torch.equal(arrived, kv) and torch.equal(decode.kv[OWN], kv)


@pytest.mark.parametrize("kv_checksum", ["off", "on"])
def test_a_load_comes_behind_the_readers_step_and_ends_when_it_is_there(kv_checksum: ChecksumMode) -> None:
    check_every_call(lambda recorded: loads_behind_a_late_step(recorded, kv_checksum))


@pytest.mark.parametrize("kv_checksum", ["off", "on"])
def test_a_chunk_is_read_while_the_device_computes_the_next_one(
    kv_checksum: ChecksumMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the copy nor the digests at its source wait for the step under way."""
    recorded = use_recorded(monkeypatch)
    use_twin_pools(monkeypatch)
    with closing_engines("cuda") as make:
        prefill, decode = (make(name, kv_checksum=kv_checksum) for name in "pd")
        decode.meet(prefill.card)
        kv, request = torch.randn(3, *prefill.kv.shape[1:]), view("t", kv="handoff", num_tokens=41)
        prefill.earlier_steps = make_step_done(prefill.kv.device)
        with recorded.compute.on():
            prefill.kv.index_copy_(0, torch.tensor(SOURCE[:2]), kv[:2])
            prefill.earlier_steps.record()
        recorded.finish()  # its output has been read
        recorded.compute.hold()
        with recorded.compute.on():
            prefill.kv.index_copy_(0, torch.tensor(SOURCE[2:]), kv[2:])
        prefill.step(confirmed=[ConfirmedRange(request, 0, 32, [SOURCE[:2]], False)])
        payload = prefill.scheduler.name_confirmed(request, [SOURCE[:2]], 32)
        assert payload is not None
        part = KVHandoff("h", 1, "h", prefill.card.engine, prefill.card.epoch, 32, payload, more=True)
        assert decode.start(view("t", kv="await_peer", num_tokens=41, handoff=part), OWN, 0) == 40
        wait_until_true(lambda: not decode.workers[0].num_open_jobs, "the first two blocks have been read")
        assert torch.equal(decode.kv[OWN[:2]], kv[:2])
        assert not torch.equal(prefill.kv[SOURCE[2:]], kv[2:])
        recorded.compute.release()
        recorded.finish()
        rest = hand_off(prefill)
        decode.start(rest, OWN, 0)
        assert not decode.loaded(rest).code
        assert torch.equal(decode.kv[OWN], kv)


def test_what_lands_is_digested_behind_its_copy_in_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = use_recorded(monkeypatch)
    assert loads_behind_a_late_step(recorded, "on")
    waits = Counter(call.function for call in recorded.calls if call.kind == "synchronize")
    assert waits == {"StreamStepDone.wait": 1, "await_copy": 1, "PoolDigests._device_digests": 1}  # at the source


def test_a_load_whose_digests_cannot_be_made_ends_behind_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its blocks could be another request's while the device still writes there."""
    recorded = use_recorded(monkeypatch)
    use_twin_pools(monkeypatch)

    def run_out_of_memory(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with closing_engines("cuda") as make:
        prefill, decode = (make(name, kv_checksum="on") for name in "pd")
        decode.meet(prefill.card)
        request = hand_off(prefill)
        monkeypatch.setattr(PoolDigests, "queue", run_out_of_memory)
        decode.start(request, OWN, 0)
        assert decode.loaded(request).code
        then = decode.kv[OWN].clone()
        recorded.finish_all()
        assert torch.equal(decode.kv[OWN], then)


def test_a_source_that_ends_while_it_is_copied_from_has_given_nothing(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generations stay as they were for ever, and what its memory holds nobody knows."""
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    gate, request = Gate(monkeypatch), hand_off(prefill)
    decode.start(request, OWN, 0)
    gate.wait()
    prefill.close()
    gate.opened.set()
    assert decode.loaded(request).code == "peer_gone"


def test_a_device_that_this_one_does_not_reach_is_named_once_and_its_prompts_are_computed(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = make_engine("p")
    use_twin_pools(monkeypatch, "far")
    decode = make_engine("d")
    decode.meet(prefill.card)
    request = hand_off(prefill)
    with caplog.at_level(logging.WARNING):
        decode.start(request, OWN, 0)
        assert decode.loaded(request).code == "incompatible_peers"
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    assert [record.message for record in caplog.records if "no peer access" in record.message] == [
        "no KV from engine p: memory of twin cannot be mapped on far: no peer access"
    ]


def test_a_pool_of_another_size_than_its_card_means_is_not_mapped(make_engine: Engines) -> None:
    """What is copied is bounded by the card's numbers, and so would be what is read behind a smaller allocation."""
    prefill, decode = make_engine("p"), make_engine("d")
    address = msgspec.msgpack.decode(prefill.card.rank_blobs[0], type=ArenaAddress)
    assert address.pool is not None
    pool = msgspec.structs.replace(address.pool, num_bytes=address.pool.num_bytes - 1)
    lie = msgspec.msgpack.encode(msgspec.structs.replace(address, pool=pool))
    decode.meet(msgspec.structs.replace(prefill.card, rank_blobs=[lie]))
    request = hand_off(prefill)
    decode.start(request, OWN, 0)
    assert decode.loaded(request).code == "incompatible_peers"


@pytest.mark.parametrize(("here", "there"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_host_memory_and_devices_do_not_mix(
    make_engine: Engines, here: str, there: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode, prefill = make_engine("d", device=here), make_engine("p", device=there)
    with caplog.at_level(logging.WARNING):
        decode.meet(prefill.card)
    assert decode.scheduler.get_num_new_matched_tokens(hand_off(prefill), 0) == NO_MATCH
    names = {"cpu": "host", "cuda": "GPU"}
    assert f"engine p keeps its KV in {names[there]} memory, this one in {names[here]} memory" in caplog.text
