"""The offline API for asyncio: `async for output in AsyncLLM(model).generate(prompt, params)`."""

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdkv.base.vllm_api import known_arguments
from pdkv.config import DEFAULT_MODEL
from pdkv.errors import EngineUnavailable
from pdkv.offline.arguments import EngineArgs
from pdkv.offline.chat_tools import ChatOptions
from pdkv.offline.engine import FORGET, read_config
from pdkv.offline.engine_thread import EngineThread
from pdkv.offline.generation import Generation
from pdkv.offline.model_tokenizer import ModelTokenizer
from pdkv.offline.outputs import RequestOutput
from pdkv.offline.requests import Conversation, Prompt, RequestMaker, as_conversations
from pdkv.offline.streams import Streams
from pdkv.sampling.params import SamplingParams
from pdkv.text import Tokenizer
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Peers


class AsyncLLM:
    """One engine in this process, on its own thread; requests of any number of tasks are batched.

    An asynchronous context manager; `shutdown` releases its memory. Streaming methods belong to the running event loop;
    one loop after another, or several at once, may use it.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        connector: str | None = None,
        connector_config: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        """Load the model; blocks until it can serve. Arguments and errors as for `LLM`."""
        self.config, handoff, plan, seed = read_config("AsyncLLM", model, connector, connector_config, **fields)
        self._requests = RequestMaker(self.config, seed)
        self._engine = EngineThread(self.config, handoff, plan)
        self._requests.max_len = self._engine.card.max_model_len
        self._stop = weakref.finalize(self, self._engine.stop)
        self._streams: dict[asyncio.AbstractEventLoop, Streams] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **unused: Any) -> Self:
        """Make an AsyncLLM with these arguments. Raises ConfigError."""
        known_arguments("from_engine_args", unused)
        return cls(**vars(engine_args))

    def shutdown(self) -> None:
        """Stop the engine: requests in flight end with RequestAborted. Blocks for the current step and for saves.

        Idempotent. `async with` does not block the event loop in the meantime.
        """
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._requests.tokenizer

    @property
    def card(self) -> EngineCard:
        """What peers need to know to read this engine's KV; see `set_peers`."""
        return self._engine.card

    def set_peers(self, cards: Sequence[EngineCard]) -> None:
        """Set the peers, as in `LLM`."""
        self._engine.send(Peers(list(cards)))

    async def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the methods that transformers has."""
        return self._requests.get_tokenizer()

    async def check_health(self) -> None:
        """Raise EngineUnavailable if the engine no longer accepts requests."""
        if self._engine.ended is not None:
            raise EngineUnavailable(self._engine.ended.reason)

    async def reset_prefix_cache(self) -> None:
        """Forget the KV that no request uses, after all requests so far."""
        self._engine.send(FORGET)

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters of `generate`: the model's, from its generation_config.json, or else vLLM's."""
        return self._requests.default_params()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **unused: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. The last output is `finished`.

        Tokens that arrive faster than they are taken are combined: an output has everything new. Cancelling the
        iterating task, or closing the generator, ends the request and frees its KV blocks.

        Args:
            prompt: a text, a list of token ids, a TextPrompt or a TokensPrompt.
            sampling_params: None: `get_default_sampling_params`. `output_kind` chooses the content of outputs: all
                choices so far (the default), only new parts, or everything once at the end.
            request_id: a name for `abort` and logs, unique among live requests; None: one is drawn.
            priority: lower is more urgent.
            unused: vLLM's other parameters, which may only have the value that changes nothing.

        Raises:
            InvalidRequest: a parameter out of its range, or a prompt that can never work.
            RequestFailed: this request failed.
            EngineDied: the engine died.
            RequestAborted: the engine was shut down.
            EngineUnavailable: the engine had failed or been shut down before.
        """
        known_arguments("generate", unused)
        make = functools.partial(self._requests.make, prompt, sampling_params, request_id, priority=priority)
        return self._stream(make)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation; arguments as in `generate` and `LLM.chat`."""
        asked = ChatOptions.of(options)

        def make() -> Generation:
            [conversation] = as_conversations([messages])
            return self._requests.make_chat(conversation, sampling_params, request_id, options=asked)

        return self._stream(make)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests of this event loop: each gets a last output with finish_reason "abort" in its choices.

        Unknown names, and those of requests that have ended, are ignored.
        """
        streams = self._streams_here()
        for name in [request_id] if isinstance(request_id, str) else request_id:
            streams.abort(name)

    async def _stream(self, make: Callable[[], Generation]) -> AsyncGenerator[RequestOutput, None]:
        generation = await asyncio.to_thread(make)  # a long prompt takes a while
        stream = self._streams_here().start(generation)
        try:
            while not stream.is_over:
                yield await stream.take()
        finally:
            stream.close()

    def _streams_here(self) -> Streams:
        """The streams of the running event loop."""
        loop = asyncio.get_running_loop()
        streams = self._streams.get(loop)
        if streams is None:
            for other in list(self._streams):  # another thread's loop may be added in the meantime
                if other.is_closed():
                    self._streams.pop(other, None)
            streams = self._streams[loop] = Streams(self._engine, loop)
        return streams


AsyncLLMEngine = AsyncLLM
"""vLLM's other name."""
