"""A recorded load, version 1: what a router writes with `--record-trace`, without a word of what was said.

JSON lines. The first is {"pdkv_trace": 1, "block_size": tokens per block, "model": name}, each further one a
`TraceRequest`; fields that a reader does not know are skipped, and so is a last line without its end.
"""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from sys import intern
from typing import Annotated, BinaryIO, TypeVar

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_TOTAL_PROMPT_TOKENS
from pdkv.bench.workload import FIRST_ID
from pdkv.errors import ConfigError

VERSION = 1

MAX_LINE_BYTES = 8 << 20
"""More than the blocks of the longest prompt."""

T = TypeVar("T")

_Ordinal = Annotated[int, Meta(ge=0, lt=2**31)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOTAL_PROMPT_TOKENS)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Block = Annotated[str, Meta(pattern="^[0-9a-f]{16}\\Z")]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of a request, written when it had ended."""

    t: _Seconds  # when it came, since the recording began
    session: _Ordinal  # equal in the turns of one conversation
    key: _Ordinal  # the API key
    prompt_tokens: _Tokens  # 0: it was refused before they were counted
    output_tokens: _Tokens
    max_tokens: _Tokens | None = None  # None: as many as fit
    blocks: tuple[_Block, ...] = ()  # one per full block of its prompt; equal ones have equal tokens up to their ends
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    slo_ttft_ms: _Seconds | None = None
    slo_tpot_ms: _Seconds | None = None
    stream: bool = True
    outcome: Annotated[str, Meta(pattern="^(stop|length|abort|error:[a-z0-9_]{1,64})\\Z")]
    ttft_s: _Seconds | None = None  # None: no token came
    e2e_s: _Seconds


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    pdkv_trace: int
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    model: str


class Trace(msgspec.Struct, frozen=True):
    """A recording; its requests are in the order in which they came."""

    model: str
    block_size: int
    requests: tuple[TraceRequest, ...]


def read_trace(path: Path) -> Trace:
    """Read a recording.

    Raises:
        ConfigError: the file cannot be read, or is no recording of this version; names the line and the field.
    """
    try:
        with path.open("rb") as file:
            lines = _lines(path, file)
            head = _decode(next(lines, (f"{path}: line 1", b"{}")), Head)
            if head.pdkv_trace != VERSION:
                raise ConfigError(f"{path}: line 1: pdkv_trace: version {VERSION} was expected, got {head.pdkv_trace}")
            found = [_request(line, head) for line in lines]
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


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    number = 0
    while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
        number += 1
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
