"""What a child process is told when it starts, and what it answers while it starts: plain data, as JSON."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdkv.config import EngineConfig, HandoffConfig, ModelFiles, RouterConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.router.engines.address import EngineAddress, Role
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import Order


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of one rank of an engine. `config.threads` is set."""

    name: str  # unique in the deployment, such as "prefill-0"
    role: Role
    epoch: str
    config: EngineConfig
    handoff: HandoffConfig
    connector: ConnectorPlan  # of what `handoff` names, and of tiers beside it
    endpoint: str  # ZeroMQ endpoint to listen on
    num_engines: int  # of the whole deployment
    run_dir: Path | None = None  # the launch's private directory, deleted by whoever outlives the launcher
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    cpus: list[int] | None = None  # CPUs to pin to
    rank: int = 0  # of config.tp
    kv_shards: int = 1  # the least common multiple of all engines' ranks
    store: Path | None = None  # where the ranks of this incarnation find each other; None: one rank
    start_timeout_s: float = 120.0  # bound of a rank's waits before the engine is ready
    cluster_key_file: Path | None = None  # what routers must have, for an endpoint at tcp://

    @property
    def process_name(self) -> str:
        """Of the rank's process, such as "decode-0" for rank 0 and "decode-0.1" for rank 1."""
        return f"{self.name}.{self.rank}" if self.rank else self.name


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The router process."""

    router_id: str
    engines: list[EngineAddress]
    model: ModelFiles
    served_model_name: str
    policy: str
    run_dir: Path | None = None  # as in EngineSpec
    orders: list[Order] = []  # hand-off orders, by preference; empty: the router's own
    identity: str = ""  # of the model that engines must have; empty: the first engine's
    await_all: bool = True  # ready when every engine is; else when a prompt can be run and decoded
    log_level: str = "info"
    config: RouterConfig = RouterConfig()
    logits_processors: list[str] = []  # names of those that engines have
    drain_s: float = 0.0  # how long requests may go on after SIGTERM
    cluster_key_file: Path | None = None  # of engines at tcp:// endpoints


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A step of the start, for people."""

    text: str


class Identified(msgspec.Struct, frozen=True, tag=True):
    """Which model is being loaded. Every rank says it once, before it is ready."""

    model: str  # identity


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process is ready."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot become ready."""

    message: str
    config: bool  # a flag, file or value is at fault
    rank_gone: bool = False  # another rank went away before, and should have said why


KNOWN = b"k"
"""What the launcher says to a starting child when it has its pid."""

Ack = Progress | Identified | Started | StartFailed
_ack_decoder: msgspec.json.Decoder[Ack] = msgspec.json.Decoder(Ack)


def encode(value: object) -> bytes:
    """JSON of a spec or an ack; it has no newline."""
    return msgspec.json.encode(value, enc_hook=_encode_path)


def take_spec() -> bytes:
    """What the launcher has put on this process's standard input, which is empty from now on.

    A spec may hold a password, and everyone on the host may read a command line.
    """
    data = sys.stdin.buffer.read()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)
    return data


def decode_engine_spec(data: bytes) -> EngineSpec:
    """Raises msgspec.DecodeError for anything that is no engine spec."""
    return msgspec.json.decode(data, type=EngineSpec, dec_hook=_decode_path)


def decode_router_spec(data: bytes) -> RouterSpec:
    """Raises msgspec.DecodeError for anything that is no router spec."""
    return msgspec.json.decode(data, type=RouterSpec, dec_hook=_decode_path)


def decode_ack(data: bytes) -> Ack:
    """Raises MalformedMessage for anything that is no ack."""
    return decode_total(_ack_decoder, data)


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} has no JSON form")


def _decode_path(kind: type, value: Any) -> Path:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} has no JSON form")
