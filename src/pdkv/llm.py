"""The offline API: `LLM(model).generate(prompts, params)`, one engine in this process and no server."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from pdkv.config import DEFAULT_MODEL, EngineConfig, HandoffConfig
from pdkv.offline.engine import LocalEngine, read_config
from pdkv.offline.generation import Generation, InFlight
from pdkv.offline.outputs import RequestOutput
from pdkv.offline.requests import Conversation, Prompt, RequestMaker, as_conversations, as_params, as_prompts
from pdkv.sampling_params import SamplingParams
from pdkv.text import Tokenizer
from pdkv.wire.messages import EngineCard, Peers


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
        llm._start(config, None)
        return llm

    def _start(self, config: EngineConfig, handoff: HandoffConfig | None) -> None:
        self.config = config
        self._request_ids = itertools.count()
        self._requests = RequestMaker(config)
        self._engine = LocalEngine(config, handoff)

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
        """
        prompt_list = as_prompts(prompts)
        params_list = as_params(params, len(prompt_list))
        generations = [
            self._requests.make(prompt, p, str(next(self._request_ids)))
            for prompt, p in zip(prompt_list, params_list, strict=True)
        ]
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
            in_flight.give_up_all()

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
        prompts = [
            self._requests.encode_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, params, progress=progress)
