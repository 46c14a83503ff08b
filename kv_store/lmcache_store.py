"""Values in an LMCache server (`python -m lmcache.v1.server HOST PORT`), spoken to in its own protocol.

A request is a header of nine integers and a key of 150 bytes, followed by the value of a PUT; an answer is nine
integers, followed by the value of a GET. The server answers no PUT, evicts nothing, deletes nothing and, when a client
goes away in the middle of a value, keeps a broken one. Hence:

- Each value has a marker, an empty value under a key of its own that is put behind it: the value counts as stored only
  with it.
- The EXIST that follows a PUT is answered when the PUT is done.
- `delete` overwrites with empty values, which gives the memory back.
- Our connections end by reset, never in the middle of a value by what looks like its end.
"""

import hashlib
import socket
import struct
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import StoreFull, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Arrived, Buffer
from pdkv.kv_store.connections import Channel, Deadline
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.pipeline import Command
from pdkv.kv_store.server_store import ServerStore

# lmcache.v1.protocol; a test compares
PUT, GET, EXIST = 1, 2, 3
SUCCESS, FAIL = 200, 400
FORMAT_BINARY = 4
DTYPE_UINT8 = 6
LOCATION_ANY = 0
_REQUEST = struct.Struct("9i150s")  # command, length, format, dtype, location, shape x 4, key
_ANSWER = struct.Struct("9i")  # code, length, format, dtype, shape x 4, location

MAX_NAME_BYTES = 150
MAX_VALUE_BYTES = 2**31 - 1  # the length is a signed 32-bit integer

Shape = tuple[int, int, int, int]
_NOTHING: Shape = (0, 0, 0, 0)
_DELETED: Shape = (0, 0, 0, 1)
_COMMITTED: Shape = (1, 0, 0, 0)


class Kind(NamedTuple):
    """The declared kind of a value."""

    format: int = FORMAT_BINARY
    dtype: int = DTYPE_UINT8
    shape: Shape = _NOTHING


class Answer(NamedTuple):
    """The header of an answer."""

    code: int
    length: int
    kind: Kind

    @property
    def shape(self) -> Shape:
        return self.kind.shape


class Wanted(NamedTuple):
    """A value to get."""

    place: int  # of its key, for `arrived`
    name: str
    buffer: Buffer
    kind: Kind


def encode_request(command: int, name: str, length: int = 0, kind: Kind | Shape = _NOTHING) -> bytes:
    """Encode the header of a request; `kind`: by default a value of plain bytes."""
    form = kind if isinstance(kind, Kind) else Kind(shape=kind)
    key = name.encode().ljust(MAX_NAME_BYTES)
    return _REQUEST.pack(command, length, form.format, form.dtype, LOCATION_ANY, *form.shape, key)


def decode_answer(data: bytes) -> Answer:
    """The header of an answer."""
    code, length, form, dtype, *shape, _ = _ANSWER.unpack(data)
    return Answer(code, length, Kind(form, dtype, (shape[0], shape[1], shape[2], shape[3])))


def _digest(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=32).hexdigest()


def value_name(key: bytes) -> str:
    """The key of a value, in the form model@world_size@worker@hash@dtype."""
    return f"pdkv@1@0@{_digest(key)}@uint8"


def marker_name(key: bytes) -> str:
    """The key of the value's marker."""
    return f"pdkv-marker@1@0@{_digest(key)}@uint8"


class LMCacheServerStore(ServerStore):
    """A server, and its answers."""

    def __init__(self, host: str, port: int, options: StoreOptions | None = None, clock: Clock = MONOTONIC) -> None:
        """Connects on first use."""
        super().__init__(f"LMCache at {host}:{port}", options, clock)
        self._address = (host, port)

    def connect(self, timeout_s: float) -> Channel:
        try:
            sock = socket.create_connection(self._address, timeout_s)
        except TimeoutError as error:
            raise StoreTimeout(f"{self.what}: no connection within {timeout_s:g} s") from error
        except OSError as error:
            raise StoreUnavailable(f"{self.what}: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
        return Channel(sock, self.what, quick_ack=True)

    def _read_answer(self, channel: Channel) -> Answer:
        answer = decode_answer(channel.read_exactly(_ANSWER.size))
        if answer.code not in (SUCCESS, FAIL) or answer.length < 0:
            raise StoreUnavailable(f"{self.what}: {answer} is not an answer of LMCache")
        return answer

    def _read_done(self, channel: Channel, _index: int) -> None:
        if self._read_answer(channel).code != SUCCESS:
            raise StoreUnavailable(f"{self.what} did not keep a value")

    def _get(self, wanted: Sequence[Wanted], found: list[bool], deadline: Deadline, arrived: Arrived) -> None:
        """Get values, whether or not they have a marker; `found`, by place: those that are there and of their kind."""

        def receive(channel: Channel, number: int) -> None:
            place, _, buffer, kind = wanted[number]
            answer = self._read_answer(channel)
            if answer == (SUCCESS, len(buffer), kind):
                channel.read_into(buffer, partial(arrived, place))
                found[place] = True
            else:
                channel.skip(answer.length)

        commands = [Command([encode_request(GET, each.name)], len(each.buffer)) for each in wanted]
        self._run(commands, receive, deadline)


class LMCacheStore(LMCacheServerStore):
    """Nothing is ever evicted: the server's memory is the limit."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._contains(keys, self._deadline())

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        deadline, found = self._deadline(), [False] * len(keys)
        wanted = [
            Wanted(index, value_name(key), buffer, Kind(shape=(len(buffer), 0, 0, 0)))
            for index, (key, buffer) in enumerate(zip(keys, out, strict=True))
        ]
        try:
            self._get(wanted, found, deadline, arrived)
        except StoreUnavailable:  # also what a broken value looks like: the server ends the connection
            present = self._contains(keys, deadline)
            found[:] = [False] * len(keys)
            self._get(list(compress(wanted, present)), found, deadline, arrived)
        return found

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        for _, value in items:
            if len(value) > MAX_VALUE_BYTES:
                raise StoreFull(f"{self.what}: a value has {len(value)} bytes; at most {MAX_VALUE_BYTES} are possible")
        deadline = self._deadline()
        present = self._contains([key for key, _ in items], deadline)  # spares the way of what is there
        missing = [item for item, found in zip(items, present, strict=True) if not found]
        commands = [
            Command(
                [
                    encode_request(PUT, value_name(key), len(value), (len(value), 0, 0, 0)),
                    value,
                    encode_request(PUT, marker_name(key), 0, _COMMITTED),
                    encode_request(EXIST, marker_name(key)),
                ],
                len(value),
            )
            for key, value in missing
        ]
        self._run(commands, self._read_done, deadline)

    def delete(self, keys: Sequence[bytes]) -> None:
        deadline = self._deadline()
        present = self._contains(keys, deadline)  # otherwise an absent key would begin to take room
        commands = [
            Command(
                [
                    encode_request(PUT, marker_name(key), 0, _DELETED),
                    encode_request(PUT, value_name(key), 0, _DELETED),
                    encode_request(EXIST, marker_name(key)),
                ]
            )
            for key, found in zip(keys, present, strict=True)
            if found
        ]
        self._run(commands, self._read_done, deadline)

    def _contains(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        found = [False] * len(keys)

        def receive(channel: Channel, index: int) -> None:
            answer = self._read_answer(channel)
            channel.skip(answer.length)
            found[index] = answer.shape == _COMMITTED

        self._run([Command([encode_request(GET, marker_name(key))]) for key in keys], receive, deadline)
        return found
