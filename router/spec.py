"""The specification of a router when it starts: plain data, as JSON."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdkv.config import ModelFiles, RouterConfig
from pdkv.router.engines.address import EngineAddress
from pdkv.router.routing.policies import DEFAULT_POLICY
from pdkv.wire.kv import Order


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: engines of another model (docs/membership.md)."""

    name: str
    model: ModelFiles
    served_model_names: list[str]  # the first is the pool's own


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a router process."""

    router_id: str
    engines: list[EngineAddress]
    model: ModelFiles
    served_model_names: list[str]  # the first is used in answers
    policy: str = DEFAULT_POLICY
    # the launch's private directory, deleted by the last process that outlives the launcher
    run_dir: Path | None = None
    orders: list[Order] = []  # hand-off orders, by preference; empty: the router's own
    identity: str = ""  # of the model that engines must have; empty: the first engine's
    await_all: bool = True  # ready when every engine is; otherwise when a prompt can be run and decoded
    log_level: str = "info"
    config: RouterConfig = RouterConfig()
    logits_processors: list[str] = []  # names of those that engines have
    drain_s: float = 0.0  # how long requests may continue after SIGTERM
    num_fronts: int = 0  # processes for HTTP; 0: the router serves it itself
    cluster_key_file: Path | None = None  # of engines at tcp:// endpoints
    # of engines that come and go (docs/membership.md):
    join_listen: str | None = None
    engines_file: Path | None = None
    engines_dns: list[str] = []
    pools: list[PoolSpec] = []
    split: Mapping[str, float] = {}  # percent of the requests for `model` that each pool runs
    # of servers of other engines:
    backend_key_file: Path | None = None
    backend_kv_events: Mapping[str, str] = {}  # where their KV events are, by name
    backend_num_seqs: int = 256  # requests that each is given at once
    backend_model_len: int | None = None  # that they must have; None: any that the model can have

    fallback: EngineAddress | None = None  # another deployment (docs/fallback.md)
    fallback_key_file: Path | None = None
    fallback_wait_s: float = 0.0

    @property
    def takes_others(self) -> bool:
        """Whether engines may come and go that the launch does not start."""
        return self.join_listen is not None or self.engines_file is not None or bool(self.engines_dns)
