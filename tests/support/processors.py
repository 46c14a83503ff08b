"""Logits processors for tests: the documentation's example, and one for each way to fail."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import Choice, Chooser, greedy

from pdkv.logits_processors import Arguments, LogitsProcessor, ModelInfo

PAGE = Path(__file__).parents[2] / "docs" / "logits-processors.md"


def example_source() -> str:
    """The class that the page shows."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(source)


def example_module() -> ModuleType:
    """A module with the page's class, `NoRepeat`."""
    module = ModuleType("no_repeat_example")
    exec(example_source(), module.__dict__)
    return module


def without_repeats(window: int) -> Chooser:
    """What the example does to greedy draws, for transformers."""

    def choose(logits: torch.Tensor, tokens: Any, num_prompt: int) -> Choice:
        logits = logits.clone()
        logits[list(tokens[num_prompt:])[-window:]] = -torch.inf
        return greedy(logits, tokens, num_prompt)

    return choose


class Faulty(LogitsProcessor):
    """Behind `after` tokens of output it does what `how` says."""

    def __init__(self, arguments: Arguments, model: ModelInfo) -> None:
        self._how, self._after = arguments["how"], arguments.get("after", 0)
        if self._how == "refuse":
            raise ValueError("not today")
        if self._how == "break":
            raise OSError("no such file")

    def is_argmax_invariant(self) -> bool:
        return bool(self._how == "invariant")

    def apply(self, logits: torch.Tensor, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> torch.Tensor:
        if len(output) < self._after:
            return logits
        results: Mapping[str, Any] = {
            "shape": logits[:-1],
            "dtype": logits.long(),
            "nothing": None,
            "nan": logits * float("nan"),
            "inf": logits + float("inf"),
            "forbid": logits - float("inf"),
            "allow": torch.zeros_like(logits),
            "invariant": logits - 1e9,
        }
        if self._how == "raise":
            logits[:] = 0.0
            raise RuntimeError("out of luck")
        if self._how == "write":
            output[0] = 1
        return results[self._how]  # type: ignore[no-any-return]
