"""The scheduler side of pull over NIXL: what hand-offs name is read by peers, and has digests."""

from pdkv.connectors.base import Shown
from pdkv.connectors.peer.pull_scheduler import PullScheduler


class NixlPullScheduler(PullScheduler):
    """As that of every pull."""

    shown = Shown.HANDOFFS
