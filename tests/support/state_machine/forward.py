"""What a world's engines compute with: a stand-in or a real model."""

from abc import ABC, abstractmethod

from pdkv.connectors.base import WorkerConnector
from pdkv.engine.block_pool import BlockPool
from pdkv.engine.executor import Executor
from pdkv.wire.messages import KVLayout

NUM_LENGTHS = 13
NUM_FAMILIES = 3


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
        self, layout: KVLayout, num_blocks: int, *, max_num_seqs: int, worker: WorkerConnector
    ) -> Executor:
        """The executor of a new engine, with its pool registered at `worker`."""

    def watch(self, executor: Executor, blocks: BlockPool) -> None:
        """Let the executor check its writes against who owns what."""

    @abstractmethod
    def prompt(self, family: int, length: int, *, changed: bool) -> list[int]:
        """Prompts of a family are prefixes of each other but for the last token of a changed one.

        Args:
            family: in [0, NUM_FAMILIES).
            length: in [1, NUM_LENGTHS]: longer with the number.
        """

    @abstractmethod
    def expected(self, prompt: list[int], num_output: int) -> list[int]:
        """What an engine without any cache, block or peer says."""
