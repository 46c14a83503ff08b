"""Worlds in which nothing gets lost and no time passes: what comes to rest before all requests have ended stands in a
cycle of waits, which only a deadline would end.
"""

from pdkv.router.engines.fleet import agreed_order
from pdkv.router.request import Route
from pdkv.wire.kv import Order
from state_machine.host import MAX_DRAIN_ROUNDS, Client, World

QUIET_ROUNDS = 30


class LiveWorld(World):
    """The first engine runs prompts, as a second one may; the others decode. Orders are agreed on as by a router."""

    def __init__(self, *args: object, order: Order, **fields: object) -> None:
        super().__init__(*args, order=order, **fields)  # type: ignore[arg-type]
        names = list(self.engines)
        self.prefills = names[: 1 + self.chooser.below(len(names) - 1)]
        self.decodes = names[len(self.prefills) :]
        cards = [engine.core.card for engine in self.engines.values()][:2]
        agreed = agreed_order(cards[0], cards[1], [order])
        assert agreed is not None
        self.order = agreed

    def route(self) -> Route:
        decode = self.decodes[self.chooser.below(len(self.decodes))]
        if self.chooser.below(12) == 1:
            return Route(decode, decode)
        prefill = self.prefills[self.chooser.below(len(self.prefills))]
        return Route(prefill, "" if self.order == "prefill_first" else decode, self.order)

    def maybe_retry(self, client: Client) -> None:
        """Nothing may fail where nothing is lost."""
        flow = client.flow
        assert flow.failure is None, flow.failure
        if flow.awaits_decode or flow.may_bind_decode:
            self.num_early += flow.may_bind_decode
            self.send(flow.bind_decode(self.decodes[self.chooser.below(len(self.decodes))], self.now))

    def act(self) -> None:
        choice = self.chooser.below(52)
        engine = list(self.engines.values())[self.chooser.below(len(self.engines))]
        if choice < 20:
            self.step(engine)
        elif choice < 32 and engine.inbox:
            engine.core.handle("router", engine.inbox.popleft(), self.now)
        elif choice < 42 and engine.outbox:
            self.receive(engine)
        elif choice < 46 and self.fabric.under_way:
            self.fabric.deliver(self.chooser.below(len(self.fabric.under_way)))
        elif choice >= 46 and len(self.clients) < 12:
            self.submit()

    def abort(self) -> None:
        """No client goes away."""

    def drain(self) -> None:
        quiet = 0
        for _ in range(MAX_DRAIN_ROUNDS):
            quiet = 0 if self.drain_once() else quiet + 1
            if quiet > QUIET_ROUNDS:
                break
        waiting = [client.flow.request_id for client in self.clients if not client.flow.ended]
        assert not waiting, f"a cycle of waits: {waiting}"
