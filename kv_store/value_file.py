"""One value in one safetensors file: 8 bytes of header length, a JSON header padded with blanks, the value.

The header has the key and the size of the value and nothing else: a file is whole if it has the right size and its
header is, byte for byte, the one computed from key and size. There is no checksum: values have their own
(connectors/store/envelope.py), and a second one would add a tenth to the time of a hit.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pdkv.kv_store.base import PART_BYTES, Buffer, Scattered

_ALIGNMENT = 512  # of the value in the file
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 20
_MAX_BUFFERS = 1024  # IOV_MAX

ReadResult = Literal["whole", "other_size", "damaged"]


def encode_header(key: bytes, size: int) -> bytes:
    """The header before the value in its file."""
    header = {
        "__metadata__": {"format": "pdkv", "key": key.hex()},
        "value": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(_LENGTH_BYTES + len(text)) // _ALIGNMENT) * _ALIGNMENT - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def write_value(fd: int, key: bytes, value: Buffer) -> None:
    """Write a value's file from its start. Raises OSError."""
    _transfer(os.pwritev, fd, [memoryview(encode_header(key, len(value))), value], 0)


def read_value(fd: int, key: bytes, out: Scattered, arrived: Callable[[int], None]) -> ReadResult:
    """Read a value's file into `out`, without any copy except the kernel's. Raises OSError.

    `arrived(stop)` is called after every PART_BYTES of the value.
    """
    size = len(out)
    expected = encode_header(key, size)
    header = memoryview(bytearray(len(expected)))
    if os.fstat(fd).st_size != len(header) + size:
        return "other_size" if _describes_itself(fd, key) else "damaged"
    stop = min(PART_BYTES, size)
    if not _transfer(os.preadv, fd, [header, *out.stretch(0, stop)], 0) or header != expected:
        return "damaged"
    arrived(stop)
    for start in range(PART_BYTES, size, PART_BYTES):
        stop = min(start + PART_BYTES, size)
        if not _transfer(os.preadv, fd, [*out.stretch(start, stop)], len(header) + start):
            return "damaged"
        arrived(stop)
    return "whole"


def _transfer(call: Any, fd: int, buffers: Sequence[Buffer], offset: int) -> bool:
    """preadv or pwritev at `offset` until all buffers are done; False at the end of the file."""
    pending = [buffer for buffer in buffers if len(buffer)]
    while pending:
        done: int = call(fd, pending[:_MAX_BUFFERS], offset)
        if done == 0:
            return False
        offset += done
        while pending and done >= len(pending[0]):
            done -= len(pending.pop(0))
        if pending:
            pending[0] = pending[0][done:]
    return True


def _describes_itself(fd: int, key: bytes) -> bool:
    """Whether the header fits the file's size: a complete value, but not of the requested size."""
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if not 0 < length <= _MAX_HEADER_BYTES:
        return False
    try:
        header = json.loads(os.pread(fd, length, _LENGTH_BYTES))
        size = header["value"]["shape"][0]
        named: str = header["__metadata__"]["key"]
    except (ValueError, KeyError, TypeError, IndexError):
        return False
    return named == key.hex() and os.fstat(fd).st_size == _LENGTH_BYTES + length + size
