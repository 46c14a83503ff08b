"""Tenants: who a request belongs to, what they may use of the router, and what they use now."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from pdkv.errors import InvalidRequest, TooManyRequests
from pdkv.router.admission.fair_queue import Turns
from pdkv.wire.kv import KVTerms

TENANT = "pdkv.tenant"
"""Key of an ASGI scope that holds the request's Tenant; absent if clients need no key."""

ANONYMOUS = "anonymous"
"""The only tenant of a router without keys."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use; 0: no limit."""

    weight: float = 1.0  # its share of the engines when others wait, too
    best_priority: int = 0  # most urgent priority that it may ask for; lower is more urgent
    max_requests: int = 0  # requests at the same time
    max_streams: int = 0  # streams among those
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # tokens of prompts and outputs
    salt: str = ""  # added to every cache salt; "": it shares its cache with other tenants that have none
    admin: bool = False  # may use /admin, and /metrics and /topology where they are protected
    fallback: bool = False  # its requests may go to another deployment
    models: tuple[str, ...] = ()  # served names of the models that it may use; empty: all
    kv_terms: KVTerms | None = None  # terms on which its KV is kept below the engines' own pools


MAX_DEBT_MINUTES = 10
"""The most one request may ask for, in minutes of its key's tokens, since the key is then locked out for that long."""


@dataclass(slots=True)
class TokenBucket:
    """A bucket of usable tokens that holds at most a minute's worth; a large request may borrow."""

    per_minute: int  # 0: no limit
    tokens: float
    filled_at: float

    def wait_s(self, num_tokens: int, now: float) -> float:
        """Seconds until this many tokens may be used; 0: now."""
        if not self.per_minute:
            return 0.0
        rate = self.per_minute / 60
        self.tokens = min(self.tokens + (now - self.filled_at) * rate, float(self.per_minute))
        self.filled_at = now
        wanted = min(num_tokens, self.per_minute)  # more than a minute's worth needs a full bucket
        return max(wanted - self.tokens, 0.0) / rate

    def charge(self, num_tokens: int, now: float) -> float:
        """Charge tokens already used. Returns how many are charged: the debt never exceeds a minute's worth."""
        if not self.per_minute:
            return 0.0
        self.wait_s(0, now)  # fills it
        charged = min(num_tokens, max(self.tokens + self.per_minute, 0.0))
        self.tokens -= charged
        return charged

    def describe(self, now: float) -> tuple[int, int, str]:
        """The limit, what is left of it, and after which time all of it is there again, such as 1m2.5s."""
        minutes, seconds = divmod(round(self.wait_s(self.per_minute, now), 3), 60)
        reset = f"{minutes:.0f}m{seconds:g}s" if minutes else f"{seconds:g}s"
        return self.per_minute, max(int(self.tokens), 0), reset


class Tenant:
    """One tenant: its grant and its usage. Belongs to one event loop at a time."""

    def __init__(self, name: str, grant: Grant, clock: Callable[[], float]) -> None:
        self.name = name
        self.num_requests = 0
        self.num_streams = 0
        self.num_pending = 0  # choices that have arrived but not begun
        self.pending_tokens = 0  # prompt tokens of those
        self.num_refused = 0
        self.num_tokens = 0  # prompt and output tokens of all requests that have ended
        self.digest = "" if name == ANONYMOUS else hashlib.sha256(name.encode()).hexdigest()[:16]
        """Name for engines, whose logs must not contain key names."""
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()  # by fairness id
        self._clock = clock
        self._requests = TokenBucket(0, 0.0, clock())
        self._bucket = TokenBucket(0, 0.0, clock())
        self.grant = Grant()
        self.change(grant)

    @property
    def keeper(self) -> str:
        """Identity of the owner of stored responses: a new key under an old name does not inherit them."""
        return f"{self.name} {self.grant.salt}"

    @property
    def models(self) -> tuple[str, ...]:
        """Served names of the models that it may use; empty: all."""
        return self.grant.models

    def change(self, grant: Grant) -> None:
        """Apply other limits from now on; running requests continue."""
        before, self.grant = self.grant, grant
        if grant.tokens_per_minute != before.tokens_per_minute:
            self._bucket = TokenBucket(grant.tokens_per_minute, float(grant.tokens_per_minute), self._clock())
        if grant.requests_per_minute != before.requests_per_minute:
            self._requests = TokenBucket(grant.requests_per_minute, float(grant.requests_per_minute), self._clock())

    def enter(self) -> None:
        """Count a request that arrives. Raises TooManyRequests."""
        limit = self.grant.max_requests
        if limit and self.num_requests >= limit:
            self._refuse(f"{_number_of(limit, 'request')} at a time", 1.0)
        if wait_s := self._requests.wait_s(1, self._clock()):
            self._refuse(f"{_number_of(self.grant.requests_per_minute, 'request')} a minute", wait_s)
        self._requests.tokens -= 1
        self.num_requests += 1

    def leave(self) -> None:
        """Count out a request that has ended."""
        self.num_requests -= 1
        assert self.num_requests >= 0, "more requests left than arrived"

    def enter_stream(self) -> None:
        """Count a streaming request that begins. Raises TooManyRequests."""
        limit = self.grant.max_streams
        if limit and self.num_streams >= limit:
            self._refuse(f"{_number_of(limit, 'stream')} at a time", 1.0)
        self.num_streams += 1

    def leave_stream(self) -> None:
        """Count out a streaming request that has ended."""
        self.num_streams -= 1
        assert self.num_streams >= 0, "more streams left than arrived"

    def check_tokens(self, num_tokens: int = 1) -> None:
        """Check that this many of the current minute's tokens are left. Raises TooManyRequests."""
        wait_s = self._bucket.wait_s(num_tokens, self._clock())
        if wait_s:
            self._refuse(f"{_number_of(self.grant.tokens_per_minute, 'token')} a minute", wait_s)

    def take_tokens(self, num_tokens: int) -> None:
        """Use tokens of this minute, and of the next ones if the request needs more than one minute allows.

        Raises:
            TooManyRequests: they are used up.
            InvalidRequest: it needs more than MAX_DEBT_MINUTES allow.
        """
        per_minute = self.grant.tokens_per_minute
        if per_minute and num_tokens > MAX_DEBT_MINUTES * per_minute:
            raise InvalidRequest(
                f"the prompts and max_tokens of all choices come to {num_tokens} tokens, more than {MAX_DEBT_MINUTES} "
                f"minutes allow: {self._whose} may have at most {_number_of(per_minute, 'token')} a minute",
                param="max_tokens",
            )
        self.check_tokens(num_tokens)
        self._bucket.tokens -= num_tokens

    def charge(self, num_tokens: int) -> float:
        """Charge tokens that were not reserved; returns how many are charged."""
        return self._bucket.charge(num_tokens, self._clock())

    def settle(self, num_charged: float, num_used: int) -> None:
        """Give back what was charged but not used, once a request is over."""
        self.num_tokens += num_used
        self._bucket.tokens += max(num_charged - num_used, 0.0)

    def rate_headers(self) -> Iterator[tuple[bytes, bytes]]:
        """OpenAI's headers about the limits a minute that it has."""
        for what, bucket in ((b"requests", self._requests), (b"tokens", self._bucket)):
            if bucket.per_minute:
                for name, value in zip(("limit", "remaining", "reset"), bucket.describe(self._clock()), strict=True):
                    yield b"x-ratelimit-%b-%b" % (name.encode(), what), str(value).encode()

    def turns_of(self, fairness_id: str) -> Turns:
        """The turns of a request; requests of one fairness id share them."""
        return self._turns.setdefault(fairness_id, Turns(is_shared=True)) if fairness_id else Turns()

    def check_priority(self, priority: int, param: str = "priority") -> None:
        """Raise InvalidRequest for a priority more urgent than the tenant may ask for; `param` names it."""
        best = self.grant.best_priority
        if priority < best:
            raise InvalidRequest(
                f"{'' if param == 'priority' else f'{param}: '}priority must be at least {best} "
                f"(lower is more urgent), got {priority}",
                param=param,
            )

    def salted(self, cache_salt: str) -> str:
        """The cache salt of a request, which no other tenant can have, whatever the client sent."""
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
    """The owner of memory and threads used in the router: a key's tenant, or else a client's address."""
    tenant: Tenant | None = scope.get(TENANT)
    return tenant.name if tenant is not None else (scope.get("client") or ("local",))[0]
