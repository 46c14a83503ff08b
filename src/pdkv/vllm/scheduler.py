"""vLLM's scheduler calls, answered by a content-addressed connector's scheduler side. Imports nothing of vLLM."""

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pdkv.base.block_keys import HASH_BLOCK_SIZE, extend_keys, root_key
from pdkv.connectors.base import (
    ConfirmedRange,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.vllm.identity import AdapterIdentities
from pdkv.vllm.staging import BlockPairs, PeerChange, StagingBooks, StepOrders
from pdkv.wire.kv import EngineCard

logger = logging.getLogger(__name__)


class VllmRequest(Protocol):
    """The used part of vllm.v1.request.Request."""

    request_id: str
    all_token_ids: Sequence[int]
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any


class ScheduledRequest(NamedTuple):
    """One request's share of a vLLM step: tokens [start, stop) are computed."""

    request_id: str
    start: int
    stop: int
    block_ids: Sequence[int]  # new ones, or all if the request is new or resumed
    is_whole_table: bool


class Identity(NamedTuple):
    """Everything that KV in vLLM's blocks depends on besides tokens."""

    model: str
    layout: str
    block_size: int


@dataclass(slots=True)
class _Tracked:
    """A request of vLLM."""

    request: VllmRequest
    root: bytes
    attempt: int = 0  # resets before it: transfers of earlier ones are distinct
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_local_hit: int = 0  # as vLLM last asked
    num_stored: int = 0  # tokens that were given to the connector, or came from it
    load_failed: bool = False


class _Load(NamedTuple):
    """A load in progress."""

    request_id: str
    pairs: BlockPairs


class VllmScheduler:
    """Requests, staging blocks and the connector's scheduler side of one vLLM engine.

    Args:
        unit_tokens: only multiples of this many tokens are saved; a multiple of the block size.
        saves: whether this engine's KV is saved.
    """

    def __init__(
        self,
        scheduler: SchedulerConnector,
        identity: Identity,
        *,
        num_staging_blocks: int,
        unit_tokens: int,
        saves: bool,
    ) -> None:
        self.books = StagingBooks(num_staging_blocks)
        self.num_skipped_tokens = 0  # not saved: no staging block was free, and the request went on
        self.num_failed_loads = 0
        self._scheduler = scheduler
        self._identity = identity
        self._block_size = identity.block_size
        self._unit_tokens = unit_tokens
        self._saves = saves
        self._adapters = AdapterIdentities()
        self._generation = ""  # of the weights; empty: those with which the engine was started
        self._num_resets = 0
        self._requests: dict[str, _Tracked] = {}
        self._loads: dict[TransferKey, _Load] = {}
        self._new_loads: dict[TransferKey, BlockPairs] = {}  # for the next step
        self._finished: list[TransferKey] = []
        self._copies, self._keys = BlockPairs([], []), list[list[bytes]]()  # of the step in preparation
        self._step_id = 0
        self._told_full = False

    # --- requests -------------------------------------------------------------------------------------------------

    def add(self, request: VllmRequest) -> None:
        """Add a request that vLLM will ask about. Requests with KV that depends on something besides tokens are
        ignored.
        """
        if request.mm_features or request.prompt_embeds is not None or request.request_id in self._requests:
            return
        adapter = self._adapters.of(request.lora_request)
        if adapter is None:
            return
        root = root_key(
            model=self._identity.model,
            layout=self._identity.layout + self._generation,
            adapter=adapter,
            cache_salt=request.cache_salt or "",
        )
        self._requests[request.request_id] = _Tracked(request, root, self._num_resets)

    def finish(self, request_id: str) -> None:
        """End the request; copies of it continue."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._finished.append(TransferKey(request_id, tracked.attempt))

    def reset(self) -> bool:
        """Note that the weights may have changed: requests added from now on do not find earlier KV, wherever it is,
        and other engines, with unknown weights, do not find theirs. KV that earlier requests compute on top of earlier
        KV is not saved; requests that vLLM restarts are added again.

        Returns:
            False: an earlier load is in progress, and vLLM would use its KV: reset again when it has ended.
        """
        self._num_resets += 1
        self._generation = f",generation={secrets.token_hex(16)}"
        for request_id in list(self._requests):
            self.finish(request_id)
        return not self._loads

    def _view(self, tracked: _Tracked) -> RequestView:
        tokens = tracked.request.all_token_ids
        extend_keys(tracked.keys, tracked.root, tokens)
        request_id = tracked.request.request_id
        return RequestView(
            request_id=request_id,
            attempt=tracked.attempt,
            transfer_id=request_id,
            kv="local",
            num_tokens=len(tokens),
            num_wanted=len(tokens) - 1,
            block_keys=tracked.keys,
            num_local_hit=tracked.num_local_hit,
        )

    # --- loads ----------------------------------------------------------------------------------------------------

    def match(self, request_id: str, num_computed: int) -> int | None:
        """Tokens of whole blocks that can be loaded after a local hit; None: ask again."""
        tracked = self._requests.get(request_id)
        if tracked is None or TransferKey(request_id, tracked.attempt) in self._loads:
            return 0
        if tracked.load_failed or num_computed % self._block_size:
            return 0
        tracked.num_local_hit = num_computed
        matched = self._scheduler.get_num_new_matched_tokens(self._view(tracked), num_computed)
        if matched.ask_again:
            return None
        return min(matched.num_tokens // self._block_size, self.books.num_free) * self._block_size

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Note that vLLM has blocks for the result of `match`: the load begins with the next step."""
        tracked = self._requests.get(request_id)
        if tracked is None or not num_external_tokens:
            return
        first, count = tracked.num_local_hit // self._block_size, num_external_tokens // self._block_size
        pairs = BlockPairs([self.books.take() for _ in range(count)], list(block_ids[first : first + count]))
        view = self._view(tracked)
        self._scheduler.update_state_after_alloc(view, [[*[0] * first, *pairs.staging]], num_external_tokens)
        self._loads[view.transfer_key] = _Load(request_id, pairs)
        self._new_loads[view.transfer_key] = pairs
        stop = tracked.num_local_hit + num_external_tokens
        tracked.num_stored = max(tracked.num_stored, stop // self._unit_tokens * self._unit_tokens)

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(
        self, scheduled: Iterable[ScheduledRequest], finished: Iterable[str], peers: PeerChange | None = None
    ) -> StepOrders:
        """Orders for the workers. The step's tokens are confirmed when they act, which is after its forward pass."""
        for request_id in finished:
            self.finish(request_id)
        self.books.end_step()
        self._copies, self._keys = BlockPairs([], []), []
        confirmed = [r for share in scheduled if (r := self._copy_out(share)) is not None]
        self._step_id += 1
        ended, self._finished = self._finished, []
        shown = confirmed if self._scheduler.observes.confirmed else []
        meta = self._scheduler.build_connector_meta(SchedulerView(self._step_id, [], shown, [], ended, [], []))
        for hold in meta.holds:
            self.books.hold(hold)
        loads, self._new_loads = self._new_loads, {}
        return StepOrders(self._copies, self._keys, loads, meta, peers)

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """Set the engines now known, without this one."""
        self._scheduler.update_peers(cards)

    def _copy_out(self, share: ScheduledRequest) -> ConfirmedRange | None:
        """Copy the blocks that this step completes, as far as their tokens are known and staging blocks are free."""
        tracked = self._requests.get(share.request_id)
        if tracked is None:
            return None
        if share.is_whole_table:
            tracked.block_ids = list(share.block_ids)
        else:
            tracked.block_ids += share.block_ids
        start = tracked.num_stored
        stop = min(share.stop, len(tracked.request.all_token_ids)) // self._unit_tokens * self._unit_tokens
        if not self._saves or stop <= start:
            return None
        view = self._view(tracked)
        images = self._images(tracked, start // self._block_size, stop // self._block_size)
        end = start + len(images) * self._block_size // self._unit_tokens * self._unit_tokens
        if end < stop:
            self._tell_full(stop - end)
        tracked.num_stored = end
        return ConfirmedRange(view, start, end, [[*[0] * (start // self._block_size), *images]], False)

    def _images(self, tracked: _Tracked, first: int, last: int) -> list[int]:
        """Staging blocks of a request's blocks [first, last): those that are images already, and new ones."""
        per_block = self._block_size // HASH_BLOCK_SIZE
        images: list[int] = []
        for index in range(first, last):
            keys = tracked.keys[index * per_block : (index + 1) * per_block]
            block_id = self.books.find_for_step(keys[-1])
            if block_id is None:
                if not self.books.num_free:
                    break
                block_id = self.books.take_for_step(keys[-1])
                self._copies.staging.append(block_id)
                self._copies.vllm.append(tracked.block_ids[index])
                self._keys.append(keys)
            images.append(block_id)
        return images

    def _tell_full(self, num_tokens: int) -> None:
        self.num_skipped_tokens += num_tokens
        if not self._told_full:
            logger.warning("KV is not saved as fast as it is computed: increase staging_tokens (reported once)")
        self._told_full = True

    # --- results --------------------------------------------------------------------------------------------------

    def update(self, results: TransferResults) -> None:
        """Results of the workers."""
        results = self._scheduler.resolve_results(results)
        if not results:
            return
        self._scheduler.update_connector_output(results)
        for key in (*results.finished_sending, *results.failed_sending):
            self.books.end_hold(key)
        for ended, ok in ((results.finished_receiving, True), (results.failed_receiving, False)):
            for key in ended:
                self._end_load(key, ok)

    def _end_load(self, key: TransferKey, ok: bool) -> None:
        load = self._loads.pop(key, None)
        if load is None:
            return
        self.books.release(load.pairs.staging)
        if ok:
            return
        self.num_failed_loads += 1
        tracked = self._requests.get(load.request_id)
        if tracked is not None:
            tracked.load_failed = True  # vLLM computes it, or fails it, according to its kv_load_failure_policy
            tracked.num_stored = 0

    def shutdown(self) -> None:
        """End the connector's side. Idempotent."""
        self._scheduler.shutdown()
