"""Which pieces are gathered: by a given size, or by one that is measured with the transport's own way."""

import socket
import threading
from contextlib import closing

import pytest

from pdkv.connectors.transfer import small_pieces
from pdkv.connectors.transfer.block_copy import Bytes
from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.connectors.transfer.small_pieces import AS_THEY_LIE, MAX_BELOW, Gate, measured_gate


@pytest.fixture(autouse=True)
def nothing_is_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_pieces, "_gates", {})


def for_nothing(rows: Bytes, ids: Ids, num_bytes: int) -> None:
    pass


def dearly(rows: Bytes, ids: Ids, num_bytes: int) -> None:
    """Each piece costs as much as copying some hundred KiB."""
    for _ in range(ids.size):
        sum(range(3000))


def test_small_pieces_are_gathered_if_there_are_enough_of_them() -> None:
    gate = Gate(4096, 3)
    sizes = as_ids([4096, 100, 8192, 4095, 0])
    assert gate.choose(sizes).tolist() == [False, True, False, True, True]
    assert gate.choose(sizes[:4]).tolist() == [False] * 4
    assert gate.choose(as_ids([])).tolist() == []
    assert gate.gathers(3, 4095)
    assert not gate.gathers(2, 4095)
    assert not gate.gathers(1000, 4096)


def test_what_lies_in_mapped_memory_is_never_gathered() -> None:
    assert not AS_THEY_LIE.gathers(1 << 20, 1)
    assert not AS_THEY_LIE.choose(as_ids([0, 1, 2])).any()


def test_pieces_that_cost_nothing_go_as_they_lie_and_dear_ones_are_gathered() -> None:
    assert measured_gate("for nothing", for_nothing) == AS_THEY_LIE
    assert measured_gate("dearly", dearly) == Gate(MAX_BELOW, 1)


def test_where_gathering_has_a_price_few_pieces_go_as_they_lie() -> None:
    gate = measured_gate("dearly", dearly, price_s=1.0)
    assert gate.below == MAX_BELOW
    assert gate.at_least > 100
    assert not gate.gathers(gate.at_least - 1, 1)


def test_the_more_gathering_copies_the_smaller_must_pieces_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 pieces cost 100 us as they lie, 10 us in one, 30 us gathered; 8 and 256 rows of 4 KiB cost 20 us and 60."""
    monkeypatch.setattr(small_pieces, "_least_seconds", lambda *works: [100e-6, 10e-6, 30e-6, 20e-6, 60e-6])
    byte_s = 40e-6 / (248 * 4096)
    once = measured_gate("once", for_nothing, copies=1)
    assert once == Gate(int((90e-6 - 10e-6) / 512 / byte_s), 1)
    twice = measured_gate("twice", for_nothing, price_s=1e-3)
    assert twice == Gate(int((90e-6 - 20e-6) / 512 / (2 * byte_s)), round(1e-3 / (70e-6 / 512)))
    assert once.below > twice.below


def test_each_way_is_measured_once_whatever_thread_asks() -> None:
    asking = threading.Barrier(4)
    measured: list[int] = []
    got: list[Gate] = []

    def move(rows: Bytes, ids: Ids, num_bytes: int) -> None:
        measured.append(threading.get_ident())
        dearly(rows, ids, num_bytes)

    def ask() -> None:
        asking.wait(10.0)
        got.append(measured_gate("counted", move))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(got) == 4
    assert len(set(got)) == 1
    assert len(set(measured)) == 1
    assert measured_gate("counted", for_nothing) == got[0]
    assert measured_gate("another", for_nothing) == AS_THEY_LIE


def test_what_fails_while_it_is_measured_is_measured_again() -> None:
    def refused(rows: Bytes, ids: Ids, num_bytes: int) -> None:
        raise PermissionError("process_vm_readv")

    with pytest.raises(PermissionError):
        measured_gate("refused", refused)
    assert measured_gate("refused", for_nothing) == AS_THEY_LIE


def test_a_measurement_moves_pieces_that_a_socket_takes_at_once() -> None:
    left, right = socket.socketpair()
    moved: list[tuple[int, int]] = []

    def move(rows: Bytes, ids: Ids, num_bytes: int) -> None:
        flat, stride = memoryview(rows.reshape(-1)), rows.shape[1]
        pieces = [flat[row * stride : row * stride + num_bytes] for row in ids.tolist()]
        assert left.sendmsg(pieces) == right.recvmsg_into(pieces)[0] == ids.size * num_bytes
        moved.append((ids.size, num_bytes))

    with closing(left), closing(right):
        left.setblocking(False)
        right.setblocking(False)
        gate = measured_gate("sockets", move)
    assert 0 <= gate.below <= MAX_BELOW
    assert len({count * size for count, size in moved}) == 1  # as many bytes in pieces as in one
    assert len({count for count, _ in moved}) == 2
    assert gate.at_least == 1
