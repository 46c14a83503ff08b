"""A KV transport of your own: decode reads prefill's pool over unix sockets. Explained in docs/writing-a-transport.md.

pip install ./examples/socket_connector && pd launch --prefill 1 --decode 1 --connector sockets
"""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdkv.base.options import Options, Seconds, option
from pdkv.connectors.base import Built, ConnectorConfig, KVConnector
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.pull_scheduler import PullScheduler
from pdkv.connectors.peer.pull_worker import PullPiece, PullWorker
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.lanes import Lane, LaneConfig
from pdkv.connectors.transfer.planning import Ids
from pdkv.connectors.transfer.units import Bytes, UnitPart, UnitPool
from pdkv.connectors.transfer.worker import JOIN_TIMEOUT_S, Job
from pdkv.errors import PeerGone, TransferTimeout

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 4 << 20
MAX_QUESTION_BYTES = 16 << 20


class Question(msgspec.Struct, frozen=True):
    """All that an asker sends on a connection. The answer is bare bytes, whose number the asker knows."""

    ids: bytes  # int64; units, whose images are the answer, or without a part: blocks, for their generations (int64)
    part: UnitPart | None = None  # layers and heads of the units, as the answering rank counts them


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is this user's process: any user can connect to an abstract socket, or take its name."""
    uid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid == os.getuid()


def receive(connection: socket.socket, out: Bytes, job: Job) -> None:
    """Fill `out`, before the job's deadline. Raises OSError, EOFError or a TransferError."""
    view = out.data
    while view:
        connection.settimeout(job.remaining_s())
        if not (count := connection.recv_into(view)):
            raise EOFError("it closed the connection")
        view = view[count:]


class Server:
    """Answers questions about one rank's pool, on a few threads, until `close`. Raises OSError if it cannot listen."""

    def __init__(self, pool: UnitPool, table: LocalBlockTable, timeout_s: float) -> None:
        self._pool, self._table, self._timeout_s = pool, table, timeout_s
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = b"\0pdkv-sockets-" + secrets.token_hex(16).encode()  # abstract: nothing to remove, if killed
        self._listener.bind(self.address)
        self._listener.listen()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the connections: none is closed while `close` breaks it
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._run, name="pdkv-answer", daemon=True) for _ in range(8)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends every `accept`
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):  # the asker was faster
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # `close`, or no descriptor is free
                self._closing.wait(0.1)
                continue
            with connection:
                with self._lock:
                    self._connections.add(connection)
                with suppress(Exception):  # whatever is wrong with a question, it gets no answer, and others do
                    if is_own_user(connection) and not self._closing.is_set():
                        self._answer(connection)
                with self._lock:
                    self._connections.remove(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Take one question, send its answer."""
        connection.settimeout(self._timeout_s)
        with connection.makefile("rb") as stream:
            question = msgspec.msgpack.decode(stream.read(MAX_QUESTION_BYTES), type=Question)
        ids = np.frombuffer(question.ids, dtype=np.int64)
        if question.part is None:
            connection.sendall(self._table.generations_of(ids.tolist()).tobytes())
            return
        for units in self._pool.cut(ids, question.part, PIECE_BYTES):
            image = np.empty(units.size * self._pool.unit_bytes(question.part), dtype=np.uint8)
            self._pool.gather(units, question.part, image, after=ON_HOST, timeout_s=self._timeout_s)
            connection.sendall(image.data)


class SocketWorker(PullWorker):
    """One rank's worker side: a server of its own pool, and a reader of its peers'."""

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], table: LocalBlockTable, timeout_s: float
    ) -> None:
        lanes = LaneConfig(num_shared=0, thread_name="pdkv-read")  # a thread per rank of a peer, made on demand
        super().__init__(config, notify, PeerCards(config), timeout_s=timeout_s, lanes=lanes)
        self._table = table
        self._server: Server | None = None
        self._lock_of_asking = threading.Lock()  # guards the connections: none is closed while `interrupt` breaks it
        self._asking: dict[Job, socket.socket] = {}

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        self._pool = UnitPool(kv_cache)
        self._server = Server(self._pool, self._table, self.timeout_s)
        self.start_threads()  # not before there is a pool that jobs can write to

    def handshake(self) -> bytes:
        assert self._server is not None, "register_kv_caches comes first"
        return self._server.address

    def shutdown(self) -> None:
        super().shutdown()
        if self._server is not None:
            self._server.close()
            self._server = None

    def make_scratch(self, lane: Lane) -> Bytes:
        return np.empty(max(PIECE_BYTES, self._pool.unit_bytes(self._pool.whole)), dtype=np.uint8)

    def read(self, job: Job, piece: PullPiece, scratch: Bytes) -> int:
        layout = self.config.layout
        own, part = piece.own_units(layout), piece.own_part(layout)
        question = Question(piece.source_units().tobytes(), piece.peer_part(layout))
        with self._ask(job, piece, piece.heads.peer_rank, question) as connection:
            for units in self._pool.cut(own, part, PIECE_BYTES):
                image = scratch[: units.size * self._pool.unit_bytes(part)]
                receive(connection, image, job)
                self._pool.scatter(units, part, image)
        return int(own.size * self._pool.unit_bytes(part))

    def generations(self, job: Job, piece: PullPiece, blocks: Ids, scratch: Bytes) -> Ids:
        now = np.empty_like(blocks)
        with self._ask(job, piece, 0, Question(blocks.tobytes())) as connection:
            receive(connection, now.view(np.uint8), job)
        return now

    def interrupt(self, job: Job) -> bool:
        with self._lock_of_asking, suppress(KeyError, OSError):  # it asks nobody now, or is not connected yet
            self._asking[job].shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
        return True

    @contextmanager
    def _ask(self, job: Job, piece: PullPiece, rank: int, question: Question) -> Iterator[socket.socket]:
        """A connection to a rank of the peer, on which the answer comes. Raises a TransferError."""
        who = f"rank {rank} of engine {piece.load.engine}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            with self._lock_of_asking:
                self._asking[job] = connection
            try:
                connection.settimeout(job.remaining_s())
                connection.connect(piece.card.rank_blobs[rank])
                connection.settimeout(job.remaining_s())  # what `interrupt` could not break yet ends here
                if not is_own_user(connection):
                    raise PeerGone(f"{who}: its address belongs to another user")
                connection.sendall(msgspec.msgpack.encode(question))
                connection.shutdown(socket.SHUT_WR)  # the question ends here
                yield connection
            except TimeoutError:
                raise TransferTimeout(f"{who} did not answer within {self.timeout_s:g} s") from None
            except (OSError, EOFError, IndexError) as error:
                raise PeerGone(f"{who}: {error}") from error
            finally:
                with self._lock_of_asking:
                    del self._asking[job]


class SocketOptions(Options):
    timeout_s: Seconds = option(10.0, "deadline of a load, and of a question to this engine")


class SocketConnector(KVConnector):
    """Built once in each rank's process. pyproject.toml names it `sockets`."""

    options_type = SocketOptions
    declares = ConnectorPlan(interface=2, kind="pull")

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        timeout_s = SocketOptions.parse(config.plan.options).timeout_s
        table = LocalBlockTable(config.num_blocks)  # written by the scheduler, read by rank 0's server
        return Built(
            lambda: PullScheduler(config, table, PeerCards(config)),
            lambda: SocketWorker(config, notify, table, timeout_s),
            table,
        )
