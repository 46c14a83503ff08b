"""Bodies with many token ids, decoded a piece at a time: a million in one go would hold the interpreter for 40 ms."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.router.http.body_size import MAX_VALUES_AT_ONCE, PIECE_BYTES, count, too_many_values

T = TypeVar("T")

_SPACES_AND_COMMAS = b" \t\r\n,"


class LongBodies(Generic[T]):
    """Decodes one kind of body, of which one field may hold a great many token ids."""

    def __init__(self, strict: type[T], lenient: type[T], field: str) -> None:
        """`field`: a list of ids, or where its type allows it of lists of ids."""
        self._strict = strict
        self._field = field
        self._is_flat = get_type_hints(strict)[field] == list[int]
        self._found = msgspec.json.Decoder(msgspec.defstruct("Found", [(field, msgspec.Raw, msgspec.Raw(b""))]))
        self._rest = [msgspec.json.Decoder(_with_raw(kind, field)) for kind in (strict, lenient)]
        self._whole = [msgspec.json.Decoder(kind) for kind in (strict, lenient)]
        self._ids = msgspec.json.Decoder(msgspec.defstruct("Ids", [(field, list[int])]))

    def decode(self, body: bytes | bytearray, num_values: int, *, ignore_unknown: bool) -> T:
        """A body that has so many values (`check_size`).

        Raises:
            InvalidRequest: too many of them are elsewhere, or the ids are not of one kind. msgspec's own errors.
        """
        raw = bytes(getattr(self._found.decode(body), self._field)).strip()
        is_list = raw.startswith(b"[") and b'"' not in raw
        if num_values - (count(raw, b",") if is_list else 0) > MAX_VALUES_AT_ONCE:
            raise too_many_values(MAX_VALUES_AT_ONCE, f" beside the token ids of {self._field}")
        if not is_list:
            return self._whole[ignore_unknown].decode(body)
        rest = self._rest[ignore_unknown].decode(body)
        fields = {name: getattr(rest, name) for name in rest.__struct_fields__}
        fields[self._field] = self._read(raw[1:-1])
        return self._strict(**fields)

    def _read(self, inner: bytes) -> list[int] | list[list[int]]:
        """The ids between the outermost brackets: of one prompt, or of several."""
        if self._is_flat or b"[" not in inner:
            return self._read_ids(inner)
        lists = []
        begin = end = 0
        while (begin := inner.find(b"[", end)) >= 0:
            if inner[end:begin].strip(_SPACES_AND_COMMAS):
                break
            end = inner.find(b"]", begin) + 1
            lists.append(self._read_ids(inner[begin + 1 : end - 1]))
        if inner[end:].strip(_SPACES_AND_COMMAS):
            text = f"{self._field} must be of one kind: texts, token ids, or lists of token ids"
            raise InvalidRequest(text, param=self._field)
        return lists

    def _read_ids(self, inner: bytes) -> list[int]:
        token_ids: list[int] = []
        for piece in _pieces(inner):
            token_ids += getattr(self._ids.decode(b'{"%b":[%b]}' % (self._field.encode(), piece)), self._field)
        return token_ids


def _with_raw(kind: type[Any], field: str) -> type[Any]:
    """The same with one field as it was sent."""
    return msgspec.defstruct(kind.__name__, [(field, msgspec.Raw)], bases=(kind,), frozen=True, kw_only=True)


def _pieces(inner: bytes) -> Iterator[bytes]:
    """Numbers between commas, cut at commas."""
    begin = 0
    while (end := inner.find(b",", begin + PIECE_BYTES)) >= 0:
        yield inner[begin:end]
        begin = end + 1
    yield inner[begin:]
