"""Parts of the `nixl` connector that need no NIXL: plans, messages, cards, the doorbell, slots, posts."""

import contextlib
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from nixl_rig import NO_DOORBELL
from recorded_streams import use_recorded

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connector_kit.rig.sockets import listeners
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.nixl import memory
from pdkv.connectors.nixl.agent import MAX_MESSAGE_BYTES, Memory, Message, may_land_late
from pdkv.connectors.nixl.blocks import POST_BYTES, are_gathered, cut_pieces
from pdkv.connectors.nixl.doorbell import Doorbell, _open_pipe
from pdkv.connectors.nixl.gather import MAX_UNITS, plan_chunks
from pdkv.connectors.nixl.memory import WORD_BYTES, LandingBuffers, Slots, generation_offset, memory_of
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.outbox import MAX_WAITING_BYTES, Outbox
from pdkv.connectors.nixl.peers import NixlPeers
from pdkv.connectors.nixl.wire import (
    BLOB_VERSION,
    Gather,
    Offer,
    OfferDigests,
    RankBlob,
    Taken,
    decode,
    encode,
    encode_blob,
)
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.connectors.transfer.block_runs import MAX_BLOCK_ID, pack_blocks
from pdkv.connectors.transfer.planning import as_ids
from pdkv.connectors.transfer.staging import StagingBuffers
from pdkv.errors import IncompatiblePeers, MalformedMessage, PeerGone, TransferTimeout
from pdkv.host.host_id import host_id
from pdkv.host.huge_pages import use_huge_pages
from pdkv.kernels.streams import HOST
from pdkv.wire.kv import EngineCard, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_size=8, block_size=16, dtype="float32", dtype_bytes=4)
NUM_BLOCKS = 8


# --- plans --------------------------------------------------------------------------------------------------------


@hypothesis.given(
    num_units=st.integers(1, 200),
    num_layers=st.integers(1, 9),
    layer_bytes=st.integers(1, 500),
    chunk=st.integers(500, 9000),
)
def test_chunks_hold_every_layer_of_every_unit_once_and_fit(
    num_units: int, num_layers: int, layer_bytes: int, chunk: int
) -> None:
    seen = np.zeros((num_units, num_layers), dtype=np.int64)
    for first, stop, layer, layer_stop in plan_chunks(num_units, num_layers, layer_bytes, chunk):
        seen[first:stop, layer:layer_stop] += 1
        assert 0 < (stop - first) * (layer_stop - layer) * layer_bytes <= chunk
    assert (seen == 1).all()


def test_a_layer_that_fits_into_no_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="one layer"):
        plan_chunks(1, 4, 5000, 4096)


def test_posts_are_bounded_and_hold_every_byte_once() -> None:
    """F18."""
    mib = 1 << 20
    runs = np.array([(3, 5, 1), (10, 20, 40), (60, 90, 2)], dtype=np.int64) * mib
    posts = cut_pieces(runs)
    assert max(int(sizes.sum()) for _, _, sizes in posts) < 2 * POST_BYTES
    pairs = [
        (source + at, destination + at)
        for post in posts
        for source, destination, size in zip(*post, strict=True)
        for at in range(0, int(size), mib)
    ]
    assert pairs == [(source + at, there + at) for source, there, size in runs for at in range(0, size, mib)]
    assert cut_pieces(runs[:0]) == []


# --- messages and cards ---------------------------------------------------------------------------------------------


def test_the_longest_request_fits_into_a_message() -> None:
    """F18: the worst case of scattered units."""
    scattered = np.random.default_rng(0).integers(0, MAX_BLOCK_ID, MAX_UNITS)
    units = pack_blocks(scattered)
    message = Gather(2**40, units, 0, 128, 0, 128, 1 << 30, 2**40)
    assert decode(encode(message)) == message
    with pytest.raises(ValueError, match="at most"):
        encode(Gather(1, bytes(MAX_MESSAGE_BYTES), 0, 1, 0, 1, 4096))


@pytest.mark.parametrize("garbage", [b"", b"\x00", b"\x92\x63\x01", b"\x93\x0a\x01\x02", b"{}", encode(Taken(1))[:-1]])
def test_what_is_no_message_is_malformed(garbage: bytes) -> None:
    """F16, F17."""
    with pytest.raises(MalformedMessage):
        decode(garbage)


def make_card(blob: bytes, **changes: object) -> EngineCard:
    values: dict[str, object] = {
        "engine": "p", "epoch": "1", "role": "any", "pid": 0, "connector": "nixl", "kind": "pull",
        "content_addressed": False, "orders": [], "model": "m", "layout": LAYOUT, "hash_block_size": HASH_BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS, "max_model_len": 64, "max_num_seqs": 4, "rank_blobs": [blob],
    }  # fmt: skip
    return EngineCard(**(values | changes))  # type: ignore[arg-type]


def make_blob(**changes: object) -> bytes:
    size = LAYOUT.block_bytes
    values: dict[str, object] = {
        "version": BLOB_VERSION, "mode": "pull", "agent": "p/1/0", "metadata": b"", "host": host_id(),
        "doorbell": NO_DOORBELL,
        "pool": Memory(1 << 20, NUM_BLOCKS * size), "block_bytes": size, "slots": Memory(0, 1), "slot_bytes": 4096,
        "permits": Memory(0, 8), "nonce": 1, "paths": ["ucx"],
    }  # fmt: skip
    return encode_blob(RankBlob(**(values | changes)))  # type: ignore[arg-type]


def known_to(card: EngineCard, **options: str) -> NixlPeers:
    config = ConnectorConfig(engine="d", epoch="1", layout=LAYOUT, num_blocks=NUM_BLOCKS, model="m")
    peers = NixlPeers(config, NixlOptions.parse(options))
    peers.add(card)
    return peers


def test_a_peer_is_found_by_incarnation_and_by_agent_until_it_goes() -> None:
    peers = known_to(make_card(make_blob()))
    blob = peers.rank("p", "1", 0)
    assert peers.agent("p/1/0") == blob
    assert peers.agents_of("p", "1") == ["p/1/0"]
    peers.remove("p", "1")
    assert peers.agent("p/1/0") is None
    assert peers.agents_of("p", "1") == []
    with pytest.raises(PeerGone):
        peers.rank("p", "1", 0)


@pytest.mark.parametrize(
    ("blob", "what"),
    [
        (b"\xff", "names no NIXL agent"),
        (make_blob(version=9), "version"),
        (make_blob(mode="push"), "'pull' is expected by engine d, engine p has 'push'"),
        (make_blob(agent="p/2/0"), "name of its agent"),
        (make_blob(block_bytes=1), "bytes per block"),
        (make_blob(pool=Memory(0, 1)), "bytes of its pool"),
        (make_blob(host="there"), "another host .there, here .*set UCX_TLS"),
        (make_blob(host="there", paths=["arena"]), "another host .there, here .*path=ucx"),
        (make_blob(paths=[]), "reads by path arena or ucx, but engine p can be read by path none"),
        (make_blob(paths=["cma"]), "reads by path arena or ucx, but engine p can be read by path cma"),
        (make_blob(generations=Memory(0, 8)), "bytes of its generations"),
    ],
)
def test_a_card_that_says_two_things_is_refused_with_both(blob: bytes, what: str) -> None:
    peers = known_to(make_card(blob))
    assert not peers.knows("p", "1")
    with pytest.raises(IncompatiblePeers, match=what):
        peers.rank("p", "1", 0)


def test_a_card_that_lacks_a_rank_is_refused() -> None:
    with pytest.raises(IncompatiblePeers, match="describes 1 of 2 ranks"):
        known_to(
            make_card(make_blob(), tp=2, layout=msgspec.structs.replace(LAYOUT, num_kv_heads=1, total_kv_heads=2))
        ).rank("p", "1", 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_generations_count_the_uses_of_a_block_where_a_peer_reads_them() -> None:
    """F4."""
    table = LocalBlockTable(4)
    table.reuse(2)
    table.reuse(2)
    table.publish(2, [b"key"])
    assert [table.generation(block) for block in range(4)] == [0, 0, 2, 0]
    assert table.values.tolist() == [0, 0, 2, 0]


def test_a_slot_gets_a_new_generation_before_it_is_written() -> None:
    """F4: of what is read later than allowed, the reader sees that it is not what was told."""
    slots = Slots(3, 4096, HOST)
    memory, first = slots.begin(1)
    memory[:] = 7
    offset = generation_offset(slots.memory.nbytes, 4096, 1)

    def seen() -> int:
        return int(slots.memory[offset : offset + WORD_BYTES].view(np.int64)[0])

    assert seen() == first
    assert not slots.memory[:4096].any()
    _, second = slots.begin(1)
    assert seen() == second != first


def test_a_buffer_in_which_something_may_land_late_is_not_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a dead network that comes back would bring it into what another transfer has read."""
    monkeypatch.setattr(memory, "MAX_LOST", 2)
    registered: list[Memory] = []

    def fail(buffers: LandingBuffers) -> int:
        with pytest.raises(TransferTimeout, match="too late"), buffers.take(1.0) as buffer:  # noqa: PT012
            address = int(buffer.ctypes.data)
            raise TransferTimeout("too late")
        return address

    late = LandingBuffers(1, 4096, registered.append, may_land_late=True, streams=HOST)
    used = [fail(late) for _ in range(3)]
    assert len(set(used)) == 3
    assert [region.address for region in registered] == used
    with pytest.raises(TransferTimeout, match="no staging buffer"), late.take(0.001):
        pass
    safe = LandingBuffers(1, 4096, registered.append, may_land_late=False, streams=HOST)
    assert fail(safe) == fail(safe)


@pytest.mark.parametrize(
    ("transports", "late"),
    [(None, False), ("rc,cuda,shm,self", False), ("tcp,self", True), ("all", True), ("^ib", True), ("ud", True)],
)
def test_what_may_land_late_is_what_is_not_known_to_end(
    monkeypatch: pytest.MonkeyPatch, transports: str | None, late: bool
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    assert may_land_late() == late


def test_huge_pages_keep_what_is_in_memory() -> None:
    array = np.arange(1 << 20, dtype=np.int64)
    expected = array.copy()
    use_huge_pages(array.ctypes.data, array.nbytes)  # the system may have none
    assert (array == expected).all()
    assert not use_huge_pages(array.ctypes.data, 4096)


def test_an_offer_of_a_long_prompt_is_a_message_and_so_are_its_digests() -> None:
    """131k scattered tokens: a prompt that was computed before its ticket came is offered at once."""
    ids = np.random.default_rng(0).permutation(1 << 17)[:8192].astype(np.int64)
    piece = PieceRange(0, 32, 0, 8, 0, 131072)
    offer = Offer("t" * 64, 1, 1, 1, 1, True, pack_blocks(ids), 0, piece)
    for message in (offer, OfferDigests(1, bytes(8 * ids.size))):
        assert decode(encode(message)) == message


# --- the doorbell -----------------------------------------------------------------------------------------------------


def test_a_message_ends_the_wait_and_so_does_its_own_process() -> None:
    """F19: who has nothing to do is woken by a message, not by the next request."""
    own, other = Doorbell("own"), Doorbell("other")
    try:
        woken: list[bool] = []
        waiting = threading.Thread(target=lambda: woken.append(own.wait(20.0)))
        waiting.start()
        assert other.send(own.address, b"x")
        waiting.join(20.0)
        assert woken == [True]
        assert not own.wait(0.0)
        own.wake()
        assert own.wait(20.0)
        assert own.take() == [Message("other", b"x")]
    finally:
        own.close()
        other.close()
        other.close()
    assert not own.wait(0.0)


def test_the_wait_for_a_message_ends_while_somebody_writes_on() -> None:
    """It used to read datagrams until there were none: whoever wrote faster held the thread."""
    own, other = Doorbell("own"), Doorbell("other")
    written, looked = threading.Event(), threading.Event()

    def write_on() -> None:
        while not looked.is_set():
            other.send(own.address, b"x")
            other.flush()
            written.set()

    writing = threading.Thread(target=write_on)
    writing.start()
    try:
        assert written.wait(20.0)
        for _ in range(100):
            own.wait(0.0)
    finally:
        looked.set()
        writing.join()
        own.close()
        other.close()


def test_messages_arrive_whole_and_in_order() -> None:
    own, others = Doorbell("own"), [Doorbell(f"e/1/{i}") for i in range(3)]
    sent = [(f"e/1/{i}", bytes([i]) * size) for size in (1, 4096, 65536, 0) for i in range(3)]
    try:
        for number, (_, data) in enumerate(sent):
            assert others[number % 3].send(own.address, data)
            assert own.wait(20.0)
        assert [(message.peer, message.data) for message in own.take()] == sent
        assert own.take() == []
        assert own.num_bad_packets == 0
    finally:
        for bell in (own, *others):
            bell.close()


def test_messages_for_which_there_is_no_room_wait_in_order_and_hold_nobody_up() -> None:
    """F5: a stopped peer, and one that goes on."""
    own, other = Doorbell("own"), Doorbell("other")
    sent = [bytes([n]) * 200_000 for n in range(10)]  # none of them fits into a pipe at once
    made = []

    def make() -> bytes:
        made.append(len(received))
        return b"made"

    try:
        received: list[bytes] = []
        for data in sent:
            assert other.send(own.address, data)
        assert other.send(own.address, make)
        assert other.send(own.address, b"last")
        assert not other.flush()
        assert other.wait(0.0)  # was woken, to flush
        while not other.flush() or b"last" not in received:
            own.wait(0.0)
            received += [message.data for message in own.take()]
        assert received == [*sent, b"made", b"last"]
        assert made[0] > 0, "it was made when its turn came"
        assert own.num_bad_packets == 0
    finally:
        own.close()
        with pytest.raises(PeerGone):
            other.send(own.address, b"x")
        other.close()


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_waits_for_a_peer_is_bounded_and_may_be_replaced(size: int) -> None:
    own, other = Doorbell("own"), Doorbell("other")
    try:
        count = 0
        while other.send(own.address, bytes(size)):
            count += 1
        assert count * size < 2 * MAX_WAITING_BYTES
        assert not other.send(own.address, b"lost")
        assert other.send(own.address, b"instead", alone=True)
        assert other.send(own.address, b"last")
        received: list[bytes] = []
        while not other.flush() or b"last" not in received:
            own.wait(0.0)
            received += [message.data for message in own.take()]
        assert received[-2:] == [b"instead", b"last"]
        assert set(received[:-2]) == {bytes(size)}
        assert len(received) < count
    finally:
        own.close()
        other.close()


def test_a_peer_that_is_gone_or_forgotten_leaves_no_descriptor() -> None:
    own, other = Doorbell("own"), Doorbell("other")
    try:
        while other.send(own.address, bytes(30_000)):
            pass
        other.forget(own.address)
        assert other.flush()
        assert num_ends(own.address.inode) == 2  # the owner's
        while other.send(own.address, bytes(30_000)):
            pass
        address = own.address
        own.close()
        assert other.flush()
        assert num_ends(address.inode) == 0
    finally:
        own.close()
        other.close()


def test_what_waits_in_a_bell_that_is_opened_anew_meanwhile_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread forgets the bell, and sends, between the flush and the note that something is left."""
    own, other, flush = Doorbell("own"), Doorbell("other"), Outbox.flush

    def flush_late(outbox: Outbox) -> bool:
        is_empty = flush(outbox)
        other.forget(own.address)
        assert other.send(own.address, b"anew")
        return is_empty

    try:
        while other.send(own.address, bytes(30_000)):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(Outbox, "flush", flush_late)
            assert not other.flush()
        deadline = time.monotonic() + 60.0
        while not other.flush():
            assert time.monotonic() < deadline, "something waits for room for ever"
            own.wait(0.0)
        own.wait(0.0)
        assert own.take()[-1].data == b"anew"
    finally:
        own.close()
        other.close()


@pytest.mark.parametrize("seed", range(20))
def test_packets_of_any_content_are_counted_and_end_nothing(seed: int) -> None:
    """F17: a process of this user writes into the pipe what it likes."""
    rng = np.random.default_rng(seed)
    own, other = Doorbell("own"), Doorbell("other")
    pipe = _open_pipe(own.address)
    assert pipe is not None
    header = struct.Struct("<QIHH")
    try:
        for _ in range(20):
            os.write(pipe, rng.bytes(rng.integers(2, 4096)))
            place, count = (int(n) for n in rng.integers(0, 4, 2))
            os.write(pipe, header.pack(1, 1, place, count) + rng.bytes(40))
        os.write(pipe, header.pack(1, 2, 0, 0xFFFF) + b"x")
        os.write(pipe, header.pack(1, 3, 0, 1) + b"\xff\xff" + b"x" * 100)  # a name of 65535 bytes
        assert other.send(own.address, b"well")
        own.wait(20.0)
        assert (own.take() or [None])[-1] == Message("other", b"well")
        assert own.num_bad_packets > 0
    finally:
        os.close(pipe)
        own.close()
        other.close()


def test_nobody_but_processes_of_this_user_reaches_a_doorbell() -> None:
    """No socket, no name: only what /proc opens, which asks who wants it."""
    before = sockets_that_take_something()
    own, other = Doorbell("own"), Doorbell("other")
    try:
        assert sockets_that_take_something() == before
        mode = os.stat(f"/proc/self/fd/{own.address.fd}").st_mode
        assert stat.S_ISFIFO(mode)
        assert stat.S_IMODE(mode) == 0o600
        if os.geteuid() == 0:  # as another user
            code = "import os, sys; os.setgid(65534); os.setuid(65534); open(sys.argv[1], 'wb', buffering=0)"
            path = f"/proc/{os.getpid()}/fd/{own.address.fd}"
            failed = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
            assert "PermissionError" in failed.stderr
        changes = [{"pid": 1}, {"start_time": 1}, {"fd": 0}, {"fd": -1}, {"fd": 10**6}, {"inode": 1}, {"pid": 2**40}]
        for change in changes:  # a recycled pid or descriptor, or a card that lies
            with pytest.raises(PeerGone):
                other.send(msgspec.structs.replace(own.address, **change), b"x")
        assert not own.wait(0.0)
        assert not other._open
    finally:
        own.close()
        other.close()


def num_ends(inode: int) -> int:
    """Descriptors that this process has of a pipe."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            num += os.readlink(f"/proc/self/fd/{name}") == f"pipe:[{inode}]"
    return num


def sockets_that_take_something() -> list[str]:
    return [str(listener) for listener in listeners(os.getpid())]


# --- GPU memory -------------------------------------------------------------------------------------------------------


class OnGpu:
    """A pool as seen by who registers it."""

    device = torch.device("cuda", 1)
    nbytes = 4096

    def data_ptr(self) -> int:
        return 1 << 40


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_gpu_memory_is_registered_as_such_and_mappings_that_grow_are_warned_of(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool: Any = OnGpu()
    assert memory_of(pool) == Memory(1 << 40, 4096, "VRAM", 1)
    assert not caplog.records
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    assert memory_of(torch.zeros(4)).kind == "DRAM"
    assert not caplog.records
    memory_of(pool)
    assert f"{name} has expandable_segments:True" in caplog.text


def test_slots_and_landing_buffers_are_pinned_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use_recorded(monkeypatch)
    made: list[int] = []

    def make_pinned(size_bytes: int) -> torch.Tensor:
        made.append(size_bytes)
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    monkeypatch.setattr(device, "make_pinned", make_pinned)
    slots = Slots(2, 4096, device)
    assert slots.begin(1)[1] == 1  # generations begin at 0, whatever lay there
    LandingBuffers(1, 4096, lambda region: None, may_land_late=False, streams=device)
    StagingBuffers(1, 512, device)
    assert made == [2 * (4096 + WORD_BYTES), 4096, 512]


def test_small_pieces_are_gathered_if_there_are_enough_of_them() -> None:
    """F18."""
    sizes = as_ids([4096, 100, 8192, 4095, 0])
    assert are_gathered(sizes, 4096, 3).tolist() == [False, True, False, True, True]
    assert are_gathered(sizes[:4], 4096, 3).tolist() == [False] * 4
    assert are_gathered(as_ids([]), 4096, 3).tolist() == []
    assert not are_gathered(as_ids([0, 1, 2]), 0, 1).any()
