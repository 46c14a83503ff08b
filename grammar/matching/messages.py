"""Messages between an engine, the process that it starts for grammars, and that process's workers, in msgpack."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pdkv.sampling.shape import Grammar

MAX_CONTROL_BYTES = 1 << 16
"""The most bytes of a packet between the engine and the process that forks workers."""

_LENGTH = struct.Struct("<I")


class SlabShape(msgspec.Struct, frozen=True):
    """Sizes of the memory that holds the masks."""

    num_workers: int
    rows_per_worker: int
    masks_per_row: int  # 1 + the drafts of a step
    num_words: int  # of a mask


# --- with the process that forks workers ---------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """The process's settings, passed at its start as JSON; it answers with `Ready`."""

    model_dir: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    time_s: float
    memory_bytes: int
    shape: SlabShape


class Ready(msgspec.Struct, frozen=True):
    """The process is ready to fork workers; or it cannot, for the reason given."""

    error: str = ""


class Place(msgspec.Struct, frozen=True):
    """The place of a worker: fork one with the attached end of a socket, or kill the one that exists."""

    worker: int


class Ended(msgspec.Struct, frozen=True):
    """A worker's end, with its status as in `waitpid`."""

    worker: int
    status: int


# --- with a worker -------------------------------------------------------------------------------------------------


class Learn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prepare a grammar. Answered by `Learned`."""

    number: int
    grammar: Grammar


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No answer will have this grammar any more."""

    number: int


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A row of the slab belongs to an answer from now on: make the masks after these tokens, and then the drafts."""

    row: int
    first: int  # by which the masks behind no token are known; those behind the next one have the next number
    grammar: int
    token_ids: list[int]
    drafts: list[int]
    own_stops: list[int]  # may come where the model may end the answer


class Step(NamedTuple):
    """Advance an answer by these tokens."""

    row: int
    token_ids: list[int]
    drafts: list[int]


class Steps(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Advance answers: make the masks after their tokens."""

    steps: list[Step]


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The row's answer has ended."""

    row: int


class Tell(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request to answer with `Told`, after all earlier orders."""


Order = Learn | Forget | Open | Steps | Close | Tell


class Learned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A grammar is ready, or refused for the reason given."""

    number: int
    refused: str


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The output of a row's answer is not allowed by its grammar, or cannot be matched."""

    row: int
    reason: str


class Told(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Tell`."""


Answer = Learned | Refused | Told

_encoder = msgspec.msgpack.Encoder()
decode_order = msgspec.msgpack.Decoder[Order](Order).decode
decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode


def encode(message: msgspec.Struct) -> bytes:
    """A packet of the control socket."""
    return _encoder.encode(message)


def frame(message: Order | Answer) -> bytes:
    """A message of a stream."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes a stream apart."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """The messages completed by this data."""
        self._data += data
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(self._data, start)[0]
            if stop > len(self._data):
                break
            yield bytes(self._data[start + _LENGTH.size : stop])
            start = stop
        del self._data[:start]
