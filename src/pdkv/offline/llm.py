"""The offline API: `LLM(model).generate(prompts, params)`, one engine in this process and no server."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from pdkv.config import DEFAULT_MODEL, EngineConfig, HandoffConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.errors import EngineUnavailable
from pdkv.offline.chat_tools import ChatOptions, ToolChoice
from pdkv.offline.engine import LocalEngine, read_config
from pdkv.offline.generation import Generation, InFlight
from pdkv.offline.outputs import RequestOutput
from pdkv.offline.requests import Conversation, Prompt, RequestMaker, as_conversations, as_params, as_prompts
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Peers

T = TypeVar("T")


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
        self._start(*read_config("LLM", model, connector, connector_config, fields))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from a ready configuration, without a connector."""
        llm = cls.__new__(cls)
        llm._start(config, None, None)
        return llm

    def _start(self, config: EngineConfig, handoff: HandoffConfig | None, connector: ConnectorPlan | None) -> None:
        self.config = config
        self._request_ids = itertools.count()
        self._requests = RequestMaker(config)
        self._engine = LocalEngine(config, handoff, connector)

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._requests.tokenizer

    @property
    def card(self) -> EngineCard:
        """What other LLMs need to know to read this one's KV, see `set_peers`."""
        return self._engine.core.card

    def set_peers(self, cards: Sequence[EngineCard]) -> None:
        """For connectors that read each other's memory (shared_memory): these LLMs are there, and no others."""
        with self._engine.interrupts:
            self._engine.send(Peers(list(cards)))

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: the model's, of its generation_config.json, else vLLM's."""
        return self._requests.default_params()

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
            EngineUnavailable: a step failed before, or the LLM was closed. The failed step raised its own error.
            KeyboardInterrupt: Ctrl-C, between two steps: all prompts are given up, and the LLM can be used again.
        """
        return self._answer(self._requests.make, as_prompts(prompts), params, progress)

    def _answer(
        self,
        make: Callable[[T, SamplingParams | None, str], Generation],
        prompts: Sequence[T],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        """What comes of prompts that `make` makes generations of."""
        generations = [
            make(prompt, p, str(next(self._request_ids)))
            for prompt, p in zip(prompts, as_params(params, len(prompts)), strict=True)
        ]
        with self._engine.interrupts:
            self._run(generations, progress)
            self._engine.settle()
        return [generation.output() for generation in generations]

    def _run(self, generations: Sequence[Generation], progress: bool) -> None:
        """Until all have ended. Raises what one of them failed by; nothing is left in the engine then."""
        in_flight = InFlight(self._engine.send)
        total = sum(len(generation.choices) for generation in generations)
        try:
            with tqdm(total=total, desc="generate", unit="seq", disable=not progress) as bar:
                for generation in generations:
                    in_flight.start(generation)
                while in_flight:
                    before = in_flight.num_ended
                    for message in self._engine.step():
                        found = in_flight.receive(message)
                        if found is not None and found.error is not None:
                            raise found.error
                    bar.update(in_flight.num_ended - before)
        finally:
            with suppress(EngineUnavailable):  # they ended with it
                in_flight.give_up_all()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        tool_parser: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations: `generate` of the prompts that the model's chat template makes of them.

        Args:
            messages: one conversation, a list of {"role": …, "content": text}, or a list of conversations.
            params: as `generate` takes them.
            tools: functions that the template describes to the model; its calls are part of the text, and where a
                parser knows how the model writes them, `tool_calls` of the choices that have ended.
            tool_choice: as in OpenAI's API; "required" and a named tool are enforced, and so are `strict` tools.
            parallel_tool_calls: whether an answer may hold several calls.
            tool_parser: "auto" (the one that the chat template tells), "hermes", "llama3_json" or "mistral".
            add_generation_prompt: whether a prompt ends with the beginning of an answer.
            continue_final_message: whether it ends within the last message; not with add_generation_prompt.
            chat_template_kwargs: more of the template's variables, such as enable_thinking.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages; and as `generate`.
        """
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            tool_parser=tool_parser,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        make = functools.partial(self._requests.make_chat, options=options)
        return self._answer(make, as_conversations(messages), params, progress)
