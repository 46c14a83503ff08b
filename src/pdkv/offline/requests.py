"""Prompts and sampling parameters, checked, tokenized and turned into an engine's requests."""

import math
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_ID_CHARS, clip
from pdkv.config import EngineConfig
from pdkv.errors import InvalidRequest
from pdkv.grammar.prepare import with_grammar
from pdkv.grammar.schema_time import SchemaTime
from pdkv.models.config import load_model_config
from pdkv.models.generation_config import log_sampling_defaults, read_sampling_defaults
from pdkv.offline.chat_tools import ChatOptions, format_of, read_calls
from pdkv.offline.generation import Choice, Generation
from pdkv.offline.model_tokenizer import ModelTokenizer
from pdkv.parsers.answer_grammar import AnswerRules, AskedShape, Calls
from pdkv.sampling.params import SamplingParams, as_type
from pdkv.text import StopAutomaton, TextStream, load_tokenizer, with_bad_word_ids
from pdkv.wire.messages import Submit

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's form of either: {"prompt": …} or {"prompt_token_ids": …, optionally with "prompt"}."""


TextPrompt = dict[str, Any]
TokensPrompt = dict[str, Any]
"""vLLM's names of such mappings."""


class _Prompt(NamedTuple):
    text: str | None
    token_ids: list[int] | None  # None: the text's
    cache_salt: str = ""  # cached KV is only found by prompts with the same salt
    priority: int = 0


Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with a role and content."""


class RequestMaker:
    """Makes generations for one model. Once `max_len` is set, it is immutable, so any thread may use it.

    Raises:
        ModelError: the model directory has no tokenizer, or a broken file.
    """

    max_len: int
    """The engine's longest request, which its KV pool may limit; the engine's owner sets this."""

    def __init__(self, config: EngineConfig, seed: int | None = None) -> None:
        """`seed`: the seeds of requests without one are drawn from it."""
        model = load_model_config(config.model, ignored_fields=config.ignore_config_fields)
        self._model, self.eos_token_ids = config.model, model.eos_token_ids
        self._draw = secrets.randbits if seed is None else random.Random(seed).getrandbits
        self._defaults = read_sampling_defaults(config.model, config.generation_config)
        log_sampling_defaults(config.model, self._defaults)
        self.tokenizer = load_tokenizer(config)

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the methods that transformers has."""
        return ModelTokenizer(self.tokenizer, self._model, self.eos_token_ids)

    def default_params(self) -> SamplingParams:
        """The default parameters: the model's, from its generation_config.json, or else vLLM's."""
        return SamplingParams(**self._defaults)

    def as_tokens(self, prompt: Prompt) -> TokensPrompt:
        """A prompt as token ids, with its salt. Raises InvalidRequest."""
        read = _read_prompt(prompt)
        return {"prompt_token_ids": self._encode(read), "cache_salt": read.cache_salt}

    def _encode(self, prompt: _Prompt) -> list[int]:
        if not (prompt.text if prompt.token_ids is None else prompt.token_ids):  # also for a tokenizer that adds a BOS
            raise InvalidRequest("prompt must not be empty", param="prompts")
        return self.tokenizer.encode(prompt.text or "") if prompt.token_ids is None else prompt.token_ids

    def make(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None, *, priority: int = 0
    ) -> Generation:
        """One prompt with all of its choices.

        Args:
            params: None: the default ones.
            request_id: the caller's name for the request; None: a random one.
            priority: lower is more urgent.

        Raises:
            InvalidRequest: a parameter out of its range, or a prompt that can never work.
        """
        priority = as_type(priority, Int32, "priority")
        return self._make(_read_prompt(prompt)._replace(priority=priority), params, request_id, None)

    def make_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        request_id: str | None = None,
        *,
        options: ChatOptions,
        priority: int = 0,
    ) -> Generation:
        """A generation of the answer to a conversation, with the prompt made by the model's chat template.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages; wrong options; and the errors of
                `make`.
        """
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message requires add_generation_prompt=False: a prompt ends with one or the other",
                param="continue_final_message",
            )
        calls = read_calls(options, self.tokenizer)
        text = self.tokenizer.render_chat(
            messages,
            tools=options.tools,
            chat_template=options.chat_template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=options.chat_template_kwargs,
        )
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self._make(_Prompt(text, token_ids, priority=priority), params, request_id, calls)

    def _make(
        self, prompt: _Prompt, params: SamplingParams | None, request_id: str | None, calls: Calls | None
    ) -> Generation:
        if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= MAX_ID_CHARS):
            expected = f"a text of 1 to {MAX_ID_CHARS} characters"
            raise InvalidRequest(f"request_id must be {expected}, got {request_id!r:.80}", param="request_id")
        params = self._complete(self.default_params() if params is None else params, calls)
        token_ids = self._encode(prompt)
        if (count := params.truncate_prompt_tokens) is not None:  # the end is kept, as in vLLM
            token_ids = token_ids[-(self.max_len - 1 if count == -1 else count) :]
        stops = StopAutomaton(params.stop) if params.stop else ()
        stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        answer = None if calls is None else format_of(calls)
        markers = frozenset[str]() if answer is None else answer.markers
        texts = self.tokenizer.token_text if params.detokenize else _no_text
        choices = []
        for submit in _submits(prompt, token_ids, params, request_id or ""):
            stream = TextStream(
                self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens, keep=markers),
                stop=stops,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_token_ids,
                shows_stop=params.include_stop_str_in_output,
            )
            choices.append(Choice(submit, stream, texts, answer))
        return Generation(request_id or choices[0].submit.request_id, prompt.text, choices, params.output_kind)

    def _complete(self, params: SamplingParams, calls: Calls | None) -> SamplingParams:
        """The parameters with everything that an engine needs. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"expected SamplingParams, got {clip(repr(params))}", param="sampling_params")
        params = params.checked()
        params = self._with_grammar(with_bad_word_ids(params, self.tokenizer), calls)
        return params if params.seed is not None else msgspec.structs.replace(params, seed=self._draw(63))

    def _with_grammar(self, params: SamplingParams, calls: Calls | None) -> SamplingParams:
        """The parameters with a grammar of the requested shape, and of the calls."""
        if calls is None:
            return with_grammar(params)
        asked = params.structured_outputs
        rules = AnswerRules(shape=None if asked is None else AskedShape(asked, "structured_outputs"), calls=calls)
        grammar = rules.grammar(self.tokenizer.knows, SchemaTime())
        return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar or params.grammar)


def _no_text(token_id: int) -> None:
    """The text of a token that is not detokenized."""


def _submits(prompt: _Prompt, token_ids: list[int], params: SamplingParams, label: str) -> list[Submit]:
    """One Submit per choice; only the first one asks for information about the prompt."""
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
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
        )
        submits.append(submit)
    return submits


def _read_prompt(prompt: Any) -> _Prompt:
    """Read a prompt. Raises InvalidRequest if it is neither text nor token ids, or has further fields."""
    given = {"prompt": prompt} if isinstance(prompt, str) else prompt
    given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else given
    rest = {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    text, token_ids, salt = (rest.pop(name, None) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    if rest or (text is None and token_ids is None):
        expected = "a text or a list of token ids, or a mapping of prompt or prompt_token_ids to such"
        raise InvalidRequest(f"expected a prompt as {expected}, got {clip(repr(prompt))}", param="prompts")
    return _Prompt(
        as_type(text, str | None, "prompt"),
        as_type(token_ids, list[int] | None, "prompt_token_ids"),
        as_type(salt, str | None, "cache_salt") or "",
    )


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """One SamplingParams per prompt. Raises InvalidRequest for another number of them."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        expected = f"{count} prompts need 1 or {count} SamplingParams, got {len(params)}"
        raise InvalidRequest(expected, param="sampling_params")
    return list(params)


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list of conversations. Raises InvalidRequest for anything else, and for an empty one."""
    items: list[Any] = list(messages) if isinstance(messages, Iterable) else [messages]
    conversations: list[Conversation] = [items] if items and isinstance(items[0], Mapping) else items
    for conversation in conversations or [[]]:
        listed = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not (listed and conversation and all(isinstance(m, Mapping) and "role" in m for m in conversation)):
            raise InvalidRequest(
                "messages must be a list of messages with a role, such as {'role': 'user', 'content': 'Hello'}, "
                f"or a list of such lists, none of them empty, got {clip(repr(messages))}",
                param="messages",
            )
    return conversations
