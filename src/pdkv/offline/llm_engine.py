"""One engine driven request by request: the basis of `LLM`, and vLLM's `LLMEngine` for programs with their own loop."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

from tqdm import tqdm

from pdkv.base.vllm_api import ABSENT, known_arguments
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.errors import EngineUnavailable, InvalidRequest
from pdkv.offline.arguments import EngineArgs
from pdkv.offline.engine import FORGET, LocalEngine, read_config
from pdkv.offline.generation import Generation, InFlight
from pdkv.offline.metrics import Metric, read_metrics
from pdkv.offline.model_tokenizer import ModelTokenizer
from pdkv.offline.outputs import RequestOutput
from pdkv.offline.requests import Prompt, RequestMaker
from pdkv.sampling.params import SamplingParams, as_type
from pdkv.text import Tokenizer


class LLMEngine:
    """Not thread-safe. Computes in `step`, on the caller's thread."""

    def __init__(
        self,
        config: EngineConfig,
        handoff: HandoffConfig | None = None,
        connector: ConnectorPlan | None = None,
        seed: int | None = None,
    ) -> None:
        """Load the model. Raises ConfigError."""
        self.config = config
        self._requests = RequestMaker(config, seed)
        self._engine = LocalEngine(config, handoff, connector)
        self._requests.max_len = self._engine.core.card.max_model_len
        self._in_flight = InFlight(self._engine.send)
        self._generations: dict[str, Generation] = {}  # of `add_request`, until `step` returns their last output
        self._news: dict[str, None] = {}  # names of requests for which `step` has something to return

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **unused: Any) -> Self:
        """Make an engine as `LLM` does with these arguments. Raises ConfigError."""
        known_arguments("from_engine_args", unused)
        return cls(*read_config("LLMEngine", **vars(engine_args)))

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError which, for vLLM's methods, says what to do instead."""
        instead = f": {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{instead}")

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        **unused: Any,
    ) -> None:
        """Add a prompt; `step` returns its outputs.

        Args:
            params: None: the model's defaults. `output_kind` chooses the content of outputs.
            arrival_time: Unix time for its metrics; None: now.
            priority: lower is more urgent.

        Raises:
            InvalidRequest: the request can never work, or another live request has its name.
            EngineUnavailable: the engine failed before, or was closed.
        """
        known_arguments("add_request", unused)
        generation = self._requests.make(prompt, params, request_id, priority=priority)
        if generation.request_id in self._generations:
            raise InvalidRequest(f"request_id must be unique: {request_id!r} is running", param="request_id")
        generation.metrics.arrival_time = (
            as_type(arrival_time, float | None, "arrival_time") or generation.metrics.arrival_time
        )
        with self._engine.interrupts:
            self._in_flight.start(generation)
            self._generations[generation.request_id] = generation

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has outputs to return."""
        return bool(self._generations)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that have not returned their last output."""
        return len(self._generations)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests: they have no further output. Unknown names are ignored."""
        with self._engine.interrupts:
            for name in [request_ids] if isinstance(request_ids, str) else request_ids:
                self._news.pop(name, None)
                generation = self._generations.pop(name, None)
                if generation is not None:
                    self._in_flight.give_up(generation)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the new outputs of requests added by `add_request`; empty if there are none.

        Raises:
            RequestFailed, InvalidRequest: one request, its `request_id`, failed and is gone; the others continue with
                the next call.
            EngineUnavailable: an earlier step failed with its own error, or the engine was closed.
            KeyboardInterrupt: Ctrl-C, between two steps. No output is lost.
        """
        if self._generations and not self._news:
            with self._engine.interrupts:
                self._advance()
                self._settle()
        outputs: list[RequestOutput] = []
        for name in list(self._news):
            generation = self._generations[name]
            if generation.error is not None and outputs:
                break  # it is raised by the next call
            del self._news[name]
            if generation.error is not None or generation.finished:
                del self._generations[name]
            if generation.error is not None:
                raise generation.error
            if generation.has_news:
                outputs.append(generation.take())
        return outputs

    def _advance(self) -> list[Generation]:
        """Run one step. Returns the requests with new output."""
        found = [self._in_flight.receive(message) for message in self._engine.step()]
        for generation in found:
            if generation is not None and self._generations.get(generation.request_id) is generation:
                self._news[generation.request_id] = None
        return [generation for generation in found if generation is not None]

    def _settle(self) -> None:
        """Wait for saves if nothing is left to compute."""
        if not len(self._in_flight):
            self._engine.settle()

    def _run(self, generations: Sequence[Generation], bar: "tqdm[Any]") -> None:
        """Run until all have ended. Raises the error of a failed request, or Ctrl-C: the others are then given up."""
        left = {id(generation): generation for generation in generations}
        with self._engine.interrupts:
            try:
                for generation in generations:
                    self._in_flight.start(generation)
                while left:
                    before = self._in_flight.num_ended
                    for generation in self._advance():
                        if id(generation) in left and generation.error is not None:
                            raise generation.error
                        if generation.finished:
                            left.pop(id(generation), None)
                    bar.update(self._in_flight.num_ended - before)
            finally:
                with suppress(EngineUnavailable):  # they ended with it
                    for generation in left.values():
                        self._in_flight.give_up(generation)
            self._settle()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._requests.tokenizer

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the methods that transformers has."""
        return self._requests.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Counts since the start, under vLLM's names."""
        load = self._engine.core.reports.make_load()
        return read_metrics(load, self._in_flight.num_tokens, self._in_flight.num_ended)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV that no request uses. Returns whether nothing is left."""
        with self._engine.interrupts:
            self._engine.send(FORGET)
        return self._engine.core.scheduler.kv.pool.counts().cached == 0

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._engine.close()
