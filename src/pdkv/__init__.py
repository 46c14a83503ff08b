"""pdkv: disaggregated prefill/decode serving for large language models, with pluggable KV connectors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdkv.base.version import VERSION as __version__
    from pdkv.offline.arguments import AsyncEngineArgs as AsyncEngineArgs
    from pdkv.offline.arguments import EngineArgs as EngineArgs
    from pdkv.offline.async_llm import AsyncLLM as AsyncLLM
    from pdkv.offline.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from pdkv.offline.beams import BeamSearchParams as BeamSearchParams
    from pdkv.offline.llm import LLM as LLM
    from pdkv.offline.llm_engine import LLMEngine as LLMEngine
    from pdkv.offline.outputs import CompletionOutput as CompletionOutput
    from pdkv.offline.outputs import RequestOutput as RequestOutput
    from pdkv.offline.requests import TextPrompt as TextPrompt
    from pdkv.offline.requests import TokensPrompt as TokensPrompt
    from pdkv.sampling.params import RequestOutputKind as RequestOutputKind
    from pdkv.sampling.params import SamplingParams as SamplingParams
    from pdkv.sampling.shape import GuidedDecodingParams as GuidedDecodingParams
    from pdkv.sampling.shape import StructuredOutputsParams as StructuredOutputsParams

_MODULES = {
    "pdkv.offline.arguments": "AsyncEngineArgs EngineArgs FlexibleArgumentParser",
    "pdkv.offline.async_llm": "AsyncLLM AsyncLLMEngine",
    "pdkv.offline.beams": "BeamSearchParams",
    "pdkv.offline.llm": "LLM",
    "pdkv.offline.llm_engine": "LLMEngine",
    "pdkv.offline.metrics": "Counter Gauge Histogram Vector",
    "pdkv.offline.outputs": "CompletionOutput Logprob RequestOutput",
    "pdkv.offline.requests": "TextPrompt TokensPrompt",
    "pdkv.sampling.params": "RequestOutputKind SamplingParams",
    "pdkv.sampling.shape": "GuidedDecodingParams StructuredOutputsParams",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import the offline API on first use: `import pdkv` stays free of torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":  # so that `pd` gets to its first line, which takes Ctrl-C, at once
        return import_module("pdkv.base.version").VERSION
    from pdkv.base.vllm_api import ABSENT

    if name in ABSENT:  # an AttributeError would lose the text on its way through `from pdkv import`
        raise ImportError(f"pdkv has no {name}: {ABSENT[name]}")
    raise AttributeError(f"module 'pdkv' has no attribute {name!r}")
