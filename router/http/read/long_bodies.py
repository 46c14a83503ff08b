"""Decodes bodies with many token ids piece by piece: a million in one go would hold the interpreter for 40 ms."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.router.http.read.body_complexity import MAX_VALUES_AT_ONCE, PIECE_BYTES, count, too_many_values

T = TypeVar("T")

_SPACES_AND_COMMAS = b" \t\r\n,"


class LongBodies(Generic[T]):
    """Decodes one kind of body, one field of which may hold very many token ids."""

    def __init__(self, strict: type[T], lenient: type[T], field: str) -> None:
        """`field`: a list of ids, or of lists of ids if its type allows it."""
        self._strict = strict
        self._field = field
        self._is_flat = get_type_hints(strict)[field] == list[int]
        self._found = msgspec.json.Decoder(msgspec.defstruct("Found", [(field, msgspec.Raw, msgspec.Raw(b""))]))
        self._rest = [msgspec.json.Decoder(_with_raw(kind, field)) for kind in (strict, lenient)]
        self._whole = [msgspec.json.Decoder(kind) for kind in (strict, lenient)]
        self._ids = msgspec.json.Decoder(msgspec.defstruct("Ids", [(field, list[int])]))

    def decode(self, body: bytes | bytearray, num_values: int, *, ignore_unknown: bool) -> T:
        """Decode a body with this many values (`check_complexity`).

        Raises:
            InvalidRequest: too many of them are in other fields, or the ids are not of one kind. msgspec's own errors.
        """
        raw = bytes(getattr(self._found.decode(body), self._field)).strip()
        is_list = raw.startswith(b"[") and b'"' not in raw
        if num_values - (count(raw, b",") if is_list else 0) > MAX_VALUES_AT_ONCE:
            raise too_many_values(MAX_VALUES_AT_ONCE, f" beside the token ids of {self._field}")
        if not is_list:
            return self._whole[ignore_unknown].decode(body)
        rest = self._rest[ignore_unknown].decode(body)
        fields = {name: getattr(rest, name) for name in rest.__struct_fields__}
        fields[self._field] = self._read(raw)
        return self._strict(**fields)

    def _read(self, raw: bytes) -> list[int] | list[list[int]]:
        """The ids in a list, or in nested lists: of one prompt, or of several."""
        last = len(raw) - 1
        if self._is_flat or raw.find(b"[", 1) < 0:
            return self._read_ids(raw, 1, last)
        lists = []
        end = 1
        while (begin := raw.find(b"[", end)) >= 0:
            if raw[end:begin].strip(_SPACES_AND_COMMAS):
                break
            end = raw.find(b"]", begin) + 1
            lists.append(self._read_ids(raw, begin + 1, end - 1))
        if raw[end:last].strip(_SPACES_AND_COMMAS):
            text = f"{self._field} must be of one kind: texts, token ids, or lists of token ids"
            raise InvalidRequest(text, param=self._field)
        return lists

    def _read_ids(self, raw: bytes, begin: int, end: int) -> list[int]:
        token_ids: list[int] = []
        for piece in _pieces(raw, begin, end):
            token_ids += getattr(self._ids.decode(b'{"%b":[%b]}' % (self._field.encode(), piece)), self._field)
        return token_ids


def _with_raw(kind: type[Any], field: str) -> type[Any]:
    """The same body with one field undecoded."""
    return msgspec.defstruct(kind.__name__, [(field, msgspec.Raw)], bases=(kind,), frozen=True, kw_only=True)


def _pieces(raw: bytes, begin: int, end: int) -> Iterator[bytes]:
    """The numbers and commas between two positions, cut at commas."""
    while (cut := raw.find(b",", begin + PIECE_BYTES, end)) >= 0:
        yield raw[begin:cut]
        begin = cut + 1
    yield raw[begin:end]
