"""Options as fields of dataclasses: the type defines the values, the field the default and the help text.

A subclass of `Options` is configured by flags, PDKV_* variables and files (config.py), by KEY=VALUE texts for a
connector or a store, or by keywords in a program. `options_of` also reads msgspec structs.
"""

import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, dataclass_transform

import msgspec
from msgspec import Meta

from pdkv.base.secret_options import read_option, without_secrets
from pdkv.base.vllm_names import own_name
from pdkv.errors import ConfigError

MAX_SECONDS = 1e6
"""The longest duration of an option by default: every timeout of the operating system can represent it."""

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Threads = Annotated[int, Meta(ge=1, le=256)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
Names = tuple[Annotated[str, Meta(min_length=1)], ...]
Bytes = Annotated[int, Meta(extra={"size": True})]
"""Written like 512MiB."""
Size = Annotated[Bytes, Meta(ge=1)]

TCP = r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})"
"""The pattern of an address: host and port, which may be too high."""

Config = TypeVar("Config")

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_BYTES = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def option(default: Any = dataclasses.MISSING, help: str = "", **details: Any) -> Any:
    """Define a field that is an option.

    Args:
        default: if absent, the option is required.
        help: one line of help.
        details: any of metavar, also (other words for a value, by word), secret=True (it may hold a password, so no
            `repr` shows it), and, as in `extra` of its type's Meta, expected (the values, in words) and size=True.
    """
    metadata = {"help": help, **details}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, repr=False, metadata=metadata)  # it may hold a password
    return dataclasses.field(default=default, repr=not details.get("secret"), metadata=metadata)


def parse_count(text: str, more_units: Mapping[str, int] = {}) -> int:
    """A whole number such as "8192", "8k" (8,000) or "8K" (8,192). Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([+-]?\d{1,32})(\.\d{1,9})?\s*([A-Za-z]*)\s*", text)
    if found is None:
        raise ValueError
    whole, fraction, unit = found.groups(default="")
    factor = _UNITS.get(unit) or more_units.get(unit.lower())
    if factor is None or (fraction and unit in ("", *"KMGT")):
        raise ValueError
    return round(float(whole + fraction) * factor) if fraction else int(whole) * factor


def parse_size(text: str) -> int:
    """Bytes of a size such as "512MiB", "2GiB" or "1000000".

    Raises:
        ConfigError: it is not a size.
    """
    try:
        size = parse_count(text, _BYTES)
    except ValueError:
        size = 0
    if size <= 0:
        raise ConfigError(f"a size such as 512MiB was expected, got {text!r}")
    return size


def parse_time(text: str, unit: str) -> float:
    """A time such as "500ms" or "0.5s", in a unit, which is "s" or "ms", and that of a plain number. Raises
    ValueError.
    """
    own = next((known for known in ("ms", "s") if text.rstrip().endswith(known)), unit)
    return float(text.rstrip().removesuffix(own)) * {("s", "ms"): 1e3, ("ms", "s"): 1e-3}.get((own, unit), 1.0)


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3" or "0,2", each once, in its order.

    Raises:
        ConfigError: malformed or empty; the message names the option `name`.
    """
    numbers: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{name}: a list such as 0-1 or 0,2 was expected, got {text!r}")
        numbers |= dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(numbers)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None: none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    if close:
        return close[0]
    within = [other for other in names if len(name) > 2 and name in other]
    return within[0] if len(within) == 1 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint after an unknown name in an error: the nearest known name, or nothing."""
    close = nearest(name, known)
    return f" (did you mean {close!r}?)" if close else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option, as its field describes it."""

    name: str
    kind: Any  # the field's type with its bounds, without `| None`
    base: Any  # without limits
    default: Any  # dataclasses.MISSING: it is required
    optional: bool  # whether None is a value
    details: Mapping[str, Any]  # see `option`, and `extra` of its type's Meta
    choices: tuple[Any, ...]  # the only values; empty: any of its type
    is_map: bool  # KEY=VALUE
    is_list: bool  # as text, with commas between its values
    bounds: Mapping[str, float]  # by msgspec's names

    @classmethod
    def of_field(cls, name: str, hint: Any, default: Any, details: Mapping[str, Any]) -> Self:
        """The option of a field with the resolved type `hint`."""
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        [kind] = {*typing.get_args(hint)} - {types.NoneType} if is_union else [hint]
        base, metas = (kind.__origin__, kind.__metadata__) if hasattr(kind, "__metadata__") else (kind, ())
        origin = typing.get_origin(base)
        bounds: dict[str, float] = {}
        about: dict[str, Any] = {}
        for meta in metas:
            bounds |= {key: bound for key in _BOUNDS if (bound := getattr(meta, key)) not in (None, sys.float_info.max)}
            about |= {"help": meta.description or "", **(meta.extra or {})}
        return cls(
            name=name,
            kind=kind,
            base=base,
            default=default,
            optional=is_union,
            details={"help": "", **about, **details},
            choices=typing.get_args(base) if origin is Literal else (),
            is_map=origin is Mapping,
            is_list=origin is tuple,
            bounds=bounds,
        )

    @property
    def required(self) -> bool:
        """Whether the option must be given."""
        return self.default is dataclasses.MISSING and not self.is_map

    @property
    def help(self) -> str:
        """One line of help."""
        return str(self.details["help"])

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help texts."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        words = {int: "N", float: "X", Path: "DIR", bool: "{true,false}", tuple[int, ...]: "ID"}.get(self.base, "TEXT")
        seconds = self.base is float and self.name.endswith("_s")
        words = "SIZE" if "size" in self.details else "SECONDS" if seconds else words
        return str(self.details.get("metavar", words))

    @property
    def _unit(self) -> str:
        """The unit of a time, as its name says: s or ms; empty for anything else."""
        unit = self.name.rpartition("_")[2]
        return unit if self.base is float and unit in ("s", "ms") else ""

    @property
    def expected(self) -> str:
        """The accepted values, in words that follow "expected"."""
        if self.choices or "expected" in self.details:
            return str(self.details.get("expected", f"one of {', '.join(self.choices)}"))
        if "size" in self.details and "multiple_of" not in self.bounds:
            return "a size such as 512MiB"
        words = {int: "a whole number", float: "a number", bool: "true or false", Names: "a list of non-empty texts"}
        has_keys = isinstance(self.base, msgspec.StructMeta) or typing.get_origin(self.base) in (dict, Mapping)
        found = "a list" if self.is_list else "a mapping" if has_keys else "text"
        found = words.get(self.base, found) + {"s": " of seconds", "ms": " of milliseconds"}.get(self._unit, "")
        if "multiple_of" in self.bounds:
            found = f"a multiple of {self.bounds['multiple_of']}"
        form = "," if self.base is int else ",.10g"
        bounds = [f"{_BOUNDS[key]} {bound:{form}}" for key, bound in self.bounds.items() if _BOUNDS[key]]
        return f"{found} {' and '.join(bounds)}" if bounds else found

    def convert(self, value: Any) -> Any:
        """A value from text, or from a file's or a program's own types.

        Raises:
            ConfigError: it is not a value of this option; the message says what was expected, and what was given.
        """
        if isinstance(value, str):
            value = self.details.get("also", {}).get(value, value)
        if value is None and self.optional:
            return None
        try:
            return self.check(self._read(value))
        except (ValueError, TypeError, OverflowError, msgspec.ValidationError):
            raise ConfigError(f"{self.expected} was expected, got {value!r}") from None

    def check(self, value: Any) -> Any:
        """Check the value, which must have the option's type and be within its limits. Raises ValueError or
        ValidationError.
        """
        converted = msgspec.convert(value, self.kind)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError
        return converted

    def _read(self, value: Any) -> Any:
        """Convert text to the option's type; other values are returned unchanged."""
        if self.is_map:
            return parse_pairs(value)
        if self.is_list:
            if isinstance(value, str) or self.base == Names:  # commas count within a command line's words, too
                words = [value] if isinstance(value, str) else value
                value = [part.strip() for word in words for part in str(word).split(",")]
            return msgspec.convert(value, self.kind, strict=False)
        if not isinstance(value, str):
            return value
        reads: dict[Any, Callable[[str], Any]] = {
            int: parse_size if "size" in self.details else parse_count,
            float: lambda text: parse_time(text, self._unit) if self._unit else float(text),
            bool: lambda text: msgspec.convert(text, bool, strict=False),
            Path: lambda text: Path(text).expanduser(),
        }
        return reads.get(self.base, str)(value)


_BOUNDS = {"ge": "of at least", "gt": "above", "le": "up to", "lt": "below", "max_length": "with a length of up to"}
_BOUNDS["multiple_of"] = ""


def options_of(config: type) -> Mapping[str, Option]:
    """The options of a dataclass or a msgspec struct, by name."""
    if config not in _known_options:
        hints = typing.get_type_hints(config, include_extras=True)
        is_struct = issubclass(config, msgspec.Struct)
        fields: Iterable[Any] = msgspec.structs.fields(config) if is_struct else dataclasses.fields(config)
        _known_options[config] = {
            item.name: Option.of_field(item.name, hints[item.name], item.default, getattr(item, "metadata", {}))
            for item in fields
        }
    return _known_options[config]


_known_options: dict[type, Mapping[str, Option]] = {}


def parse_pairs(value: Any) -> dict[str, str]:
    """KEY=VALUE texts, a JSON object of scalars, or a file's table; for KEY=@FILE the value is the file's content.

    Raises:
        ConfigError: it is neither, or such a file cannot be read.
    """
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, str) and text.lstrip().startswith("{"):
        value = _read_json(text)
    elif isinstance(value, str):
        value = value.split(",")
    if isinstance(value, Mapping):
        if not all(isinstance(v, str | int | float) for v in value.values()):
            raise ConfigError(f"a table of plain values was expected, got {value!r}")
        return {k: read_option(str(v).lower() if isinstance(v, bool) else str(v), k) for k, v in value.items()}
    if not isinstance(value, list):
        raise ConfigError(f"KEY=VALUE was expected, got {value!r}")
    pairs: dict[str, str] = {}
    for text in value:
        key, separator, setting = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not (separator and key.strip()) or "://" in key:  # a URL without its key
            raise ConfigError(f"KEY=VALUE was expected, got {without_secrets(repr(text))}")
        key = key.strip()
        if pairs.setdefault(key, read_option(setting, key)) != read_option(setting, key):
            raise ConfigError(f"{key} is given twice")
    return pairs


def _read_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"a JSON object was expected, got {without_secrets(text)!r}: {error}") from None


def read_values(
    given: Iterable[tuple[str, Any]],
    known: Mapping[str, Option],
    *,
    owner: str = "",
    kind: str = "option",
    show: Callable[[str], str] = str,
    of_vllm: bool = False,
) -> dict[str, Any]:
    """Checked and converted values by the options' own names.

    Args:
        given: names and values, in the order in which they were given.
        known: the options that may be given, by name.
        owner: prefix of error messages, such as "LLM: ".
        kind: the kind of a name, such as "option".
        show: how a name is written in messages.
        of_vllm: whether vLLM's names are accepted, too.

    Raises:
        ConfigError: an unknown name, with the nearest known one; an invalid value, with what was expected; or
            two values under two names of one option.
    """
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given:
        own = name if name in known else None
        if own is None and of_vllm:
            try:
                own = own_name(name, value, known, show)
            except ConfigError as error:
                raise ConfigError(f"{owner}{error}") from None
        if own is None:
            close = nearest(name, known)
            meant = f" (did you mean {show(close)!r}?)" if close else ""
            names = "" if of_vllm else f"; known: {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"{owner}unknown {kind} {show(name)!r}{meant}{names}")
        if not own:
            continue
        try:
            converted = known[own].convert(value)
        except ConfigError as error:
            raise ConfigError(f"{owner}{'' if of_vllm else 'option '}{show(name)}: {error}") from None
        if values.get(own, converted) != converted and written[own] != show(name):  # otherwise the last one counts
            both = f"{written[own]} {values[own]} and {show(name)} {converted}"
            raise ConfigError(without_secrets(f"{owner}{both} are two values of one option"))
        values[own], written[own] = converted, show(name)
    return values


class OptionTexts(dict[str, str]):
    """Options as they were typed, with their owner, for errors.

    A plain mapping works wherever one is expected; its errors then name no owner.
    """

    def __init__(self, texts: Mapping[str, str], owner: str, *, prefix: str = "") -> None:
        """`owner`: such as "connector nixl"; `prefix`: the text before each name where it was typed."""
        super().__init__(texts)
        self.owner = owner
        self.prefix = prefix


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of classes with options as fields. Every subclass is a frozen dataclass with keyword arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Refuse invalid values from a program, which no user could give. Raises ConfigError that names the field and
        its value.
        """
        for name, item in options_of(type(self)).items():
            value = getattr(self, name)
            if value is item.default or value is None:
                continue
            try:
                item.check(value)
            except (ValueError, msgspec.ValidationError):
                raise ConfigError(f"{name}: {item.expected} was expected, got {value!r}") from None

    @classmethod
    def names(cls) -> frozenset[str]:
        """The options' names."""
        return frozenset(item.name for item in dataclasses.fields(cls))

    @classmethod
    def parse(cls, texts: Mapping[str, Any], *, only: Collection[str] | None = None) -> Self:
        """The options given as texts.

        Args:
            texts: by name, possibly OptionTexts.
            only: names that may be given; None: all.

        Raises:
            ConfigError: an unknown name, an invalid value, or a missing option; the message names the option as it was
                typed, and the nearest known one.
        """
        owner, prefix = (f"{texts.owner}: ", texts.prefix) if isinstance(texts, OptionTexts) else ("", "")
        known = {name: item for name, item in options_of(cls).items() if only is None or name in only}
        values = read_values(texts.items(), known, owner=owner, show=lambda name: prefix + name)
        for name, item in known.items():
            if item.required and not values.get(name):
                raise ConfigError(f"{owner}requires the option {prefix}{name}={item.metavar}: {item.help}")
        return cls(**values)


def from_fields(config: type[Config], values: Mapping[str, Any], *, owner: str) -> Config:
    """A configuration from a program's fields, with values of their own types or text; vLLM's names are accepted, too,
    and None as the default.

    Raises:
        ConfigError: an unknown field, with the nearest known one, or an invalid value.
    """
    known = options_of(config)
    given = [(name, value) for name, value in values.items() if value is not None or name not in known]
    return config(**read_values(given, known, owner=f"{owner}: ", of_vllm=True))
