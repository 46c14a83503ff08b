"""Options made from configuration dataclasses: one source for the command line, the environment and a file.

Precedence: command line, then PDKV_* variables, then the file of --config, then the dataclass's default.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pdkv.base.options import Option, did_you_mean, nearest, options_of, parse_pairs, read_values
from pdkv.base.secret_options import API_KEY, STORE_SIGN_KEY, has_secret, without_secrets
from pdkv.base.vllm_names import SHORT, UNSUPPORTED, VLLM
from pdkv.errors import ConfigError
from pdkv.host.memory_limits import format_bytes
from pdkv.kernels.compiled import ISA

ENVIRONMENT_PREFIX = "PDKV_"

Config = TypeVar("Config")

logger = logging.getLogger(__name__)


def new_command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    run: Callable[[argparse.Namespace], int] | None,
    summary: str,
    more: str = ".",
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a command. `summary` is its help, and the beginning of its description, which ends with `more`."""
    description = summary[:1].upper() + summary[1:] + more
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description, **options)
    parser.set_defaults(run=run)
    return parser


def check_numbers(arguments: argparse.Namespace, *names: str, zero: bool = False) -> None:
    """Raise ConfigError for flags whose number is not finite and above 0 or, with `zero`, at least 0."""
    for name in names:
        value = getattr(arguments, name)
        if not (0 < value < float("inf") or (zero and value == 0)):
            least = "0 or more" if zero else "above 0"
            raise ConfigError(f"{_as_flag(name)}: a number {least} was expected, got {value:g}")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line that suggests the nearest name; flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> Any:  # arguments of a subcommand pass through here, too
        """As in argparse, but every argument must be valid text, and unknown ones are errors."""
        for text in sys.argv[1:] if args is None else args:
            if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
                self.error(f"an argument is not valid UTF-8: {text!r}")
        namespace, rest = super().parse_known_args(args, namespace)
        for action in self._get_positional_actions():  # argparse gives up one that may be left out at the next option
            if rest and rest[0][:1] != "-" and action.nargs == "?" and getattr(namespace, action.dest) is None:
                setattr(namespace, action.dest, self._get_values(action, [rest.pop(0)]))
        if rest:
            name = rest[0].partition("=")[0]
            flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
            close = nearest(name[2:], [flag for flag in flags if flag.replace("-", "_") not in UNSUPPORTED])
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


Flags = Mapping[str, Option]
"""Options by the names of their flags, such as "threads" or "prefill_threads"."""


def _as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _as_variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _other_names(name: str, item: Option) -> list[str]:
    """Other names of a flag: vLLM's."""
    names = [theirs for theirs, of in VLLM.items() if of.ours == item.name]
    return [name.removesuffix(item.name) + other for other in names]


def variables_of(flags: Flags) -> set[str]:
    """The environment variables of a flag."""
    return {_as_variable(form) for name, item in flags.items() for form in (name, *_other_names(name, item))}


def flags_of(config: type, *, role: str = "", exclude: Sequence[str] = ()) -> dict[str, Option]:
    """The flags of a configuration; with `role`, their forms for that role."""
    prefix = f"{role}_" if role else ""
    return {prefix + name: item for name, item in options_of(config).items() if name not in exclude}


def with_default(item: Option) -> str:
    """The help text of an option with its default, unless the text already names it."""
    if item.default in (None, dataclasses.MISSING, (), "") or item.base is Path or "(default: " in item.help:
        return item.help
    shown = format_bytes(item.default).replace(" ", "") if "size" in item.details else str(item.default)
    of_model = "the model's, else " if item.details.get("of_model") else ""
    return f"{item.help} (default: {of_model}{shown.lower() if item.base is bool else shown})"


class Noted(argparse.Action):
    """Records each flag with its value, in order, in `given`, which `collect` reads."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Called where the flag or positional argument appears, or a positional one is absent."""
        given: list[tuple[str, Any]] = getattr(namespace, "given", [])
        if values == []:  # a switch, or a flag of vLLM's without a value
            values = not (option_string or "").startswith("--no-")
        if self.nargs == "+":  # once for each value
            values = [*dict(given).get(self.dest, ()), *values]
            given = [item for item in given if item[0] != self.dest]
        if values is not None:
            namespace.given = [*given, (self.dest, values)]


def add_flags(parser: argparse._ActionsContainer, flags: Flags) -> None:
    """Add flags to an argparse parser; those of a role are hidden from help. Values stay text: `collect` checks
    them.
    """
    for name, item in flags.items():
        shown = with_default(item).replace("%", "%%") if name == item.name else argparse.SUPPRESS
        nargs = 0 if item.base is bool else "+" if item.is_map or item.is_list else None
        _add(parser, name, nargs, shown, metavar=item.metavar)
        for other in _other_names(name, item):
            _add(parser, other, nargs)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags that have no counterpart, hidden from help. `collect` accepts or refuses them."""
    for name, theirs in UNSUPPORTED.items():
        if _as_flag(name) not in parser._option_string_actions:
            _add(parser, name, 0 if theirs.is_switch else None if theirs.neutral else "*")


def _add(
    parser: argparse._ActionsContainer, name: str, nargs: int | str | None, help: str = argparse.SUPPRESS, **shown: Any
) -> None:
    strings = [_as_flag(name), *(flag for flag, of in SHORT.items() if of == name)]
    if nargs == 0:
        strings.append("--no-" + strings[0][2:])
    parser.add_argument(*strings, dest=name, action=Noted, nargs=nargs, help=help, **shown)


def collect(
    flags: Flags,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    known_variables: Collection[str] = (),
    file: Path | None = None,
) -> dict[str, Any]:
    """The values given in any source, by option name, checked and converted.

    Args:
        arguments: the parsed command line; `given` has the flags and their values.
        environment: where PDKV_* variables are looked up (default: this process's).
        known_variables: PDKV_* variables that are not options here but not mistakes either.
        file: a TOML, YAML or JSON file of option names and values.

    Raises:
        ConfigError: an unknown key or PDKV_* variable, a value of the wrong kind, one option given under two names in
            one source, or an unreadable file.
    """
    others = {API_KEY, STORE_SIGN_KEY, ISA, *known_variables} - variables_of(flags)
    values: dict[str, Any] = {}
    if file is not None:
        table = [(key.replace("-", "_"), value) for key, value in read_config_file(file).items()]
        values |= read_values(table, flags, owner=f"{file}: ", kind="key", of_vllm=True)
    variables = [
        (variable.removeprefix(ENVIRONMENT_PREFIX).lower(), text)
        for variable, text in (os.environ if environment is None else environment).items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in others
    ]
    values |= read_values(variables, flags, kind="environment variable", show=_as_variable, of_vllm=True)
    return values | read_values(arguments.get("given", ()), flags, show=_as_flag, of_vllm=True)


def read_config_file(path: Path) -> dict[str, Any]:
    """The table in a .toml, .yaml or .json file.

    Raises:
        ConfigError: it cannot be read, is malformed, or holds no table.
    """
    try:
        text = path.read_bytes().decode()
        if path.suffix in (".yaml", ".yml"):
            table = _read_yaml(text)
        else:
            table = json.loads(text, object_pairs_hook=_table) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # raised by json, tomllib, YAML and decode()
        raise ConfigError(f"{path}: malformed: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise ConfigError(f"{path}: a table of options was expected, got {type(table).__name__}")
    return table


def _read_yaml(text: str) -> Any:
    """Raises ValueError."""
    import yaml  # type: ignore[import-untyped]

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            _table([(key.value, value) for key, value in node.value])
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _table(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping node as a table. Raises ValueError for a repeated key."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} appears twice")
    return dict(pairs)


CONNECTOR_CONFIG = "--connector-config"


def connector_options(texts: Sequence[str]) -> dict[str, str]:
    """Options from --connector-config alone; warns of a password. Raises ConfigError."""
    warn_of_secrets(CONNECTOR_CONFIG, texts)
    try:
        return parse_pairs(list(texts))
    except ConfigError as error:
        raise ConfigError(f"{CONNECTOR_CONFIG}: {error}") from None


def warn_of_given_secrets(arguments: argparse.Namespace) -> None:
    """Warn of passwords on the command line, once per option."""
    for name, value in getattr(arguments, "given", ()):
        if name in ("connector_config", "kv_store"):
            warn_of_secrets(_as_flag(name), value if isinstance(value, list) else [value])


def warn_of_secrets(flag: str, texts: Sequence[str]) -> None:
    """Warn, once, if the flag has a password on the command line. `texts`: KEY=URL or only a URL."""
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
    """Make a configuration from collected values; with `role`, that role's values take precedence.

    Raises:
        ConfigError: the dataclass refuses a value.
    """
    for name, wanted in options_of(config).items():
        if wanted.required and name not in values:
            raise ConfigError(f"--{name.replace('_', '-')} {wanted.metavar} is required: {wanted.help}")
    fields = {name: values[name] for name in options_of(config) if name in values}
    if role:
        fields |= {name: values[f"{role}_{name}"] for name in options_of(config) if f"{role}_{name}" in values}
    return config(**fields)
