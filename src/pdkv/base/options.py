"""Options as fields of dataclasses: kind, default, help text and bounds stand in one place.

A subclass of `Options` is what a connector or a store takes as KEY=VALUE texts: `Options.parse` reads
`--connector-config` and a store's URL, and `pd connector show` prints what `options_of` finds. The configuration behind
the command line's flags has the same fields (config.py).
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, dataclass_transform

import msgspec

from pdkv.errors import ConfigError

MAX_SECONDS = 1e6
"""Longest duration that an option may ask for by default: what every timeout of the operating system can hold."""

MAX_THREADS = 256
"""Most threads that one option may ask for."""

Config = TypeVar("Config")

_REQUIRED: Any = dataclasses.MISSING
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def option(default: Any = _REQUIRED, help: str = "", **details: Any) -> Any:
    """A dataclass field that is an option.

    Args:
        default: absent: the option must be given.
        help: one line for people.
        details: any of ge, gt, le (bounds of a number), multiple_of, size=True (bytes, written such as 512MiB),
            convert (a function from text to value that raises ValueError with what was expected), metavar,
            aliases (other projects' names for it, which are suggested and not accepted), and secret=True (it may hold
            a password: no `repr` shows it).
    """
    metadata = {"help": help, **details}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, repr=False, metadata=metadata)  # it may hold a password
    return dataclasses.field(default=default, repr=not details.get("secret"), metadata=metadata)


def parse_size(text: str) -> int:
    """Bytes of a size such as "512MiB", "2GiB" or "1000000".

    Raises:
        ConfigError: no such size.
    """
    number = text.strip()
    factor = 1
    for unit in sorted(filter(None, _UNITS), key=len, reverse=True):
        if number.lower().endswith(unit.lower()):
            number, factor = number[: -len(unit)].strip(), _UNITS[unit]
            break
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(f"a size such as 512MiB was expected, got {text!r}")
    return size


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3" or "0,2", each once, in its order.

    Raises:
        ConfigError: malformed or empty; says so of the option `name`.
    """
    numbers: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{name}: a list such as 0-1 or 0,2 was expected, got {text!r}")
        numbers |= dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(numbers)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return close[0]
    within = [other for other in names if len(name) > 2 and name in other]
    return within[0] if len(within) == 1 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What follows an unknown name in an error: the nearest known one, or nothing."""
    close = nearest(name, known)
    return f" (did you mean {close!r}?)" if close else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option, as its field describes it."""

    name: str
    kind: Any  # the field's type, without `| None`
    optional: bool  # whether None is a value
    default: Any  # dataclasses.MISSING: it must be given
    details: Mapping[str, Any]  # help, ge, gt, le, multiple_of, size, convert, metavar, aliases, secret

    @classmethod
    def of_hint(cls, name: str, hint: Any, default: Any, details: Mapping[str, Any] | None = None) -> Self:
        """The option whose resolved type is `hint`."""
        kinds = [hint]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        assert len(kinds) == 1, hint
        return cls(name=name, kind=kinds[0], optional=kinds[0] is not hint, default=default, details=details or {})

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING and not self.is_map

    @property
    def help(self) -> str:
        """One line for people."""
        return str(self.details.get("help", ""))

    @property
    def is_map(self) -> bool:
        """Whether its value is a table of KEY=VALUE."""
        return typing.get_origin(self.kind) is Mapping

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, written such as 512MiB."""
        return bool(self.details.get("size"))

    @property
    def choices(self) -> tuple[Any, ...]:
        """The only values that are accepted; empty: there is no such list."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def metavar(self) -> str:
        """What stands for the value in help texts."""
        if "metavar" in self.details:
            return str(self.details["metavar"])
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        if self.is_size:
            return "SIZE"
        if self.kind is float and self.name.endswith("_s"):
            return "SECONDS"
        return {int: "N", float: "X", Path: "DIR", bool: "{true,false}"}.get(self.kind, "TEXT")

    @property
    def expected(self) -> str:
        """The values that are accepted, in words that "was expected" follows."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.is_size and "multiple_of" not in self.details:
            return "a size such as 512MiB"
        seconds = self.kind is float and self.name.endswith("_s")
        words = "a number of seconds" if seconds else _WORDS.get(self.kind, "text")
        if "multiple_of" in self.details:
            words = f"a multiple of {self.details['multiple_of']}"
        bounds = [f"{word} {self.details[key]:,.10g}" for key, word in _BOUNDS.items() if key in self.details]
        return f"{words} {' and '.join(bounds)}" if bounds else words

    def convert(self, value: Any) -> Any:
        """A value from text, or from a file's own types.

        Raises:
            ConfigError: it is none of this option's; the message says what was expected and what there is.
        """
        if value is None and self.optional:
            return None
        try:
            converted = self._convert(value)
        except (ValueError, OverflowError, ConfigError, msgspec.ValidationError) as error:
            words = f"{error}" if "convert" in self.details else self.expected
            raise ConfigError(f"{words} was expected, got {value!r}") from None
        return converted

    def check(self, value: Any) -> None:
        """Raises ConfigError for a number out of bounds."""
        if isinstance(value, int | float):
            self.convert(value)

    def _convert(self, value: Any) -> Any:
        if "convert" in self.details:
            return self.details["convert"](value)
        if self.kind is Path and isinstance(value, str | Path):
            return Path(value).expanduser()
        if isinstance(value, str) and self.kind in (int, float):
            value = parse_size(value) if self.is_size else self.kind(value)
        bounds = {name: self.details[name] for name in ("ge", "gt", "le", "multiple_of") if name in self.details}
        kind: Any = typing.Annotated[self.kind, msgspec.Meta(**bounds)] if bounds else self.kind
        converted = msgspec.convert(value, kind, strict=not isinstance(value, str))
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError
        return converted


_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "up to"}


def options_of(config: type) -> Mapping[str, Option]:
    """The options that are fields of a dataclass, by name."""
    if config not in _known_options:
        hints = typing.get_type_hints(config)
        _known_options[config] = {
            item.name: Option.of_hint(item.name, hints[item.name], item.default, item.metadata)
            for item in dataclasses.fields(config)
        }
    return _known_options[config]


_known_options: dict[type, Mapping[str, Option]] = {}


def check_bounds(config: Any) -> None:
    """Refuse a configuration with a number out of its option's bounds: what a program says, like what a user types.

    Raises:
        ConfigError: the message names the field, its value and what was expected.
    """
    for name, item in options_of(type(config)).items():
        try:
            item.check(getattr(config, name))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


class OptionTexts(dict[str, str]):
    """Options as they were typed, and whose they are: what errors say.

    A plain mapping does wherever one is expected; its errors then name no owner.
    """

    def __init__(self, texts: Mapping[str, str], owner: str, *, prefix: str = "") -> None:
        """`owner`: such as "connector nixl"; `prefix`: what stood before each name where it was typed."""
        super().__init__(texts)
        self.owner = owner
        self.prefix = prefix


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of classes whose fields are options. Every subclass is a frozen dataclass with keyword arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The options' names."""
        return frozenset(item.name for item in dataclasses.fields(cls))

    @classmethod
    def parse(cls, texts: Mapping[str, str], *, only: Collection[str] | None = None) -> Self:
        """The options that texts say.

        Args:
            texts: by name, perhaps OptionTexts.
            only: names that may be given; None: all.

        Raises:
            ConfigError: an unknown name, a value out of its range, or an option that is missing; the message names the
                option as it was typed, and the nearest known one.
        """
        owner = f"{texts.owner}: " if isinstance(texts, OptionTexts) else ""
        prefix = texts.prefix if isinstance(texts, OptionTexts) else ""
        known = {name: item for name, item in options_of(cls).items() if only is None or name in only}
        values: dict[str, Any] = {}
        for name, text in texts.items():
            if name not in known:
                raise ConfigError(f"{owner}unknown option {prefix + name!r}{_hint(name, known, prefix)}")
            try:
                values[name] = known[name].convert(text)
            except ConfigError as error:
                raise ConfigError(f"{owner}option {prefix}{name}: {error}") from None
        for name, item in known.items():
            if item.required and not values.get(name):
                raise ConfigError(f"{owner}needs the option {prefix}{name}={item.metavar}: {item.help}")
        return cls(**values)


def _hint(name: str, known: Collection[str], prefix: str) -> str:
    close = nearest(name, known)
    meant = f" (did you mean {prefix + close!r}?)" if close else ""
    return f"{meant}; known: {', '.join(sorted(known)) or 'none'}"


def seconds(default: float | None, help: str, *, le: float = MAX_SECONDS) -> Any:
    """An option that is a duration above 0."""
    return option(default, help, gt=0, le=le)


def from_fields(config: type[Config], values: Mapping[str, Any], *, owner: str) -> Config:
    """A configuration from fields that a program gives, with values of their own types or text.

    Raises:
        ConfigError: an unknown field, with the nearest known one, or a value out of its range.
    """
    known = options_of(config)
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            alias = next((item.name for item in known.values() if name in item.details.get("aliases", ())), None)
            meant = f" (did you mean {alias!r}?)" if alias else did_you_mean(name, known)
            raise ConfigError(f"{owner} has no field {name!r}{meant}")
        item = known[name]
        try:
            converted[name] = value if item.is_map else item.convert(value)
        except ConfigError as error:
            raise ConfigError(f"{owner}: {name}: {error}") from None
    return config(**converted)
