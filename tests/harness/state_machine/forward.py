"""What a world's engines compute with: a stand-in or a real model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from held_grammars import HeldStore
from random_proposer import RandomProposer

from pdkv.connectors.base import WorkerConnector
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.plan import NewRequest
from pdkv.engine.proposers.base import Proposer
from pdkv.engine.worker.executor import Executor
from pdkv.wire.kv import KVLayout

NUM_LENGTHS = 13
NUM_FAMILIES = 3
MAX_OUTPUT = 7


class Forward(ABC):
    """A forward pass and the prompts that suit it. Shared by all engines of any number of worlds."""

    block_sizes: tuple[int, int, int]
    vocab_size: int
    eos: frozenset[int]
    max_model_len: int
    scale: int = 1  # tokens that take the place of one of the stand-in's in limits

    @abstractmethod
    def layout(self, block_size: int) -> KVLayout:
        """Of one engine's pool."""

    @abstractmethod
    def make_executor(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        worker: WorkerConnector,
        proposer: Any = None,
        grammars: HeldStore | None = None,
    ) -> Executor:
        """The executor of a new engine, with its pool registered at `worker`. `grammars` makes its masks."""

    def watch(self, executor: Executor, blocks: BlockPool) -> None:
        """Let the executor check its writes against who owns what."""

    def check_block(self, content: Any, tokens: Sequence[int], block_size: int) -> None:
        """Raise AssertionError where a block's KV is not that of the last `block_size` of these tokens."""

    @abstractmethod
    def prompt(self, family: int, length: int, *, changed: bool) -> list[int]:
        """Prompts of a family are prefixes of each other but for the last token of a changed one.

        Args:
            family: in [0, NUM_FAMILIES).
            length: in [1, NUM_LENGTHS]: longer with the number.
        """

    def proposer(self, num_tokens: int, seed: int) -> Proposer | None:
        """One that is right more often than not."""
        if not num_tokens:
            return None
        return RandomProposer(num_tokens, self._foresee, vocab_size=self.vocab_size, seed=seed)

    def _foresee(self, request: NewRequest) -> list[int]:
        prompt = tuple(request.prompt_token_ids)
        if prompt not in self._foreseen:
            self._foreseen[prompt] = self.expected(request.prompt_token_ids, MAX_OUTPUT)
        return self._foreseen[prompt]

    @cached_property
    def _foreseen(self) -> dict[tuple[int, ...], list[int]]:
        return {}

    @abstractmethod
    def expected(self, prompt: list[int], num_output: int) -> list[int]:
        """What an engine without any cache, block or peer says."""
