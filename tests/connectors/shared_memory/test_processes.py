"""Shared memory between processes: arenas of peers that write, die, come back, or are not who their card says."""

import base64
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import shared_memory_peer
from traffic import wait_until_true
from warm import PYTHON, WarmPopen

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.arena.arena import Arena, ArenaAddress, ArenaShape, PeerArena, open_peer_arena
from pdkv.connectors.arena.block_table import key_words
from pdkv.connectors.base import ConnectorConfig, TransferKey, TransferOutcome
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata
from pdkv.connectors.shared_memory.worker import SharedMemoryWorker
from pdkv.connectors.transfer.planning import as_ids
from pdkv.errors import IncompatiblePeers, PdkvError, PeerGone, StaleEpoch
from pdkv.wire.kv import EngineCard, KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_size=32, block_size=16, dtype="bfloat16", dtype_bytes=2)
NUM_BLOCKS = 64
_WAIT_S = 60.0


class Peer:
    """A process that owns an arena."""

    def __init__(self, mode: str, *, name: str = "peer", epoch: str = "1") -> None:
        script = shared_memory_peer.__file__
        layout = msgspec.json.encode(LAYOUT).decode()
        self.process = WarmPopen(
            [*PYTHON, script, name, epoch, layout, str(NUM_BLOCKS), mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        blob = base64.b64decode(self.process.stdout.readline())
        self.address = msgspec.msgpack.decode(blob, type=ArenaAddress)
        self.card = EngineCard(
            engine=name, epoch=epoch, role="any", pid=self.process.pid, connector="shared_memory", kind="pull",
            content_addressed=True, orders=[], model="m", layout=LAYOUT, hash_block_size=HASH_BLOCK_SIZE,
            num_blocks=NUM_BLOCKS, max_model_len=1024, max_num_seqs=8, rank_blobs=[blob],
        )  # fmt: skip

    def open(self, **changes: Any) -> PeerArena:
        address = msgspec.structs.replace(self.address, **changes)
        return open_peer_arena(address, self.card)

    def end(self, number: int | None = None) -> None:
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(timeout=_WAIT_S)


@pytest.fixture(scope="module")
def held_peer() -> Iterator[Peer]:
    """A peer that does nothing, for tests that do nothing to it."""
    peer = Peer("hold", epoch="2")
    yield peer
    peer.end()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(*arguments: Any, **options: Any) -> Peer:
        peers.append(Peer(*arguments, **options))
        return peers[-1]

    yield make
    for peer in peers:
        if peer.process.returncode is None:
            peer.end()


class Reader:
    """The worker side of an engine in this process."""

    def __init__(self) -> None:
        self.arena = Arena(engine="reader", epoch="1", layout=LAYOUT, num_blocks=NUM_BLOCKS)
        self._woken = threading.Semaphore(0)
        config = ConnectorConfig(engine="reader", epoch="1", layout=LAYOUT, num_blocks=NUM_BLOCKS)
        self.worker = SharedMemoryWorker(config, self.arena, self._woken.release, io_threads=1, load_timeout_s=_WAIT_S)
        self.num_loads = 0

    def load(self, peer: Peer, source: list[int], generations: list[int]) -> tuple[TransferOutcome, np.ndarray]:
        """Load blocks into blocks 0, 1, … and return those as 8-byte words, one row per block."""
        self.num_loads += 1
        key = TransferKey(f"t{self.num_loads}", 1)
        stop = len(source) * LAYOUT.block_size
        names = (as_ids(source).tobytes(), as_ids(generations).tobytes())
        load = BlockLoad(key, peer.card.engine, peer.card.epoch, 0, stop, LAYOUT.block_size, *names, range(len(source)))
        self.worker.start_load_kv(PullMetadata(step_id=self.num_loads, loads=[load]))
        while not (results := self.worker.get_finished()):
            assert self._woken.acquire(timeout=_WAIT_S)
        outcome = {**results.finished_receiving, **results.failed_receiving}[key]
        return outcome, self.arena.data()[: len(source)].view(np.int64)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.worker.shutdown()
    reader.arena.close()


def _words(numbers: list[int]) -> np.ndarray:
    return key_words([shared_memory_peer.key(number) for number in numbers])


def _arena_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdkv:peer")


def test_blocks_of_another_process_are_found_and_copied(make_peer: Callable[..., Peer], reader: Reader) -> None:
    peer = make_peer("hold")
    reader.worker.update_peers([peer.card], [])
    found = peer.open().table.find_chain(_words([5, 3, 40, 41, 1000]))
    assert found.units.tolist() == [5, 3, 40, 41]
    outcome, words = reader.load(peer, found.units.tolist(), found.generations.tolist())
    assert outcome.code == ""
    assert outcome.num_bytes == 4 * LAYOUT.block_bytes
    assert (words == np.array([[5], [3], [40], [41]])).all()


def test_an_owner_that_is_killed_is_seen_to_be_gone(make_peer: Callable[..., Peer]) -> None:
    """What maps its memory on a device has no other way to know that it was still its memory."""
    peer = make_peer("hold")
    arena = peer.open()
    arena.check_owner()
    peer.end(signal.SIGKILL)
    with pytest.raises(PeerGone, match="has ended"):
        arena.check_owner()


def _load_newest(peer: Peer, reader: Reader, view: PeerArena, num_blocks: int) -> TransferOutcome | None:
    """Load the newest blocks of a peer that overwrites them all the time; whatever is admitted must be right."""
    newest = int(view.data[0].view(np.int64)[0])
    numbers = list(range(newest - num_blocks + 1, newest + 1))
    found = view.table.find(_words(numbers))
    present = np.flatnonzero(found.units >= 0)
    if not present.size:
        return None
    outcome, words = reader.load(peer, found.units[present].tolist(), found.generations[present].tolist())
    if not outcome.code:
        assert (words == np.array(numbers)[present][:, None]).all(), "torn or foreign bytes were admitted"
    return outcome


def test_no_wrong_byte_is_admitted_from_a_pool_that_is_overwritten(
    make_peer: Callable[..., Peer], reader: Reader
) -> None:
    peer = make_peer("churn")
    reader.worker.update_peers([peer.card], [])
    view = peer.open()
    outcomes = [_load_newest(peer, reader, view, 1 + i % (NUM_BLOCKS - 1)) for i in range(1500)]
    codes = [outcome.code for outcome in outcomes if outcome is not None]
    assert set(codes) <= {"", "stale_generation"}
    assert codes.count("") > 20
    assert codes.count("stale_generation") > 0


@pytest.mark.parametrize("num_loads_before", [0, 3, 50])
def test_a_killed_writer_leaves_right_bytes_or_a_typed_error_and_no_memory(
    make_peer: Callable[..., Peer], reader: Reader, num_loads_before: int
) -> None:
    """F5, F24."""
    gc.collect()  # of earlier tests: what they leave must not go in between
    descriptors, mappings = len(os.listdir("/proc/self/fd")), _arena_mappings()
    peer = make_peer("churn")
    reader.worker.update_peers([peer.card], [])
    view = peer.open()
    for i in range(num_loads_before):
        _load_newest(peer, reader, view, 1 + i)
    peer.process.kill()  # while it writes
    outcomes = [_load_newest(peer, reader, view, NUM_BLOCKS - 1) for _ in range(20)]
    peer.end()
    outcomes += [_load_newest(peer, reader, view, NUM_BLOCKS - 1) for _ in range(3)]
    assert {outcome.code for outcome in outcomes if outcome is not None} <= {"", "stale_generation", "peer_gone"}
    reader.worker.update_peers([], [peer.card])
    assert reader.load(peer, [1], [0])[0].code == "peer_gone"
    with pytest.raises(PeerGone):
        peer.open()
    del view
    wait_until_true(lambda: _arena_mappings() <= mappings, "the arena is unmapped")
    wait_until_true(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "its descriptor is closed")


def test_a_peer_that_died_before_the_first_read_is_gone(make_peer: Callable[..., Peer], reader: Reader) -> None:
    peer = make_peer("hold")
    reader.worker.update_peers([peer.card], [])
    peer.end(signal.SIGKILL)
    for _ in range(2):
        assert reader.load(peer, [1], [0])[0].code == "peer_gone"


def test_a_successor_is_used_and_its_predecessor_is_not(make_peer: Callable[..., Peer], reader: Reader) -> None:
    old = make_peer("hold", epoch="1")
    reader.worker.update_peers([old.card], [])
    assert reader.load(old, [1], [0])[0].code == ""
    old.end(signal.SIGKILL)
    new = make_peer("hold", epoch="2")
    reader.worker.update_peers([new.card], [old.card])
    assert reader.load(old, [1], [0])[0].code == "stale_epoch"
    assert reader.load(new, [1], [0])[0].code == ""


# --- not who the card says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"start_time": 1}, PeerGone, r"is another one now: start time \d+, 1 was expected"),  # a recycled pid
        ({"inode": 1}, PeerGone, r"is another file now: inode \d+, 1 was expected"),
        ({"size": 4096}, PeerGone, "its card says 4096"),
        ({"fd": 1}, PeerGone, r"fd/1 is pipe:\[\d+\], /memfd:pdkv:\.\.\. was expected"),
        ({"fd": 9999}, PeerGone, "cannot be opened: No such file"),
        ({"pid": 2**22 + 1}, PeerGone, "cannot be opened: process 4194305 is gone"),
        ({"host": "elsewhere"}, IncompatiblePeers, "one host"),
    ],
    ids=str,
)
def test_an_address_that_does_not_fit_is_refused(
    held_peer: Peer, changes: dict[str, Any], error: type[PdkvError], text: str
) -> None:
    with pytest.raises(error, match=text):
        held_peer.open(**changes)


def test_another_incarnation_behind_the_address_is_refused(held_peer: Peer) -> None:
    with pytest.raises(StaleEpoch, match="peer's, epoch 2"):
        open_peer_arena(held_peer.address, msgspec.structs.replace(held_peer.card, epoch="1"))


@pytest.mark.parametrize(
    "changes", [{"num_blocks": NUM_BLOCKS + 1}, {"layout": msgspec.structs.replace(LAYOUT, head_size=64)}], ids=str
)
def test_an_arena_that_is_not_what_the_card_says_is_refused(held_peer: Peer, changes: dict[str, Any]) -> None:
    """What a load may name is bounded by the card's numbers, and the copy by them alone."""
    with pytest.raises(IncompatiblePeers, match="its card says"):
        open_peer_arena(held_peer.address, msgspec.structs.replace(held_peer.card, **changes))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_memfd_that_is_no_arena_is_refused(held_peer: Peer, sealed: bool) -> None:
    template = held_peer.address
    fd = os.memfd_create("pdkv:peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 20)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10 | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        start_time = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        address = ArenaAddress(os.getpid(), start_time, fd, os.fstat(fd).st_ino, template.host, 1 << 20)
        with pytest.raises(IncompatiblePeers, match="magic" if sealed else "not sealed"):
            open_peer_arena(address, msgspec.structs.replace(held_peer.card, epoch="1"))
    finally:
        os.close(fd)


def test_a_peer_can_neither_write_nor_resize_an_arena(held_peer: Peer) -> None:
    address = held_peer.address
    view = held_peer.open()
    assert not view.data.flags.writeable
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, address.size)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_a_pool_is_mapped_ahead_to_its_end(held_peer: Peer) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    view = held_peer.open()
    assert not view.map_ahead()  # nothing was read there
    view.is_source = True
    before = resident_bytes()
    while view.map_ahead():
        pass
    assert resident_bytes() - before >= view.data.nbytes // 2
    assert view.num_mapped_bytes >= view.data.nbytes


def test_arenas_have_room_for_table_and_data() -> None:
    shape = ArenaShape.of(LAYOUT, 1000)
    assert shape.data_offset % mmap.PAGESIZE == 0
    assert shape.data_offset >= 4096 + shape.table.num_bytes
    assert shape.size == shape.data_offset + 1000 * LAYOUT.block_bytes
