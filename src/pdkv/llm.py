"""The offline API: `LLM(model).generate(prompts, params)`, one engine in this process and no server."""

import dataclasses
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from tqdm import tqdm

from pdkv.build_engine import build_engine
from pdkv.config import DEFAULT_MODEL, EngineConfig, HandoffConfig
from pdkv.connectors.registry import check_connector
from pdkv.engine.step_loop import make_step_loop
from pdkv.errors import ConfigError, InvalidRequest, RequestFailed
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import log_sampling_defaults, read_sampling_defaults
from pdkv.options import from_fields
from pdkv.sampling_params import SamplingParams
from pdkv.text import StopAutomaton, TextStream, Tokenizer, with_bad_word_ids
from pdkv.wire.messages import (
    Abort,
    EngineCard,
    EngineToRouter,
    Failed,
    Finished,
    Peers,
    SourceCounts,
    Submit,
    TokenLogprob,
    Tokens,
)

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 60.0
"""How long `generate` waits for its saves: far more than a store's own deadlines, for a store that keeps none."""

_ROUTER_ID = "local"
Prompt = str | list[int]
Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with a role and what it says."""


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. A stop token is the last of `token_ids`; a stop string is cut from `text`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None  # the stop string, or the stop token id, that ended it
    logprobs: list[TokenLogprob] | None  # one per token where asked for


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of one prompt."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_cached_tokens: int  # prompt tokens whose KV the first choice found cached, here or through the connector
    outputs: list[CompletionOutput]

    def to_dict(self) -> dict[str, Any]:
        """As JSON would have it."""
        return dict(msgspec.to_builtins(self))


@dataclasses.dataclass(slots=True)
class _Choice:
    """One generation in flight, or ended."""

    submit: Submit
    stream: TextStream
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    sources: SourceCounts = dataclasses.field(default_factory=SourceCounts)
    siblings: "list[_Choice]" = dataclasses.field(default_factory=list)  # start when this one has its first token

    def push(self, tokens: Tokens) -> bool:
        """Take new tokens; returns whether a stop string ended the text."""
        piece = self.stream.push(tokens.token_ids)
        self._append(piece.text, piece.stop)
        self.token_ids += tokens.token_ids[: piece.num_tokens]
        self.logprobs += (tokens.logprobs or [])[: piece.num_tokens]
        if tokens.prompt_logprobs is not None:
            self.prompt_logprobs = tokens.prompt_logprobs.decode()
        self.sources = tokens.sources or self.sources
        return piece.stop is not None

    def end(self, message: Finished) -> None:
        """The engine ended it; what was held back for a stop string comes out."""
        self.sources = message.sources
        self.finish_reason = message.reason
        self.stop_reason = message.stop_token_id
        piece = self.stream.finish()
        self._append(piece.text, piece.stop)

    def _append(self, text: str, stop: str | None) -> None:
        self.text += text
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def output(self) -> CompletionOutput:
        assert self.finish_reason is not None
        return CompletionOutput(
            index=self.submit.choice,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if self.submit.params.logprobs is not None else None,
        )


class LLM:
    """One engine in this process. Not thread-safe. A context manager; `close` gives its memory back."""

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        connector: str | None = None,
        connector_config: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        """Load the model.

        Args:
            connector: a content-addressed one, such as "shared_storage". KV that this LLM computes is saved, and that
                of a prompt's first tokens that another LLM or an engine has saved is loaded instead of computed.
            connector_config: the connector's options, such as {"path": "/tmp/kv"}.
            fields: those of EngineConfig, such as dtype="float32" or max_num_seqs=64.

        Raises:
            ConfigError: a wrong field, model directory or connector option.
        """
        config = from_fields(EngineConfig, {"model": Path(model), **fields}, owner="LLM")
        self._start(config, _handoff_config(connector, connector_config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from a ready configuration, without a connector."""
        llm = cls.__new__(cls)
        llm._start(config, None)
        return llm

    def _start(self, config: EngineConfig, handoff: HandoffConfig | None) -> None:
        self.config = config
        self._eos_token_ids = load_model_config(config.model).eos_token_ids
        self._sampling_defaults = read_sampling_defaults(config.model, config.generation_config)
        log_sampling_defaults(config.model, self._sampling_defaults)
        self.tokenizer = Tokenizer.from_dir(config.model)
        self._wake = wake = threading.Event()  # set by the connector's threads and the one that runs steps
        self._has_news = has_news = threading.Event()  # set by the connector's

        def notify() -> None:
            has_news.set()
            wake.set()

        epoch = secrets.token_hex(8)
        self._core = build_engine(config, handoff, name=f"llm-{epoch}", epoch=epoch, notify=notify)
        self._core.router_joined(_ROUTER_ID, self._core.card.epoch)
        self._steps = make_step_loop(self._core, config.max_steps_ahead, wake.set, config.least_step_ahead_s)
        self._end_steps = weakref.finalize(self, self._steps.close)  # a thread would keep all memory
        self._live: dict[str, _Choice] = {}

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._end_steps()
        self._core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def card(self) -> EngineCard:
        """What other LLMs need to know to read this one's KV, see `set_peers`."""
        return self._core.card

    def set_peers(self, cards: Sequence[EngineCard]) -> None:
        """For connectors that read each other's memory (shared_memory): these LLMs are there, and no others."""
        self._core.handle(_ROUTER_ID, Peers(list(cards)), time.monotonic())

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: the model's, of its generation_config.json, else vLLM's."""
        return SamplingParams(**self._sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the result has their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one per prompt; None: `get_default_sampling_params`.
            progress: whether a bar is shown on stderr.

        With a connector, all KV that was computed is saved when this returns, or its save has failed.

        Raises:
            InvalidRequest: a parameter out of its range, or a prompt that can never work.
            RequestFailed: the engine failed on one of them; the others are given up.
        """
        prompt_list = _as_list(prompts)
        given = self.get_default_sampling_params() if params is None else params
        params_list = _as_params(given, len(prompt_list))
        requests = [self._make_choices(prompt, p) for prompt, p in zip(prompt_list, params_list, strict=True)]
        try:
            with tqdm(total=sum(map(len, requests)), desc="generate", unit="seq", disable=not progress) as bar:
                for choices in requests:
                    self._submit(choices[0])
                while self._live:
                    before = len(self._live)
                    num_new = self._step()
                    bar.update(before + num_new - len(self._live))
        finally:
            self._abandon()
        self._settle()
        return [
            _request_output(prompt, choices, p)
            for prompt, choices, p in zip(prompt_list, requests, params_list, strict=True)
        ]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations: `generate` of the prompts that the model's chat template makes of them.

        Args:
            messages: one conversation, a list of {"role": …, "content": text}, or a list of conversations.
            params: as `generate` takes them.
            tools: functions that the template describes to the model; its calls are part of the text.
            add_generation_prompt: whether a prompt ends with the beginning of an answer.
            continue_final_message: whether it ends within the last message; not with add_generation_prompt.
            chat_template_kwargs: more of the template's variables, such as enable_thinking.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages; and as `generate`.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False: a prompt ends with one or the other",
                param="continue_final_message",
            )
        texts = [
            self.tokenizer.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in _as_conversations(messages)
        ]
        prompts: list[Prompt] = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, params, progress=progress)

    def _make_choices(self, prompt: Prompt, params: SamplingParams) -> list[_Choice]:
        """One per choice of one prompt. The first one's prefill is the others' prefix hit, so they wait for it."""
        params.validate()
        params = with_bad_word_ids(params, self.tokenizer)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids or prompt == "":
            raise InvalidRequest("prompt must not be empty", param="prompts")
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        stops = StopAutomaton(params.stop) if params.stop else ()
        choices = []
        for index in range(params.n):
            request_id = secrets.token_hex(8)
            submit = Submit(
                request_id=request_id,
                transfer_id=request_id,
                attempt=0,
                choice=index,
                prompt_token_ids=token_ids,
                params=params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None),
                timeout_s=math.inf,
            )
            stream = TextStream(
                self.tokenizer.detokenizer(),
                stop=stops,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_token_ids,
            )
            choices.append(_Choice(submit, stream))
        choices[0].siblings = choices[1:]
        return choices

    def _submit(self, choice: _Choice) -> None:
        self._live[choice.submit.request_id] = choice
        self._core.handle(_ROUTER_ID, choice.submit, time.monotonic())

    def _step(self) -> int:
        """What the engine can do as soon as there is something to do; returns how many choices that made start."""
        wait_s = self._steps.wait_s()
        self._wake.wait(threading.TIMEOUT_MAX if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))
        self._wake.clear()
        if self._has_news.is_set():
            self._has_news.clear()
            self._steps.wake()
        self._steps.turn()
        num_new = 0
        for _, messages in self._core.take_messages(time.monotonic()):
            for message in messages:
                num_new += self._receive(message)
        return num_new

    def _receive(self, message: EngineToRouter) -> int:
        if not isinstance(message, Tokens | Finished | Failed):
            return 0
        choice = self._live.get(message.request_id)
        if choice is None:
            return 0  # what its last step still yielded after a stop string
        match message:
            case Tokens():
                if choice.push(message):
                    del self._live[message.request_id]
                    self._core.handle(_ROUTER_ID, Abort(message.request_id, message.attempt), time.monotonic())
                siblings, choice.siblings = choice.siblings, []
                for sibling in siblings:
                    self._submit(sibling)
                return len(siblings)
            case Finished():
                choice.end(message)
                del self._live[message.request_id]
            case Failed():
                if message.code == InvalidRequest.code:
                    raise InvalidRequest(message.message)
                raise RequestFailed(message.message, request_id=message.request_id, retryable=message.retryable)
        return 0

    def _settle(self) -> None:
        """Wait for saves."""
        deadline = time.monotonic() + SAVE_TIMEOUT_S
        while self._core.has_work or not (self._core.external.is_idle and self._steps.is_idle):
            if time.monotonic() >= deadline:
                logger.warning("the connector's saves have not ended within %g s", SAVE_TIMEOUT_S)
                return
            self._step()

    def _abandon(self) -> None:
        """Give up what an exception left running."""
        for request_id, choice in self._live.items():
            self._core.handle(_ROUTER_ID, Abort(request_id, choice.submit.attempt), time.monotonic())
        self._live.clear()


def _handoff_config(connector: str | None, options: Mapping[str, str] | None) -> HandoffConfig | None:
    """What an engine's connector is built from; None: an engine without.

    Raises:
        ConfigError: a connector that is unknown, or that needs a router to bring two engines together.
    """
    if connector is None:
        if options:
            raise ConfigError(f"connector_config={dict(options)} needs a connector, such as connector='shared_storage'")
        return None
    handoff = HandoffConfig(connector=connector, connector_config=dict(options or {}))
    if not check_connector(connector, handoff.connector_config).content_addressed:
        raise ConfigError(
            f"connector {connector!r} carries KV between two engines that a router brings together (`pd launch`); "
            "an LLM needs one that finds KV by its content, such as 'shared_storage' or 'store'"
        )
    return handoff


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Raises InvalidRequest for what is neither one nor a list of them, and for one that is empty."""
    items: list[Any] = list(messages)
    conversations: list[Conversation] = [items] if items and isinstance(items[0], Mapping) else items
    for conversation in conversations or [[]]:
        listed = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not (listed and conversation and all(isinstance(m, Mapping) and "role" in m for m in conversation)):
            raise InvalidRequest(
                "messages must be a list of messages with a role, such as {'role': 'user', 'content': 'Hello'}, "
                "or a list of such lists, none of them empty",
                param="messages",
            )
    return conversations


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    for item in items:
        if not isinstance(item, str | list):
            raise InvalidRequest(f"a prompt is a text or a list of token ids, got {item!r}", param="prompts")
    return items  # type: ignore[return-value]


def _as_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{count} prompts need 1 or {count} SamplingParams, got {len(params)}", param="params")
    return list(params)


def _request_output(prompt: Prompt, choices: list[_Choice], params: SamplingParams) -> RequestOutput:
    first = choices[0]
    return RequestOutput(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=first.submit.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.sources.local_hit + first.sources.remote + first.sources.store,
        outputs=[choice.output() for choice in choices],
    )
