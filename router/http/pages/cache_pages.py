"""POST /admin/cache/…: looks up, clears, pins, unpins, prefetches and moves a prompt's KV in engines and tiers."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
from msgspec import Meta

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.base.clock import MONOTONIC
from pdkv.base.limits import check_cache_salt, clip
from pdkv.base.options import did_you_mean
from pdkv.errors import EngineUnavailable, InvalidRequest, RequestFailed, RequestTimeout, StoreFull, StoreUnsupported
from pdkv.errors import TransferTimeout as LateTier
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.tenants import Tenant
from pdkv.router.engines.cache_view import describe_caches
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.state import EngineState
from pdkv.router.http.read.bodies import Message, TokenizeChatBody
from pdkv.router.http.read.chat import read_conversation
from pdkv.router.http.read.decoding import BodyDecoder
from pdkv.router.http.read.prompts import check_length, encode
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.request import GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVTerms
from pdkv.wire.tiers import CacheAction, CacheAnswer, CacheOrder, TierAnswer, names_tier

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

POOL = "pool"
"""The tier that consists of an engine's own blocks (engine/outside/cache_orders.py)."""

HOST = "host"
"""The kind of a tier that each engine writes for itself and all read (kv_store/host_store.py)."""

MAX_BODY_BYTES = 8 << 20

MOVE_GRACE_S = 30.0
"""Seconds after its deadline at which a move has ended on every engine: a store's calls have their own deadlines."""

ACTIONS: tuple[CacheAction, ...] = get_args(CacheAction)

_ON_ALL: tuple[CacheAction, ...] = ("clear", "unpin")
"""Actions that need no prompt."""

_CONTENTS = ("prompt", "messages", "tokens", "keys")


class CacheBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV that a request is about, and its place."""

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tokens: list[int] | None = None
    keys: list[str] | None = None  # hexadecimal keys of a prompt's full hash blocks, from the first on
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    api_key: str | None = None  # the name of the client's key, if keys have their own salts
    engine: str | None = None  # only this engine; for prefetch and a move into host memory: into its own
    tier: Annotated[str, Meta(max_length=256)] = ""
    source: Annotated[str, Meta(max_length=256)] = msgspec.field(
        default="", name="from"
    )  # move: the tier that values leave; `tier` is the destination
    copy: bool = False  # move: keep the values in the source, too
    ttl_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # pin
    timeout_s: Annotated[float, Meta(gt=0, le=300)] = 10.0
    return_keys: bool = False


_BODY = BodyDecoder(CacheBody, tokens="tokens")


class CachePages:
    """Operators' requests about caches. Lives in the dispatcher's event loop.

    Args:
        model: its tokenizer is used for prompts, as for requests.
        keys: the API keys, if clients need one.
    """

    def __init__(self, dispatcher: "Dispatcher", model: Callable[[], ServedModel], keys: KeyRing | None = None) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._keys = keys
        self._next_move_at = 0.0

    def describe(self) -> dict[str, Any]:
        """The contents and hits of pools and tiers, JSON-ready (engines/cache_view.py)."""
        names: dict[int, list[str]] = {}
        for tenant in self._keys.tenants if self._keys is not None else ():
            if tenant.grant.kv_terms is not None:
                names.setdefault(tenant.grant.kv_terms.owner, []).append(tenant.name)
        return describe_caches(self._dispatcher.engines(), names)

    async def answer(self, action: str, data: bytes | bytearray) -> dict[str, Any]:
        """Carry out an action; returns, JSON-ready, {"prompt_tokens", "engines": [{"name", "role", "tiers": […]}]}.

        Raises:
            InvalidRequest: the action is not possible; 404 for an unknown engine or tier, 409 if there is no room to
                pin or to move to, or if a move is in progress.
            EngineUnavailable: the engine, or every engine, cannot be reached now.
            RequestTimeout: no engine answered in time.
            RequestFailed: every engine failed.
        """
        if action not in ACTIONS:
            raise InvalidRequest(
                f"there is no /admin/cache/{clip(action)}: expected one of {', '.join(ACTIONS)}", status=404
            )
        body = await asyncio.to_thread(_BODY.decode, data)
        _check(action, body)
        engines = _choose(self._dispatcher.fleet, body.engine)
        tokens, keys, num_tokens = await asyncio.to_thread(self._read, body, engines[0])
        if body.engine is None and (action == "prefetch" or (action == "move" and names_tier(HOST, body.tier))):
            engines = _one_of(engines, keys or ())
        order = CacheOrder(
            order_id="",
            action=action,
            keys=keys,
            tier=body.tier,
            ttl_s=body.ttl_s,
            timeout_s=body.timeout_s,
            kv_terms=self._terms_of(body) if action in ("prefetch", "move") else None,
            source=body.source,
            copy=body.copy,
        )
        if action == "prefetch" and body.tier == POOL:
            await self._load(engines[0].name, order, tokens, self._salt_of(body))
            order = msgspec.structs.replace(order, action="lookup")
        answers = await self._ask([engine.name for engine in engines], order)
        _check_answers(order, answers)
        told: dict[str, Any] = {"prompt_tokens": num_tokens} if keys is not None else {}
        if body.return_keys:
            told["keys"] = [key.hex() for key in keys or ()]
        return told | {"engines": [_describe(engine, answers[engine.name]) for engine in engines]}

    async def _ask(self, names: Sequence[str], order: CacheOrder) -> Mapping[str, CacheAnswer]:
        """The answer of each engine. Moves run one at a time: of two in opposite directions, on two engines, each could
        remove the value that the other relies on. An engine that is late, or was given up, may still be moving.
        """
        if order.action != "move":
            return await self._dispatcher.listener.cache_orders.ask(names, order)
        if MONOTONIC.now() < self._next_move_at:
            raise InvalidRequest("another move is in progress: only one at a time is possible", status=409)
        self._next_move_at = MONOTONIC.now() + order.timeout_s + MOVE_GRACE_S
        answers = await self._dispatcher.listener.cache_orders.ask(names, order)
        if not any(tier.code == LateTier.code for answer in answers.values() for tier in answer.tiers):
            self._next_move_at = 0.0
        return answers

    async def _load(self, name: str, order: CacheOrder, tokens: list[int] | None, salt: str) -> None:
        """Load a prompt from tiers into an engine's own blocks by running it and generating one token."""
        if tokens is None:
            raise InvalidRequest(
                "keys: to load into an engine's own blocks, give the prompt or its tokens", param="keys"
            )
        ask = self._dispatcher.listener.cache_orders.ask
        answers = await ask([name], msgspec.structs.replace(order, action="lookup", tier=""))
        there = {tier.tier: tier.num_tokens for tier in answers[name].tiers}
        num_found = max(there.values(), default=0)
        if num_found <= there.get(POOL, 0) or not self._dispatcher.fleet.is_ready(name):
            return
        behind = tokens[num_found : num_found + 1] or tokens[:1]  # any value: only the token after a hit is computed
        request = GenerateRequest(
            prompt_token_ids=[*tokens[:num_found], *behind][: self._model().max_model_len - 1],
            params=SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True),
            cache_salt=salt,
            kv_terms=order.kv_terms,
            timeout_s=order.timeout_s,
            label="cache-prefetch",
        )
        generation = self._dispatcher.start_on(name, request)
        try:
            async for _ in generation:
                pass
        finally:
            generation.abort()

    def _read(self, body: CacheBody, engine: EngineState) -> tuple[list[int] | None, list[bytes] | None, int]:
        """(tokens of the prompt, if known; its block keys, or None for all; number of tokens)."""
        assert engine.card is not None
        block = engine.card.hash_block_size
        if body.keys is not None:
            return None, _parse_keys(body.keys), len(body.keys) * block
        tokens = _tokens_of(body, self._model())
        if tokens is None:
            return None, None, 0
        if len(tokens) < block:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens; KV is found in blocks of {block}, and it has no whole one",
                param=_given(body)[0],
            )
        layout, salt = engine.card.layout.identity, self._salt_of(body)
        keys: list[bytes] = []
        extend_keys(keys, root_key(model=engine.card.model, layout=layout, cache_salt=salt), tokens)
        return tokens, keys, len(tokens)

    def _salt_of(self, body: CacheBody) -> str:
        salt = body.cache_salt or ""
        check_cache_salt(salt)
        tenant = self._tenant_of(body)
        return salt if tenant is None else tenant.salted(salt)

    def _terms_of(self, body: CacheBody) -> KVTerms | None:
        tenant = self._tenant_of(body)
        return None if tenant is None else tenant.grant.kv_terms

    def _tenant_of(self, body: CacheBody) -> Tenant | None:
        if body.api_key is None:
            return None
        tenants = {tenant.name: tenant for tenant in self._keys.tenants} if self._keys is not None else {}
        if body.api_key not in tenants:
            known = did_you_mean(body.api_key, tenants)
            raise InvalidRequest(f"there is no API key named {clip(body.api_key)!r}{known}", param="api_key")
        return tenants[body.api_key]


def _given(body: CacheBody) -> list[str]:
    return [name for name in _CONTENTS if getattr(body, name) is not None]


def _check(action: CacheAction, body: CacheBody) -> None:
    given = _given(body)
    if len(given) > 1 or (not given and action not in _ON_ALL):
        raise InvalidRequest(
            f"{action}: one of {', '.join(_CONTENTS)} was expected, got {' and '.join(given) or 'none'}",
            param=given[1] if given else "prompt",
        )
    if body.messages is None:
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name} is only allowed with messages, and there are none", param=name)
    own = {"ttl_s": (body.ttl_s, "pin"), "from": (body.source, "move"), "copy": (body.copy, "move")}
    for name, (value, owner) in own.items():
        if value and action != owner:
            raise InvalidRequest(f"{name} is only allowed for {owner}, got it for {action}", param=name)
    if action == "move":
        _check_move(body)


def _check_move(body: CacheBody) -> None:
    ways = {
        "from": (body.source, "what engines' own blocks hold is in the tiers below them already"),
        "tier": (body.tier, f"use prefetch with tier {POOL!r} to bring values there"),
    }
    for name, (tier, hint) in ways.items():
        if not tier:
            raise InvalidRequest(f"move: {name}: a tier was expected, such as '{HOST}', got none", param=name)
        if tier == POOL:
            raise InvalidRequest(
                f"move: {name}: a tier below the engines' own blocks was expected, got {POOL!r}: {hint}", param=name
            )
    if body.source == body.tier:
        raise InvalidRequest(
            f"move: from and tier: two tiers were expected, got {clip(body.tier)!r} twice", param="tier"
        )


def _tokens_of(body: CacheBody, model: ServedModel) -> list[int] | None:
    """Tokens of the prompt, as those of a request; None: no prompt is given."""
    if body.messages is not None:
        chat = TokenizeChatBody(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens,
        )
        return read_conversation(chat, model, _is_never_cancelled).token_ids
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        tokens = encode(body.prompt, model, "prompt", _is_never_cancelled, add_special_tokens=adds)
        check_length(len(tokens), None, model, "prompt")
        return tokens
    if body.tokens is not None:
        check_length(len(body.tokens), None, model, "tokens")
        model.check_token_ids(body.tokens, "tokens")
    return body.tokens


def _is_never_cancelled() -> bool:
    return False


def _parse_keys(texts: Sequence[str]) -> list[bytes]:
    keys = []
    for index, text in enumerate(texts):
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if not 1 <= len(key) <= 64:
            raise InvalidRequest(
                f"keys[{index}]: a block key in hexadecimal was expected, got {clip(text)!r}", param=f"keys[{index}]"
            )
        keys.append(key)
    if not keys:
        raise InvalidRequest("keys must not be empty", param="keys")
    return keys


def _choose(fleet: Fleet, name: str | None) -> list[EngineState]:
    """The engines to ask: all that are ready, or the named one."""
    if name is None:
        ready = [engine for engine in fleet.own() if engine.life == "ready"]
        if not ready:
            raise EngineUnavailable("no engine is ready")
        return ready
    if name not in fleet.engines:
        known = did_you_mean(name, fleet.engines) or f"; known: {', '.join(fleet.engines)}"
        raise InvalidRequest(f"there is no engine {clip(name)!r}{known}", param="engine", status=404)
    if fleet.engines[name].life != "ready":
        raise EngineUnavailable(f"{name} {fleet.engines[name].condition}")
    return [fleet.engines[name]]


def _one_of(engines: Sequence[EngineState], keys: Sequence[bytes]) -> list[EngineState]:
    """One engine that runs prompts, since all read what it brings; the prompt decides which, to spread the load."""
    able = [engine for engine in engines if engine.role in ("prefill", "any")] or engines
    return [able[int.from_bytes(keys[-1][:4]) % len(able)]]


def _check_answers(order: CacheOrder, answers: Mapping[str, CacheAnswer]) -> None:
    """Raise the errors of `CachePages.answer` if no engine succeeded."""
    tiers = [(name, tier) for name, answer in answers.items() for tier in answer.tiers]
    if not tiers:
        raise _no_tier(order, dict.fromkeys(tier for answer in answers.values() for tier in answer.known))
    if any(not tier.code for _, tier in tiers):
        return
    name, first = tiers[0]
    text = f"{' of '.join(part for part in (first.tier, name) if part)}: {first.problem}"
    codes = {tier.code for _, tier in tiers}
    if StoreFull.code in codes:
        raise InvalidRequest(text, status=409)
    if codes == {StoreUnsupported.code}:
        raise InvalidRequest(text, param="tier")
    if codes == {LateTier.code}:
        raise RequestTimeout(text, request_id="")
    raise RequestFailed(text, request_id="")


def _no_tier(order: CacheOrder, known: Collection[str]) -> InvalidRequest:
    """The error for an order whose tier does not exist."""
    for param, name in (("from", order.source), ("tier", order.tier)):
        if name and not any(names_tier(name, tier) for tier in known):
            text = f"no engine has a tier {clip(name)!r}; known: {', '.join(known)}"
            return InvalidRequest(text, param=param, status=404)
    if order.action == "move":
        text = (
            f"move: from and tier: two tiers of one store were expected, got {clip(order.source)!r} and "
            f"{clip(order.tier)!r}; known: {', '.join(known)}"
        )
        return InvalidRequest(text, param="tier")
    text = "there is no tier below the engines' own pools; --kv-host-memory and --kv-store of the launch make some"
    return InvalidRequest(f"{order.action}: {text}", param="tier")


def _describe(engine: EngineState, answer: CacheAnswer) -> dict[str, Any]:
    told: dict[str, Any] = {"name": engine.name, "role": engine.role, "tiers": []}
    for tier in answer.tiers:
        if tier.tier:
            told["tiers"].append(_describe_tier(tier))
        else:
            told["error"] = {"code": tier.code, "message": tier.problem}
    return told


def _describe_tier(tier: TierAnswer) -> dict[str, Any]:
    if tier.code:
        return {"tier": tier.tier, "error": {"code": tier.code, "message": tier.problem}}
    return {"tier": tier.tier, "tokens": tier.num_tokens, "values": tier.num_values}
