"""Blocks of requests: prefix hits, allocation, and the moment content enters the cache."""

from collections.abc import Iterable, Sequence
from itertools import chain

from pdkv.engine.block_pool import BlockPool, Holder
from pdkv.engine.request import Request


class KVCacheManager:
    """Maps requests to blocks of one pool.

    Args:
        block_size: tokens per KV block, a multiple of `hash_block_size`.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, hash_block_size: int) -> None:
        assert block_size % hash_block_size == 0
        self.pool = pool
        self.block_size = block_size
        self.hash_block_size = hash_block_size
        self._keys_per_block = block_size // hash_block_size
        self._step_blocks: dict[int, list[list[int]]] = {}  # step in flight -> blocks of requests that left meanwhile

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def find_hit(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix of the request's wanted tokens. Holds nothing."""
        if request.submit.params.prompt_logprobs is not None:
            return []  # their logits must be computed
        request.update_hash_keys(request.num_wanted, self.hash_block_size)
        keys, per_block = request.hash_keys, self._keys_per_block
        hit: list[int] = []
        for last in range(per_block - 1, request.num_wanted // self.hash_block_size, per_block):
            block_id = self.pool.lookup(keys[last])
            if block_id is None:
                break
            hit.append(block_id)
        return hit

    def admit(self, request: Request, hit: list[int], num_tokens: int) -> bool:
        """Give a request without blocks its hit and new blocks up to `num_tokens`; False: there are not enough."""
        assert not request.block_ids
        self.pool.hold(hit, Holder.ACTIVE)
        new = self.pool.allocate(max(self.blocks_for(num_tokens) - len(hit), 0))
        if new is None:
            self.pool.release(hit, Holder.ACTIVE)
            return False
        request.block_ids = hit + new
        request.num_committed_blocks = len(hit)
        request.num_local_hit = len(hit) * self.block_size
        return True

    def num_taken(self, num_tokens: int, hit: list[int]) -> int:
        """Blocks fewer available once a request has those for `num_tokens` tokens, `hit` being the first of them."""
        num_free_hits = sum(not self.pool.is_held(block_id) for block_id in hit)
        return self.blocks_for(num_tokens) - len(hit) + num_free_hits

    def fits(self, num_tokens: int, hit: list[int]) -> bool:
        """Whether blocks for `num_tokens` tokens could be had now, `hit` being the first of them. Holds nothing."""
        return self.num_taken(num_tokens, hit) <= self.pool.num_available

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request lacks for `num_tokens` tokens; 0 or less: none."""
        return self.blocks_for(num_tokens) - len(request.block_ids)

    def will_fit(self, request: Request, num_tokens: int, kept: Iterable[Sequence[int]]) -> bool:
        """Whether `grow` will succeed when the steps in flight have ended and `kept` blocks are given back, too."""
        leaving = chain(chain.from_iterable(self._step_blocks.values()), kept)
        return self.num_missing(request, num_tokens) <= self.pool.num_available + self.pool.num_freed_by(leaving)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks up to `num_tokens`; False: there are not enough."""
        missing = self.num_missing(request, num_tokens)
        if missing <= 0:
            return True
        new = self.pool.allocate(missing)
        if new is None:
            return False
        request.block_ids += new
        return True

    def commit(self, request: Request) -> None:
        """Enter the request's full blocks of confirmed tokens into the cache; partial blocks never are."""
        num_full = min(request.num_confirmed, request.num_tokens) // self.block_size
        if num_full <= request.num_committed_blocks:
            return
        request.update_hash_keys(num_full * self.block_size, self.hash_block_size)
        keys, per_block = request.hash_keys, self._keys_per_block
        for i in range(request.num_committed_blocks, num_full):
            parent = keys[i * per_block - 1] if i else None
            self.pool.commit(request.block_ids[i], keys[i * per_block : (i + 1) * per_block], parent)
        request.num_committed_blocks = num_full

    def discard(self, block_ids: Sequence[int]) -> None:
        """What is in these blocks is not to be found any more; who holds them keeps them."""
        for block_id in block_ids:
            if self.pool.has_content(block_id):
                self.pool.withdraw(block_id)

    def free(self, request: Request) -> None:
        """The request gives up its blocks; a step in flight that names them holds them until its update."""
        leaving = self._step_blocks.get(request.last_step_id)
        if leaving is not None:
            leaving.append(request.block_ids)
        else:
            self.pool.release(request.block_ids, Holder.ACTIVE)
        request.block_ids = []

    def begin_step(self, step_id: int) -> None:
        """The step is in flight: it touches the blocks of requests whose `last_step_id` it is."""
        self._step_blocks[step_id] = []

    def end_step(self, step_id: int) -> None:
        """The step touches no block any more."""
        for block_ids in self._step_blocks.pop(step_id, ()):
            self.pool.release(block_ids, Holder.ACTIVE)
