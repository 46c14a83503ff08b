"""A failure that an engine reports, as its type."""

from pdkv.errors import (
    EngineDied,
    InvalidRequest,
    NonFiniteLogits,
    PdkvError,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
)
from pdkv.wire.messages import Failed

_KINDS = (RequestTimeout, RequestAborted, NonFiniteLogits, EngineDied)
_BY_CODE: dict[str, type[RequestFailed]] = {kind.code: kind for kind in _KINDS}


def error_of(message: Failed) -> PdkvError:
    """InvalidRequest, or the RequestFailed that its code names."""
    if message.code == InvalidRequest.code:
        return InvalidRequest(message.message, param=message.param or None)
    kind = _BY_CODE.get(message.code, RequestFailed)
    error = kind(message.message, request_id=message.request_id, retryable=message.retryable)
    error.code = message.code
    return error
