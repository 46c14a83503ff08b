"""JSON with everything but ASCII escaped: no client takes U+2028 and the like within an event for a line's end."""

import re
from json.encoder import encode_basestring_ascii

import msgspec

_OTHERS = re.compile("[^\x00-\x7f]+")


def ascii_json(value: object) -> bytes:
    """A value of JSON's types, of structs, and of `msgspec.Raw` that is such JSON already."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return _OTHERS.sub(lambda found: encode_basestring_ascii(found[0])[1:-1], data.decode()).encode("ascii")
