"""The `pd` command. A subcommand's implementation is imported when it runs; nothing imports this module."""

import argparse
import os
import select
import sys
from collections.abc import Sequence

from pdkv import __version__
from pdkv.base.secret_options import without_secrets
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
    """Run the command; returns the exit code: 0, 1 (failed) or 2 (a wrong flag, file or value)."""
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except (ConfigError, InvalidRequest) as error:
        print(f"pd: error: {without_secrets(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except PdkvError as error:
        print(f"pd: failed: {without_secrets(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        return EXIT_READER_GONE
    return code


def _reader_is_gone() -> bool:
    """Whether the reader of standard output has gone away."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


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
