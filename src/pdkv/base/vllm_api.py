"""Names of vLLM's offline API that have no counterpart here, and what to do instead; docs/from-vllm.md shows them."""

from collections.abc import Iterable, Mapping
from typing import Any

from pdkv.base.limits import clip
from pdkv.base.options import did_you_mean
from pdkv.errors import InvalidRequest

_ADAPTER = "adapters are not served: merge it into the weights and load the merged model"

# fmt: off
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("classify", "reward"), "no classifier is served: LLM.embed and LLM.score are what there is"),
    "encode": "use LLM.embed, or LLM.score",
    "PoolingParams": "LLM.embed has arguments of its own: dimensions, normalize and pooling",
    **dict.fromkeys(("sleep", "wake_up"), "close() gives the memory back, and a new LLM takes it"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the engine runs no code of callers; a logits processor does"),
    **dict.fromkeys(("start_profile", "stop_profile"), "run the program under a profiler, such as torch.profiler"),
    "LoRARequest": _ADAPTER,
    "PromptAdapterRequest": "put what it says into the prompt",
    "KVTransferConfig": "LLM(connector=..., connector_config=...) says how KV is shared",
    "CompilationConfig": "nothing is compiled; LLM(enforce_eager=True) turns CUDA graphs off",
    "ModelRegistry": "docs/models.md lists the architectures",
}
"""Methods and classes."""

ABSENT_ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "lora_request": (None, _ADAPTER),
    "tokenization_kwargs": ({}, "SamplingParams(truncate_prompt_tokens=N) truncates; token ids are taken as they are"),
    "mm_processor_kwargs": ({}, "prompts are text"),
    "prompt_adapter_request": (None, "put what it says into the prompt"),
    "guided_options_request": (None, "use SamplingParams(structured_outputs=StructuredOutputsParams(...))"),
    "trace_headers": ({}, "traces are made by `pd launch`"),
    "pooling_params": (None, "dimensions, normalize and pooling are arguments"),
    "data_parallel_rank": (None, "there is one engine; `pd launch` spreads requests over several"),
    "concurrency_limit": (None, "LLM(max_num_seqs=N) bounds what runs at once"),
    "use_beam_search": (False, "use LLM.beam_search"),
    "length_penalty": (1.0, "it is part of BeamSearchParams, for LLM.beam_search"),
    "early_stopping": (False, "LLM.beam_search ends when all beams have"),
    "flat_logprobs": (False, "logprobs are a dict per token"),
    "logprob_token_ids": (None, "logprobs=N gives the N most likely tokens; allowed_token_ids says which may come"),
    "thinking_token_budget": (-1, "max_tokens bounds thoughts and answer together"),
    "repetition_detection": (None, "repetition_penalty makes repetitions less likely"),
}
"""Arguments of calls and of SamplingParams: the only accepted value besides None, and what to do instead."""
# fmt: on


def known_arguments(owner: str, given: Mapping[str, Any], known: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments in `known`. Raises InvalidRequest for others, unless they are absent or have the accepted value."""
    known = {*known}
    for name in given.keys() - known:
        if name not in ABSENT_ARGUMENTS:
            raise InvalidRequest(f"{owner} has no {name!r}{did_you_mean(name, known)}", param=name)
        neutral, instead = ABSENT_ARGUMENTS[name]
        values = given[name] if isinstance(given[name], list) else [given[name]]  # of each prompt
        if any(value not in (None, neutral) for value in values):
            raise InvalidRequest(f"{owner} takes no {name}={clip(repr(given[name]))}: {instead}", param=name)
    return {name: value for name, value in given.items() if name in known}
