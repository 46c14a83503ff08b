"""Arguments of an engine in the form that vLLM's programs use."""

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
        """Add an option for each argument; arguments that are not given do not appear in the parsed result."""
        for name, item in options_of(EngineConfig).items():
            kind: Any = {"action": argparse.BooleanOptionalAction} if item.base is bool else {"metavar": item.metavar}
            flag, shown = "--" + name.replace("_", "-"), item.help.replace("%", "%%")
            parser.add_argument(flag, default=argparse.SUPPRESS, help=shown, **kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments in the result of such a parser; other options are ignored."""
        known = options_of(EngineConfig)
        return cls(**{name: value for name, value in vars(args).items() if name in known})


AsyncEngineArgs = EngineArgs
FlexibleArgumentParser = argparse.ArgumentParser
