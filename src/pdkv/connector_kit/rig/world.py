"""The engines of one case and their processes: makes, steps, stops and restarts them, and leaves nothing behind."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.host import Host
from pdkv.connector_kit.rig.processes import HostProcess, Zygote, wait_for_any
from pdkv.connectors.registry import plan_connector
from pdkv.errors import IncompatiblePeers, PdkvError
from pdkv.wire.kv import ChecksumMode, KVGroup, KVLayout, LayoutKind, Positions

NUM_KV_HEADS = 4
"""KV heads of the model; up to four ranks hold different ones."""


TRANSFER_POLL_S = 0.5
"""As in the engine: seconds between checks for unannounced results."""

SHORT_S = 0.8
"""Deadline of a connector's waits in worlds where nothing has to succeed within it."""

AMPLE_S = 1.5
"""As above, if transfers must succeed, too: the first one between processes just forked, on a busy machine."""

LATE_S = 1.2
"""Seconds after a deadline within which it must be reported."""


class Violation(PdkvError):
    """The connector has broken a contract; the message says which."""

    code = "contract_violation"


class NotApplicable(PdkvError):
    """Raised by a case that does not apply to this connector."""

    code = "not_applicable"


class Refused(PdkvError):
    """The connector refuses this shape of peers, as it may, with both sides' values."""

    code = "refused"


def require(condition: bool, message: str) -> None:
    """Raise Violation unless `condition` holds."""
    if not condition:
        raise Violation(message)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of one engine: blocks, layers, heads, ranks."""

    tp: int = 1
    block_size: int = 16
    num_blocks: int = 64
    num_layers: int = 3
    head_size: int = 8
    num_heads: int = NUM_KV_HEADS  # of all ranks
    dtype: str = "float32"
    dtype_bytes: int = 4
    groups: tuple[KVGroup, ...] = ()  # then num_layers is ignored
    sides: int = 2
    positions: Positions = "rotated"

    def layout(self) -> KVLayout:
        """The KV layout of one rank."""
        return KVLayout(
            num_layers=len(self.groups[0].layers) if self.groups else self.num_layers,
            num_kv_heads=max(self.num_heads // self.tp, 1),
            head_size=self.head_size,
            block_size=self.block_size,
            dtype=self.dtype,
            dtype_bytes=self.dtype_bytes,
            total_kv_heads=self.num_heads,
            groups=self.groups,
            sides=self.sides,
            positions=self.positions,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings shared by all worlds of a run. "{directory}" in an option stands for a private directory of each
    world.
    """

    zygote: Zygote
    directory: Path
    connector: str
    options: dict[str, str]
    short_options: dict[str, str] = field(default_factory=dict)  # deadlines: "{deadline}" is that of the world
    one_process: bool = False
    layouts: tuple[LayoutKind, ...] = ()  # named by its plan
    groups: tuple[KVGroup, ...] = ()  # shape of engines for which none was chosen
    kv_checksum: ChecksumMode = "on"
    timeout_s: float = 20.0
    quick: bool = False
    world_numbers: "itertools.count[int]" = field(default_factory=itertools.count)


class World:
    """A producer "p" and a consumer "d", and further engines that a case boots. Used as a context manager."""

    engine_type: ClassVar[type[Engine]] = Engine

    def __init__(
        self,
        setting: Setting,
        producer: Shape | None = None,
        consumer: Shape | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s`: of the connector's waits; None: its own. Raises Refused if a shape cannot be built."""
        self.setting = setting
        self.timeout_s = setting.timeout_s
        self.poll_s = TRANSFER_POLL_S
        self.passed_s = (
            deadline_s or 0
        ) + LATE_S  # the time by which the connector has reported a deadline, if it does so itself
        self.engines: dict[str, Engine] = {}
        self.shapes: dict[str, Shape] = {}
        self._epochs: dict[str, int] = {}
        self._all_hosts: list[HostProcess] = []
        self._shared: HostProcess | None = None
        directory = setting.directory / f"world-{next(setting.world_numbers)}"
        directory.mkdir()
        short = {name: value.replace("{deadline}", str(deadline_s)) for name, value in setting.short_options.items()}
        options = {**setting.options, **(short if deadline_s is not None else {})}
        texts = {name: value.replace("{directory}", str(directory)) for name, value in options.items()}
        self._plan = plan_connector(setting.connector, texts)
        usual = Shape(groups=setting.groups)
        shapes = {"p": producer or usual, "d": consumer or usual}
        self._kv_shards = math.lcm(*(shape.tp for shape in shapes.values()))
        try:
            for name, shape in shapes.items():
                self.boot(name, shape)
            self.introduce()
        except BaseException:
            self.kill_all()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.kill_all()

    @property
    def producer(self) -> Engine:
        """The engine that computes prompts."""
        return self.engines["p"]

    @property
    def consumer(self) -> Engine:
        """The engine that loads."""
        return self.engines["d"]

    # --- engines come and go --------------------------------------------------------------------------------------

    def boot(self, name: str, shape: Shape, hosts: Sequence[HostProcess] = ()) -> Engine:
        """Start an engine, or its next incarnation, in new processes or in `hosts`; `introduce` tells the others."""
        self.shapes[name] = shape
        self._epochs[name] = epoch = self._epochs.get(name, -1) + 1
        if shape.tp > 1 and self.setting.one_process:
            raise Refused("each rank is a process, and this connector works only within one process")
        hosts = hosts or [self._host() for _ in range(shape.tp)]
        try:
            engine = self.engine_type(
                name, f"{name}.{epoch}", hosts,
                plan=self._plan, layout=shape.layout(),
                num_blocks=shape.num_blocks, kv_shards=self._kv_shards, timeout_s=self.timeout_s,
                kv_checksum=self.setting.kv_checksum,
            )  # fmt: skip
        except PdkvError as error:
            if shape.tp > 1 and error.code in ("config_error", "incompatible_peers"):
                raise Refused(f"{shape.tp} ranks: {error}") from error
            raise
        self.engines[name] = engine
        return engine

    def introduce(self) -> None:
        """Tell all engines all cards. Raises Refused if a connector refuses one."""
        cards = [engine.card for engine in self.engines.values()]
        refusals = []
        for engine in self.live_engines():
            try:
                refusals += engine.update_peers(cards)
            except IncompatiblePeers as error:
                refusals.append(str(error))
        if refusals:
            raise Refused(refusals[0])

    def restart(self, name: str) -> Engine:
        """Kill an engine (kill -9) and start its next incarnation; the others are told of both at once."""
        self.kill(name)
        return self.revive(name)

    def revive(self, name: str, hosts: Sequence[HostProcess] = ()) -> Engine:
        """Start the next incarnation of an engine that was killed or, in `hosts`, shut down; all engines are told."""
        engine = self.boot(name, self.shapes[name], hosts)
        self.introduce()
        return engine

    def kill(self, name: str) -> None:
        """Kill all ranks with SIGKILL, without telling the others."""
        engine = self.engines.pop(name)
        if self.setting.one_process:
            engine.hosts[0].ask("", Host.drop, engine.timeout_s, name)
            return
        for host in engine.hosts:
            host.kill()

    def stop(self, name: str) -> None:
        """SIGSTOP all ranks."""
        self.need_processes("a peer cannot be stopped alone")
        for host in self.engines[name].hosts:
            host.stop()

    def resume(self, name: str) -> None:
        """SIGCONT all ranks."""
        for host in self.engines[name].hosts:
            host.resume()

    def need_processes(self, why: str) -> None:
        """Raise NotApplicable for connectors whose engines share a process."""
        if self.setting.one_process:
            raise NotApplicable(f"engines share a process: {why}")

    def live_engines(self) -> list[Engine]:
        """Engines that can run steps."""
        return [engine for engine in self.engines.values() if engine.is_live]

    def _host(self) -> HostProcess:
        if self._shared is None or not self.setting.one_process:
            self._shared = self.setting.zygote.fork()
            self._all_hosts.append(self._shared)
        return self._shared

    # --- time passes ----------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Let the engines run until `condition` holds.

        Raises:
            Violation: it does not within `timeout_s` (the setting's by default).
        """
        if not self.runs_until(condition, timeout_s or self.timeout_s):
            rest = "; ".join(engine.describe_rest() for engine in self.engines.values())
            raise Violation(f"not within {timeout_s or self.timeout_s:g} s: {what} ({rest})")

    def runs_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Let the engines run until `condition` holds (True) or the time is over (False)."""
        deadline = MONOTONIC.now() + timeout_s
        while True:
            for engine in self.live_engines():
                engine.step_if_needed(self.poll_s)
            if condition():
                return True
            left = deadline - MONOTONIC.now()
            if left <= 0:
                return False
            hosts = [host for engine in self.live_engines() for host in engine.hosts]
            wait_for_any(hosts, min(left, TRANSFER_POLL_S / 4))

    def run_for(self, seconds: float) -> None:
        """Let the engines run for a while in which something must not happen."""
        self.runs_until(lambda: False, seconds)

    # --- the end --------------------------------------------------------------------------------------------------

    def check_pools(self) -> None:
        """Check that no block was written that no load owned. Raises Violation."""
        for engine in self.live_engines():
            blocks = engine.foreign_writes()
            require(not blocks, f"engine {engine.name}: blocks {blocks} were written although no load had them")

    def check_rest(self) -> None:
        """Wait until everything is at rest: no hold, lease or quarantine is left, all blocks are free."""
        live = self.live_engines()
        self.until(lambda: all(engine.is_idle for engine in live), "all blocks come back")
        for engine in live:
            engine.step()
            require(not engine.num_held, f"blocks are still held: {engine.describe_rest()}")

    def close(self) -> None:
        """Come to rest, check the pools, shut down, end the processes. Raises Violation or HostFailed."""
        self.check_rest()
        self.check_pools()
        live = self.live_engines()
        for engine in live:
            engine.close()
        for host in {id(host): host for engine in live for host in engine.hosts}.values():
            host.exit(self.timeout_s)

    def kill_all(self) -> None:
        """Kill all processes, in any state."""
        for host in self._all_hosts:
            host.kill()


def lengths(setting: Setting, block_size: int = 16) -> Sequence[int]:
    """Prompt lengths around every boundary."""
    b = block_size
    quick = [1, b, b + 1, 5 * b - 1, 7 * b + 3]
    return quick if setting.quick else [*quick, b - 1, 2 * b, 12 * b, 12 * b + 1, 21 * b + 5]
