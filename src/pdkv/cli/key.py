"""`pd key new NAME`: makes an API key, shows it once, and prints the lines that tell the router about it."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pdkv.cli.options import new_command
from pdkv.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `key` to the `pd` parser."""
    parser = commands.add_parser(
        "key", help="make an API key for --api-key-file", description="Make API keys for --api-key-file."
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    summary = "make an API key and show it once; only its hash is stored"
    new = new_command(actions, "new", run_new, summary)
    new.add_argument("name", metavar="NAME", help="name of the key's owner; shown in metrics and errors")
    new.add_argument("--admin", action="store_true", help="let the key use /admin, too")
    new.add_argument(
        "--append", type=Path, metavar="FILE", help="add the key's lines to this key file (created with mode 0600)"
    )


def run_new(arguments: argparse.Namespace) -> int:
    """Run `pd key new`."""
    from pdkv.router.admission.api_keys import make_key, read_key_file

    file: Path | None = arguments.append
    names = {key.name for key in read_key_file(file)} if file is not None and file.exists() else set()
    if arguments.name in names:
        raise ConfigError(f"{file} already has a key named {arguments.name!r}: choose another name")
    key, lines = make_key(arguments.name, admin=arguments.admin)
    if file is None:
        print(f"# add these lines to the key file:\n\n{lines}", file=sys.stderr)
    else:
        _append(file, lines)
        print(f"added to {file}; a running launch reads it again on SIGHUP", file=sys.stderr)
    print("this key is shown only now:", file=sys.stderr)
    print(key)
    return 0


def _append(file: Path, lines: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(lines if os.fstat(descriptor).st_size == 0 else "\n" + lines)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
