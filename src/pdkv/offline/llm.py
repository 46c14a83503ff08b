"""The offline API: `LLM(model).generate(prompts, params)`, one engine in this process and no server."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from pdkv.base.vllm_api import known_arguments
from pdkv.config import DEFAULT_MODEL, EngineConfig, PoolingKind
from pdkv.errors import InvalidRequest
from pdkv.models.pooling_config import read_pooling
from pdkv.offline.beams import BeamSearchOutput, BeamSearchParams, search
from pdkv.offline.chat_tools import ChatOptions
from pdkv.offline.engine import read_config
from pdkv.offline.generation import Generation
from pdkv.offline.llm_engine import LLMEngine
from pdkv.offline.outputs import EmbeddingOutput, PoolingRequestOutput, RequestOutput, ScoringOutput
from pdkv.offline.requests import Conversation, Prompt, as_conversations, as_params, as_prompts
from pdkv.sampling.params import SamplingParams, as_type
from pdkv.text.pooled import INSTRUCTION, embedding_of, judged_text, judging, score_of
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Peers

Progress = bool | Callable[..., Any]
"""Whether a progress bar is shown, or a function that makes one as `tqdm` does."""


class LLM(LLMEngine):
    """One engine in this process. Not thread-safe. A context manager; `close` releases its memory."""

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
            connector: a content-addressed one, such as "shared_storage". KV that this LLM computes is saved, and KV of
                a prompt's first tokens that another LLM or an engine has saved is loaded instead of computed.
            connector_config: the connector's options, such as {"path": "/tmp/kv"}.
            fields: fields of EngineConfig, such as dtype="float32" or max_num_seqs=64, also by vLLM's names
                (docs/from-vllm.md); and seed, from which the seeds of requests without one are drawn.

        Raises:
            ConfigError: a wrong field, model directory or connector option.
        """
        super().__init__(*read_config("LLM", model, connector, connector_config, **fields))
        self._request_ids = itertools.count()

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Make an LLM from a finished configuration, without a connector."""
        llm = cls.__new__(cls)
        LLMEngine.__init__(llm, config)
        llm._request_ids = itertools.count()
        return llm

    @property
    def llm_engine(self) -> LLMEngine:
        """This engine itself, which can also be driven by `add_request` and `step`."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def card(self) -> EngineCard:
        """What other LLMs need to know to read this LLM's KV; see `set_peers`."""
        return self._engine.core.card

    def set_peers(self, cards: Sequence[EngineCard]) -> None:
        """Set the peers of a connector that reads other engines' memory (shared_memory): exactly these LLMs."""
        with self._engine.interrupts:
            self._engine.send(Peers(list(cards)))

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters of `generate`: the model's, from its generation_config.json, or else vLLM's."""
        return self._requests.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        priority: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in the same order.

        Args:
            prompts: a text, a list of token ids, a TextPrompt or TokensPrompt, or a list of such.
            sampling_params: for all prompts, or one per prompt; None: `get_default_sampling_params`.
            use_tqdm: whether to show a progress bar on stderr, or a function that makes one.
            priority: one per prompt; lower is more urgent.
            prompt_token_ids: vLLM's older name of `prompts`.
            unused: vLLM's other parameters, which may only have the value that changes nothing.

        With a connector, all computed KV has been saved when this returns, or its save has failed.

        Raises:
            InvalidRequest: a parameter out of its range, or a prompt that can never work.
            RequestFailed: the engine failed on one of the prompts; the others are given up.
            EngineUnavailable: an earlier step failed with its own error, or the LLM was closed.
            KeyboardInterrupt: Ctrl-C, between two steps: all prompts are given up, and the LLM can be used again.
        """
        known_arguments("generate", unused)
        given = as_prompts(_one_of(prompts, prompt_token_ids))
        return self._answer(self._requests.make, given, sampling_params, use_tqdm, priority)

    def _answer(
        self,
        make: Callable[..., Generation],
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: Progress,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of prompts, from which `make` makes generations."""
        done = self._complete(make, prompts, params, use_tqdm, priority)
        return [generation.output() for generation in done]

    def _complete(
        self,
        make: Callable[..., Generation],
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: Progress,
        priority: Sequence[int] | None = None,
    ) -> list[Generation]:
        """The generations, which have ended."""
        if not callable(use_tqdm):
            as_type(use_tqdm, bool, "use_tqdm")
        priorities = [0] * len(prompts) if priority is None else as_type(priority, list[int], "priority")
        if len(priorities) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts need as many priorities, got {priority}", param="priority")
        generations = [
            make(prompt, p, str(next(self._request_ids)), priority=priority)
            for prompt, p, priority in zip(prompts, as_params(params, len(prompts)), priorities, strict=True)
        ]
        total = sum(len(generation.choices) for generation in generations)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=total, desc="generate", unit="seq", disable=not use_tqdm) as bar:
            self._run(generations, bar)
        return generations

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations: `generate` with the prompts that the model's chat template makes of them.

        Args:
            messages: one conversation, a list of {"role": …, "content": text}, or a list of conversations.
            sampling_params, use_tqdm: as in `generate`.
            options: the fields of ChatOptions, such as tools or chat_template; and vLLM's other parameters, which may
                only have the value that changes nothing.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages; and the errors of `generate`.
        """
        make = functools.partial(self._requests.make_chat, options=ChatOptions.of(options))
        return self._answer(make, as_conversations(messages), sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        dimensions: int | None = None,
        normalize: bool = True,
        pooling: PoolingKind = "auto",
        **unused: Any,
    ) -> list[PoolingRequestOutput]:
        """Embed prompts (docs/embeddings.md); the results are in the same order.

        Args:
            prompts, use_tqdm, unused: as in `generate`.
            dimensions: the number of those that are kept, of a model that is trained for it.
            normalize: whether embeddings have the length 1.
            pooling: the last token's state or the mean of all; auto: as the model's files say.

        Raises:
            NonFiniteLogits: the model computed NaN or infinity; and the errors of `generate`.
        """
        known_arguments("embed", unused)
        rules = read_pooling(self.config.model, as_type(pooling, PoolingKind, "pooling"))
        rules.check_dimensions(as_type(dimensions, int | None, "dimensions"))
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=rules.checked_kind())
        given = as_prompts(prompts)
        done = self._complete(self._requests.make, given, params, use_tqdm)
        embeddings = [embedding_of(g.choices[0].pooled, dimensions=dimensions, normalize=normalize) for g in done]
        return [_pooled(g, EmbeddingOutput(numbers.tolist())) for g, numbers in zip(done, embeddings, strict=True)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: Progress = True,
        instruction: str = INSTRUCTION,
        **unused: Any,
    ) -> list[PoolingRequestOutput]:
        """How well documents fit queries, by a model that answers yes or no as Qwen3-Reranker does.

        Args:
            data_1: one query for all documents, or one for each.
            data_2: the documents.
            use_tqdm, unused: as in `generate`.

        Raises:
            InvalidRequest: the model has no chat template, or no token for yes or no; and the errors of `embed`.
        """
        known_arguments("score", unused)
        given = {"data_1": data_1, "data_2": data_2}.items()
        queries, documents = (
            as_type([data] if isinstance(data, str) else data, list[str], name) for name, data in given
        )
        queries = queries * len(documents) if len(queries) == 1 else queries
        if len(queries) != len(documents):
            raise InvalidRequest(f"{len(documents)} documents need 1 or as many queries, got {len(queries)}")
        pairs, tokenizer = zip(queries, documents, strict=True), self.tokenizer
        texts = [judged_text(tokenizer, query, document, instruction) for query, document in pairs]
        prompts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]
        done = self._complete(self._requests.make, prompts, judging(tokenizer), use_tqdm)
        return [_pooled(g, ScoringOutput(score_of(g.choices[0].pooled))) for g in done]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: Progress = False, **unused: Any
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts, by vLLM's beam search; the results are in the same order.

        Raises:
            InvalidRequest: a wrong parameter or prompt; and the errors of `generate`.
        """
        known_arguments("beam_search", unused)
        given = [self._requests.as_tokens(prompt) for prompt in as_prompts(prompts)]
        generate = functools.partial(self.generate, use_tqdm=use_tqdm)
        return search(given, params, self._requests, generate)


def _pooled(generation: Generation, outputs: EmbeddingOutput | ScoringOutput) -> PoolingRequestOutput:
    output = generation.output()
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def _one_of(prompts: Any, prompt_token_ids: Any) -> Any:
    """Return the one that is given. Raises InvalidRequest if both or neither are."""
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequest("exactly one of prompts and prompt_token_ids must be given", param="prompts")
    return prompt_token_ids if prompts is None else prompts
