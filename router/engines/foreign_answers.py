"""One request to a server of another engine: its body, and its stream of events as an engine's messages. No I/O."""

import hashlib
import math
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest, RequestFailed
from pdkv.router.engines.foreign_kinds import KINDS, OF_OUTPUT, Kind
from pdkv.text import Tokenizer
from pdkv.wire.kv import EngineCard, KVHandoff
from pdkv.wire.messages import PROBE_SALT, Finished, FinishReason, HandedOff, Submit, TokenLogprob, Tokens
from pdkv.wire.reports import SourceCounts

MAX_LINE_BYTES = 1 << 18
"""Longest line of a stream, and the most bytes between two tokens, besides a prompt that is sent back."""

MAX_TEXT_CHARS = 1 << 16
"""Longest text of one event: it is tokenized on the event loop."""

MAX_SALTS = 1 << 16
"""Salts whose digests are known when a server's KV events name them."""

MAX_PARAMS_BYTES = 1 << 18
"""Longest kv_transfer_params: those of 1,000,000 tokens in blocks of 32."""

_ASKED = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
_OF_STREAMS = ("stream_options", "min_tokens", "logprobs", "return_tokens_as_token_ids", "return_token_ids")

_PROMPT_TOKEN_BYTES = 12
_ANCHOR_TOKENS = 8
_ID_PREFIX = "token_id:"

_REASONS: Mapping[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # vLLM's
    matched_stop: int | str | None = None  # SGLang's
    logprobs: msgspec.Raw = msgspec.Raw()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


_chunks, _logprobs = msgspec.json.Decoder(_Chunk), msgspec.json.Decoder(_Logprobs)
_prefilled = msgspec.json.Decoder(_Prefilled)


def fault(submit: Submit, text: str, *, retryable: bool = True) -> RequestFailed:
    """The failure of one request by a server's fault."""
    return RequestFailed(text[:1000], request_id=submit.request_id, retryable=retryable)


class Salts:
    """Clients' salts as servers get them: digests by a key of this process. The latest ones can be told again."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[str, str] = OrderedDict()

    def digest(self, salt: str) -> str:
        """What is sent."""
        digest = hashlib.blake2b(salt.encode(), key=self._key, digest_size=24).hexdigest()
        self._known[digest] = salt
        self._known.move_to_end(digest)
        if len(self._known) > MAX_SALTS:
            self._known.popitem(last=False)
        return digest

    def find(self, digest: str) -> str | None:
        """The salt."""
        return self._known.get(digest)


def request_body(submit: Submit, kind: str, model: str, max_model_len: int, salts: Salts) -> dict[str, Any]:
    """The body of POST /v1/completions. Another server that continues gets the output so far as a part of the prompt.

    Raises:
        InvalidRequest: a parameter forbids that.
    """
    own, params, done = KINDS[kind], submit.params, len(submit.output_token_ids)
    neutral = type(params)()
    takes = [name for name in own.takes if name != "seed"]
    asked = {name: value for name in takes if (value := getattr(params, name)) != getattr(neutral, name)}
    for name in OF_OUTPUT:
        if done and name in asked:
            raise InvalidRequest(f"no other server can continue after {done} tokens with {name}", param=name)
    body = asked | {"temperature": params.temperature, "top_p": params.top_p, "model": model, "stream": True}
    if own.tells_ids:  # else the model's own defaults would apply there
        body |= {"return_token_ids": True, "top_k": params.top_k or -1, "min_p": params.min_p}
        body |= {"repetition_penalty": params.repetition_penalty}
    if "seed" in own.takes and not (params.greedy or submit.seed_drawn):
        body["seed"] = _seed(submit)
    if params.logprobs is not None and "logprobs" in own.takes:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.min_tokens and "min_tokens" in own.takes:
        body["min_tokens"] = max(params.min_tokens - done, 0)
    if own.takes_salt and submit.cache_salt not in ("", PROBE_SALT):
        body["cache_salt"] = salts.digest(submit.cache_salt)
    prompt = [*submit.prompt_token_ids, *submit.output_token_ids]
    most = max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens - done
    body |= {"prompt": prompt, "max_tokens": most, "stream_options": {"include_usage": True}}
    return body | _params_of(submit)


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body by which a prefill server computes the prompt of such a body, and keeps its KV for a decode server."""
    kept = {name: value for name, value in body.items() if name not in _OF_STREAMS}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": _ASKED}


def handed_off(submit: Submit, data: bytes, card: EngineCard) -> HandedOff:
    """A prefill server's answer; where its KV is travels as it came, at most MAX_PARAMS_BYTES. Raises RequestFailed."""
    try:
        answer = _prefilled.decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise fault(submit, f"an answer that cannot be read ({error}): {_shown(data)}") from None
    params = bytes(answer.kv_transfer_params)
    if len(params) > MAX_PARAMS_BYTES or not params.startswith((b"{", b"null")):
        raise fault(submit, f"kv_transfer_params of {len(params)} bytes: {_shown(params)}")
    num_tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
    handoff = KVHandoff(
        submit.request_id, submit.attempt, submit.transfer_id, card.engine, card.epoch, num_tokens, params
    )
    return HandedOff(submit.request_id, submit.attempt, _sources(submit, _cached_of(answer.usage)), handoff)


def _params_of(submit: Submit) -> dict[str, msgspec.Raw]:
    """Where a decode server finds the KV. What another one has perhaps read already, or lacks output, is computed."""
    handoff, num_tokens = submit.handoff, len(submit.prompt_token_ids) + len(submit.output_token_ids)
    if handoff is None or (handoff.attempt, handoff.num_tokens) != (submit.attempt, num_tokens):
        return {}
    return {"kv_transfer_params": msgspec.Raw(handoff.payload)}


def _sources(submit: Submit, num_cached: int) -> SourceCounts:
    """The sources of a prompt's tokens; a decode server counts those that it was given as cached, too."""
    num_prompt = len(submit.prompt_token_ids)
    num_cached = min(max(num_cached, 0), num_prompt)
    if submit.kv == "await_peer":
        return SourceCounts(computed=num_prompt - num_cached, remote=num_cached)
    return SourceCounts(computed=num_prompt - num_cached, local_hit=num_cached)


def _cached_of(usage: "_Usage | None") -> int:
    details = None if usage is None else usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def _seed(submit: Submit) -> int | None:
    """The client's own for the first choice from its beginning; others get seeds of their own made of it."""
    seed, place = submit.params.seed, (submit.choice, len(submit.output_token_ids))
    if seed is None or place == (0, 0):
        return seed
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class Events:
    """Cuts a stream of server-sent events into their data."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        prompt = len(submit.prompt_token_ids) + len(submit.output_token_ids)
        self._most = MAX_LINE_BYTES + _PROMPT_TOKEN_BYTES * prompt  # the first event may have the prompt
        self._rest = b""
        self._num_bytes = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of the events that are whole now. Raises RequestFailed for too many bytes without a token."""
        self._num_bytes += len(data)
        if self._num_bytes > self._most:
            raise fault(self._submit, f"more than {self._most} bytes without a token")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return (line[5:].strip() for line in lines if line.startswith(b"data:"))

    def progressed(self) -> None:
        """A token came."""
        self._num_bytes = 0


class Answer:
    """Turns the events of one stream into messages. What no honest server would send raises RequestFailed."""

    def __init__(self, submit: Submit, kind: Kind, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._submit, self._kind, self._vocab_size = submit, kind, vocab_size
        self._texts = None if kind.tells_ids else _TextTokens(submit, tokenizer)
        self._position = len(submit.output_token_ids)
        self._most = math.inf if submit.params.max_tokens is None else submit.params.max_tokens
        self._num_cached = 0
        self._reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self.is_whole = False  # the server has said that nothing more comes

    @property
    def has_ended(self) -> bool:
        """Whether the last token has come; only the counts may still follow."""
        return self._reason is not None

    def take(self, data: bytes) -> Tokens | None:
        """The tokens of one event, if it has any."""
        if data == b"[DONE]":
            self.is_whole = True
            return None
        try:
            chunk = _chunks.decode(data)
            if chunk.error is not None:
                raise fault(self._submit, f"it reported an error: {_shown(chunk.error)}")
            self._num_cached = _cached_of(chunk.usage) or self._num_cached
            return self._take_choices(chunk.choices)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise fault(self._submit, f"an event that cannot be read ({error}): {_shown(data)}") from None

    def finished(self) -> Finished:
        """The last message, once it `has_ended`."""
        assert self._reason is not None
        submit, sources = self._submit, _sources(self._submit, self._num_cached)
        return Finished(submit.request_id, submit.attempt, self._reason, sources, self._stop_token_id)

    def _take_choices(self, choices: list[_Choice]) -> Tokens | None:
        if not choices:
            return None
        choice = choices[0]
        if len(choices) > 1 or choice.index or self.has_ended:
            raise fault(self._submit, f"choice {choices[-1].index} of 1, or one after its end")
        token_ids = self._ids_of(choice)
        message = self._tokens(token_ids, choice) if token_ids else None
        if choice.finish_reason is not None:
            self._end(choice)
        return message

    def _ids_of(self, choice: _Choice) -> list[int]:
        if self._texts is not None:
            if self._position >= self._most:
                return []
            return self._texts.push(choice.text or "")[: int(min(self._most - self._position, MAX_TEXT_CHARS))]
        if choice.token_ids is None:
            raise fault(self._submit, "it sends no token ids: a server that knows return_token_ids is needed")
        if any(not 0 <= token_id < self._vocab_size for token_id in choice.token_ids):
            raise fault(self._submit, f"token ids outside the vocabulary of {self._vocab_size}")
        return choice.token_ids

    def _tokens(self, token_ids: list[int], choice: _Choice) -> Tokens:
        submit, position = self._submit, self._position
        self._position += len(token_ids)
        if self._position > self._most:
            raise fault(submit, f"token {self._position} of at most {self._most}")
        logprobs = None if submit.params.logprobs is None else self._logprobs_of(token_ids, choice)
        return Tokens(submit.request_id, submit.attempt, position, token_ids, logprobs)

    def _logprobs_of(self, token_ids: list[int], choice: _Choice) -> list[TokenLogprob]:
        given, most = _logprobs.decode(choice.logprobs), self._submit.params.logprobs or 0
        if list(map(_id_of, given.tokens)) != token_ids:
            raise fault(self._submit, "logprobs of other tokens than were sent")
        return [
            _logprob(token_id, logprob, top, most)
            for token_id, logprob, top in zip(token_ids, given.token_logprobs, given.top_logprobs, strict=True)
        ]

    def _end(self, choice: _Choice) -> None:
        if choice.finish_reason not in _REASONS:
            raise fault(self._submit, f"it ended the answer by {_shown(choice.finish_reason)}")
        self._reason = _REASONS[choice.finish_reason]
        stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
        self._stop_token_id = stop if isinstance(stop, int) and 0 <= stop < self._vocab_size else None


class _TextTokens:
    """Turns pieces of text into tokens that the tokenizer turns into the same text again."""

    def __init__(self, submit: Submit, tokenizer: Tokenizer) -> None:
        self._submit, self._tokenizer = submit, tokenizer
        self._before = [*submit.prompt_token_ids, *submit.output_token_ids][-_ANCHOR_TOKENS:]

    def push(self, text: str) -> list[int]:
        """The tokens of the next piece. Raises RequestFailed if there are none with that text."""
        if not text:
            return []
        if len(text) > MAX_TEXT_CHARS:
            raise fault(self._submit, f"{len(text)} characters in one event")
        for token_ids in self._ways(text):
            if self._decode([*self._before, *token_ids]) == self._decode(self._before) + text:
                self._before = [*self._before, *token_ids][-_ANCHOR_TOKENS:]
                return token_ids
        raise fault(self._submit, f"its text cannot be turned into tokens: {_shown(text)}")

    def _ways(self, text: str) -> Iterator[list[int]]:
        """By itself; and behind another text, where tokenizers that mark the beginnings of texts put no mark."""
        encode = self._tokenizer.encode
        yield encode(text, add_special_tokens=False)
        for anchor in ("a", "\n"):
            before, both = (encode(t, add_special_tokens=False) for t in (anchor, anchor + text))
            if both[: len(before)] == before:
                yield both[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _logprob(token_id: int, logprob: float, top: Mapping[str, float], most: int) -> TokenLogprob:
    ranked = sorted(((_id_of(text), value) for text, value in top.items()), key=lambda item: -item[1])
    if not all(map(math.isfinite, (logprob, *(value for _, value in ranked)))) or len(ranked) > most + 1:
        raise ValueError(f"{len(ranked)} logprobs, or one that is no number")
    return TokenLogprob(token_id, logprob, 1 + sum(value > logprob for _, value in ranked), tuple(ranked[:most]))


def _id_of(text: str) -> int:
    """The id in "token_id:5". Raises ValueError."""
    if not text.startswith(_ID_PREFIX) or not 0 <= (token_id := int(text.removeprefix(_ID_PREFIX))) < 2**31:
        raise ValueError(f"token_id:N was expected, got {text[:40]!r}")
    return token_id


def _shown(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return repr(text)[:200]
