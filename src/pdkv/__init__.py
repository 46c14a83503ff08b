"""pdkv: disaggregated prefill/decode serving for large language models, with pluggable KV connectors."""

from typing import TYPE_CHECKING, Any

from pdkv.version import VERSION as __version__

if TYPE_CHECKING:
    from pdkv.llm import LLM
    from pdkv.sampling_params import SamplingParams

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
