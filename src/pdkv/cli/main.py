"""The `pd` command. A subcommand's implementation is imported when it runs; nothing imports this module."""

import argparse
import contextlib
import errno
import os
import select
import sys
from collections.abc import Sequence

from pdkv import __version__
from pdkv.base.log_fields import printable
from pdkv.base.secret_options import without_secrets
from pdkv.cli import EXIT_INTERRUPTED
from pdkv.cli import bench as cli_bench
from pdkv.cli import cache as cli_cache
from pdkv.cli import connector as cli_connector
from pdkv.cli import engine as cli_engine
from pdkv.cli import engines as cli_engines
from pdkv.cli import generate as cli_generate
from pdkv.cli import key as cli_key
from pdkv.cli import launch as cli_launch
from pdkv.cli import profile as cli_profile
from pdkv.cli import scale as cli_scale
from pdkv.cli import simulate as cli_simulate
from pdkv.cli import status as cli_status
from pdkv.cli.options import Parser
from pdkv.errors import ConfigError, InvalidRequest, PdkvError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_READER_GONE = 141  # the exit code that a shell shows for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 (failed), 2 (a wrong flag, file or value), 130 (Ctrl-C) or 141."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _silence(1)  # what is buffered would fail again at the end
            return _failed(f"failed: {error.strerror}", EXIT_FAILED)
        if error.errno not in (errno.EPIPE, errno.EIO) or not _without_readers():
            raise
        return EXIT_READER_GONE
    finally:
        for fd in _without_readers():
            _silence(fd)  # or the interpreter's own flush fails, and says so


def _run(argv: Sequence[str] | None) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # it is closed in `pd … >&-`
            sys.stdout.flush()
    except (ConfigError, InvalidRequest) as error:
        return _failed(f"error: {error}", EXIT_USAGE)
    except PdkvError as error:
        return _failed(f"failed: {error}", EXIT_FAILED)
    return code


def _failed(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # the code says it, too
        print(f"pd: {printable(without_secrets(text))}", file=sys.stderr)
    return code


def _silence(fd: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def _without_readers() -> list[int]:
    """Which of standard output and error is a pipe without a reader, or a terminal that was closed."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return [fd for fd, events in poll.poll(0) if events & select.POLLERR]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each leaf sets `run`."""
    parser = Parser(prog="pd", description="Disaggregated prefill/decode serving with pluggable KV connectors.")
    parser.add_argument("--version", action="version", version=f"pdkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    cli_launch.add_command(commands)
    cli_engine.add_command(commands)
    cli_engines.add_commands(commands)
    cli_status.add_commands(commands)
    cli_cache.add_command(commands)
    cli_scale.add_commands(commands)
    cli_generate.add_command(commands)
    cli_bench.add_command(commands)
    cli_profile.add_command(commands)
    cli_simulate.add_commands(commands)
    cli_connector.add_command(commands)
    cli_key.add_command(commands)
    return parser
