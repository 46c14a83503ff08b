"""JSON with non-ASCII characters escaped, so that no client mistakes U+2028 and similar characters in an event for a
line end.
"""

import re
from json.encoder import encode_basestring_ascii

import msgspec

_OTHERS = re.compile("[^\x00-\x7f]+")


def ascii_json(value: object) -> bytes:
    """Encode a value made of JSON's types, structs, and `msgspec.Raw` that is already such JSON."""
    data = msgspec.json.encode(value)
    if data.isascii():
        return data
    return _OTHERS.sub(lambda found: encode_basestring_ascii(found[0])[1:-1], data.decode()).encode("ascii")
