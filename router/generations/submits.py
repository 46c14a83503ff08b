"""What a flow says to engines and hears of their failures, as values."""

from typing import Literal

import msgspec

from pdkv.errors import EngineDied, InvalidRequest, PdkvError, RequestAborted, RequestFailed, RequestTimeout
from pdkv.router.generations.request import GenerateRequest
from pdkv.wire.messages import MAX_TIMEOUT_S, Failed, KVHandoff, Submit

_FAILURES: dict[str, type[RequestFailed]] = {e.code: e for e in (RequestTimeout, RequestAborted, EngineDied)}


def make_submit(
    request: GenerateRequest,
    output_token_ids: list[int],
    *,
    request_id: str,
    transfer_id: str,
    attempt: int,
    timeout_s: float,
    kv: Literal["local", "handoff", "await_peer"],
    until: Literal["first_token", "end"],
    wants_prompt_logprobs: bool,
    conditional: bool = False,
    handoff: KVHandoff | None = None,
    ticket: bytes | None = None,
    trial_tokens: int = 0,
) -> Submit:
    """A request that begins, or goes on behind its output; `timeout_s`: what is left for it, or infinite."""
    params = request.params
    if not wants_prompt_logprobs and params.prompt_logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return Submit(
        request_id=request_id,
        transfer_id=transfer_id,
        attempt=attempt,
        choice=request.choice,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output_token_ids,
        params=params,
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_s=min(max(timeout_s, 0.001), MAX_TIMEOUT_S),
        until=until,
        kv=kv,
        conditional=conditional,
        handoff=handoff,
        ticket=ticket,
        trial_tokens=trial_tokens,
        label=request.label,
        traceparent=request.traceparent,
    )


def error_of(message: Failed) -> PdkvError:
    """The failure that an engine reports, as its type."""
    if message.code == InvalidRequest.code:
        return InvalidRequest(message.message, param=message.param or None)
    kind = _FAILURES.get(message.code, RequestFailed)
    error = kind(message.message, request_id=message.request_id, retryable=message.retryable)
    error.code = message.code
    return error
