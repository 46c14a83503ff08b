"""Failures reported by an engine, as typed errors."""

from pdkv import errors
from pdkv.errors import (
    EngineDied,
    GrammarGivenUp,
    InvalidRequest,
    LogitsProcessorFailed,
    NonFiniteLogits,
    PdkvError,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    ServerBusy,
)
from pdkv.wire.messages import Failed

_KINDS = (RequestTimeout, RequestAborted, NonFiniteLogits, LogitsProcessorFailed, EngineDied)
_MISTAKES: dict[str, type[InvalidRequest]] = {kind.code: kind for kind in (InvalidRequest, GrammarGivenUp)}
_BY_CODE: dict[str, type[RequestFailed]] = {kind.code: kind for kind in _KINDS}

_CODES = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PdkvError)}


def error_of(message: Failed) -> PdkvError:
    """InvalidRequest or GrammarGivenUp, ServerBusy, or the RequestFailed that the code names."""
    if message.code in _MISTAKES:
        return _MISTAKES[message.code](message.message, param=message.param or None)
    if message.code == ServerBusy.code:
        return ServerBusy(message.message)
    kind = _BY_CODE.get(message.code, RequestFailed)
    error = kind(message.message, request_id=message.request_id, retryable=message.retryable)
    error.code = known_code(message.code)
    return error


def known_code(code: str) -> str:
    """A code that an engine sent, if there is an error of it; others are one, since an engine may send anything."""
    return code if code in _CODES else RequestFailed.code
