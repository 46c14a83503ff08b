"""From configuration dataclasses to options: one source for the command line, the environment and a file.

Precedence: command line, then PDKV_* variables, then the file of --config, then the dataclass's default.
"""

import argparse
import dataclasses
import difflib
import json
import logging
import os
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pdkv.config import parse_size
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.secret_options import STORE_SIGN_KEY, has_secret, read_option, without_secrets

ENVIRONMENT_PREFIX = "PDKV_"

Config = TypeVar("Config")

logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and whose flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {without_secrets(message)} (see {self.prog} --help)\n")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: the field `field` of a configuration dataclass under the name `name`."""

    name: str  # such as "threads" or "prefill_threads"
    field: str
    kind: Any  # the field's type, without `| None`
    optional: bool  # whether None is a value
    size: bool  # bytes, written such as 512MiB
    help: str
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """The command line's form."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_map(self) -> bool:
        """Whether its value is a list of KEY=VALUE."""
        return typing.get_origin(self.kind) is Mapping

    @property
    def variable(self) -> str:
        """The environment's form."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def options_of(config: type, *, role: str = "", exclude: Sequence[str] = ()) -> list[Option]:
    """The options of a configuration dataclass; with `role` its per-role forms."""
    hints = typing.get_type_hints(config)
    options = []
    for item in dataclasses.fields(config):
        if item.name in exclude:
            continue
        kind, optional = _without_none(hints[item.name])
        help_text = f"{item.name.replace('_', ' ')} of the {role} engines" if role else item.metadata["help"]
        if not role and item.default is not dataclasses.MISSING and item.default is not None and kind is not Path:
            shown = format_bytes(item.default).replace(" ", "") if item.metadata.get("size") else item.default
            help_text += f" (default: {shown})"
        options.append(
            Option(
                name=f"{role}_{item.name}" if role else item.name,
                field=item.name,
                kind=kind,
                optional=optional,
                size=bool(item.metadata.get("size")),
                help=help_text,
                metavar=item.metadata.get("metavar"),
            )
        )
    return options


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        assert len(kinds) == 1, hint
        return kinds[0], True
    return hint, False


def add_options(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add flags to an argparse parser. Their values stay text: `collect` is the one that checks."""
    for option in options:
        shown = option.help.replace("%", "%%")
        if option.kind is bool:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=shown)
        elif option.is_map:
            parser.add_argument(option.flag, nargs="+", action="extend", help=shown, metavar=_metavar(option))
        else:
            parser.add_argument(option.flag, help=shown, metavar=_metavar(option))


def _metavar(option: Option) -> str:
    if option.metavar is not None:
        return option.metavar
    if typing.get_origin(option.kind) is Literal:
        return "{" + ",".join(typing.get_args(option.kind)) + "}"
    if option.size:
        return "SIZE"
    if option.kind is float and option.name.endswith("_s"):
        return "SECONDS"
    return {int: "N", float: "X", Path: "DIR"}.get(option.kind, "TEXT")


def collect(
    options: Sequence[Option],
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
    by_name = {option.name: option for option in options}
    if file is not None:
        for key, value in read_config_file(file).items():
            name = key.replace("-", "_")
            if name not in by_name:
                raise ConfigError(f"{file}: unknown key {key!r}{_suggestion(name, by_name)}")
            values[name] = _convert(by_name[name], value, f"{file}: {key}")
    by_variable = {option.variable: option for option in options}
    for variable, text in (os.environ if environment is None else environment).items():
        if variable in by_variable:
            option = by_variable[variable]
            given = text.split(",") if option.is_map else text
            values[option.name] = _convert(option, given, variable)
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in (*known_variables, STORE_SIGN_KEY):
            raise ConfigError(f"unknown environment variable {variable}{_suggestion(variable, by_variable)}")
    for option in options:
        value = arguments.get(option.name)
        if value is not None:
            values[option.name] = _convert(option, value, option.flag)
    return values


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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


def _convert(option: Option, value: Any, where: str) -> Any:
    """A value of the option's kind from text (command line, environment) or from a file's own types."""
    kind = option.kind
    if value is None and option.optional:
        return None
    if option.is_map:
        return convert_map(value, where)
    if option.size and isinstance(value, str):
        try:
            return parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"{where}: one of {', '.join(choices)} was expected, got {value!r}")
        return value
    if kind is bool and isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{where}: {_WORDS[kind]} was expected, got {value!r}") from None
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    if type(value) is not kind:
        raise ConfigError(f"{where}: {_WORDS.get(kind, 'text')} was expected, got {value!r}")
    return value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


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
    warn_of_secrets(texts)
    return convert_map(texts, CONNECTOR_CONFIG)


def warn_of_secrets(texts: Sequence[str]) -> None:
    """Warn, once, if --connector-config has a password on the command line."""
    text = next((text for text in texts if has_secret(text)), None)
    if text is not None:
        logger.warning(
            "%s %s: every user of this host can read the password on the command line; use %s=@FILE, "
            "--config FILE or the variable PDKV_CONNECTOR_CONFIG instead",
            CONNECTOR_CONFIG, without_secrets(text), text.partition("=")[0],
        )  # fmt: skip


def build(config: type[Config], values: Mapping[str, Any], *, role: str = "") -> Config:
    """Make a configuration from collected values; with `role`, the values of that role come first.

    Raises:
        ConfigError: the dataclass refuses a value.
    """
    fields = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        for name in (f"{role}_{item.name}", item.name) if role else (item.name,):
            if name in values:
                fields[item.name] = values[name]
                break
    return config(**fields)
