"""Which model, and with it which pool, runs a request (docs/membership.md): by its name, or by a split."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.router.http.read.bodies import ChatBody, CompletionBody, EmbeddingBody, RerankBody
from pdkv.router.http.read.job import Job
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.request import Split

Body = ChatBody | CompletionBody | EmbeddingBody | RerankBody

_IDS = ("allowed_token_ids", "logit_bias", "stop_token_ids", "return_token_ids", "return_tokens_as_token_ids")


class User(Protocol):
    """A tenant, as far as the process knows it."""

    @property
    def models(self) -> tuple[str, ...]:
        """Served names of the models that it may use; empty: all."""


def models_of(tenant: User | None) -> tuple[str, ...]:
    """Served names of the models that a tenant may use; empty: all."""
    return tenant.models if tenant is not None else ()


def prepare_for(body: Body, model: ServedModel, tenant: User | None, prepare: Callable[[ServedModel], Job]) -> Job:
    """The job of a request by the model that its name chooses among `model` and those of pools, or by that of a split;
    if this one cannot take it, by the named one. Embeddings, rankings and token ids are not split: those of two models
    do not compare. Raises what `prepare` does, and InvalidRequest for an unknown model.
    """
    allowed = models_of(tenant)
    named, split = model.named(body.model, allowed), None
    if named.shares and isinstance(body, ChatBody | CompletionBody) and not _has_ids(body):
        split = named.split(_sticky_key(body), allowed)
        if split.pool:
            try:
                return _run_by(split.pool, prepare, named.run_by(split.pool), split)
            except InvalidRequest:
                split = split._replace(without=[*split.without, split.pool])
    return _run_by(named.pool, prepare, named, split)


def _run_by(pool: str, prepare: Callable[[ServedModel], Job], model: ServedModel, split: Split | None) -> Job:
    return msgspec.structs.replace(prepare(model), served=model, pool=pool, split=split)


def _has_ids(body: ChatBody | CompletionBody) -> bool:
    """Whether a request or its answer names tokens by their ids, which are of one vocabulary."""
    prompt = body.prompt if isinstance(body, CompletionBody) else ""
    is_text = isinstance(prompt, str) or all(isinstance(part, str) for part in prompt)
    return not is_text or body.prompt_logprobs is not None or any(getattr(body, name) for name in _IDS)


def _sticky_key(body: ChatBody | CompletionBody) -> bytes:
    """What the requests of one conversation, or one client's, have in common."""
    if label := body.session_id or body.prompt_cache_key or body.user:
        return label.encode()
    if isinstance(body, CompletionBody):
        return msgspec.json.encode(body.prompt)
    users = (index for index, message in enumerate(body.messages) if message.role == "user")
    return msgspec.json.encode(body.messages[: next(users, len(body.messages)) + 1])
