"""From configuration dataclasses to options: one source for the command line, the environment and a file.

Precedence: command line, then PDKV_* variables, then the file of --config, then the dataclass's default.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pdkv.base.options import Option, did_you_mean, nearest, options_of
from pdkv.base.secret_options import STORE_SIGN_KEY, has_secret, read_option, without_secrets
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes

ENVIRONMENT_PREFIX = "PDKV_"

Config = TypeVar("Config")

logger = logging.getLogger(__name__)


def capitalized(text: str) -> str:
    """With a capital first letter, and all others as they are."""
    return text[:1].upper() + text[1:]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line that suggests the nearest name; flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # a subcommand's come this way, too
        """As ever, but all must be text, and nothing may be left over."""
        for text in sys.argv[1:] if args is None else args:
            if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
                self.error(f"an argument is not valid UTF-8: {text!r}")
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            close = nearest(name[2:], [flag[2:] for flag in self._option_string_actions if flag.startswith("--")])
            meant = f" (did you mean '--{close}'?)" if close and name.startswith("--") else ""
            self.error(f"unrecognized argument {name}{meant}")
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            kind = "command" if isinstance(action, argparse._SubParsersAction) else "value"
            meant = did_you_mean(str(value), choices) or f"; known: {', '.join(choices)}"
            raise argparse.ArgumentError(None if kind == "command" else action, f"unknown {kind} {value!r}{meant}")

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {without_secrets(message)} (see {self.prog} --help)\n")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of a configuration dataclass under the name `name`."""

    name: str  # such as "threads" or "prefill_threads"
    option: Option
    help: str | None  # None: not shown

    @property
    def flag(self) -> str:
        """The command line's form."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment's form."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def flags_of(config: type, *, role: str = "", exclude: Sequence[str] = ()) -> list[Flag]:
    """The flags of a configuration dataclass; with `role` its per-role forms."""
    return [
        Flag(name=f"{role}_{name}" if role else name, option=item, help=None if role else _help(item))
        for name, item in options_of(config).items()
        if name not in exclude
    ]


def _help(item: Option) -> str:
    """Its help text with its default."""
    if item.default in (None, dataclasses.MISSING) or item.kind is Path:
        return item.help
    shown = format_bytes(item.default).replace(" ", "") if item.is_size else item.default
    return f"{item.help} (default: {shown})"


def add_flags(parser: argparse._ActionsContainer, flags: Iterable[Flag]) -> None:
    """Add flags to an argparse parser. Their values stay text: `collect` is the one that checks."""
    for flag in flags:
        shown = argparse.SUPPRESS if flag.help is None else flag.help.replace("%", "%%")
        if flag.option.kind is bool:
            parser.add_argument(flag.flag, action=argparse.BooleanOptionalAction, default=None, help=shown)
        elif flag.option.is_map:
            parser.add_argument(flag.flag, nargs="+", action="extend", help=shown, metavar=flag.option.metavar)
        else:
            parser.add_argument(flag.flag, help=shown, metavar=flag.option.metavar)


def collect(
    flags: Sequence[Flag],
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    known_variables: Collection[str] = (),
    file: Path | None = None,
) -> dict[str, Any]:
    """The values that were given anywhere, by option name, checked and converted.

    Args:
        arguments: what the command line says; None stands for an absent flag.
        environment: where PDKV_* variables are looked up (default: this process's).
        known_variables: PDKV_* variables that are no option here and yet no mistake.
        file: a TOML or JSON file of option names and values.

    Raises:
        ConfigError: an unknown key, an unknown PDKV_* variable, a value of the wrong kind, or an unreadable file.
    """
    values: dict[str, Any] = {}
    by_name = {flag.name: flag for flag in flags}
    if file is not None:
        for key, value in read_config_file(file).items():
            name = key.replace("-", "_")
            if name not in by_name:
                raise ConfigError(f"{file}: unknown key {key!r}{did_you_mean(name, by_name)}")
            values[name] = _convert(by_name[name], value, f"{file}: {key}")
    by_variable = {flag.variable: flag for flag in flags}
    for variable, text in (os.environ if environment is None else environment).items():
        if variable in by_variable:
            flag = by_variable[variable]
            given = text.split(",") if flag.option.is_map else text
            values[flag.name] = _convert(flag, given, variable)
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in (*known_variables, STORE_SIGN_KEY):
            raise ConfigError(f"unknown environment variable {variable}{did_you_mean(variable, by_variable)}")
    for flag in flags:
        value = arguments.get(flag.name)
        if value is not None:
            values[flag.name] = _convert(flag, value, flag.flag)
    return values


def read_config_file(path: Path) -> dict[str, Any]:
    """The table in a .toml or .json file.

    Raises:
        ConfigError: it cannot be read, is malformed, or holds no table.
    """
    try:
        data = path.read_bytes()
        table = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # of json, tomllib and decode()
        raise ConfigError(f"{path}: malformed: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: a table of options was expected, got {type(table).__name__}")
    return table


def _convert(flag: Flag, value: Any, where: str) -> Any:
    """A value of the option's kind from text (command line, environment) or from a file's own types."""
    if flag.option.is_map:
        return convert_map(value, where)
    try:
        return flag.option.convert(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def convert_map(value: Any, where: str) -> dict[str, str]:
    """KEY=VALUE texts, or a file's table of scalars; of KEY=@FILE the value is what the file holds.

    Raises:
        ConfigError: it is neither, or such a file cannot be read; `where` says whose it is.
    """
    if isinstance(value, dict):
        if not all(isinstance(v, str | int | float) for v in value.values()):
            raise ConfigError(f"{where}: a table of plain values was expected, got {value!r}")
        texts = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}
        return {k: read_option(text, f"{where}: {k}") for k, text in texts.items()}
    if not isinstance(value, list):
        raise ConfigError(f"{where}: KEY=VALUE was expected, got {value!r}")
    pairs: dict[str, str] = {}
    for text in value:
        key, separator, setting = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not (separator and key.strip()) or "://" in key:  # a URL without its key
            raise ConfigError(f"{where}: KEY=VALUE was expected, got {without_secrets(repr(text))}")
        pairs[key.strip()] = read_option(setting, f"{where}: {key.strip()}")
    return pairs


CONNECTOR_CONFIG = "--connector-config"


def connector_options(texts: Sequence[str]) -> dict[str, str]:
    """The options of --connector-config where there is only the flag; warns of a password. Raises ConfigError."""
    warn_of_secrets(CONNECTOR_CONFIG, texts)
    return convert_map(texts, CONNECTOR_CONFIG)


def warn_of_secrets(flag: str, texts: Sequence[str]) -> None:
    """Warn, once, if the flag has a password on the command line. `texts`: KEY=URL or a URL alone."""
    text = next((text for text in texts if has_secret(text)), None)
    if text is not None:
        key, separator, _ = text.partition("=")
        file = f"{key}=@FILE" if separator and "://" not in key else f"{flag} @FILE"
        logger.warning(
            "%s %s: every user of this host can read the password on the command line; use %s, "
            "--config FILE or the variable %s instead",
            flag, without_secrets(text), file, ENVIRONMENT_PREFIX + flag[2:].replace("-", "_").upper(),
        )  # fmt: skip


def build(config: type[Config], values: Mapping[str, Any], *, role: str = "") -> Config:
    """Make a configuration from collected values; with `role`, the values of that role come first.

    Raises:
        ConfigError: the dataclass refuses a value.
    """
    fields: dict[str, Any] = {}
    for name, wanted in options_of(config).items():
        if wanted.required and name not in values:
            raise ConfigError(f"--{name.replace('_', '-')} {wanted.metavar} is needed: {wanted.help}")
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        for name in (f"{role}_{item.name}", item.name) if role else (item.name,):
            if name in values:
                fields[item.name] = values[name]
                break
    return config(**fields)
