"""The yardsticks of a connector: memcpy, and its bare transport."""

from statistics import median
from types import TracebackType
from typing import Self

import msgspec

from pdkv.connector_kit.bench.bare import BARE_SIDE, LOCAL_COPY, BareSide, bare_of
from pdkv.connector_kit.bench.plan import TIMEOUT_S, Plan, plan_bytes, store_values
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.host import Host
from pdkv.connector_kit.rig.processes import HostProcess, Zygote
from pdkv.connector_kit.rig.world import NotApplicable, Setting
from pdkv.connectors.registry import CONNECTORS, load_connector


class Memcpy:
    """One thread's copy of the same number of bytes, warm, from memory larger than the last-level cache."""

    def __init__(self, num_bytes: int, region_bytes: int) -> None:
        self._side = BareSide(p.BareSpec(BARE_SIDE, LOCAL_COPY, num_bytes, num_bytes, num_bytes, region_bytes, {}, b""))

    def seconds(self) -> float:
        """Seconds of one copy."""
        return self._side.move(False, TIMEOUT_S)


class Bare:
    """Two processes around a bare transport."""

    def __init__(self, zygote: Zygote, spec: p.BareSpec) -> None:
        self._source, self._reader = zygote.fork(), zygote.fork()
        address = self._open(self._source, spec)
        self._open(self._reader, msgspec.structs.replace(spec, address=address))

    def seconds(self, in_pieces: bool) -> float:
        """Seconds of one move."""
        for host in (self._source, self._reader):
            host.send("bare", BareSide.move, in_pieces, TIMEOUT_S)
        self._source.receive(BareSide.move, TIMEOUT_S)
        return self._reader.receive(BareSide.move, TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End both processes in any case. After an error, such as Ctrl-C, one may still be moving data."""
        for host in (self._reader, self._source):
            try:
                if kind is None:
                    host.ask("", Host.close, TIMEOUT_S, "bare")
                    host.exit(TIMEOUT_S)
            finally:
                host.kill()

    def _open(self, host: HostProcess, spec: p.BareSpec) -> bytes:
        return host.ask("", Host.open_bare, TIMEOUT_S, "bare", spec)


def measure_bare(plan: Plan, setting: Setting, num_tokens: int, repeats: int) -> float:
    """Median seconds of the bare transport for this many tokens, in one piece. Raises NotApplicable without one."""
    bare = open_bare(plan, setting, plan_bytes(plan, num_tokens))
    if bare is None:
        raise NotApplicable(f"no bare transport is known for {plan.connector}")
    with bare:
        return median([bare.seconds(False) for _ in range(repeats + 1)][1:])


def open_bare(plan: Plan, setting: Setting, size: int) -> Bare | None:
    """Both sides for the plan's connector and this many bytes; None: there is no bare transport."""
    target = bare_of(CONNECTORS.target(plan.connector), load_connector(plan.connector), setting.options)
    if target is None:
        return None
    shape, consumer = plan.consumer, plan.consumer.layout()
    heads = min(plan.producer.layout().num_kv_heads, consumer.num_kv_heads)
    piece_bytes = plan.piece_bytes or heads * shape.block_size * consumer.row_bytes
    tokens, parts = store_values(plan, setting.options)
    value_bytes = tokens * consumer.token_bytes * shape.tp // parts
    options = {**setting.options, "directory": str(setting.directory)}
    spec = p.BareSpec(BARE_SIDE, target, size, piece_bytes, min(value_bytes, size), plan.region_bytes, options)
    return Bare(setting.zygote, spec)
