"""The forward pass of pdkv.testing on as small blocks as its arithmetic allows, for schedules."""

from collections.abc import Sequence
from typing import Any

from held_grammars import HeldStore

from pdkv.connectors.base import WorkerConnector
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.proposers.base import TokenProposer
from pdkv.engine.worker.executor import Executor
from pdkv.testing.standin import NUM_LAYERS, VOCAB_SIZE, StandInExecutor, chain_value, expected_tokens
from pdkv.wire.kv import KVGroup, KVLayout
from state_machine.forward import Forward


class StandIn(Forward):
    """The hash of every KV byte, on as small blocks as the arithmetic allows.

    `groups`: of its layers; none: one, which sees all tokens.
    """

    block_sizes = (2, 4, 3)
    vocab_size = VOCAB_SIZE
    eos = frozenset(range(30))
    max_model_len = 20

    def __init__(self, groups: tuple[KVGroup, ...] = ()) -> None:
        self._groups = groups

    def layout(self, block_size: int) -> KVLayout:
        num_layers = len(self._groups[0].layers) if self._groups else NUM_LAYERS
        return KVLayout(num_layers, 1, 1, block_size, "int64", 8, groups=self._groups)

    def make_executor(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        worker: WorkerConnector,
        proposer: TokenProposer | None = None,
        grammars: HeldStore | None = None,
    ) -> StandInExecutor:
        fields = {"max_num_seqs": max_num_seqs, "proposer": proposer, "grammars": grammars}
        return StandInExecutor(num_blocks, layout, worker, **fields)  # type: ignore[arg-type]

    def watch(self, executor: Executor, blocks: BlockPool) -> None:
        assert isinstance(executor, StandInExecutor)
        executor.pool.blocks = blocks

    def check_block(self, content: Any, tokens: Sequence[int], block_size: int) -> None:
        chain: list[int] = []
        for token_id in tokens:
            chain.append(chain_value(chain[-1] if chain else 0, token_id))
        for layer, (group, index) in enumerate(self.layout(block_size).places):
            if not group:  # those of others are found with it, and are not told
                right = [-value if layer else value for value in chain[-block_size:]]
                assert content[index].tolist() == right, f"a block of {tokens} holds other KV"

    def prompt(self, family: int, length: int, *, changed: bool) -> list[int]:
        prompt = [100 + 50 * family + i for i in range(length)]
        if changed:
            prompt[-1] += 17
        return prompt

    def expected(self, prompt: list[int], num_output: int) -> list[int]:
        layout = self.layout(1)
        return expected_tokens(prompt, num_output, [layout.windows[group] for group, _ in layout.places])
