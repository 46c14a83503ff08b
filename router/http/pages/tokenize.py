"""POST /tokenize and /detokenize in vLLM's format, with the limits that prompts have."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdkv.base.trace_context import new_trace
from pdkv.config import HttpApi
from pdkv.errors import InvalidRequest, PdkvError
from pdkv.router.admission.tenants import TENANT
from pdkv.router.http.answer.exchange import Exchange
from pdkv.router.http.read.chat import read_conversation
from pdkv.router.http.read.decoding import DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_TEXT, has_field
from pdkv.router.http.read.intake import Shared
from pdkv.router.http.read.pool_choice import models_of
from pdkv.router.http.read.prompts import encode
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.router.http.server.deadline import Deadline
from pdkv.router.http.server.request_body import Disconnected

T = TypeVar("T")


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as in the vocabulary


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens, special ones included."""

    prompt: str


Answer = Callable[[bytes | bytearray, ServedModel, HttpApi, Cancelled, Sequence[str]], msgspec.Struct]


def tokenize(
    body: bytes | bytearray, model: ServedModel, api: HttpApi, cancelled: Cancelled, allowed: Sequence[str] = ()
) -> TokenizeReply:
    """Tokenize a body by one of the `allowed` models (`ServedModel.named`). Raises InvalidRequest if it is malformed or
    longer than a prompt may be, and RequestAborted if cancelled.
    """
    if has_field(body, "messages"):
        chat = TOKENIZE_CHAT.decode(body, ignore_unknown=api.ignores_unknown)
        model = model.named(chat.model, allowed)
        token_ids, shows = read_conversation(chat, model, cancelled).token_ids, chat.return_token_strs
    else:
        text = TOKENIZE_TEXT.decode(body, ignore_unknown=api.ignores_unknown)
        model = model.named(text.model, allowed)
        add_special_tokens = text.add_special_tokens is not False
        token_ids = encode(text.prompt, model, "prompt", cancelled, add_special_tokens=add_special_tokens)
        shows = text.return_token_strs
    return TokenizeReply(
        count=len(token_ids),
        max_model_len=model.max_model_len,
        tokens=token_ids,
        token_strs=[model.tokenizer.token(i) for i in token_ids] if shows else None,
    )


def detokenize(
    body: bytes | bytearray, model: ServedModel, api: HttpApi, cancelled: Cancelled, allowed: Sequence[str] = ()
) -> DetokenizeReply:
    """Detokenize a body. Raises InvalidRequest if it is malformed, too long, or has an id outside the vocabulary."""
    request = DETOKENIZE.decode(body, ignore_unknown=api.ignores_unknown)
    model = model.named(request.model, allowed)
    if len(request.tokens) > model.max_model_len:
        raise InvalidRequest(
            f"tokens must have at most as many entries as the model's length ({model.max_model_len}), "
            f"got {len(request.tokens)}",
            param="tokens",
        )
    model.check_token_ids(request.tokens, "tokens")
    return DetokenizeReply(prompt=model.tokenizer.decode(request.tokens, skip_special_tokens=False))


class TextEndpoint:
    """An endpoint that the router answers itself, without an engine; it counts as a request of its key while it
    runs.
    """

    def __init__(self, answer: Answer, shared: Shared) -> None:
        self._answer = answer
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, model = self._shared, self._shared.model()
        exchange = Exchange(send, send, Headers(scope=scope).get("x-request-id"), new_trace())

        def work(body: bytes | bytearray, cancelled: Cancelled) -> bytes:
            allowed = models_of(scope.get(TENANT))
            return msgspec.json.encode(self._answer(body, model, shared.api, cancelled, allowed))

        def on_body() -> None:
            exchange.body_is_here = True

        try:
            with await shared.desk.receive(scope):
                deadline = Deadline(shared.limits.body_timeout_s)
                data, gone = await shared.intake.read(
                    scope, receive, work, deadline, request_id=exchange.request_id, on_body=on_body
                )
                gone.cancel()
                await exchange.send_whole(200, data)
        except PdkvError as error:
            await exchange.fail(error)
        except Disconnected:
            return
