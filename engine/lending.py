"""Loans: hands the cached part of a prompt off to another engine without computing anything (docs/kv-hierarchy.md)."""

from pdkv.engine.hooks import PrefillHooks
from pdkv.engine.kv.kv_cache_manager import PrefixHit
from pdkv.engine.request import Request
from pdkv.engine.scheduler import Scheduler
from pdkv.errors import KVNotFound


def lend(request: Request, scheduler: Scheduler, prefill: PrefillHooks, now: float) -> None:
    """Hand off the cached part of a prompt. Its blocks are leased as after a prefill, under the borrower's transfer id
    and within the same limit on leased blocks. The borrower does not wait: it computes what cannot be lent.

    Raises:
        KVNotFound: nothing can be lent.
    """
    kv, external = scheduler.kv, scheduler.external
    hit = kv.find_hit(request)
    if reason := _why_not(request, hit, scheduler, prefill):
        raise KVNotFound(reason, key=request.transfer_key)
    admitted = kv.admit(request, hit, hit.num_tokens, hit.num_tokens)
    assert admitted, "a hit alone takes no new block"
    request.num_computed = request.num_confirmed = hit.num_tokens
    external.report_confirmed(request, last=True)
    prefill.handed_off(request, external.finished(request), now)
    kv.free(request)


def _why_not(request: Request, hit: PrefixHit, scheduler: Scheduler, prefill: PrefillHooks) -> str:
    """Why it cannot be lent; empty: it can."""
    if not hit.num_tokens:
        return "the cache has nothing of it"
    if not prefill.may_lend(scheduler.kv.num_kept(hit.num_tokens)):
        return "too much is leased"
    return ""
