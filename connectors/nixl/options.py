"""--connector-config of the `nixl` connector."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdkv.connectors.base import parse_options
from pdkv.connectors.nixl.wire import Mode
from pdkv.connectors.transfer.lanes import LaneConfig
from pdkv.option_types import parse_bool, parse_choice, parse_count, parse_natural, parse_seconds


@dataclass(frozen=True, kw_only=True)
class NixlOptions:
    """Options, with their defaults."""

    mode: Mode = "pull"
    transfer_timeout_s: float = 10.0  # deadline of one transfer on one rank, from its start on
    gather_below: int = 4096  # bytes of a run of blocks, below which it is gathered with others
    gather_min_pieces: int = 64  # where there are fewer of those, they go one by one
    slots: int = 4  # buffers in which units are gathered; half of them at most are one reader's
    slot_bytes: int = 4 * 1024 * 1024
    readers: int = 2  # threads that read large transfers from peers on the host, together
    writes: bool = False  # push: the sender writes large runs itself, instead of having them read
    progress_thread: bool = False  # NIXL's own: for transports that need the peer's help, such as TCP between hosts

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "NixlOptions":
        """Raises ConfigError for an unknown option or value."""
        return cls(**parse_options(options, _CONVERTERS))

    @property
    def lanes(self) -> LaneConfig:
        """One thread per peer rank that something is exchanged with."""
        return LaneConfig(thread_name="pdkv-nixl-io")


def _slot_size(text: str) -> int:
    if (value := int(text)) < 4096 or value % 4096:
        raise ValueError("a multiple of 4096 bytes was expected")
    return value


_CONVERTERS: dict[str, Callable[[str], object]] = {
    "mode": parse_choice("pull", "push"),
    "transfer_timeout_s": parse_seconds,
    "gather_below": parse_natural,
    "gather_min_pieces": parse_count,
    "slots": parse_count,
    "slot_bytes": _slot_size,
    "readers": parse_count,
    "writes": parse_bool,
    "progress_thread": parse_bool,
}
