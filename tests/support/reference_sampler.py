"""The draw of a seeded token, written a second time: plain Python over float64, token by token.

What a last digit of the logits could change is not clear: two tokens that arrive within MARGIN, a probability within
MARGIN of a boundary, a weight whose ratio to a filter's bound is within TIE of 1.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from oracle import TIE, Choice

MARGIN = 1e-5
_WORD = 0xFFFFFFFF


@cache
def threefry4x32_13(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Threefry4x32-13 of Salmon, Moraes, Dror, Shaw (SC'11), on Python's integers.

    Its words are those of four tokens, and of that place in all prompts that have the same seed.
    """
    keys = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ 0x1BD11BDA]
    x = [(word + own) & _WORD for word, own in zip(counter, key, strict=True)]
    rotations = [(10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20)]
    for i in range(13):
        for at, by in zip((0, 2), rotations[i % 8], strict=True):
            other = (at + 1) if i % 2 == 0 else 3 - at
            x[at] = (x[at] + x[other]) & _WORD
            x[other] = ((x[other] << by | x[other] >> (32 - by)) & _WORD) ^ x[at]
        if i % 4 == 3:
            x = [(word + keys[(j + i // 4 + 1) % 5]) & _WORD for j, word in enumerate(x)]
            x[3] = (x[3] + i // 4 + 1) & _WORD
    return tuple(x)


def uniform(seed: int, choice: int, position: int, token: int) -> float:
    """The number in (0, 1) of one token at one place: 52 bits, and a half."""
    key = seed & _WORD, (seed % (1 << 64)) >> 32, choice, position
    counter = token // 64 * 16 + token % 16
    high, low = (threefry4x32_13((counter, level, 0, 0), key)[token // 16 % 4] for level in (0, 1))
    return ((high << 20 | low >> 12) + 0.5) / 2**52


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
        position = len(tokens) - num_prompt
        times = sorted((-math.log(uniform(self.seed, self.choice, position, i)) / w, i) for i, w in kept.items())
        first, second = times[0][0], times[1][0] if len(times) > 1 else math.inf
        return Choice(times[0][1], is_clear and second > first * (1 + MARGIN))

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
