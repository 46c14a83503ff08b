"""A proposer that is right with some probability, and proposes anything else otherwise."""

import random
from collections.abc import Callable, Sequence

from pdkv.engine.plan import NewRequest
from pdkv.engine.proposers.base import IntArray, ProposerOptions, TokenProposer

Foresight = Callable[[NewRequest], Sequence[int]]
"""The whole output that a request will have, as far as it is known."""


class RandomProposer(TokenProposer):
    """Proposes 0 to `num_tokens` tokens. Two of the same seed that are asked the same propose the same."""

    def __init__(
        self, num_tokens: int, foresee: Foresight, *, vocab_size: int, seed: int = 0, chance: float = 0.7
    ) -> None:
        """`chance`: of each token to be right."""
        super().__init__(ProposerOptions(num_speculative_tokens=num_tokens, adaptive=False))
        self.num_right = 0  # guesses, those behind a wrong one included
        self.num_wrong = 0
        self._foresee = foresee
        self._vocab_size = vocab_size
        self._chance = chance
        self._random = random.Random(seed)

    def guess(self, request: NewRequest, known: IntArray, most: int) -> list[int]:
        start = len(known) - len(request.prompt_token_ids)
        coming = self._foresee(request)[start : start + self._random.randint(0, self.num_tokens)]
        guesses = []
        for token_id in coming:
            if self._random.random() < self._chance:
                guesses.append(token_id)
            else:
                guesses.append((token_id + self._random.randrange(1, self._vocab_size)) % self._vocab_size)
        self.num_right += sum(guess == token_id for guess, token_id in zip(guesses, coming, strict=True))
        self.num_wrong += sum(guess != token_id for guess, token_id in zip(guesses, coming, strict=True))
        return guesses
