"""Plain data, as JSON, that a child process gets when it starts, and its answers during the start."""

import os
import sys
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.router.engines.address import Role
from pdkv.wire.decoding import decode_total

T = TypeVar("T")


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of one rank of an engine. `config.threads` is set."""

    name: str  # unique in the deployment, such as "prefill-0"
    role: Role
    epoch: str
    config: EngineConfig
    handoff: HandoffConfig
    connector: ConnectorPlan  # of the connector that `handoff` names, and of tiers next to it
    endpoint: str  # ZeroMQ endpoint to listen on
    num_engines: int  # of the whole deployment
    # the launch's private directory, deleted by the last process that outlives the launcher
    run_dir: Path | None = None
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    cpus: list[int] | None = None  # CPUs to pin to
    rank: int = 0  # of config.tp
    kv_shards: int = 1  # the least common multiple of all engines' ranks
    store: Path | None = None  # how the ranks of this incarnation reach one another; None: one rank
    start_timeout_s: float = 120.0  # limit of a rank's waits before the engine is ready
    cluster_key_file: Path | None = None  # key that routers must have, for an endpoint at tcp://
    asked_at: float | None = None  # when this incarnation was asked for, by this host's monotonic clock

    @property
    def process_name(self) -> str:
        """Name of the rank's process, such as "decode-0" for rank 0 and "decode-0.1" for rank 1."""
        return f"{self.name}.{self.rank}" if self.rank else self.name


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A step of the start, in words."""

    text: str


class Identified(msgspec.Struct, frozen=True, tag=True):
    """The model that is being loaded. Every rank reports it once, before it is ready."""

    model: str  # identity


class Started(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The process is ready. On another node it says its pid and where it listens."""

    pid: int = 0
    endpoint: str = ""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot become ready."""

    message: str
    config: bool  # a flag, file or value is at fault
    rank_gone: bool = False  # another rank ended before, and should have reported why


KNOWN = b"k"
"""Sent by the launcher to a starting child once it has its pid."""

Ack = Progress | Identified | Started | StartFailed
_ack_decoder: msgspec.json.Decoder[Ack] = msgspec.json.Decoder(Ack)


def encode(value: object) -> bytes:
    """JSON of a spec or an ack, without a newline."""
    return msgspec.json.encode(value, enc_hook=os.fspath)


def take_spec() -> bytes:
    """Read the launcher's spec from this process's standard input, which is empty from now on.

    A spec may hold a password, and every user of the host can read a command line.
    """
    data = sys.stdin.buffer.read()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)
    return data


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a spec, of which JSON has every type but paths. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=kind, dec_hook=lambda path_type, value: path_type(value))


def decode_ack(data: bytes) -> Ack:
    """Decode an ack. Raises MalformedMessage."""
    return decode_total(_ack_decoder, data)
