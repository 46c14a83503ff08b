"""Reads a recorded load, which a router writes with `--record-trace`, and makes prompts of it.

A last line without its end, where a recording was cut off, is skipped.
"""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from sys import intern
from typing import BinaryIO, TypeVar

import msgspec

from pdkv.base.trace_format import VERSION, Head, TraceRequest
from pdkv.bench.workload import FIRST_ID
from pdkv.errors import ConfigError

__all__ = ["Trace", "TraceRequest", "prompts", "read_trace"]

MAX_LINE_BYTES = 8 << 20
"""More than the blocks of the longest prompt."""

MAX_BYTES, MAX_REQUESTS, MAX_TOKENS = 1 << 30, 1 << 20, 1 << 28
"""Limits of a whole recording; tokens are those of its prompts, all of which are held in memory."""

T = TypeVar("T")


class Trace(msgspec.Struct, frozen=True):
    """A recording; its requests are in the order in which they came."""

    model: str
    block_size: int
    requests: tuple[TraceRequest, ...]


def read_trace(path: Path) -> Trace:
    """Read a recording.

    Raises:
        ConfigError: the file cannot be read, is no recording of this version, or is too large; names the line and the
            field, or the limit.
    """
    try:
        with path.open("rb") as file:
            lines = _lines(path, file)
            head = _decode(next(lines, (f"{path}: line 1", b"{}")), Head)
            if head.pdkv_trace != VERSION:
                raise ConfigError(f"{path}: line 1: pdkv_trace: version {VERSION} was expected, got {head.pdkv_trace}")
            found = list(_within_limits(path, (_request(line, head) for line in lines)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return Trace(head.model, head.block_size, tuple(sorted(found, key=lambda request: request.t)))


def prompts(trace: Trace, vocab: int) -> Iterator[list[int]]:
    """Token ids from FIRST_ID to below `vocab` for the prompt of each request, in their order.

    Equal blocks get equal tokens, unequal blocks different ones. What comes behind a prompt's last full block is its
    own.
    """
    if vocab <= FIRST_ID + 1:
        raise ConfigError(f"a vocabulary of more than {FIRST_ID + 1} token ids was expected, got {vocab}")
    for number, request in enumerate(trace.requests):
        ids: list[int] = []
        for block in request.blocks:
            ids += _tokens(block, trace.block_size, vocab)
        yield ids + _tokens(f"the rest of {number}", request.prompt_tokens - len(ids), vocab)


def _tokens(seed: str, length: int, vocab: int) -> list[int]:
    drawn = array("I", hashlib.shake_128(seed.encode()).digest(length * array("I").itemsize))
    return [FIRST_ID + value % (vocab - FIRST_ID) for value in drawn]


def _within_limits(path: Path, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    num_tokens = 0
    for number, request in enumerate(requests, 1):
        num_tokens += request.prompt_tokens
        if number > MAX_REQUESTS:
            raise ConfigError(f"{path}: a recording of at most {MAX_REQUESTS} requests was expected, it has more")
        if num_tokens > MAX_TOKENS:
            raise ConfigError(f"{path}: at most {MAX_TOKENS} prompt tokens in all were expected, it has more")
        yield request


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    number = 0
    while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
        number += 1
        if file.tell() > MAX_BYTES:
            raise ConfigError(f"{path}: a recording of at most {MAX_BYTES} bytes was expected, it has more")
        yield f"{path}: line {number}", line
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{path}: line {number + 1} has more than {MAX_LINE_BYTES} bytes")


def _request(line: tuple[str, bytes], head: Head) -> TraceRequest:
    request = _decode(line, TraceRequest)
    if len(request.blocks) * head.block_size > request.prompt_tokens:
        raise ConfigError(
            f"{line[0]}: blocks: at most {request.prompt_tokens // head.block_size} were expected for "
            f"{request.prompt_tokens} prompt tokens, got {len(request.blocks)}"
        )
    return msgspec.structs.replace(request, blocks=tuple(map(intern, request.blocks)))  # many prompts share them


def _decode(line: tuple[str, bytes], kind: type[T]) -> T:
    where, data = line
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
