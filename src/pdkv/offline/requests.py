"""Prompts and sampling parameters, checked, tokenized and made what an engine takes."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import msgspec

from pdkv.base.limits import MAX_ID_CHARS, clip
from pdkv.config import EngineConfig
from pdkv.errors import InvalidRequest
from pdkv.grammar.prepare import with_grammar
from pdkv.grammar.schema_time import SchemaTime
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import log_sampling_defaults, read_sampling_defaults
from pdkv.offline.chat_tools import ChatOptions, format_of, read_calls
from pdkv.offline.generation import Choice, Generation
from pdkv.parsers.answer_grammar import AnswerRules, AskedShape, Calls
from pdkv.sampling.params import SamplingParams, as_type
from pdkv.text import StopAutomaton, TextStream, load_tokenizer, with_bad_word_ids
from pdkv.wire.messages import Submit

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's form of either: {"prompt": …} or {"prompt_token_ids": …, perhaps with "prompt"}."""

_TextAndIds = tuple[str | None, list[int] | None]  # the ids are the text's where there are none

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with a role and what it says."""


class RequestMaker:
    """Makes generations for one model. Immutable once made: any thread may use it.

    Raises:
        ModelError: the model directory has no tokenizer, or a broken file.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._eos_token_ids = load_model_config(config.model, ignored_fields=config.ignored_fields).eos_token_ids
        self._defaults = read_sampling_defaults(config.model, config.generation_config)
        log_sampling_defaults(config.model, self._defaults)
        self.tokenizer = load_tokenizer(config)

    def default_params(self) -> SamplingParams:
        """The model's, of its generation_config.json, else vLLM's."""
        return SamplingParams(**self._defaults)

    def make(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None) -> Generation:
        """One prompt with all of its choices.

        Args:
            params: None: the default ones.
            request_id: the caller's own name for it; None: one is drawn.

        Raises:
            InvalidRequest: a parameter out of its range, or a prompt that can never work.
        """
        return self._make(_read_prompt(prompt), params, request_id, None)

    def make_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        request_id: str | None = None,
        *,
        options: ChatOptions,
    ) -> Generation:
        """The answer to a conversation, as the model's chat template puts it.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages; options that are wrong; and as
                `make`.
        """
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False: a prompt ends with one or the other",
                param="continue_final_message",
            )
        calls = read_calls(options, self.tokenizer)
        text = self.tokenizer.render_chat(
            messages,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=options.chat_template_kwargs,
        )
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self._make((None, token_ids), params, request_id, calls)

    def _make(
        self, prompt: _TextAndIds, params: SamplingParams | None, request_id: str | None, calls: Calls | None
    ) -> Generation:
        text, token_ids = prompt
        if not (text if token_ids is None else token_ids):  # also for a tokenizer that adds a BOS
            raise InvalidRequest("prompt must not be empty", param="prompts")
        if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= MAX_ID_CHARS):
            expected = f"a text of 1 to {MAX_ID_CHARS} characters"
            raise InvalidRequest(f"request_id must be {expected}, got {request_id!r:.80}", param="request_id")
        params = self._complete(self.default_params() if params is None else params, calls)
        token_ids = self.tokenizer.encode(text or "") if token_ids is None else token_ids
        stops = StopAutomaton(params.stop) if params.stop else ()
        stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        answer = None if calls is None else format_of(calls)
        markers = frozenset[str]() if answer is None else answer.markers
        choices = []
        for submit in _submits(token_ids, params, request_id or ""):
            detokenizer = self.tokenizer.detokenizer(keep=markers)
            stream = TextStream(detokenizer, stop=stops, min_tokens=params.min_tokens, stop_token_ids=stop_token_ids)
            choices.append(Choice(submit, stream, answer))
        return Generation(request_id or choices[0].submit.request_id, text, choices, params.output_kind)

    def _complete(self, params: SamplingParams, calls: Calls | None) -> SamplingParams:
        """With all that an engine needs. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, got {clip(repr(params))}", param="params")
        params = params.checked()
        params = self._with_grammar(with_bad_word_ids(params, self.tokenizer), calls)
        return params if params.seed is not None else msgspec.structs.replace(params, seed=secrets.randbits(63))

    def _with_grammar(self, params: SamplingParams, calls: Calls | None) -> SamplingParams:
        """With a grammar of the shape that is asked for, and of the calls."""
        if calls is None:
            return with_grammar(params)
        asked = params.structured_outputs
        rules = AnswerRules(shape=None if asked is None else AskedShape(asked, "structured_outputs"), calls=calls)
        grammar = rules.grammar(self.tokenizer.knows, SchemaTime())
        return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar or params.grammar)


def _submits(token_ids: list[int], params: SamplingParams, label: str) -> list[Submit]:
    """One per choice; what is said of the prompt is asked of the first alone."""
    submits = []
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
            label=label,
        )
        submits.append(submit)
    return submits


def _read_prompt(prompt: Any) -> _TextAndIds:
    """Its text, its token ids, or both. Raises InvalidRequest for what is neither, or says more."""
    given = {"prompt": prompt} if isinstance(prompt, str) else prompt
    given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else given
    rest = {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    text, token_ids = rest.pop("prompt", None), rest.pop("prompt_token_ids", None)
    if rest or (text is None and token_ids is None):
        expected = "a text or a list of token ids, or a mapping of prompt or prompt_token_ids to such"
        raise InvalidRequest(f"a prompt is {expected}, got {clip(repr(prompt))}", param="prompts")
    return as_type(text, str | None, "prompt"), as_type(token_ids, list[int] | None, "prompt_token_ids")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """One per prompt. Raises InvalidRequest for another number of them."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{count} prompts need 1 or {count} SamplingParams, got {len(params)}", param="params")
    return list(params)


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
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
