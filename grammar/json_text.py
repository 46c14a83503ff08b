"""JSON that a client sends as a text of its own."""

from typing import Any

import msgspec

from pdkv.errors import InvalidRequest


def read_json(text: str, what: str) -> Any:
    """The value that a text stands for.

    Raises:
        InvalidRequest: it is no JSON. NaN, numbers beyond a double's range and halves of surrogate pairs are none.
    """
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from None
