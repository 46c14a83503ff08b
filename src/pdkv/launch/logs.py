"""Logging of one process: lines on stderr that say which process wrote them."""

import logging
import sys

from pdkv.secret_options import without_secrets


class _Formatter(logging.Formatter):
    """Masks passwords in whatever is logged, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def configure_logging(process: str, level: str) -> None:
    """Send this process's log records to stderr as `time level process: message`. Called by process mains only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)-7s {process}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]  # a forked child has its parent's handler
    root.setLevel(logging.WARNING)
    logging.getLogger("pdkv").setLevel(level.upper())
