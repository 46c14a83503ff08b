"""JSON that a client sends as a text."""

from typing import Any

import msgspec

from pdkv.errors import InvalidRequest


def read_json(text: str, what: str) -> Any:
    """The JSON value of a text.

    Raises:
        InvalidRequest: it is not JSON; NaN, numbers beyond a double's range and halves of surrogate pairs are refused.
    """
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from None
