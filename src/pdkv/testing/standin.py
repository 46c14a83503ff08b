"""A forward pass with a next token that is a hash of every KV byte that it reads: one wrong or missing byte changes the
text.

The KV of a token is a function of all tokens up to it, so that content from another prompt, another position or another
layer never fits.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.connectors.base import NO_TRANSFERS, WorkerConnector
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.plan import NewRequest, SampledTokens, ScheduledRequest, StepOutput, StepPlan
from pdkv.engine.proposers.base import TokenProposer
from pdkv.engine.worker.executor import NOTHING_ENDED, Ended, Executor
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.types import RequestKey

VOCAB_SIZE = 997
NUM_LAYERS = 2


def chain_value(previous: int, token_id: int) -> int:
    """Layer 0's KV of a token after a prefix with `previous` as its last KV."""
    return zlib.crc32(token_id.to_bytes(4, "little"), previous & 0xFFFFFFFF) + 1


def next_token(values: npt.NDArray[np.int64]) -> int:
    """The token that follows KV of shape (num_layers, num_tokens)."""
    return zlib.crc32(np.ascontiguousarray(values).tobytes()) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], num_output: int, windows: Sequence[int] = (0, 0)) -> list[int]:
    """The output of an engine without any cache, block or peer. `windows`: for each layer; 0: the layer attends to all
    tokens.
    """
    tokens = list(prompt)
    chain: list[int] = []
    for token_id in prompt:
        chain.append(chain_value(chain[-1] if chain else 0, token_id))
    for _ in range(num_output):
        values = np.array([chain, [-v for v in chain]], dtype=np.int64)
        for layer, window in enumerate(windows):
            values[layer, : max(len(chain) - window, 0) if window else 0] = 0
        tokens.append(next_token(values))
        chain.append(chain_value(chain[-1], tokens[-1]))
    return tokens[len(prompt) :]


class GuardedPool:
    """A KV pool that refuses violations of ownership: a write into a free block or into one with content."""

    def __init__(self, array: npt.NDArray[np.int64]) -> None:
        self.array = array
        self.blocks: BlockPool | None = None

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        for block_id in index if isinstance(index, list) else [index[0]]:
            self.check_writable(block_id)
        self.array[index] = value

    def check_writable(self, block_id: int) -> None:
        """Raise AssertionError for a block that must not be written."""
        assert self.blocks is not None
        assert self.blocks.is_held(block_id), f"write into free block {block_id}"
        assert not self.blocks.has_content(block_id), f"write into immutable block {block_id}"


class StandInExecutor(Executor):
    """Keeps its own copy of each request's tokens and block tables, as workers do.

    The pool has shape (num_blocks, layout.num_layers, block_size), int64. The model has NUM_LAYERS layers.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        worker: WorkerConnector | None,
        *,
        max_num_seqs: int | None = None,
        proposer: TokenProposer | None = None,
        grammars: Any = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.pool = GuardedPool(np.full((num_blocks, layout.num_layers, layout.block_size), -7, dtype=np.int64))
        self.block_size = layout.block_size
        self._places, self._windows = layout.places, layout.windows
        assert len(self._places) == NUM_LAYERS
        self.worker = worker
        self.proposer = proposer
        self.grammars = grammars
        self._held: set[RequestKey] = set()  # left out
        self._requests: dict[RequestKey, NewRequest] = {}
        self._drafts: dict[RequestKey, Sequence[int]] = {}
        self._tokens: dict[RequestKey, list[int]] = {}
        self._blocks: dict[RequestKey, list[list[int]]] = {}  # by group
        if worker is not None:
            worker.register_kv_caches(self.pool)  # type: ignore[arg-type]

    def execute(self, plan: StepPlan) -> StepOutput:
        for key in plan.ended:
            del self._tokens[key], self._blocks[key], self._requests[key]
            self._drafts.pop(key, None)
            self._held.discard(key)
            if self.grammars is not None and key in self.grammars.answers:
                self.grammars.end(key)
        self._held.difference_update(plan.resumed)
        for new in plan.new:
            self._requests[new.key] = new
            self._tokens[new.key] = new.prompt_token_ids + new.output_token_ids
            self._blocks[new.key] = [list(table) for table in new.block_ids]
            if new.grammar is not None and self.grammars is not None:
                self.grammars.open(new.key, new.grammar, new.output_token_ids, ())
        assert self.max_num_seqs is None or len(self._tokens) <= self.max_num_seqs, "the batch has no slot left"
        for share in plan.scheduled:
            for table, added in zip(self._blocks[share.key], share.new_block_ids, strict=False):
                table += added
        late = [share.key for share in plan.scheduled if share.samples and self._is_late(share.key)]
        self._held.update(late)
        sampled = self._forward(plan)
        transfers = self.worker.get_finished() if self.worker is not None else NO_TRANSFERS
        return StepOutput(plan.step_id, sampled, {}, transfers, late=late)

    def _is_late(self, key: RequestKey) -> bool:
        if key in self._held:
            return True
        has_grammar = self._requests[key].grammar is not None and self.grammars is not None
        return has_grammar and self.grammars.masks([key])[0] is None

    def take_finished(self) -> Ended:
        return Ended(self.worker.get_finished()) if self.worker is not None else NOTHING_ENDED

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        if self.worker is not None:
            self.worker.update_peers(added, removed)

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()

    def _forward(self, plan: StepPlan) -> dict[RequestKey, SampledTokens]:
        worker, meta = self.worker, plan.kv_meta
        hooks = worker is not None and meta is not None and meta.needs_layer_hooks
        if worker is not None and meta is not None:
            for transfer, direction in plan.cancels:
                worker.cancel(transfer, direction)
            worker.start_load_kv(meta)
        shares = [self._share(share) for share in plan.scheduled]
        for layer in range(NUM_LAYERS):
            if hooks:
                worker.wait_for_layer_load(layer)  # type: ignore[union-attr]
            for key, start, tokens in shares:
                self._write_layer(layer, key, start, tokens)
            if hooks:
                worker.save_kv_layer(layer, self.pool, meta)  # type: ignore[union-attr, arg-type]
        if worker is not None:
            worker.wait_for_save()
        drawing = [share for share in plan.scheduled if share.samples and share.key not in self._held]
        sampled = {share.key: SampledTokens(self._draw(share), None) for share in drawing}
        if self.proposer is not None:
            for key in sampled:
                known = np.array(self._tokens[key], np.int32)
                self._drafts[key] = self.proposer.guess(self._requests[key], known, self.proposer.num_tokens)
        return sampled

    def _share(self, share: ScheduledRequest) -> tuple[RequestKey, int, list[int]]:
        """The input to compute: the first position and the tokens."""
        tokens, start = self._tokens[share.key], share.num_computed
        count = share.num_scheduled - share.num_drafts
        if self.proposer is None or not share.samples:
            return share.key, start, tokens[start : start + count]
        start = len(tokens) - count
        return share.key, start, [*tokens[start:], *self._take_drafts(share)]

    def _take_drafts(self, share: ScheduledRequest) -> Sequence[int]:
        return self._drafts.get(share.key, ())[: share.num_drafts]

    def _draw(self, share: ScheduledRequest) -> list[int]:
        """The tokens after the known ones, and after the drafts as far as they are right."""
        tokens, drawn = self._tokens[share.key], list[int]()
        stop = len(tokens) if self.proposer is not None else share.num_computed + share.num_scheduled
        for guess in [*self._take_drafts(share), None]:
            drawn.append(next_token(self.read(self._blocks[share.key], stop + len(drawn))))
            if drawn[-1] != guess:
                break
        tokens += drawn
        return drawn

    def read(self, tables: Sequence[Sequence[int]], num_tokens: int) -> Any:
        """KV of the first tokens that the last one attends to, (NUM_LAYERS, num_tokens); 0 for others."""
        values = np.zeros((NUM_LAYERS, num_tokens), dtype=np.int64)
        for layer, (group, index) in enumerate(self._places):
            window = self._windows[group]
            first = max(num_tokens - window, 0) if window else 0
            skipped = first // self.block_size
            blocks = self.pool[tables[group][skipped : -(-num_tokens // self.block_size)]][:, index].ravel()
            values[layer, first:] = blocks[first - skipped * self.block_size :][: num_tokens - first]
        return values

    def _write_layer(self, layer: int, key: RequestKey, start: int, tokens: Sequence[int]) -> None:
        """Write the KV of tokens from position `start` on."""
        group, index = self._places[layer]
        blocks, size = self._blocks[key][group], self.block_size
        sign = 1 if layer == 0 else -1
        previous = 0
        if start:
            previous = sign * int(self.pool[blocks[(start - 1) // size], index, (start - 1) % size])
        for position, token_id in enumerate(tokens, start):
            previous = chain_value(previous, token_id)
            self.pool[blocks[position // size], index, position % size] = sign * previous
