"""Arguments of an engine as vLLM's programs keep them."""

import argparse
from pathlib import Path
from typing import Any, Self

from pdkv.base.options import options_of
from pdkv.config import DEFAULT_MODEL, EngineConfig


class EngineArgs:
    """Arguments of `LLM` as attributes, for `LLMEngine.from_engine_args`. Each is checked when it is read."""

    def __init__(self, model: str | Path = DEFAULT_MODEL, **arguments: Any) -> None:
        vars(self).update(arguments, model=model)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each argument; those that are not given are not in what it parses."""
        for name, item in options_of(EngineConfig).items():
            kind: Any = {"action": argparse.BooleanOptionalAction} if item.base is bool else {"metavar": item.metavar}
            flag, shown = "--" + name.replace("_", "-"), item.help.replace("%", "%%")
            parser.add_argument(flag, default=argparse.SUPPRESS, help=shown, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Of what such a parser has read, other options aside."""
        known = options_of(EngineConfig)
        return cls(**{name: value for name, value in vars(args).items() if name in known})


AsyncEngineArgs = EngineArgs
FlexibleArgumentParser = argparse.ArgumentParser
