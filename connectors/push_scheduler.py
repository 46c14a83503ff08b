"""The scheduler side of push: tickets for what is wanted here, batches of what is wanted elsewhere.

What is confirmed goes out batch by batch while later chunks compute, the tail last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdkv.connectors.base import (
    NO_MATCH,
    BlockHold,
    ConfirmedRange,
    ConnectorConfig,
    Finished,
    KVConnectorMetadata,
    MatchedTokens,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.block_runs import BlockRun, expand_runs, make_runs
from pdkv.connectors.peers import PeerCards
from pdkv.connectors.planning import blocks_of
from pdkv.errors import TransferError
from pdkv.messages import MAX_BLOB_BYTES, EngineCard


class PushTicket(msgspec.Struct, frozen=True, array_like=True):
    """Where tokens [start, stop) of a transfer are wanted: in the receiver's blocks, the first one holds `start`."""

    engine: str
    epoch: str
    transfer_id: str
    attempt: int
    start: int
    stop: int
    runs: list[BlockRun]

    @property
    def key(self) -> TransferKey:
        """(transfer_id, attempt)."""
        return (self.transfer_id, self.attempt)

    def block_ids(self, block_size: int) -> list[int]:
        """The receiver's blocks, whose size its card says.

        Raises:
            TransferError: they are not as many as the tokens need.
        """
        expanded = expand_runs(self.runs)
        if expanded is None or len(expanded[0]) != len(blocks_of(self.start, self.stop, block_size)):
            raise TransferError(
                f"a ticket of engine {self.engine} does not name its blocks", transfer_id=self.transfer_id
            )
        return expanded[0]


_TICKETS = msgspec.msgpack.Decoder(PushTicket)


def decode_ticket(data: bytes) -> PushTicket | None:
    """A ticket; None: it is none."""
    try:
        ticket = _TICKETS.decode(data)
    except msgspec.DecodeError:
        return None
    return ticket if 0 <= ticket.start <= ticket.stop else None


class PushSend(msgspec.Struct, frozen=True):
    """One batch of a transfer: tokens [start, stop), which lie in `block_ids`, the first of which holds `start`."""

    key: TransferKey
    batch: TransferKey  # names this batch's hold on its source blocks
    ticket: PushTicket
    start: int
    stop: int
    block_ids: list[int]
    last: bool  # the ticket's range is complete with it


class PushMetadata(KVConnectorMetadata, kw_only=True):
    """Receives to be registered and sends to be posted in this step."""

    receives: list[PushTicket] = msgspec.field(default_factory=list)
    refused: list[TransferKey] = msgspec.field(default_factory=list)  # loads for which no ticket could be made
    unsendable: list[TransferKey] = msgspec.field(default_factory=list)  # sends whose tickets cannot be served
    sends: list[PushSend] = msgspec.field(default_factory=list)
    dropped: list[TransferKey] = msgspec.field(default_factory=list)  # sends that nobody waits for any more


@dataclass(slots=True)
class _Sending:
    """What of a ticket has been given to the worker."""

    ticket: PushTicket | None  # None: what came was no ticket
    num_sent: int = 0  # tokens [ticket.start, num_sent) are under way or delivered
    num_batches: int = 0
    failed: bool = False


class PushScheduler(SchedulerConnector):
    """Scheduler side: tickets for what is wanted here, batches of what is wanted elsewhere."""

    def __init__(self, config: ConnectorConfig, peers: PeerCards) -> None:
        self.config = config
        self.block_size = config.layout.block_size
        self.peers = peers
        self._receives: list[PushTicket] = []
        self._refused: list[TransferKey] = []
        self._unsendable: list[TransferKey] = []
        self._sending: dict[TransferKey, _Sending] = {}

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        if request.kv != "await_peer" or request.kv_ready is False:
            return NO_MATCH
        return MatchedTokens(request.num_wanted - num_computed_tokens)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> bytes | None:
        """The ticket. Blocks too scattered to be named within its bound fail the load at once."""
        if request.kv != "await_peer":
            return None
        start, stop = request.num_local_hit, request.num_local_hit + num_external_tokens
        wanted = blocks_of(start, stop, self.block_size)
        runs = make_runs(block_ids[wanted.start : wanted.stop])
        ticket = PushTicket(self.config.engine, self.config.epoch, *request.transfer_key, start, stop, runs)
        encoded = msgspec.msgpack.encode(ticket)
        if len(encoded) > MAX_BLOB_BYTES:
            self._refused.append(request.transfer_key)
            return None
        if num_external_tokens:
            self._receives.append(ticket)
        return encoded

    def build_connector_meta(self, view: SchedulerView) -> PushMetadata:
        sends = [send for confirmed in view.confirmed if (send := self._next_batch(confirmed)) is not None]
        dropped = [key for key in view.aborted if self._sending.pop(key, None) is not None]
        receives, self._receives = self._receives, []
        refused, self._refused = self._refused, []
        unsendable, self._unsendable = self._unsendable, []
        return PushMetadata(
            step_id=view.step_id,
            receives=receives,
            refused=refused,
            unsendable=unsendable,
            sends=sends,
            dropped=dropped,
            holds=[BlockHold(send.batch, send.block_ids, send.key) for send in sends],
        )

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> Finished:
        return Finished(hold_blocks=request.kv == "handoff")

    def update_connector_output(self, results: TransferResults) -> None:
        for key in results.finished_sending:
            self._sending.pop(key, None)
        for key in results.failed_sending:
            if key in self._sending:
                self._sending[key].failed = True  # nothing more of it is sent; `aborted` forgets it

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        self.peers.replace(cards)

    def shutdown(self) -> None:
        self.peers.clear()
        self._sending.clear()

    def _next_batch(self, confirmed: ConfirmedRange) -> PushSend | None:
        """What of a confirmed range is wanted and has not been sent yet."""
        request = confirmed.request
        if request.kv != "handoff" or request.ticket is None:
            return None
        key = request.transfer_key
        sending = self._sending.get(key)
        if sending is None:
            ticket = decode_ticket(request.ticket)
            sending = self._sending[key] = _Sending(ticket, ticket.start if ticket is not None else 0)
        ticket = sending.ticket
        if not sending.failed and (ticket is None or (confirmed.last and confirmed.stop < ticket.stop)):
            sending.failed = True
            self._unsendable.append(key)  # it wants what will never be here
        ready = confirmed.stop if confirmed.last else confirmed.stop // self.block_size * self.block_size
        if ticket is None or sending.failed or (stop := min(ready, ticket.stop)) <= sending.num_sent:
            return None
        start, sending.num_sent = sending.num_sent, stop
        sending.num_batches += 1
        batch = (f"{key[0]}/{sending.num_batches}", key[1])
        blocks = blocks_of(start, stop, self.block_size)
        block_ids = list(confirmed.block_ids[blocks.start : blocks.stop])
        return PushSend(key, batch, ticket, start, stop, block_ids, stop == ticket.stop)
