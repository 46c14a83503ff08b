"""Each child's view of a request in `multi`: its own ticket, its own part of the hand-off."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdkv.connectors.base import (
    ConfirmedRange,
    Observed,
    RequestView,
    ScheduledRange,
    SchedulerView,
    Shown,
    TransferKey,
)
from pdkv.connectors.multi.wire import decode_handoff, decode_ticket
from pdkv.connectors.plan import ConnectorPlan
from pdkv.wire.kv import ConnectorKind, KVHandoff

Range = TypeVar("Range", ScheduledRange, ConfirmedRange)


class ChildViews:
    """Views of one engine's requests, by child."""

    def __init__(self, kind: ConnectorKind, children: Sequence[ConnectorPlan]) -> None:
        """`kind`: the kind of the combined connector."""
        self.num_malformed = 0  # hand-offs and tickets that could not be read
        self._kind = kind
        self._kinds = [child.kind for child in children]
        self._lends = [child.lends for child in children]
        self.reader = self._kinds.index("pull") if kind == "pull" else None  # the child of hand-offs in parts

    def takes_part(self, key: TransferKey, child: int) -> bool:
        """Whether a child takes part in a hand-off under that key. Every child does, except a store beside other kinds
        of connectors and, in a loan, a child that does not lend.
        """
        return not self.is_beside(child) and (not key.lent or self._lends[child])

    def is_beside(self, child: int) -> bool:
        """Whether a child is a store, and other children do the hand-offs."""
        return self._kinds[child] == "store" != self._kind

    def sees_handoff(self, request: RequestView, child: int) -> bool:
        """Whether a request's hand-off has anything for a child."""
        view = self.request(request, child)
        return view is not None and view.handoff is not None

    def request(self, request: RequestView, child: int) -> RequestView | None:
        """A request as one child sees it; None: the hand-off has nothing for that child.

        A store next to a pull or a push sees an ordinary request: it takes no part in the hand-off.
        """
        is_idle = request.kv != "local" and (
            self.is_beside(child) or (self._kind == "push" and self._kinds[child] == "pull")
        )
        if is_idle or not self.takes_part(request.transfer_key, child):
            return msgspec.structs.replace(request, kv="local", handoff=None, ticket=None)
        if request.ticket is None and request.handoff is None:
            return request
        view = request
        if request.ticket is not None:
            ticket = decode_ticket(request.ticket)
            self.num_malformed += ticket is None
            own = ticket.ticket if ticket is not None and ticket.child == child else None
            view = msgspec.structs.replace(view, ticket=own)
        if request.handoff is not None:
            payloads = self._payloads(request.handoff)
            self.num_malformed += payloads is None
            payload = None if payloads is None else payloads[child]
            if request.kv == "handoff" and (payload is None or not self._lends[child]):
                return msgspec.structs.replace(view, handoff=None)  # nothing is lent to it: it may find the KV itself
            if payload is None:
                return None
            view = msgspec.structs.replace(view, handoff=msgspec.structs.replace(request.handoff, payload=payload))
        return view

    def _payloads(self, handoff: KVHandoff) -> list[bytes | None] | None:
        """The children's payloads; None: they are malformed. A prompt's part is one child's alone."""
        if handoff.more:
            return [handoff.payload if child == self.reader else None for child in range(len(self._kinds))]
        return decode_handoff(handoff.payload, len(self._kinds))

    def step(self, view: SchedulerView, child: int, observes: Observed) -> SchedulerView:
        """A step as one child sees it. A pushing child sees a hand-off again when its ticket is late; a lending child
        sees a loan.
        """
        confirmed: Sequence[ConfirmedRange] = view.confirmed if observes.confirmed else ()
        if not self._lends[child]:
            confirmed = [c for c in confirmed if not c.request.lent]
        if self._kinds[child] != "push":
            confirmed = [c for c in confirmed if not c.last or c.request.transfer_key in view.finished]
        else:
            confirmed = [c for c in confirmed if c.request.transfer_key not in view.aborted]
        if self._kinds[child] == "push" and not observes.confirmed & Shown.OTHERS:
            confirmed = [c for c in confirmed if c.request.kv == "handoff"]
        return msgspec.structs.replace(
            view,
            scheduled=self._ranges(view.scheduled, child) if observes.scheduled else (),
            confirmed=self._ranges(confirmed, child),
            waiting_keys=view.waiting_keys if observes.waiting_keys else (),
            waiting_terms=view.waiting_terms if observes.waiting_keys else (),
        )

    def _ranges(self, ranges: Sequence[Range], child: int) -> list[Range]:
        own = []
        for item in ranges:
            request = self.request(item.request, child) or msgspec.structs.replace(item.request, handoff=None)
            own.append(item if request is item.request else msgspec.structs.replace(item, request=request))
        return own
