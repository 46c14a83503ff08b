"""The dispatcher's face to the HTTP side: `Admission` and `Visit`, or a front's clients of them (router/fronts)."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from starlette.types import Scope

from pdkv.router.request import GenerateRequest
from pdkv.wire.kv import KVTerms

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Generation

Deliver = Callable[["Generation"], None]
"""A callback that takes a generation over the moment it begins: its owner can abort it from then on."""


class Wishes(NamedTuple):
    """What the headers of a request ask for."""

    slo_ttft_s: float = 0.0  # seconds within which the first token should come; 0: as soon as possible
    slo_tpot_s: float = 0.0  # seconds that each further one should take; 0: as few as possible
    priority: int | None = None  # of the objective that it names
    objective_header: str = ""  # that named it
    fairness_id: str = ""  # requests with the same one share their key's turns as one
    explain: bool = False  # why its engines were chosen
    num_hops: int = 0  # deployments whose fallback it has been through


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of its tenant, once it has been read."""

    priority: int
    wishes: Wishes
    cache_salt: str
    prompt_lengths: list[int]
    n: int
    max_tokens: int | None
    stream: bool
    num_predicted: int = 0  # tokens of the expected output, which each choice brings along
    pool: str = ""  # whose engines are to run it


class Terms(NamedTuple):
    """On what terms a request is served."""

    priority: int
    cache_salt: str
    kv_terms: KVTerms | None
    tenant: str  # its digest
    explain: bool = False
    may_leave: bool = False  # another deployment may have it
    pool: str = ""


class Replay(NamedTuple):
    """An answer that is taken up again."""

    body: bytes  # of its request
    reply_id: str
    created: int
    label: str
    seen: tuple[int, ...] = ()  # events that its client has, by choice, and then those of its end
    pool: str = ""  # that runs it


class Stay(Protocol):
    """One request's stay in the router, as a context manager (`Visit`)."""

    @property
    def resume_id(self) -> str:
        """The id with which its client may take it up elsewhere; "": it cannot."""

    @property
    def replay(self) -> Replay | None:
        """The earlier request that this one takes up."""

    def check(self) -> None:
        """Raise TooManyRequests if there is no room for it."""
        return

    async def admit(self, asked: Asked, body: bytes, reply_id: str, created: int, label: str) -> Terms:
        """Reserve what it asks for. `body` and the names: kept, if the answer is taken up later.

        Raises:
            TooManyRequests, InvalidRequest: it gets less than it asks for, now or ever.
        """

    async def start(self, request: GenerateRequest, deliver: Deliver, index: int) -> "Generation":
        """Begin the choice of this index when its turn comes."""

    def came(self, num_tokens: int) -> None:
        """Count output tokens as they arrive."""
        return

    def used(self, num_tokens: int, num_cached: int = 0) -> None:
        """Record the final number of prompt and output tokens, and those of them that were cached."""
        return

    def abort(self) -> None:
        """Remove everything of this request from the queue. Idempotent."""

    def __enter__(self) -> "Stay": ...

    def __exit__(self, kind: object, error: object, trace: object, /) -> None: ...


class Desk(Protocol):
    """Where requests arrive."""

    @property
    def draining(self) -> str:
        """Why no new requests are taken; empty if they are."""

    @property
    def objectives(self) -> Mapping[str, int]:
        """Priorities that headers may name."""

    async def receive(self, scope: Scope) -> Stay:
        """The stay of a request of which only the head is known; its tenant is in the scope from then on.

        Raises:
            Draining, TooManyRequests, Unauthorized.
        """

    def drain(self, why: str) -> None:
        """Take no new requests from now on. Idempotent."""
