"""What one launch is made of: the options of `pd launch` beside those of the engines and the hand-off."""

import math
from dataclasses import dataclass, field
from typing import Literal

from pdkv.config import EngineConfig, HandoffConfig, RouterConfig
from pdkv.errors import ConfigError
from pdkv.limits import MAX_WAIT_S
from pdkv.options import check_bounds, option, seconds
from pdkv.wire.messages import Order


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The topology and its front."""

    prefill: int = option(1, "number of prefill engines; 0 = aggregated engines, as many as --decode says", ge=0)
    decode: int = option(1, "number of decode engines", ge=1)
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 = any free one", ge=0, le=65535)
    policy: str = option("prefix_aware", "how the router chooses engines", metavar="NAME")
    order: Literal["auto", "prefill_first", "concurrent", "needs_peer_first", "decode_first"] = option(
        "auto", "which engine is asked first; auto: the router's favourite of those that the connector allows"
    )
    served_model_name: str | None = option(None, "the model's name in the API (default: its directory's name)")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least level of the log lines on stderr")
    start_timeout_s: float = seconds(120.0, "how long a process may take to become ready", le=MAX_WAIT_S)
    drain_s: float = option(
        30.0,
        "how long running requests may go on after a stop, or before an engine is stopped; 0 = not at all",
        ge=0,
        le=MAX_WAIT_S,
    )
    start_method: Literal["fork", "spawn"] = option(
        "fork", "fork: from one process that has imported torch; spawn: each imports"
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty")

    @property
    def orders(self) -> list[Order]:
        """The hand-off orders that the router may take; empty: its own choice."""
        return [] if self.order == "auto" else [self.order]

    @property
    def num_engines(self) -> int:
        """Engines of both roles."""
        return self.prefill + self.decode


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that `pd launch` starts from. With `launch.prefill == 0` the `decode` engines are aggregated."""

    launch: LaunchConfig
    handoff: HandoffConfig
    prefill: EngineConfig
    decode: EngineConfig
    router: RouterConfig = field(default_factory=RouterConfig)

    @property
    def num_ranks(self) -> int:
        """Processes that compute."""
        return self.launch.prefill * self.prefill.tp + self.launch.decode * self.decode.tp

    @property
    def kv_shards(self) -> int:
        """Parts that stored KV heads are cut into: the least common multiple of all engines' ranks."""
        return math.lcm(self.decode.tp, self.prefill.tp) if self.launch.prefill else self.decode.tp

    @property
    def shape(self) -> str:
        """The topology in words, such as "2 prefill, 4 decode, connector shared_memory"."""
        engines = (
            f"{self.launch.prefill} prefill{_ranks(self.prefill)}, {self.launch.decode} decode{_ranks(self.decode)}"
        )
        if self.launch.prefill == 0:
            engines = f"{self.launch.decode} aggregated{_ranks(self.decode)}"
        return f"{engines}, connector {self.handoff.connector}"


def _ranks(config: EngineConfig) -> str:
    return f" (tp {config.tp})" if config.tp > 1 else ""
