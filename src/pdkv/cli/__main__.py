"""The entry of `pd` and of `python -m pdkv.cli`, where Ctrl-C shows no traceback while modules are imported."""

import os
import signal
import sys

from pdkv.cli import EXIT_INTERRUPTED


def start() -> int:
    """Run the command; returns its exit code. Ctrl-C before and behind it ends the process at once."""
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else its parent has it ignored
    if interrupts:
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from pdkv.cli.main import main

    if not interrupts:
        return main()
    end = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, end)


if __name__ == "__main__":
    sys.exit(start())
