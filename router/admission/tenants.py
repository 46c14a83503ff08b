"""Who a request belongs to, what they may have of the router, and what they have of it now."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest, TooManyRequests
from pdkv.wire.kv import KVTerms

TENANT = "pdkv.tenant"
"""Where a scope names the Tenant whose request it is; absent: clients need no key."""

ANONYMOUS = "anonymous"
"""The one tenant of a router without keys."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may have; 0: as much as there is."""

    weight: float = 1.0  # its share of the engines, beside others that wait
    best_priority: int = 0  # the most urgent priority that it may ask for; lower is more urgent
    max_requests: int = 0  # at the same time
    max_streams: int = 0  # of them
    tokens_per_minute: int = 0  # of prompts and outputs
    salt: str = ""  # its own part of every cache salt; "": it shares its cache with others that have none
    admin: bool = False  # may use /admin, and /metrics and /topology where they are protected
    kv_terms: KVTerms | None = None  # on which its KV is kept below the engines' own pools


MAX_DEBT_MINUTES = 10
"""What one request may ask for at most, in minutes of its key's tokens: so long is the key then locked out."""


@dataclass(slots=True)
class TokenBucket:
    """Tokens that may be used: as many as a minute brings are there at most, and a large request may borrow."""

    per_minute: int  # 0: no bound
    tokens: float
    filled_at: float

    def wait_s(self, num_tokens: int, now: float) -> float:
        """Seconds after which so many may be used; 0: they may be now."""
        if not self.per_minute:
            return 0.0
        rate = self.per_minute / 60
        self.tokens = min(self.tokens + (now - self.filled_at) * rate, float(self.per_minute))
        self.filled_at = now
        wanted = min(num_tokens, self.per_minute)  # more than a minute's worth needs a full bucket
        return max(wanted - self.tokens, 0.0) / rate

    def charge(self, num_tokens: int, now: float) -> float:
        """Tokens were used that nothing was taken for. Returns how many are charged: a minute's is the debt at most."""
        if not self.per_minute:
            return 0.0
        self.wait_s(0, now)  # fills it
        charged = min(num_tokens, max(self.tokens + self.per_minute, 0.0))
        self.tokens -= charged
        return charged


class Tenant:
    """One tenant: its grant, and what it uses. One event loop at a time."""

    def __init__(self, name: str, grant: Grant, clock: Callable[[], float]) -> None:
        self.name = name
        self.num_requests = 0
        self.num_streams = 0
        self.num_pending = 0  # choices that came and did not begin
        self.pending_tokens = 0  # of their prompts
        self.num_refused = 0
        self.num_tokens = 0  # prompt and output of all requests that ended
        self.digest = "" if name == ANONYMOUS else hashlib.sha256(name.encode()).hexdigest()[:16]
        """Names it to engines, whose logs are to name no key."""
        self._clock = clock
        self._bucket = TokenBucket(grant.tokens_per_minute, float(grant.tokens_per_minute), clock())
        self.grant = grant

    @property
    def keeper(self) -> str:
        """Whose its responses are: a key that takes the name of another one over does not take those."""
        return f"{self.name} {self.grant.salt}"

    def change(self, grant: Grant) -> None:
        """Other limits from now on; what is under way goes on."""
        if grant.tokens_per_minute != self.grant.tokens_per_minute:
            self._bucket = TokenBucket(grant.tokens_per_minute, float(grant.tokens_per_minute), self._clock())
        self.grant = grant

    def enter(self) -> None:
        """A request comes. Raises TooManyRequests."""
        limit = self.grant.max_requests
        if limit and self.num_requests >= limit:
            self._refuse(f"{_number_of(limit, 'request')} at a time", 1.0)
        self.num_requests += 1

    def leave(self) -> None:
        """It is over."""
        self.num_requests -= 1
        assert self.num_requests >= 0, "more requests left than came"

    def enter_stream(self) -> None:
        """A request that streams begins. Raises TooManyRequests."""
        limit = self.grant.max_streams
        if limit and self.num_streams >= limit:
            self._refuse(f"{_number_of(limit, 'stream')} at a time", 1.0)
        self.num_streams += 1

    def leave_stream(self) -> None:
        """It is over."""
        self.num_streams -= 1
        assert self.num_streams >= 0, "more streams left than came"

    def check_tokens(self, num_tokens: int = 1) -> None:
        """Whether it may use so many of this minute's. Raises TooManyRequests."""
        wait_s = self._bucket.wait_s(num_tokens, self._clock())
        if wait_s:
            self._refuse(f"{_number_of(self.grant.tokens_per_minute, 'token')} a minute", wait_s)

    def take_tokens(self, num_tokens: int) -> None:
        """Use tokens of this minute's, and of the next ones' if it needs more than one brings.

        Raises:
            TooManyRequests: they are used up.
            InvalidRequest: it needs more than MAX_DEBT_MINUTES bring.
        """
        per_minute = self.grant.tokens_per_minute
        if per_minute and num_tokens > MAX_DEBT_MINUTES * per_minute:
            raise InvalidRequest(
                f"the prompts and max_tokens of all choices come to {num_tokens} tokens, more than {MAX_DEBT_MINUTES} "
                f"minutes bring: {self._whose} may have at most {_number_of(per_minute, 'token')} a minute",
                param="max_tokens",
            )
        self.check_tokens(num_tokens)
        self._bucket.tokens -= num_tokens

    def charge(self, num_tokens: int) -> float:
        """Tokens came that nothing was taken for; returns how many are charged."""
        return self._bucket.charge(num_tokens, self._clock())

    def settle(self, num_charged: float, num_used: int) -> None:
        """A request is over: what was charged and not used is given back."""
        self.num_tokens += num_used
        self._bucket.tokens += max(num_charged - num_used, 0.0)

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest for a more urgent one than it may ask for."""
        best = self.grant.best_priority
        if priority < best:
            raise InvalidRequest(
                f"priority must be at least {best} (lower is more urgent), got {priority}", param="priority"
            )

    def salted(self, cache_salt: str) -> str:
        """The cache salt of a request: nobody else's, whatever the client said."""
        if not self.grant.salt:
            return cache_salt
        return hashlib.sha256(f"{len(self.grant.salt)}:{self.grant.salt}{cache_salt}".encode()).hexdigest()

    def _refuse(self, limit: str, retry_after_s: float) -> None:
        self.num_refused += 1
        seconds = math.ceil(max(retry_after_s, 1.0))
        raise TooManyRequests(
            f"{self._whose} may have at most {limit}: try again in {seconds} s", retry_after_s=float(seconds)
        )

    @property
    def _whose(self) -> str:
        return "clients without a key" if self.name == ANONYMOUS else f"the key {self.name!r}"


def _number_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def payer(scope: Mapping[str, Any]) -> str:
    """Who shares what the router itself has, its memory and its threads: a key's tenant, else a client's address."""
    tenant: Tenant | None = scope.get(TENANT)
    return tenant.name if tenant is not None else (scope.get("client") or ("local",))[0]
