"""pdkv: disaggregated prefill/decode serving for large language models, with pluggable KV connectors."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdkv.llm import LLM
    from pdkv.sampling_params import SamplingParams

try:
    __version__ = version("pdkv")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the offline API on first use: `import pdkv` stays free of torch."""
    if name == "LLM":
        from pdkv.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pdkv.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pdkv' has no attribute {name!r}")
