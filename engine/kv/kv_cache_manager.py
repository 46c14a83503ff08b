"""The blocks of requests: prefix hits, allocation, entering content into the cache, and freeing blocks that no later
token attends to.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.engine.kv.kv_groups import kept_from, num_held_at_end, num_held_at_once
from pdkv.engine.request import Request, held_blocks

MAX_COMMITTED_BLOCKS = 2048
"""The most blocks of a KV group that enter the cache with one step, so that other requests do not wait for a long
prompt's; twice as many as a step computes, if that is more.
"""


class PrefixHit(NamedTuple):
    """Cached blocks of a request's first tokens."""

    num_tokens: int
    tables: list[list[int]]  # one per KV group, equally long; -1: not needed, since the next token does not see it


class _Prompt(NamedTuple):
    """A prompt known only by its keys. Attributes as in Request."""

    hash_keys: list[bytes]


@dataclass(slots=True)
class _Leaving:
    """The blocks that a request holds after its end until everything it confirmed is in the cache. Attributes as in
    Request.
    """

    block_tables: list[list[int]]
    num_given_up: list[int]
    hash_keys: list[bytes]
    num_committed_blocks: int
    num_full_blocks: int


class KVCacheManager:
    """Maps requests to blocks of one pool.

    Args:
        block_size: tokens per KV block, a multiple of `hash_block_size`.
        windows: for each KV group, the number of tokens that its layers attend to; 0: all.
        max_step_tokens: tokens of one step.
        hit_tokens: a store's hits end at multiples of this, so the window before such a multiple is kept; 0: there is
            no store.
        caches: whether other requests can find the content of blocks; False: it belongs to its own requests alone.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        hash_block_size: int,
        windows: Sequence[int] = (0,),
        max_step_tokens: int = 0,
        hit_tokens: int = 0,
        caches: bool = True,
    ) -> None:
        assert block_size % hash_block_size == 0
        self.pool = pool
        self.block_size = block_size
        self.hash_block_size = hash_block_size
        self._windows = tuple(windows)
        self._has_windows = any(windows)
        self._max_step_tokens = max_step_tokens
        self._hit_tokens = hit_tokens
        self._caches = caches
        self._keys_per_block = block_size // hash_block_size
        self._step_blocks: dict[int, list[_Leaving]] = {}  # step in flight -> requests that have ended since
        self._leaving: deque[_Leaving] = deque()
        self.max_committed_blocks = max(MAX_COMMITTED_BLOCKS, 2 * max_step_tokens // block_size)  # with one step
        self._num_to_commit = self.max_committed_blocks  # more blocks of each group until the end of the next step

    def blocks_for(self, num_tokens: int) -> int:
        """Number of block-table entries for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_kept(self, num_tokens: int) -> int:
        """Number of blocks, of all groups, that a request keeps after its first `num_tokens` tokens."""
        return num_held_at_end(self._windows, num_tokens, self.block_size, self._hit_tokens)

    def num_at_once(self, num_tokens: int) -> int:
        """The most blocks, of all groups, that a request of `num_tokens` tokens needs while it is computed."""
        sizes = (self.block_size, self._max_step_tokens, self._hit_tokens)
        return num_held_at_once(self._windows, num_tokens, *sizes)

    # --- hits -----------------------------------------------------------------------------------------------------

    def find_hit(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request's wanted tokens: all of its blocks in groups without a window, and
        in the other groups those that the next token attends to. Holds nothing.
        """
        if request.submit.params.computes_prompt:
            return PrefixHit(0, [[] for _ in self._windows])
        # A stored value may end behind what is wanted.
        request.update_hash_keys(request.num_tokens, self.hash_block_size)
        return self._find_hit(request, request.num_wanted // self.block_size)

    def find_prefix(self, keys: Sequence[bytes]) -> PrefixHit:
        """As `find_hit`, for a prompt of full hash blocks with these keys."""
        return self._find_hit(_Prompt(list(keys)), len(keys) // self._keys_per_block)

    def drop_cached(self, keys: Sequence[bytes] | None) -> int:
        """Drop the cached blocks of the prompt with these keys, or all cached blocks; blocks with a holder stay.
        Returns the number dropped.
        """
        if keys is None:
            return self.pool.drop_cached()
        prompt, length = _Prompt(list(keys)), len(keys) // self._keys_per_block
        chains = [self._keys(prompt, group, 0, length) for group in range(len(self._windows))]
        found = [self.pool.lookup(key) for key in chain.from_iterable(chains)]
        return self.pool.drop_cached([block_id for block_id in found if block_id is not None])

    def _find_hit(self, request: "Request | _Prompt", length: int) -> PrefixHit:
        """The longest hit within the first `length` blocks."""
        tables: list[list[int]] = []
        for group, window in enumerate(self._windows):  # groups without a window come first
            if not window:
                tables.append(self.pool.lookup_chain(self._keys(request, group, 0, length)))
                length = len(tables[group])
        length = self._find_window_length(request, length)
        for group, window in enumerate(self._windows):
            if not window:
                del tables[group][length:]
            else:
                tables.append(self._find_last(request, group, length))
        return PrefixHit(length * self.block_size, tables)

    def _find_last(self, request: "Request | _Prompt", group: int, length: int) -> list[int]:
        """A table of `length` entries, with those present that the next token sees."""
        first = first_seen_block(self._windows[group], length * self.block_size, self.block_size)
        found = [self.pool.lookup(key) for key in self._keys(request, group, first, length)]
        assert None not in found, "`_find_window_length` has seen them"
        return [-1] * first + [block_id for block_id in found if block_id is not None]

    def _find_window_length(self, request: "Request | _Prompt", length: int) -> int:
        """The longest prefix in blocks, at most `length`, after which every group with a window has what the next token
        sees.
        """
        groups = [group for group, window in enumerate(self._windows) if window]
        agreed = 0  # groups that have what is needed after `length` blocks
        while length and agreed < len(groups):
            for group in groups:
                shorter = self._shorten(request, group, length)
                agreed = agreed + 1 if shorter == length else 1
                length = shorter
                if agreed >= len(groups) or not length:
                    break
        return length

    def _shorten(self, request: "Request | _Prompt", group: int, length: int) -> int:
        """The longest prefix in blocks, at most `length`, after which the group has what the next token sees."""
        needed = -(-(self._windows[group] - 1) // self.block_size)
        there = 0  # consecutive blocks
        while there < min(needed, length):
            index = length - there - 1
            if self.pool.lookup(_group_key(request.hash_keys[(index + 1) * self._keys_per_block - 1], group)) is None:
                length, there = index, 0
            else:
                there += 1
        return length

    def _keys(self, content: "Request | _Leaving | _Prompt", group: int, start: int, stop: int) -> list[bytes]:
        """The keys of a request's blocks [start, stop) of one group in the pool."""
        per_block = self._keys_per_block
        keys = content.hash_keys[(start + 1) * per_block - 1 : stop * per_block : per_block]
        return _group_keys(keys, group)

    # --- allocation -----------------------------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, resume_at: int) -> bool:
        """Give a request without blocks its hit and new blocks up to `num_tokens`; False: there are not enough.

        Args:
            resume_at: the first token to be computed: blocks that it does not attend to are not taken.
        """
        assert not request.block_tables
        total = self.blocks_for(num_tokens)
        firsts = [first_seen_block(window, resume_at, self.block_size) for window in self._windows]
        hits = [table[first:] for table, first in zip(hit.tables, firsts, strict=True)]
        for own in hits:
            self.pool.hold(own, Holder.ACTIVE)
        missing = [max(total - max(first, len(table)), 0) for table, first in zip(hit.tables, firsts, strict=True)]
        new = self._allocate(sum(missing))
        if new is None:
            for own in hits:
                self.pool.release(own, Holder.ACTIVE)
            return False
        taken = 0
        for first, own, count in zip(firsts, hits, missing, strict=True):
            request.block_tables.append([-1] * first + own + new[taken : taken + count])
            taken += count
        request.num_given_up = firsts
        request.num_committed_blocks = hit.num_tokens // self.block_size
        request.num_local_hit = hit.num_tokens
        return True

    def num_taken(self, num_tokens: int, hit: PrefixHit, resume_at: int) -> int:
        """The number of available blocks that a request takes for `num_tokens` tokens, as `admit` would
        allocate them.
        """
        total, count = self.blocks_for(num_tokens), 0
        for table, window in zip(hit.tables, self._windows, strict=True):
            first = first_seen_block(window, resume_at, self.block_size)
            count += max(total - max(first, len(table)), 0)
            own = table[first:]
            count += len(own) - self.pool.num_held(own)
        return count

    def fits(self, num_tokens: int, hit: PrefixHit, resume_at: int, *, spare: int = 0) -> bool:
        """Whether a request could now get all blocks that it needs up to `num_tokens` tokens, with `spare` blocks of
        each group to spare. Holds nothing.
        """
        if self._fits(num_tokens, hit, resume_at, spare):
            return True
        return self._make_way() and self._fits(num_tokens, hit, resume_at, spare)

    def _fits(self, num_tokens: int, hit: PrefixHit, resume_at: int, spare: int) -> bool:
        available = self.pool.num_available - spare * len(self._windows)
        if self.blocks_for(num_tokens) * len(self._windows) <= available:
            return True
        needed = self.num_taken(num_tokens, hit, resume_at)
        if self._has_windows:
            needed = min(needed, self.num_at_once(num_tokens))
        return needed <= available

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Number of blocks that a request lacks for `num_tokens` tokens; 0 or less: none."""
        tables = request.block_tables
        return (self.blocks_for(num_tokens) - len(tables[0])) * len(tables)

    def num_slots(self, request: Request) -> int:
        """Number of tokens that the request has blocks for."""
        return len(request.block_tables[0]) * self.block_size

    def will_fit(self, request: Request, num_tokens: int, kept: Iterable[Sequence[int]]) -> bool:
        """Whether `grow` will succeed once the steps in flight have ended and `kept` blocks have been freed."""
        in_steps = (held_blocks(left.block_tables) for left in chain.from_iterable(self._step_blocks.values()))
        leaving = chain(in_steps, kept)
        return self.num_missing(request, num_tokens) <= self.pool.num_available + self.pool.num_freed_by(leaving)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request the blocks up to `num_tokens`; False: there are not enough."""
        missing = self.num_missing(request, num_tokens)
        if missing <= 0:
            return True
        new = self._allocate(missing)
        if new is None:
            return False
        tables = request.block_tables
        each = missing // len(tables)
        for group, table in enumerate(tables):
            table += new[group * each : (group + 1) * each]
        return True

    def _allocate(self, num_blocks: int) -> list[int] | None:
        new = self.pool.allocate(num_blocks)
        return self.pool.allocate(num_blocks) if new is None and self._make_way() else new

    def _make_way(self) -> bool:
        """Give back the blocks of ended requests although not all are in the cache; False: they hold none."""
        left, self._leaving = self._leaving, deque()
        for leaving in left:
            self._release(leaving)
        return bool(left)

    # --- content --------------------------------------------------------------------------------------------------

    def commit(self, request: Request) -> int:
        """Enter the request's full blocks of confirmed tokens into the cache; partial blocks never enter.

        Only the first group's content is announced to routers. In groups without a window, no more blocks enter than
        one step allows; the request's next steps continue, including those after its end. Blocks that a window may soon
        give up, which are few, do not wait.

        Returns:
            The number of confirmed tokens at which there is more to do.
        """
        num_full = min(request.num_confirmed, request.num_tokens) // self.block_size
        if num_full > request.num_committed_blocks:
            request.update_hash_keys(num_full * self.block_size, self.hash_block_size)
            request.num_full_blocks = num_full
            self._enter(request)
        if self._has_windows:
            self._give_up_unseen(request)
            return 0
        return (request.num_committed_blocks + 1) * self.block_size

    def _enter(self, content: "Request | _Leaving") -> None:
        num_now = min(content.num_full_blocks, content.num_committed_blocks + self._num_to_commit)
        self._num_to_commit -= num_now - content.num_committed_blocks
        for group, window in enumerate(self._windows):
            self._commit(content, group, content.num_full_blocks if window else num_now)
        content.num_committed_blocks = num_now

    def _enter_leaving(self) -> None:
        """Blocks are given back together, so that the end of a chain is reused before its beginning."""
        while self._leaving and self._num_to_commit:
            first = self._leaving[0]
            if first.num_committed_blocks < first.num_full_blocks:
                self._enter(first)
            else:
                self._release(self._leaving.popleft())

    def _commit(self, content: "Request | _Leaving", group: int, stop: int) -> None:
        first, per_block = max(content.num_committed_blocks, content.num_given_up[group]), self._keys_per_block
        if first >= stop or not self._caches:
            return
        block_ids = content.block_tables[group][first:stop]
        if group:
            self.pool.commit(block_ids, self._keys(content, group, first, stop), None, announced=False)
        else:
            keys = content.hash_keys[first * per_block : stop * per_block]
            self.pool.commit(block_ids, keys, content.hash_keys[first * per_block - 1] if first else None)

    def _give_up_unseen(self, request: Request) -> None:
        """Release blocks that no token from the last confirmed one on sees: a step in flight computes later tokens, so
        it neither reads nor writes them. Their content can be found until they are reused.
        """
        seen = kept_from(request.num_confirmed, self._hit_tokens)
        for group, (window, table) in enumerate(zip(self._windows, request.block_tables, strict=True)):
            start = request.num_given_up[group]
            stop = min(first_seen_block(window, seen, self.block_size), len(table))
            if start < stop:
                self.pool.release(table[start:stop], Holder.ACTIVE)
                table[start:stop] = [-1] * (stop - start)
                request.num_given_up[group] = stop

    def can_resume(self, request: Request, num_tokens: int) -> bool:
        """Whether the request has the blocks that the token after its first `num_tokens` attends to."""
        return all(
            -1 not in table[first_seen_block(window, num_tokens, self.block_size) :]
            for window, table in zip(self._windows, request.block_tables, strict=True)
            if window
        )

    def discard(self, request: Request, block_ids: Sequence[int]) -> None:
        """Make the content of these blocks of the request unfindable; holders keep them. Content that has not entered
        the cache never will.
        """
        request.num_full_blocks = request.num_committed_blocks
        self.pool.withdraw(block_ids)

    # --- the end --------------------------------------------------------------------------------------------------

    def free(self, request: Request) -> bool:
        """Give up the request's blocks. A step in flight that names them holds them until its update, and the cache
        until all of their content has entered it.

        Returns:
            Whether further steps are needed for that.
        """
        leaving = _Leaving(
            request.block_tables,
            request.num_given_up,
            request.hash_keys,
            request.num_committed_blocks,
            request.num_full_blocks,
        )
        request.block_tables = []
        in_step = self._step_blocks.get(request.last_step_id)
        if in_step is not None:
            in_step.append(leaving)
            return False
        self._leave(leaving)
        return bool(self._leaving)

    def begin_step(self, step_id: int) -> None:
        """Note that the step is in flight: it touches the blocks of the requests that have `last_step_id` equal to
        `step_id`.
        """
        self._step_blocks[step_id] = []

    def end_step(self, step_id: int) -> bool:
        """Note that the step no longer touches any block.

        Returns:
            Whether another step is needed: content of ended requests is still entering the cache, or has released
            blocks.
        """
        for leaving in self._step_blocks.pop(step_id, ()):
            self._leave(leaving)
        goes_on = bool(self._leaving)
        self._enter_leaving()
        self.pool.clean_index()
        self._num_to_commit = self.max_committed_blocks
        return goes_on

    def _leave(self, leaving: _Leaving) -> None:
        if leaving.num_committed_blocks < leaving.num_full_blocks:
            self._leaving.append(leaving)
        else:
            self._release(leaving)

    def _release(self, leaving: _Leaving) -> None:
        self.pool.release(held_blocks(leaving.block_tables), Holder.ACTIVE)


def _group_key(key: bytes, group: int) -> bytes:
    """The key of a block of this group in the pool; for the first group, the block's own key."""
    return key + group.to_bytes(2, "little") if group else key


def _group_keys(keys: list[bytes], group: int) -> list[bytes]:
    if not group:
        return keys
    suffix = _group_key(b"", group)
    return [key + suffix for key in keys]
