"""The draw of a seeded token, written a second time: plain Python over float64, token by token.

What a last digit of the logits could change is not clear: a probability within MARGIN of a boundary, a weight whose
ratio to a filter's bound is within TIE of 1.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import TIE, Choice

MARGIN = 1e-5
_WORD = 0xFFFFFFFF


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon, Moraes, Dror, Shaw (SC'11), on Python's integers."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ low, second & _WORD, (first >> 32) ^ d ^ high, first & _WORD
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return a, b, c, d


def uniform(seed: int, choice: int, position: int) -> float:
    """The uniform in [0, 1) of one output token: 53 bits of the first two words."""
    words = philox4x32_10((position & _WORD, position >> 32, choice, 0), (seed & _WORD, (seed % (1 << 64)) >> 32))
    return ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)) / (1 << 53)


@dataclass(frozen=True, kw_only=True)
class SeededChooser:
    """Sampling parameters as a request body names them; a `Chooser`."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    choice: int = 0

    def body(self) -> dict[str, Any]:
        """The fields of a request."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "choice"}
        return {**fields, "logit_bias": {str(k): v for k, v in self.logit_bias.items()}}

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int], num_prompt: int) -> Choice:
        scaled = self._scale(logits.double().tolist(), tokens, num_prompt)
        best = max(scaled)
        weights = {i: math.exp(value - best) for i, value in enumerate(scaled)}
        kept, is_clear = self._filter(weights)
        total = sum(kept.values())
        target = uniform(self.seed, self.choice, len(tokens) - num_prompt)
        cumulated, chosen = 0.0, -1
        for token_id in sorted(kept):
            if abs(cumulated / total - target) < MARGIN and cumulated > 0.0:
                is_clear = False
            cumulated += kept[token_id]
            if chosen < 0 and target < cumulated / total:
                chosen = token_id
        return Choice(chosen, is_clear)

    def _scale(self, values: list[float], tokens: Sequence[int], num_prompt: int) -> list[float]:
        """Bias, penalties and temperature."""
        for token_id, bias in self.logit_bias.items():
            values[token_id] += bias
        for token_id in set(tokens):
            value = values[token_id]
            values[token_id] = value / self.repetition_penalty if value > 0 else value * self.repetition_penalty
        for token_id, count in Counter(tokens[num_prompt:]).items():
            values[token_id] -= self.frequency_penalty * count + self.presence_penalty
        return [value / self.temperature for value in values]

    def _filter(self, weights: dict[int, float]) -> tuple[dict[int, float], bool]:
        """Min-p, top-k and top-p over weights relative to the likeliest token's; and whether that was clear."""
        is_clear = self.min_p == 0.0 or all(abs(weight / self.min_p - 1) > TIE for weight in weights.values())
        ranked = sorted((w, -i) for i, w in weights.items() if w >= self.min_p)[::-1]
        if 0 < self.top_k < len(ranked):
            is_clear = is_clear and ranked[self.top_k - 1][0] / max(ranked[self.top_k][0], 1e-300) > 1 + TIE
            ranked = ranked[: self.top_k]
        if self.top_p < 1.0:
            total, before = sum(w for w, _ in ranked), 0.0
            nucleus = []
            for weight, negative_id in ranked:
                is_clear = is_clear and abs(before / total - self.top_p) > MARGIN
                if before < self.top_p * total:
                    nucleus.append((weight, negative_id))
                before += weight
            ranked = nucleus
        return {-negative_id: weight for weight, negative_id in ranked}, is_clear
