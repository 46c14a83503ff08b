"""The configuration of a launch: the options of `pd launch` besides those of the engines and the hand-off."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from pdkv.base.limits import MAX_WAIT_S
from pdkv.base.options import Names, Natural, Options, Positive, Seconds, option
from pdkv.config import EngineConfig, HandoffConfig, RouterConfig, TiersConfig
from pdkv.errors import ConfigError
from pdkv.launch.kv_tiers import describe_tiers
from pdkv.router.engines.address import (
    EngineAddress,
    check_endpoint,
    check_engine_name,
    check_numeric,
    read_split,
    split_pool,
)
from pdkv.router.engines.foreign_kinds import check_sources, read_backends, read_fallback
from pdkv.router.engines.sources import split_dns_name
from pdkv.wire.kv import Order


class LaunchConfig(Options):
    """The topology of a launch and its front end."""

    prefill: Natural = option(1, "number of prefill engines; 0: --decode sets the number of aggregated engines")
    decode: Natural = option(1, "number of decode engines")
    remote_engines: Mapping[str, str] = option(
        {}, "engines that `pd engine` runs on other hosts, by name", metavar="NAME=tcp://HOST:PORT"
    )
    cluster_key_file: Path | None = option(
        None, "file with the secret shared by this launch and its remote engines", metavar="FILE"
    )
    join_listen: str | None = option(
        None, "address at which engines announce themselves with `pd engine --join`", metavar="tcp://ADDRESS:PORT"
    )
    engines_file: Path | None = option(
        None, "file of lines NAME=tcp://ADDRESS:PORT, engines that come and go as it is replaced", metavar="FILE"
    )
    engines_dns: Names = option(
        (), "names in DNS whose addresses are engines: of SRV records, or with the engines' port", metavar="NAME[:PORT]"
    )
    pool: Mapping[str, str] = option(
        {}, "pools of engines of other models, which join from other hosts, by name", metavar="NAME=MODEL"
    )
    pool_alias: Mapping[str, str] = option(
        {}, "names of pools' models in the API besides the pools' own", metavar="NAME=POOL"
    )
    split: Mapping[str, str] = option(
        {}, "percent of the requests for --model that each pool runs instead", metavar="POOL=PERCENT"
    )
    backend: Names = option(
        (),
        "servers of other engines (vllm, sglang, openai, or vllm-prefill with vllm-decode) that run all requests; no "
        "engine is started here",
        metavar="KIND=URL",
    )
    backend_key_file: Path | None = option(
        None, "file with the API key that is sent to the servers of --backend", metavar="FILE"
    )
    fallback: str | None = option(
        None,
        "another deployment, for requests that this one has no engine or no room for; a server of the kind openai if "
        "no kind is given",
        metavar="[KIND=]URL",
    )
    fallback_wait_s: Seconds = option(10.0, "predicted wait in the queue beyond which requests go to --fallback")
    fallback_key_file: Path | None = option(None, "file with the API key that is sent to --fallback", metavar="FILE")
    cluster: Literal["local", "ray"] = option("local", "where the engines run: on this host, or where Ray places them")
    address: str | None = option(
        None, "a Ray cluster that this host belongs to (default: the one that runs here)", metavar="HOST:PORT"
    )
    backend_kv_events: Mapping[str, str] = option(
        {},
        "where servers of --backend publish their KV events and, with a second port, repeat them; by name",
        metavar="vllm-0=tcp://HOST:PORT[/PORT]",
    )
    kv_shards: Positive | None = option(
        None,
        "for stores only: the least common multiple of the tp of all engines, remote ones included (default: that of "
        "the engines started here)",
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: Annotated[int, Meta(ge=0, le=65535)] = option(8000, "port to listen on; 0: any free one")
    uds: Path | None = option(None, "unix socket to listen on instead of host and port", metavar="PATH")
    policy: str = option("prefix_aware", "policy by which the router chooses engines", metavar="NAME")
    order: Literal["auto", "prefill_first", "concurrent", "needs_peer_first", "decode_first"] = option(
        "auto",
        "order in which prefill and decode are contacted; needs_peer_first: decode allocates blocks and sends a "
        "ticket, with which prefill then starts; decode_first: decode also computes prompts that it has nearly all of; "
        "auto: the router's preferred order among those that the connector supports",
    )
    served_model_name: Names = option(
        (),
        "the model's name in the API, followed by any aliases (default: its name on the hub, or its directory's name)",
        metavar="NAME",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "minimum level of the log lines on stderr")
    start_timeout_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = option(
        120.0, "how long a process may take to become ready"
    )
    drain_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = option(
        30.0, "how long requests may keep running after a stop, or before an engine is stopped; 0: not at all"
    )
    router_fronts: Annotated[int, Meta(ge=0, le=64)] = option(
        0, "processes for HTTP, TLS and text in front of the router's own, which then only decides; 0: it does both"
    )
    start_method: Literal["fork", "spawn"] = option(
        "fork", "fork: fork engines from one process that has imported torch; spawn: each engine imports it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backends and (self.prefill or self.decode or self.remote_engines):
            raise ConfigError(
                f"backend excludes engines of this launch, got --prefill {self.prefill} --decode {self.decode} "
                f"--remote-engines {' '.join(self.remote_engines) or 'none'}: their KV and their identity differ"
            )
        if self.backend_key_file is not None and not self.backend:
            raise ConfigError("backend_key_file is given, but no --backend to send the key to")
        if self.fallback is not None:
            read_fallback(self.fallback)
        elif self.fallback_key_file is not None:
            raise ConfigError("fallback_key_file is given, but no --fallback to send the key to")
        check_sources(self.backend_kv_events, self.backends)
        if not self.remote_engines and not self.decode and not self.backend and not self.takes_others:
            raise ConfigError("decode must be at least 1 where there are no --remote-engines, and none may join, got 0")
        if self.backends and self.takes_others:
            raise ConfigError(
                "backend excludes --join-listen, --engines-file and --engines-dns: engines of one kind only"
            )
        if self.takes_others and self.cluster_key_file is None:
            raise ConfigError("join_listen, engines_file and engines_dns need a --cluster-key-file, as the engines do")
        if self.remote_engines and self.cluster_key_file is None:
            raise ConfigError("remote_engines need a --cluster-key-file, the one that they were started with")
        if self.join_listen is not None:
            check_endpoint(self.join_listen)
        for name in self.engines_dns:
            split_dns_name(name)
            self.check_pool_of(name, "engines_dns")
        self._check_pools()
        if self.cluster == "local" and self.address is not None:
            raise ConfigError(
                f"address is the one of a Ray cluster, but --cluster ray is not given; got {self.address!r}"
            )
        if self.cluster == "ray" and self.backend:
            raise ConfigError("cluster ray excludes --backend: there is no engine for Ray to place")
        for name, endpoint in self.remote_engines.items():
            check_engine_name(name)
            check_endpoint(endpoint)

    def check_pool_of(self, name: str, option: str) -> None:
        """Raise ConfigError for NAME@POOL of an option if there is no such pool."""
        if (pool := split_pool(name)[1]) and pool not in self.pool:
            raise ConfigError(f"{option}: --pool was expected to name the pool of {name!r}")

    def _check_pools(self) -> None:
        """Raise ConfigError for pools that no engine can join, aliases of unknown ones, and an impossible split."""
        if self.pool and not self.takes_others:
            raise ConfigError("pool needs --join-listen, --engines-file or --engines-dns: its engines come from there")
        for name in self.pool:
            check_engine_name(name, "a pool's name")
        for alias, name in self.pool_alias.items():
            if name not in self.pool:
                raise ConfigError(f"pool_alias: {alias} is to be a name of pool {name!r}, which --pool does not name")
        read_split(self.split, self.pool)

    @property
    def orders(self) -> list[Order]:
        """The hand-off orders that the router may use; empty: its own choice."""
        return [] if self.order == "auto" else [self.order]

    @cached_property
    def backends(self) -> list[EngineAddress]:
        """The servers of other engines."""
        return read_backends(self.backend)

    @property
    def takes_others(self) -> bool:
        """Whether engines may come and go that this launch does not start (docs/membership.md)."""
        return self.join_listen is not None or self.engines_file is not None or bool(self.engines_dns)

    @property
    def num_engines(self) -> int:
        """Engines of both roles, on all hosts."""
        return self.prefill + self.decode + len(self.remote_engines)

    @property
    def aggregated(self) -> bool:
        """Whether the engines started here both prefill and decode. With remote engines, they have roles."""
        return not self.prefill and bool(self.decode) and not self.remote_engines


class HostedEngine(Options):
    """The options of `pd engine` besides those of the engine and the hand-off."""

    name: str = option(help="the engine's name, as in --remote-engines")
    role: Literal["prefill", "decode", "any"] = option("any", "the engine's role; any: both")
    listen: str = option(help="address for routers; heartbeats use the next port", metavar="tcp://ADDRESS:PORT")
    join: str | None = option(
        None, "the --join-listen of a running router that is to take the engine in", metavar="tcp://ADDRESS:PORT"
    )
    pool: str = option("", "pool of that router in which the engine is to be (default: none)", metavar="NAME")
    advertise: str | None = option(
        None, "address at which that router reaches the engine (default: --listen)", metavar="tcp://ADDRESS:PORT"
    )
    drain_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = option(
        30.0, "with --join: how long the router may take to finish or move the engine's requests after a stop"
    )
    cluster_key_file: Path = option(
        help="file with the secret that the engine shares with its router's launch", metavar="FILE"
    )
    kv_shards: Positive | None = option(
        None, "for stores only: the least common multiple of the tp of all engines (default: this engine's tp)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "minimum level of the log lines on stderr")
    log_format: Literal["text", "json"] = option("text", "format of the log lines on stderr")
    start_timeout_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = option(
        120.0, "how long the engine may take to become ready"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine_name(self.name)
        check_endpoint(self.listen)
        if self.join is not None:
            check_endpoint(self.join)
            check_numeric(self.reachable_at)
        elif self.advertise is not None or self.pool:
            name = "pool" if self.advertise is None else "advertise"
            raise ConfigError(f"{name} is for routers that the engine is to --join, and none is given")
        if self.pool:
            check_engine_name(self.pool, "a pool's name")

    @property
    def reachable_at(self) -> str:
        """The endpoint that routers are told."""
        return self.advertise or self.listen


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """All settings of `pd launch`. With `launch.aggregated`, the `decode` engines are aggregated ones."""

    launch: LaunchConfig
    handoff: HandoffConfig
    prefill: EngineConfig
    decode: EngineConfig
    router: RouterConfig = field(default_factory=RouterConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)

    @property
    def num_ranks(self) -> int:
        """Processes that compute."""
        return self.launch.prefill * self.prefill.tp + self.launch.decode * self.decode.tp

    @property
    def on_ray(self) -> bool:
        """Whether Ray places the engines, which find their share of a node there."""
        return self.launch.cluster == "ray"

    @property
    def kv_shards(self) -> int:
        """Number of parts that stored KV heads are cut into: the least common multiple of all engines' ranks."""
        own = math.lcm(self.decode.tp, self.prefill.tp) if self.launch.prefill else self.decode.tp
        return self.launch.kv_shards or own

    @property
    def shape(self) -> str:
        """The topology in words, such as "2 prefill, 4 decode, connector shared_memory"."""
        engines = (
            f"{self.launch.prefill} prefill{_ranks(self.prefill)}, {self.launch.decode} decode{_ranks(self.decode)}"
        )
        if self.launch.backend:
            return f"{(n := len(self.launch.backends))} server{'s' * (n > 1)} of other engines"
        if self.launch.aggregated:
            engines = f"{self.launch.decode} aggregated{_ranks(self.decode)}"
        if self.launch.remote_engines:
            engines = f"{engines}, {len(self.launch.remote_engines)} on other hosts"
        if self.launch.takes_others:
            engines = f"{engines}, others may join"
        return f"{engines}, connector {self.handoff.connector}{describe_tiers(self.tiers)}"


def _ranks(config: EngineConfig) -> str:
    return f" (tp {config.tp})" if config.tp > 1 else ""
