"""--connector-config of the `nixl` connector."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from pdkv.base.options import Bytes, Natural, Options, Positive, Seconds, Threads, option
from pdkv.connectors.nixl.wire import PATHS, Mode, Path
from pdkv.connectors.transfer.lanes import LaneConfig


class NixlOptions(Options):
    """Options of the `nixl` connector, with their defaults."""

    mode: Mode = option(
        "pull", "pull: decode reads the blocks that prefill keeps; push: decode reads what prefill offers"
    )
    transfer_timeout_s: Seconds = option(10.0, "deadline of one transfer on one rank, from its start")
    gather_below: Natural = option(
        4096, "ucx: runs of blocks with fewer bytes than this are gathered into larger pieces"
    )
    gather_min_pieces: Positive = option(64, "ucx: if fewer runs than this would be gathered, they are sent one by one")
    slots: Annotated[int, Meta(ge=1, le=4096)] = option(
        4, "buffers for gathering; one reader uses at most half of them"
    )
    slot_bytes: Annotated[Bytes, Meta(ge=4096, le=1 << 30, multiple_of=4096)] = option(
        4 << 20, "size of a buffer for gathering"
    )
    path: Literal["auto", "arena", "ucx"] = option(
        "auto",
        "how peers on this host are read; arena: by mapping their pools; ucx: by NIXL, the only path to other hosts; "
        "auto: the first of these that works",
    )
    threads_per_peer: Threads | None = option(
        None, "mode=pull: number of threads that load from each rank of a peer (default: 1, or 4 on a GPU)"
    )
    progress_thread: bool = option(
        False, "run NIXL's own progress thread, for transports that need the peer's help, such as TCP between hosts"
    )

    @property
    def paths(self) -> Sequence[Path]:
        """The paths that may be used, the best one first."""
        return PATHS if self.path == "auto" else (self.path,)

    @property
    def lanes(self) -> LaneConfig:
        """One thread per peer rank that data is exchanged with, or `threads_per_peer`."""
        return LaneConfig(thread_name="pdkv-nixl-io")
