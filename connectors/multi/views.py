"""What each child of `multi` sees of a request: its own ticket, its own part of the hand-off."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdkv.connectors.base import ConfirmedRange, Observed, RequestView, ScheduledRange, SchedulerView, Shown
from pdkv.connectors.multi.wire import decode_handoff, decode_ticket
from pdkv.wire.messages import ConnectorKind

Range = TypeVar("Range", ScheduledRange, ConfirmedRange)


class ChildViews:
    """Views of one engine's requests, by child."""

    def __init__(self, kind: ConnectorKind, kinds: Sequence[ConnectorKind]) -> None:
        """`kind`: of all together; `kinds`: of each child."""
        self.num_malformed = 0  # hand-offs and tickets that could not be read
        self._kind = kind
        self._kinds = kinds

    def request(self, request: RequestView, child: int) -> RequestView | None:
        """A request as one child sees it; None: the hand-off has nothing for that child."""
        kind = self._kinds[child]
        if self._kind == "push" and kind == "pull" and request.kv != "local":
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
            payloads = decode_handoff(request.handoff.payload, len(self._kinds))
            self.num_malformed += payloads is None
            if payloads is None or (payload := payloads[child]) is None:
                return None
            view = msgspec.structs.replace(view, handoff=msgspec.structs.replace(request.handoff, payload=payload))
        return view

    def step(self, view: SchedulerView, child: int, observes: Observed) -> SchedulerView:
        """A step as one child sees it. Only a push is shown a hand-off again, for a late ticket."""
        confirmed = view.confirmed if observes.confirmed else ()
        if self._kinds[child] != "push":
            confirmed = [c for c in confirmed if not c.last or c.request.transfer_key in view.finished]
        elif not observes.confirmed & Shown.OTHERS:
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
