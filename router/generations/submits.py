"""Messages of a flow to engines, as values."""

from typing import Literal

import msgspec

from pdkv.router.request import GenerateRequest
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import MAX_TIMEOUT_S, Submit


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
    load_timeout_s: float = 0.0,
) -> Submit:
    """The Submit of a request that starts, or continues after its output; `timeout_s`: what is left, or infinite."""
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
        load_timeout_s=load_timeout_s,
        kv_terms=request.kv_terms,
        tenant=request.tenant,
        prediction_token_ids=request.prediction_token_ids if until == "end" else [],
    )
