"""The interface for authors of logits processors (docs/logits-processors.md)."""

from pdkv.sampling.logits_processors import Arguments, LogitsProcessor, ModelInfo

__all__ = ["Arguments", "LogitsProcessor", "ModelInfo"]
