"""pdkv: disaggregated prefill/decode serving for large language models, with pluggable KV connectors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdkv.version import VERSION as __version__

if TYPE_CHECKING:
    from pdkv.async_llm import AsyncLLM
    from pdkv.llm import LLM
    from pdkv.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "AsyncLLM", "RequestOutputKind", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "pdkv.llm",
    "AsyncLLM": "pdkv.async_llm",
    "SamplingParams": "pdkv.sampling_params",
    "RequestOutputKind": "pdkv.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the offline API on first use: `import pdkv` stays free of torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'pdkv' has no attribute {name!r}")
