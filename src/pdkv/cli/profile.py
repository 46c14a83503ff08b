"""`pd profile`: measures an engine and writes the curves that paced engines, `pd simulate` and `pd plan` read."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdkv.cli.bench import add_target, check_folder, find_target, longest_of, write_result
from pdkv.cli.options import new_command
from pdkv.cli.running import say


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `profile` to the `pd` parser."""
    summary = "measure an engine in minutes, and write its profile for `pd simulate`, `pd plan` and paced engines"
    parser = new_command(commands, "profile", run, summary)
    add_target(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the profile, a TOML file")
    add("--like", default="h100", metavar="NAME", help="profile with the KV's shape and what is not measured "
        "(default: h100)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="equal seeds send equal prompts (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Run `pd profile`."""
    from pdkv.config import PACED
    from pdkv.simulate.fit import as_toml, fit, server
    from pdkv.testing.paced import read_profile

    check_folder(arguments.output, "--output")
    like, target = read_profile(Path(PACED + arguments.like)), find_target(arguments)
    like = replace(like, max_model_len=min(like.max_model_len, longest_of(target) or like.max_model_len))
    found = fit(server(target), like, seed=arguments.seed, say=say if sys.stderr.isatty() else lambda text: None)
    text = "\n".join(as_toml(found, target.url)) + "\n"
    write_result(arguments.output, text.encode(), "--output")
    print(text, end="")
    return 0
