"""Engines that come and go: sources propose endpoints, cards admit, withdrawals drain (docs/membership.md)."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.router.engines.address import check_engine_name, split_pool
from pdkv.router.engines.engine_client import EngineClient
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.operations import Operations
from pdkv.wire.kv import EngineCard

MAX_PROPOSALS = 1024
"""The most endpoints of all sources; each costs the router four sockets."""

MOVE_S = 5.0
"""Seconds until nothing holds on to an engine from which everything was moved."""

Door = Callable[[EngineCard], str]
News = Callable[[str, str, str], None]
"""Called with (endpoint, kind of `Verdict`, why)."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Proposal:
    """An endpoint, and its engine once that is a member."""

    endpoint: str
    names: Mapping[str, str]  # that its sources expect there, by source; empty: any
    client: EngineClient
    draining: "asyncio.Task[None] | None" = None  # once all its sources have withdrawn it
    hurried: bool = False  # its name is wanted elsewhere
    pool: str = ""  # in which its engine is to be


class Membership:
    """Lives in the dispatcher's event loop, and writes the dispatcher's table through `Operations`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        operations: Operations,
        connect: Callable[[str, Door], EngineClient],
        drain_s: float,
    ) -> None:
        """`connect(endpoint, door)` makes a client; `drain_s`: how long requests of an engine that leaves may go on."""
        self._dispatcher, self._operations, self._connect = dispatcher, operations, connect
        self._drain_s = drain_s
        self._wanted: dict[str, Mapping[str, str]] = {}  # names by endpoint, by source
        self._proposals: dict[str, Proposal] = {}  # by endpoint
        self._members: dict[str, Proposal] = {}  # those that were admitted, by name
        self.on_news: News = lambda endpoint, kind, why: None
        dispatcher.proposed = self.describe

    def propose(self, source: str, wanted: Mapping[str, str]) -> None:
        """Replace what a source proposes: the names that it expects at endpoints; empty: any; with @POOL, in that pool.

        Raises:
            ConfigError: there would be too many, or a pool is unknown or not the one of another source; nothing was
                changed.
        """
        all_wanted = {**self._wanted, source: wanted}
        endpoints = dict.fromkeys(endpoint for given in all_wanted.values() for endpoint in given)
        if len(endpoints) > MAX_PROPOSALS:
            raise ConfigError(f"{len(endpoints)} engines are proposed, and at most {MAX_PROPOSALS} were expected")
        names_at = {e: {s: given[e] for s, given in all_wanted.items() if e in given} for e in endpoints}
        for endpoint, names in names_at.items():
            self._check_pool(endpoint, names)
        self._wanted = all_wanted
        for endpoint, names in names_at.items():
            if (proposal := self._proposals.get(endpoint)) is None:
                self._begin(endpoint, names)
            elif _pool_of(names) != proposal.pool:
                self._change_pool(proposal, names)
            else:
                self._keep(proposal, names)
        for proposal in [p for e, p in self._proposals.items() if e not in endpoints]:
            self._withdraw(proposal)

    def name_at(self, endpoint: str) -> str:
        """Name of the member at this endpoint; empty: there is none."""
        proposal = self._proposals.get(endpoint)
        return proposal.client.name if proposal is not None and self._is_member(proposal) else ""

    def is_up(self, endpoint: str) -> bool:
        """Whether a member at this endpoint is ready."""
        name = self.name_at(endpoint)
        return self._of(name).fleet.is_ready(name)

    def describe(self) -> list[dict[str, str]]:
        """Endpoints whose engines are not admitted, JSON-ready."""
        return [
            {
                "endpoint": p.endpoint,
                "source": _sources(p),
                "name": next(filter(None, (split_pool(text)[0] for text in p.names.values())), ""),
                "reason": p.client.problem or "it does not answer",
            }
            for p in self._proposals.values()
            if not self._is_member(p)
        ]

    def close(self) -> None:
        """Stop whatever is under way. The dispatcher closes members' connections."""
        for proposal in self._proposals.values():
            if proposal.draining is not None:
                proposal.draining.cancel()
            if not self._is_member(proposal):
                proposal.client.close()

    def _is_member(self, proposal: Proposal) -> bool:
        return self._members.get(proposal.client.name) is proposal

    def _begin(self, endpoint: str, names: Mapping[str, str]) -> None:
        client = self._connect(endpoint, lambda card: self._judge(proposal, card))
        proposal = Proposal(endpoint, names, client, pool=_pool_of(names))
        self._proposals[endpoint] = proposal
        proposal.client.connect(self._dispatcher.pools.at(proposal.pool).listener)

    def _check_pool(self, endpoint: str, names: Mapping[str, str]) -> None:
        """Raise ConfigError for a pool that is unknown, or not the one that another source says."""
        pools = {source: split_pool(text)[1] for source, text in names.items()}
        for pool in pools.values():
            self._dispatcher.pools.at(pool)
        if len(set(pools.values())) > 1:
            raise ConfigError(f"sources name several pools for the engine at {endpoint}: {pools}")

    def _of(self, name: str) -> Dispatcher:
        """The dispatcher that has an engine."""
        return self._dispatcher.pools.holder(name)

    def _change_pool(self, proposal: Proposal, names: Mapping[str, str]) -> None:
        """Ask an endpoint anew that is to be in another pool; if it is a member, it leaves its pool as if it died."""
        if proposal.draining is not None:
            proposal.draining.cancel()
            proposal.draining = None
        proposal.names = names
        if self._is_member(proposal):
            self._start_over(proposal)
        else:
            proposal.client.close()
            self._begin(proposal.endpoint, names)

    def _keep(self, proposal: Proposal, names: Mapping[str, str]) -> None:
        """Note who proposes it now; one that was about to leave stays."""
        proposal.names = names
        engines = self._of(proposal.client.name).fleet.engines
        if self._is_member(proposal):
            engines[proposal.client.name].source = _sources(proposal)
        if proposal.draining is not None:
            proposal.draining.cancel()
            proposal.draining = None
            engines[proposal.client.name].leaving = False
            self._operations.resume(proposal.client.name)

    def _withdraw(self, proposal: Proposal) -> None:
        if not self._is_member(proposal):
            proposal.client.close()
            del self._proposals[proposal.endpoint]
        elif proposal.draining is None:
            proposal.hurried, proposal.draining = False, asyncio.create_task(self._drain(proposal))

    async def _drain(self, proposal: Proposal) -> None:
        """Let a member's requests end, or move them; then it is gone."""
        name, dispatcher = proposal.client.name, self._of(proposal.client.name)
        engine, changes = dispatcher.fleet.engines[name], dispatcher.changes
        engine.leaving = True
        self._operations.drain(name, force=True)

        def is_idle() -> bool:
            return not engine.books.requests and not dispatcher.driver.num_requests_on(name)

        if not engine.is_silent:
            await changes.wait_for(lambda: proposal.hurried or is_idle(), self._drain_s)
        if not is_idle():
            self._operations.move_away(name)
            await changes.wait_for(is_idle, MOVE_S)
        self._remove(proposal)

    def _remove(self, proposal: Proposal) -> None:
        """Take an engine out of the table; others may have its name now."""
        self._operations.remove(proposal.client.name, force=True)
        del self._members[proposal.client.name], self._proposals[proposal.endpoint]
        self.on_news(proposal.endpoint, "left", "")
        for other in self._proposals.values():
            if not self._is_member(other):
                other.client.retry()

    def _start_over(self, proposal: Proposal) -> None:
        """Take an engine out of the table, and ask its endpoint anew, if that is still proposed."""
        if not self._is_member(proposal):
            return
        if proposal.draining is not None:
            proposal.draining.cancel()
        self._remove(proposal)
        if proposal.draining is None:
            self._begin(proposal.endpoint, proposal.names)

    def _judge(self, proposal: Proposal, card: EngineCard) -> str:
        """Why the engine at the endpoint is not admitted; empty: it is a member now."""
        name, client = card.engine, proposal.client
        if self._is_member(proposal):
            if name != client.name:
                asyncio.get_running_loop().call_soon(self._start_over, proposal)
                return f"{client.name} was here, and now it is {name}"
            return ""
        try:
            self._check(proposal, card)
        except ConfigError as error:
            if str(error) != client.problem:
                logger.error("%s is not admitted: %s", proposal.endpoint, error)
            holder = self._members.get(name)
            waits = holder is not None and holder.draining is not None
            self.on_news(proposal.endpoint, "waiting" if waits else "refused", str(error))
            return str(error)
        client.name = name
        self._members[name] = proposal
        place = {"endpoint": proposal.endpoint, "source": _sources(proposal), "pool": proposal.pool}
        self._operations.admit(client, card.role, **place)
        self.on_news(proposal.endpoint, "admitted", "")
        return ""

    def _check(self, proposal: Proposal, card: EngineCard) -> None:
        """Raise ConfigError, with both values, if a card does not admit its engine."""
        name, endpoint = card.engine, proposal.endpoint
        check_engine_name(name)
        for source, text in proposal.names.items():
            if (expected := split_pool(text)[0]) not in ("", name):
                raise ConfigError(f"engine {name} answers at {endpoint}, where {source} expected {expected}")
        self._dispatcher.pools.at(proposal.pool).fleet.check(name, card)
        if (holder := self._of(name).fleet.engines.get(name)) is not None and not self._gives_way(name):
            raise ConfigError(
                f"the engine at {endpoint} is named {name}, as the one at {holder.endpoint} ({holder.source}): each "
                "needs a name of its own"
            )

    def _gives_way(self, name: str) -> bool:
        """Remove the member of this name if it is gone; hasten its leaving if it is about to leave."""
        dispatcher, member = self._of(name), self._members.get(name)
        engine = dispatcher.fleet.engines[name]
        if member is None:
            return False
        if engine.life == "ready" and not engine.is_silent:
            member.hurried = True
            dispatcher.changes.notify()
            return False
        self._start_over(member)
        return True


def _pool_of(names: Mapping[str, str]) -> str:
    """The pool of an endpoint: its sources agree."""
    return split_pool(next(iter(names.values())))[1]


def _sources(proposal: Proposal) -> str:
    return "+".join(proposal.names)
