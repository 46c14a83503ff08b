"""Errors that are kept and raised again."""

import pytest

from pdkv import errors
from pdkv.errors import InvalidRequest, PdkvError, RequestFailed, RequestTimeout

ERRORS = [
    InvalidRequest("too long", param="prompt", status=413),
    RequestFailed("no engine is left", request_id="r-1", retryable=True),
    RequestTimeout("5 s passed", request_id="r-2"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_anew_is_equal_and_has_no_traceback(error: PdkvError) -> None:
    with pytest.raises(PdkvError) as raised:
        raise error
    new = raised.value.anew()
    assert new is not error
    assert new.__traceback__ is None
    assert (type(new), str(new), vars(new)) == (type(error), str(error), vars(error))


def test_every_error_can_be_made_anew() -> None:
    """Whatever its own constructor asks for."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, PdkvError):
            made = kind.__new__(kind, "a text")
            made.field = 1  # type: ignore[attr-defined]
            assert (str(made.anew()), made.anew().field) == ("a text", 1)  # type: ignore[attr-defined]
