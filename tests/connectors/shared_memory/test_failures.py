"""The shared_memory connector when things end early: cancels, deadlines, peers that leave or do not fit, shutdown."""

import errno
import gc
import logging
import operator
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from shared_memory_rig import Engine, Engines, Gate, make_layout, view
from traffic import wait_until_true

from pdkv.connectors.base import NO_MATCH
from pdkv.errors import ConfigError
from pdkv.wire.kv import EngineCard

torch.set_num_threads(1)


def test_a_running_load_fails_only_when_its_copy_has_stopped(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    gate = Gate(monkeypatch)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    gate.wait()
    decode.worker.cancel(request.transfer_key, "receive")
    assert not decode.worker.get_finished()  # the blocks are still being written
    gate.opened.set()
    assert decode.loaded(request).code == "transfer_cancelled"


def test_a_load_past_its_deadline_fails(make_engine: Engines) -> None:
    prefill, decode = make_engine("p"), make_engine("d", load_timeout_s="1e-9")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    assert decode.loaded(request).code == "transfer_timeout"


@pytest.mark.parametrize(("successor", "code"), [(False, "peer_gone"), (True, "stale_epoch")])
def test_loads_from_a_peer_that_left_fail(make_engine: Engines, successor: bool, code: str) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    num_tokens = decode.scheduler.get_num_new_matched_tokens(request, 0).num_tokens
    decode.scheduler.update_state_after_alloc(request, [[0, 1, 2]], num_tokens)
    decode.meet(*[make_engine("p", epoch="2").card] * successor)
    decode.step()
    assert decode.loaded(request).code == code


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES], ids=errno.errorcode.__getitem__
)
def test_a_peer_that_cannot_be_mapped_now_is_mapped_later(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A lack of descriptors or memory here is no fault of the peer's; only what is stays with its card."""
    prefill, decode = make_engine("p"), make_engine("d")
    real = os.open

    def open_or_fail(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).startswith("/proc/") and "/fd/" in str(path):
            raise OSError(number, os.strerror(number))
        return real(path, *rest, **named)

    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_or_fail)
        decode.meet(prefill.card)
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    if number == errno.EACCES:
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    else:
        assert decode.start(request, [0, 1, 2], 0) == 40
        assert decode.loaded(request).code == ""


def test_a_copy_in_flight_outlives_its_peers_removal(make_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    decode.meet(prefill.card)
    gate = Gate(monkeypatch)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    gate.wait()
    decode.meet()
    gate.opened.set()
    assert decode.loaded(request).code == ""
    assert torch.equal(decode.tokens([0, 1, 2], 0, 40), prefill.tokens([9, 3, 1], 0, 40))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "other"}, "model differs: 'm' in engine d, 'other' in engine p"),
        ({"layout": make_layout(num_layers=3)}, "KV layout differs: 'layers=2"),
        ({"layout": make_layout(num_kv_heads=1)}, "KV heads differs: 2 in engine d, 1 in engine p"),
        ({"layout": make_layout(head_size=16)}, "head_size=16"),
        ({"layout": make_layout(dtype="float16", dtype_bytes=2)}, "dtype=float16"),
        ({"layout": make_layout(24)}, "blocks of 24 tokens"),
        ({"hash_block_size": 32}, "hash block size differs: 16 in engine d, 32 in engine p"),
        ({"tp": 2}, "says 2 KV heads a rank, but 2 ranks have 1"),
        ({"tp": 4}, "says 2 KV heads a rank, but 4 ranks have 1"),
        ({"tp": 3}, "2 KV heads cannot be divided among 3 tensor parallel ranks"),
        ({"pp": 2}, "pipeline parallel stages differs: 1 in engine d, 2 in engine p"),
        ({"rank_blobs": [], "connector": "memory"}, "(connector memory): its card names no arena"),
        ({"rank_blobs": [b"\xc1"]}, "its card names no arena"),
    ],
    ids=str,
)
def test_incompatible_peers_are_named_once_and_not_used(
    make_engine: Engines, changes: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    fields = {name: getattr(prefill.card, name) for name in EngineCard.__struct_fields__}
    card = EngineCard(**(fields | changes))
    with caplog.at_level(logging.WARNING):
        decode.scheduler.update_peers([card])
        decode.scheduler.update_peers([card])
        request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    assert len(caplog.messages) == 1
    assert text in caplog.messages[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threads": "1"}, "unknown option 'threads' \\(did you mean 'io_threads'\\?\\); known: content_lookup"),
        ({"io_threads": "0"}, "at least 1"),
        ({"load_timeout_s": "nan"}, "number of seconds"),
        ({"content_lookup": "maybe"}, "true or false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Engine("d", **options)


def test_pools_elsewhere_are_refused(make_engine: Engines) -> None:
    engine = make_engine("d")
    with pytest.raises(ConfigError, match="must allocate the KV pool itself"):
        engine.worker.register_kv_caches(torch.zeros_like(engine.kv))
    with pytest.raises(ConfigError, match=r"in host memory, the KV is on meta|must allocate the KV pool"):
        engine.worker.register_kv_caches(engine.kv.to("meta"))


def _resources() -> tuple[int, int, int]:
    """Open descriptors, mappings of arenas, threads; when the pools' pages are touched, which splits mappings."""
    for thread in threading.enumerate():
        if thread.name == "pdkv-touch":
            thread.join()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:pdkv"), threading.active_count()


def _wait_for_resources(most: tuple[int, int, int]) -> None:
    """Read them until there is no more of any: an I/O thread that maps ahead keeps its peer for that long."""
    wait_until_true(lambda: all(map(operator.le, _resources(), most)), f"no more than {most}")


_ALLOCATE_UNDER_A_LIMIT = """
import resource
from shared_memory_rig import Engine
from pdkv.engine.worker.ranks.ring_queue import RingWriter
from pdkv.errors import ConfigError
from pdkv.kernels import pool_copy
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for make in (lambda: Engine("p"), lambda: RingWriter([])):
    try:
        make()
    except ConfigError as error:
        print(error)
"""


def test_memory_that_cannot_be_had_is_a_configuration_error() -> None:
    found = warm.run([*warm.PYTHON, "-c", _ALLOCATE_UNDER_A_LIMIT])
    arena, ring = found.stdout.splitlines()
    assert re.match(r"cannot allocate \d+ bytes of shared memory for 48 KV blocks: File too large; ", arena), arena
    assert re.match(r"cannot allocate \d+ bytes of shared memory for the ranks' queue: File too large", ring), ring


def test_everything_is_given_back() -> None:
    gc.collect()  # of earlier tests: what they leave must not go in between
    before = _resources()
    prefill, decode = Engine("p"), Engine("d")
    alone = _resources()
    decode.meet(prefill.card)
    request = view("t", kv="await_peer", num_tokens=41, handoff=prefill.offer([9, 3, 1], 40))
    decode.start(request, [0, 1, 2], 0)
    assert decode.loaded(request).code == ""
    assert _resources()[1] <= alone[1] + 1  # both sides have one view of the peer
    decode.meet()
    _wait_for_resources(alone)
    prefill.close()
    decode.close()
    del prefill, decode
    _wait_for_resources(before)
