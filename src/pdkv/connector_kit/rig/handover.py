"""The hand-over of one prompt from the producer to the consumer, as steps that a case can take, repeat or interrupt."""

import itertools
from collections.abc import Callable, Sequence

from pdkv.connector_kit.rig.content import Piece, Text
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.request import TextRequest
from pdkv.connector_kit.rig.world import World, require
from pdkv.connectors.base import MatchedTokens, TransferOutcome
from pdkv.engine.kv.block_pool import Holder
from pdkv.errors import TransferError

_seeds = itertools.count(1)


def new_text(num_tokens: int) -> list[Piece]:
    """A text with a unique beginning."""
    return [Piece(next(_seeds), num_tokens)]


def new_name() -> str:
    """An unused transfer id."""
    return f"t{next(_seeds)}"


def in_order(side: "Handover", order: str, starts: Sequence[int]) -> list[Callable[[], None]]:
    """The steps in one of the possible orders, with the prompt in chunks that begin with the tokens `starts`."""
    prefill: list[Callable[[], None]] = [side.begin_prefill]
    for start in starts:
        prefill.append(lambda start=start: side.compute(start))  # type: ignore[misc]
    prefill.append(side.hand_off)
    match order:
        case "prefill_first":
            return [*prefill, side.find, side.allocate, side.start]
        case "decode_first":
            return [side.reserve, *prefill, side.find, side.start]
        case "needs_peer_first":
            return [side.find, side.allocate, side.start, side.bring_ticket, *prefill]
        case "concurrent":
            begun = 2 if len(prefill) > 3 else 1  # in the middle of the prompt, if it has one
            load = [side.find, side.allocate, side.start, side.bring_ticket]
            return [*prefill[:begun], *load, *prefill[begun:]]
        case "late_ticket":
            return [*prefill, side.find, side.allocate, side.start, side.bring_ticket]
    raise ValueError(order)


class Handover:
    """The producer's and the consumer's side of one transfer.

    Args:
        order: "prefill_first", "decode_first" (pull, store), "needs_peer_first" or "concurrent" (push).
        num_hit_blocks: blocks that the consumer already has; they hold the kit's own pattern, and must keep it.
        chunk: tokens per step on the producer; 0: all at once.
        check: whether the producer computes the text's KV and the consumer's is compared with it.
        is_told: whether the producer's workers are told of the hand-off before the consumer.
    """

    def __init__(
        self,
        world: World,
        num_tokens: int,
        *,
        order: str | None = None,
        text: Text | None = None,
        transfer_id: str | None = None,
        attempt: int = 0,
        num_hit_blocks: int = 0,
        chunk: int = 0,
        check: bool = True,
        is_told: bool = False,
        producer: str = "p",
        consumer: str = "d",
    ) -> None:
        self.world = world
        self.producer: Engine = world.engines[producer]
        self.consumer: Engine = world.engines[consumer]
        self.is_push = self.producer.card.kind == "push"
        self.order = order or ("needs_peer_first" if self.is_push else "prefill_first")
        self.num_tokens = num_tokens
        self.chunk = chunk or num_tokens
        self.check = check
        self._is_told = is_told
        text = new_text(num_tokens + 1) if text is None else text
        transfer_id = transfer_id or new_name()
        self.sender = TextRequest(
            text, num_tokens, kv="handoff", transfer_id=transfer_id, attempt=attempt, layout=self.producer.layout,
            has_content=check,
        )  # fmt: skip
        self.receiver = TextRequest(
            text, num_tokens, kv="await_peer", transfer_id=transfer_id, attempt=attempt, layout=self.consumer.layout
        )
        self.key = self.sender.transfer_key
        self.num_external = 0
        self._hit: list[int] = []
        self.leased: list[int] = []
        self.leased_tables: list[list[int]] = []
        self._ticket: bytes | None = None
        self._is_layerwise = self._is_late = False
        self.num_hit_blocks = num_hit_blocks
        self.producer.on_ready[self.sender.key] = self._on_ready

    # --- all of it ------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Callable[[], None]]:
        """The steps of this order; after the last one the load is in progress, and `finish` waits for it."""
        return in_order(self, self.order, range(0, self.num_tokens, self.chunk))

    def take(self, *steps: Callable[[], None]) -> None:
        """Take the given steps, or all of them."""
        for step in steps or self.steps:
            step()

    def prefill(self) -> None:
        """The producer's part, with the end of the save into a store."""
        self.begin_prefill()
        for start in range(0, self.num_tokens, self.chunk):
            self.compute(start)
        self.hand_off()
        if self.producer.card.kind == "store":
            self.world.until(lambda: self.receiver.kv_ready is not None, f"the save of {self.describe()} ends")

    def run(self) -> None:
        """Take all steps, wait for the end, and check the received KV."""
        self.take()
        self.finish()

    def finish(self) -> None:
        """Wait for a successful load with the right content, and let both sides release it."""
        outcome = self.wait()
        require(not outcome.code, f"load of {self.describe()} failed: {outcome.code}")
        require(not self._is_late, f"layerwise load of {self.describe()}: its step was over before it was reported")
        require(self.wrong == "", f"load of {self.describe()} was reported as finished: {self.wrong}")
        self.end()

    def wait(self, timeout_s: float | None = None) -> TransferOutcome:
        """The load's outcome, once all of the consumer's ranks have reported."""
        if not self.num_external:
            return TransferOutcome()
        lacks_ticket = self.is_push and self._ticket is None
        without = ", for which a push connector has given no ticket," if lacks_ticket else ""
        self.world.until(lambda: self.ended, f"the load of {self.describe()}{without} ends", timeout_s)
        return self.consumer.received[self.receiver.transfer_key]

    @property
    def ended(self) -> bool:
        """Whether the load's end was reported."""
        return self.receiver.transfer_key in self.consumer.received

    @property
    def wrong(self) -> str:
        """What is wrong with the content of a load that was reported as finished."""
        return self.consumer.wrong.get(self.receiver.transfer_key, "")

    def end(self) -> None:
        """End the consumer's request; its Release reaches the producer."""
        self.drop_receiver()
        self.release()

    def settle(self) -> TransferOutcome:
        """Wait for the load's end: received KV must be right, and a failure must have its own type."""
        outcome = self.wait()
        require(self.wrong == "", f"load of {self.describe()} was reported as finished: {self.wrong}")
        self.require_typed(outcome)
        self.end()
        return outcome

    def require_typed(self, outcome: TransferOutcome) -> None:
        """Check that a failure's code names a type of errors.py below TransferError (or the connector's own below
        that).
        """
        codes = set(self.consumer.built.error_codes) - {TransferError.code}
        require(not outcome.code or outcome.code in codes, f"{outcome.code!r} is not an error's code")

    def abort(self) -> None:
        """Give up on both sides, as the router tells them when the client is gone."""
        self.drop_receiver()
        if self.sender.block_ids:
            self.producer.abort(self.sender)
        self.release()

    def drop_receiver(self) -> None:
        """End the consumer's request; a load in progress is cancelled and its blocks quarantined."""
        if self.receiver.block_ids:
            self.consumer.end_load(self.receiver)
            if self.num_external and not self.ended:
                self.consumer.tell_aborted(self.receiver.transfer_key)
            self.consumer.kv.free(self.receiver)
        self.consumer.pool.release(self._hit, Holder.ACTIVE)
        self._hit = []

    def next_reader(self) -> None:
        """The next attempt of the consumer's request with the same hand-off; the last one was dropped."""
        last = self.receiver
        self.receiver = TextRequest(
            last.text, self.num_tokens, kv="await_peer", transfer_id=last.transfer_key.transfer_id,
            attempt=last.transfer_key.attempt + 1, layout=self.consumer.layout,
        )  # fmt: skip
        self.receiver.draw()
        self.receiver.handoff = last.handoff
        self.receiver.kv_ready = last.kv_ready or None
        self.num_external, self._ticket = 0, None

    def release(self) -> None:
        """Bring the Release to the producer."""
        self.producer.release(self.key)
        self.producer.on_ready.pop(self.sender.key, None)

    def describe(self) -> str:
        """The transfer in words."""
        return f"{self.num_tokens} tokens ({self.order}, local hit {self.receiver.num_local_hit}, key {self.key})"

    # --- producer -------------------------------------------------------------------------------------------------

    def begin_prefill(self) -> None:
        """Allocate blocks for the whole prompt, unless it has them."""
        if not self.sender.block_ids:
            self._wait_for_room(self.producer, self.num_tokens)
            self.producer.allocate(self.sender, self.num_tokens)

    def prefill_as(self, dead: "Handover") -> None:
        """Prefill into the blocks that a dead incarnation of the producer has handed off, in the same generations."""
        self.producer.mimic(dead.producer, dead.leased)
        self.sender.block_tables = [list(table) for table in dead.leased_tables]
        self.sender.num_given_up = [table.count(-1) for table in dead.leased_tables]
        self.prefill()

    def compute(self, start: int) -> None:
        """Schedule, execute and confirm one chunk."""
        stop = min(start + self.chunk, self.num_tokens)
        self.producer.step((self.sender, start, stop))
        self.computed(stop)

    def computed(self, stop: int) -> None:
        """Note that the prompt's first tokens are in their blocks."""
        self.sender.num_confirmed = stop
        if stop < self.num_tokens:
            self.producer.confirm(self.sender)

    def hand_off(self) -> None:
        """End the prompt: its blocks pass to a lease, and the hand-off leaves."""
        self.sender.draw()
        tables = self.sender.block_tables  # blocks that a window gives up in the end are marked in them
        self.receiver.handoff = self.producer.hand_off(self.sender)
        self.leased_tables = [list(table) for table in tables]
        self.leased = [block for table in tables for block in table if block >= 0]
        self.receiver.draw()
        if self._is_told:
            self.producer.step()

    # --- consumer -------------------------------------------------------------------------------------------------

    def find(self, *, at_once: bool = False) -> None:
        """Ask until the connector knows what can be loaded, which must be everything missing.

        Args:
            at_once: before the engines run again.
        """
        if not self.receiver.block_ids:
            self._take_hit()
        start = len(self._hit) * self.consumer.block_size
        missing = self.num_tokens - start
        if not missing:
            return
        num_tokens = self.ask_until_known(start, at_once=at_once)
        require(num_tokens == missing, f"only {num_tokens} of {missing} tokens can be loaded: {self.describe()}")
        self.num_external = num_tokens

    def ask_until_known(self, start: int, *, at_once: bool = False) -> int:
        """Call get_num_new_matched_tokens until it answers; a tail on its way is waited for."""
        found: list[MatchedTokens] = []

        def known() -> bool:
            found[:] = [self.consumer.external.match(self.receiver, start)]
            return not found[0].ask_again

        if not (at_once and known()):
            self.world.until(known, f"the connector knows what it has of {self.describe()}")
        self._is_layerwise = found[0].mode == "layerwise" and not self.receiver.block_ids
        return found[0].num_tokens

    def reserve(self) -> None:
        """Decode first: allocate blocks for everything before the source is known."""
        self._take_hit()
        start = len(self._hit) * self.consumer.block_size
        matched = self.consumer.external.match(self.receiver, start)
        is_unknown = matched.ask_again or start == self.num_tokens
        require(is_unknown, f"without a hand-off it answers {matched} instead of 'ask again'")
        self.consumer.allocate(self.receiver, self.num_tokens, hit=self._hit, resume_at=self.num_tokens)

    def allocate(self) -> None:
        """Allocate blocks for the whole range after the local hit, and for what a layerwise load computes with it."""
        num_tokens = self.num_tokens + self._is_layerwise
        self._wait_for_room(self.consumer, num_tokens)
        self.consumer.allocate(self.receiver, num_tokens, hit=self._hit, resume_at=self.num_tokens)

    def start(self) -> None:
        """Pass the blocks to the connector; the next step begins the load."""
        self.post()
        in_time = self.consumer.step_with_load(self.receiver, self.num_tokens, is_layerwise=self._is_layerwise)
        self._is_late = not in_time

    def post(self) -> None:
        """Pass the blocks to the connector."""
        self._ticket = self.consumer.start_load(
            self.receiver, self.num_external, is_layerwise=self._is_layerwise, check=self.check
        )

    def bring_ticket(self) -> None:
        """Bring the ticket to the producer: before its prefill, during it, or after its end.

        A connector that has found the content elsewhere (`multi`, in another child) gives none. That content is not
        kept for it, so its load ends before the producer continues.
        """
        self.sender.ticket = self._ticket
        if self._ticket is None:
            if self.num_external:
                self.wait()
            return
        if self.producer.prefill.holds(self.key):
            self.producer.late_ticket(self.sender, self._ticket)
        elif self.sender.block_ids:
            self.producer.confirm(self.sender, again=True)

    def _wait_for_room(self, engine: Engine, num_tokens: int) -> None:
        """Wait for blocks: transfers that are over on one side may still be read or acknowledged on the other."""
        num_blocks = -(-num_tokens // engine.block_size) * engine.layout.num_groups
        if engine.pool.num_available < num_blocks:
            self.world.until(lambda: engine.pool.num_available >= num_blocks, f"{num_blocks} blocks come free")

    def _take_hit(self) -> None:
        if self.num_hit_blocks and not self._hit:
            self._hit = self.consumer.pool.allocate(self.num_hit_blocks) or []

    def _on_ready(self, ok: bool) -> None:
        if ok or self.receiver.transfer_key == self.key:
            self.receiver.kv_ready = ok


def legal_orders(world: World) -> Sequence[str]:
    """The orders that the connector declares, including late tickets if they are legal."""
    declared = world.consumer.card.orders
    if world.consumer.card.kind != "push":
        return [order for order in ("prefill_first", "decode_first") if order in declared]
    orders = ["needs_peer_first"]
    return [*orders, "concurrent", "late_ticket"] if "concurrent" in declared else orders
