"""Decodes bodies to typed structs; errors name the field and its allowed values."""

import functools
import operator
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest
from pdkv.router.http.read.bodies import (
    TRANSFER_FIELDS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from pdkv.router.http.read.body_complexity import MAX_VALUES_AT_ONCE, check_complexity, too_many_values
from pdkv.router.http.read.long_bodies import LongBodies

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")
_WRONG_VALUE = re.compile(r"^Invalid enum value (?P<value>.*)$", re.DOTALL)
_INDEX = re.compile(r"\[[^]]*]")

_MAX_MESSAGE = 16 * 1024
"""Characters at the two ends of msgspec's message that are read: they hold what is wrong, and where."""

T = TypeVar("T")


class BodyDecoder(Generic[T]):
    """Decodes one kind of body."""

    def __init__(self, strict: type[T], *, tokens: str = "") -> None:
        """`tokens`: the field that may hold very many token ids."""
        lax: type[T] = lenient(strict)
        self._strict, self._lenient = msgspec.json.Decoder(strict), msgspec.json.Decoder(lax)
        self._long = LongBodies(strict, lax, tokens) if tokens else None
        self._type = inspect.type_info(strict)
        self._only = list(_only_values(self._type))

    def decode(self, body: bytes | bytearray, *, ignore_unknown: bool = False) -> T:
        """Decode a body.

        Raises:
            InvalidRequest: malformed JSON, an unknown, missing or unsupported field, or a wrong type; names the field.
        """
        num_values = check_complexity(body)
        decoder = self._lenient if ignore_unknown else self._strict
        try:
            if num_values <= MAX_VALUES_AT_ONCE:
                value = decoder.decode(body)
            elif self._long is not None:
                value = self._long.decode(body, num_values, ignore_unknown=ignore_unknown)
            else:
                raise too_many_values(MAX_VALUES_AT_ONCE)
        except msgspec.ValidationError as error:
            raise _invalid_field(str(error), self._type) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("the body is not valid JSON: it is nested too deeply") from None
        for path, only, why in self._only:
            given: Any = value
            for name in path:
                given = None if given is None else getattr(given, name)
            if given is not None and given != only:
                name = ".".join(path)
                reason = why and f", since {why}"
                raise InvalidRequest(
                    f"{name}: {_listed([given])} is not supported{reason}; allowed: {_listed([only])}", param=name
                )
        return value


def lenient(kind: Any) -> Any:
    """The same type, except that its structs, including nested ones, accept unknown fields and drop them."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = [(field, lenient(field.type)) for field in msgspec.structs.fields(kind)]
        own = [(field, type_) for field, type_ in fields if type_ is not field.type]
        names: dict[str, Any] = {of.name: of.default for of, _ in own if of.default is not msgspec.NODEFAULT}
        names["__annotations__"] = {field.name: type_ for field, type_ in own}
        settings = {"frozen": True, "kw_only": True, "forbid_unknown_fields": False}
        return types.new_class(kind.__name__, (kind,), settings, lambda namespace: namespace.update(names))
    given = get_args(kind)
    parts = tuple(map(lenient, given))
    if all(part is known for part, known in zip(parts, given, strict=True)):
        return kind
    origin = get_origin(kind)
    return functools.reduce(operator.or_, parts) if origin is types.UnionType else origin[parts]


def has_field(body: bytes | bytearray, name: str) -> bool:
    """Whether a body is an object with that field; other errors in it are not looked for."""
    check_complexity(body)
    try:
        return name in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _only_values(type_: inspect.Type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object, str]]:
    """The fields that accept only one value, and why, including those of nested objects."""
    for option in _options(type_):
        if isinstance(option, inspect.Metadata) and option.extra is not None and "only" in option.extra:
            yield path, option.extra["only"], option.extra["why"]
        elif isinstance(option, inspect.StructType):
            for field in option.fields:
                yield from _only_values(field.type, (*path, field.encode_name))


def _options(type_: inspect.Type) -> Sequence[inspect.Type]:
    return type_.types if isinstance(type_, inspect.UnionType) else [type_]


def _invalid_field(text: str, type_: inspect.Type) -> InvalidRequest:
    """The error for msgspec's message, naming the field."""
    if len(text) > _MAX_MESSAGE:  # it repeats what was sent, and each step below would make a copy
        text = text[: _MAX_MESSAGE // 2] + text[-_MAX_MESSAGE // 2 :]
    at = _AT.search(text)
    path = clip(at["path"].replace("[...]", "[]")) if at else ""
    what = text[: at.start()] if at else text
    if (unknown := _UNKNOWN.match(what)) is not None:
        return _unknown_field(path, clip(unknown["field"]))
    if (missing := _MISSING.match(what)) is not None:
        param = ".".join(part for part in (path, missing["field"]) if part)
        return InvalidRequest(f"{param} is required", param=param)
    if not path:
        return InvalidRequest(f"the body is not a request: {what}")
    if path in TRANSFER_FIELDS:
        return _unknown_field("", path)
    if what.startswith("Expected `null`"):
        why = _why_absent(type_, path)
        reason = why and f", since {why}"
        return InvalidRequest(f"{path} is not supported{reason}: leave it out or send null", param=path)
    if (wrong := _WRONG_VALUE.match(what)) is not None:
        what = f"{clip(wrong['value'])} is not supported"
    allowed = _allowed(type_, [part for part in _INDEX.sub(".[]", path).split(".") if part])
    choices = f"; allowed: {_listed(allowed)}" if allowed else ""
    return InvalidRequest(f"{path}: {what}{choices}", param=path)


def _why_absent(type_: inspect.Type, path: str) -> str:
    """Why a field of the body may only be null; empty if there is no more to say."""
    assert isinstance(type_, inspect.StructType)
    for field in type_.fields:
        if field.encode_name == path and isinstance(field.type, inspect.Metadata) and field.type.extra is not None:
            return str(field.type.extra["why"])
    return ""


def _unknown_field(path: str, field: str) -> InvalidRequest:
    param = ".".join(part for part in (path, field) if part)
    if field in TRANSFER_FIELDS:
        return InvalidRequest(
            f"{param} is not accepted: the server alone decides where a request runs and where its KV goes", param=param
        )
    return InvalidRequest(f"{param} is not a known field (--unknown-fields ignore would drop it)", param=param)


def _allowed(type_: inspect.Type, path: Sequence[str]) -> list[object]:
    """The values that the field at `path` is limited to; empty if other values may be right, too."""
    values: list[object] = []
    for option in _options(type_):
        if isinstance(option, inspect.LiteralType) and not path:
            values += option.values
        elif isinstance(option, inspect.ListType) and path[:1] == ["[]"]:
            values += _allowed(option.item_type, path[1:])
        elif isinstance(option, inspect.StructType):
            for field in option.fields:
                if path[:1] == [field.encode_name]:
                    values += _allowed(field.type, path[1:])
    return values


def _listed(values: Sequence[object]) -> str:
    return ", ".join("true" if value is True else "false" if value is False else repr(value) for value in values)


COMPLETION = BodyDecoder(CompletionBody, tokens="prompt")
CHAT = BodyDecoder(ChatBody)
EMBEDDING = BodyDecoder(EmbeddingBody, tokens="input")
RERANK = BodyDecoder(RerankBody)
TOKENIZE_TEXT = BodyDecoder(TokenizeTextBody)
TOKENIZE_CHAT = BodyDecoder(TokenizeChatBody)
DETOKENIZE = BodyDecoder(DetokenizeBody, tokens="tokens")
