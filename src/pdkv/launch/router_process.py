"""The router, or one of its fronts, as a child process of the launcher."""

import logging

from pdkv.host.linux import set_process_name
from pdkv.host.malloc import set_malloc
from pdkv.launch.acks import Acknowledger, StartGivenUp
from pdkv.launch.lifeline import sweep_if_orphaned, watch_lifeline
from pdkv.launch.logs import configure_logging
from pdkv.launch.run_dir import ADMIN_SOCKET, FRONTS_SOCKET, MARKS_FILE
from pdkv.launch.specs import decode, take_spec
from pdkv.router.front_process import run_front
from pdkv.router.process import run_router
from pdkv.router.spec import RouterSpec

_LIFELINE_GRACE_S = 3.0  # more than connections get to end after a stop

_HEAP_BYTES = 4 << 20

logger = logging.getLogger(__name__)


def main(name: str, *fds: str) -> int:
    """Run the router in this process, or the front of this name; returns its exit status. A router is ready when every
    engine has answered.
    """
    spec = decode(take_spec(), RouterSpec)
    listen_fd, ack_fd, lifeline_fd = map(int, fds)
    seen = spec.config.observability
    configure_logging(name, spec.log_level, seen.log_format, access_log=seen.access_log)
    set_process_name(f"pd {name}")
    _bound_heap()
    watch_lifeline(lifeline_fd, lambda: None, grace_s=_LIFELINE_GRACE_S, run_dir=spec.run_dir)  # the loop sees it, too
    ack = Acknowledger(ack_fd)
    try:
        if name != "router":
            assert spec.run_dir is not None
            return run_front(spec, listen_fd, lifeline_fd, spec.run_dir / FRONTS_SOCKET, ack.ready)
        return run_router(
            spec,
            listen_fd=listen_fd,
            lifeline_fd=lifeline_fd,
            admin_socket=spec.run_dir / ADMIN_SOCKET if spec.run_dir is not None else None,
            marks_file=spec.run_dir / MARKS_FILE if spec.run_dir is not None else None,
            on_ready=ack.ready,
        )
    except StartGivenUp:
        return 1
    except Exception as error:
        if ack.answered:
            logger.exception("the %s stops after an error", name)
        else:
            ack.failed(error)
        return 1
    finally:
        sweep_if_orphaned(lifeline_fd, spec.run_dir)


def _bound_heap() -> None:
    """Keep the process at its initial size, whatever requests do.

    By default glibc keeps ever larger allocations, up to 32 MiB each, after the first one that was freed, and gives
    each working thread its own heap. Pages for small growth are touched now.
    """
    if set_malloc(mmap_threshold=1 << 20, trim_threshold=2 * _HEAP_BYTES, max_arenas=1):
        pieces = [bytearray(256 << 10) for _ in range(_HEAP_BYTES // (256 << 10))]
        pieces.clear()
