"""pdkv: disaggregated prefill/decode serving for large language models, with pluggable KV connectors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdkv.base.version import VERSION as __version__

if TYPE_CHECKING:
    from pdkv.offline.async_llm import AsyncLLM
    from pdkv.offline.llm import LLM
    from pdkv.sampling.params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "AsyncLLM", "RequestOutputKind", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "pdkv.offline.llm",
    "AsyncLLM": "pdkv.offline.async_llm",
    "SamplingParams": "pdkv.sampling.params",
    "RequestOutputKind": "pdkv.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import the offline API on first use: `import pdkv` stays free of torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'pdkv' has no attribute {name!r}")
