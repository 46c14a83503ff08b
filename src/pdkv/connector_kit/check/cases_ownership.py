"""Cases about ownership: which side may read or write a block, and when."""

from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.rig.content import Text
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.handover import Handover, legal_orders, new_name, new_text
from pdkv.connector_kit.rig.request import TextRequest
from pdkv.connector_kit.rig.world import SHORT_S, TRANSFER_POLL_S, NotApplicable, Setting, Shape, World, require

BIG = Shape(num_blocks=160, num_layers=4, head_size=64)
"""Tokens of blocks of 128 KiB: a transfer takes long enough to be interrupted."""

HUGE, HUGE_BLOCKS = Shape(num_blocks=144, num_layers=8, head_size=128), 64
"""Number of blocks of 512 KiB that make 32 MiB: a peer can be stopped in the middle of their transfer."""

WHILE_S = TRANSFER_POLL_S

MAX_ATTEMPTS = 8
"""Attempts to stop a producer in the middle of a transfer: on a busy machine it may be over before the stop."""

"""Seconds for which something must not happen; every engine runs at least one step in that time."""


class ContentRead:
    """Looks for the first `num_tokens` tokens (whole blocks) of a text on one engine, and loads those found."""

    def __init__(self, world: World, engine: Engine, text: Text, num_tokens: int) -> None:
        self._world = world
        self._engine = engine
        self._text = text
        self._num_tokens = num_tokens
        self._is_layerwise = False

    def num_found(self) -> int:
        """Tokens that can be loaded now; 0 while the connector is still looking."""
        return self._ask(self._new_request())

    def appears_within(self, seconds: float) -> bool:
        """Whether anything is found within that time, during which the engines run."""
        request = self._new_request()
        return self._world.runs_until(lambda: self._ask(request) > 0, seconds)

    def load(self) -> str:
        """Load the tokens found now. Returns what is wrong with them; empty if nothing is, or nothing was found."""
        request = self._new_request()
        num_tokens = self._ask(request)
        if not num_tokens:
            return ""
        engine = self._engine
        engine.allocate(request, num_tokens + self._is_layerwise, resume_at=num_tokens)
        engine.start_load(request, num_tokens, is_layerwise=self._is_layerwise)
        engine.step_with_load(request, num_tokens, is_layerwise=self._is_layerwise)
        self._world.until(lambda: request.transfer_key in engine.received, f"the load of {num_tokens} tokens ends")
        engine.kv.free(request)
        return engine.wrong.get(request.transfer_key, "")

    def require_nothing(self, when: str, seconds: float) -> None:
        """Raise Violation if anything is found in that time."""
        require(not self.appears_within(seconds), f"{when}: the KV can be found")

    def _new_request(self) -> TextRequest:
        return TextRequest(
            self._text, self._num_tokens + 1, kv="local", transfer_id=new_name(), attempt=0, layout=self._engine.layout
        )

    def _ask(self, request: TextRequest) -> int:
        matched = self._engine.external.match(request, 0)
        self._is_layerwise = matched.mode == "layerwise"
        return 0 if matched.ask_again else matched.num_tokens


@case("partial_writes", covers="F10")
def partial_writes(setting: Setting) -> None:
    """Incomplete or unconfirmed KV cannot be found, and is not reported as received."""
    with World(setting) as world:
        if world.consumer.card.content_addressed:
            _unconfirmed_content(world)
        if world.consumer.card.kind == "push":
            transfer = Handover(world, 100, chunk=32)
            transfer.take(*transfer.steps[:-3])
            world.run_for(WHILE_S)
            require(not transfer.ended, "reported as received although a part was not even computed")
            transfer.take(*transfer.steps[-3:])
            transfer.finish()
    with World(setting, BIG, BIG) as world:
        for order in legal_orders(world):
            Handover(world, 16 * (32 if setting.quick else 128) - 3, order=order).run()


def _unconfirmed_content(world: World) -> None:
    """Half a step, an unconfirmed step, a preemption; then the same tokens again, confirmed."""
    transfer = Handover(world, 128)
    producer = world.producer
    reader = ContentRead(world, world.consumer, transfer.sender.text, 128)
    transfer.begin_prefill()
    plan = producer.plan((transfer.sender, 0, 128))
    producer.execute(plan, layers=(0, 2), end=False)
    seen = [reader.num_found() for _ in range(3)]
    require(not any(seen), f"after two of three layers {max(seen)} tokens can be found")
    producer.execute(plan, begin=False, layers=(2, 3))
    reader.require_nothing("computed and not confirmed", WHILE_S)
    producer.preempt(transfer.sender)
    reader.require_nothing("computed and preempted before it was confirmed", WHILE_S)
    transfer.prefill()
    found = reader.appears_within(world.timeout_s) or producer.card.kind == "push"
    require(found, "confirmed content is not found")
    wrong = reader.load()
    require(not wrong, f"found by content: {wrong}")
    transfer.release()


@case("late_reads", covers="F4")
def late_reads(setting: Setting) -> None:
    """Blocks reused before or during a load: the read is refused, or it is the old content after all."""
    with World(setting) as world:
        if world.consumer.card.kind == "push":
            raise NotApplicable("the writer reads its own blocks, which it holds")
        for steps_before in (0, 1, 2):
            transfer = Handover(world, 100)
            transfer.prefill()
            _load_late(transfer, steps_before)
        Handover(world, 40).run()
    rounds = 3 if setting.quick else 12
    with World(setting, BIG, BIG) as world:
        for _ in range(rounds):
            transfer = Handover(world, 16 * 24)
            transfer.prefill()
            _load_late(transfer, 3)
        Handover(world, 40).run()


def _load_late(transfer: Handover, steps_before: int) -> None:
    """Find, allocate, start; before one of them (or right after the start) the producer reuses the blocks."""
    world, producer = transfer.world, transfer.producer

    def reuse() -> None:
        producer.release(transfer.key)
        producer.step()

    if steps_before == 0:
        reuse()
    transfer.num_external = transfer.ask_until_known(0)
    if steps_before == 1:
        reuse()
    if transfer.num_external:
        transfer.allocate()
        if steps_before == 2:
            reuse()
        transfer.start()
    if steps_before == 3:
        reuse()
    transfer.settle()
    producer.release(transfer.key)
    world.check_pools()


@case("attempts")
def attempts(setting: Setting) -> None:
    """A second attempt is another transfer: nothing of the first one counts for it, lands in it or ends it."""
    with World(setting) as world:
        name = new_name()
        first = Handover(world, 52, transfer_id=name)
        second = Handover(world, 52, transfer_id=name, attempt=1)
        if first.is_push:
            _attempts_push(first, second)
        else:
            first.take()
            first.drop_receiver()  # the lease of the first attempt lives on for a while
            second.take(*second.steps[:-1])
            second.take(second.steps[-1])
            world.consumer.cancel(first.key, "receive")
            world.consumer.step()
            second.finish()
            first.release()
        world.check_rest()
        Handover(world, 52, transfer_id=name, attempt=2).run()


def _attempts_push(first: Handover, second: Handover) -> None:
    """The first attempt's ticket is served after the consumer has given the second one's."""
    world = first.world
    first.take(first.find, first.allocate, first.start, first.bring_ticket)
    first.drop_receiver()
    second.take(second.find, second.allocate, second.start)
    first.prefill()
    world.run_for(WHILE_S)
    require(not second.ended, "data sent for the first attempt counts for the second one")
    second.bring_ticket()
    second.prefill()
    second.finish()
    first.release()


@case("later_attempts")
def later_attempts(setting: Setting) -> None:
    """KV of one attempt is read by later ones: after a reader that gave up, and one that has all of it."""
    with World(setting) as world:
        for gives_up in (True, False):
            transfer = Handover(world, 52)
            transfer.take()
            for _ in range(2):
                if not gives_up:
                    require(not transfer.wait().code, f"load of {transfer.describe()} failed")
                transfer.drop_receiver()
                transfer.next_reader()
                transfer.take(transfer.find, transfer.allocate, transfer.start, transfer.bring_ticket)
            transfer.finish()
        world.check_rest()


@case("replay", covers="F9")
def replay(setting: Setting) -> None:
    """Blocks of a preempted or finished request are overwritten at once: the next reader gets no poison."""
    with World(setting, Shape(num_blocks=96), Shape(num_blocks=96)) as world:
        for confirmed in (0, 48, 128):
            _preempted(world, confirmed)
        for order in legal_orders(world):
            for num_tokens in (37, 128):
                text = new_text(num_tokens + 1)
                Handover(world, num_tokens, text=text, order=order).run()
                again = Handover(world, num_tokens, text=text, order=order)
                again.run()
        world.check_pools()


def _preempted(world: World, num_confirmed: int) -> None:
    """A prompt of 128 tokens loses its blocks after a part was confirmed; others use them, and the prompt is read."""
    producer = world.producer
    text = new_text(129)
    transfer = Handover(world, 128, text=text)
    transfer.begin_prefill()
    if num_confirmed:
        producer.step((transfer.sender, 0, num_confirmed))
        transfer.sender.num_confirmed = num_confirmed
        producer.confirm(transfer.sender)
        producer.step((transfer.sender, num_confirmed, 128))
        # It is no victim until then.
        world.until(lambda: not producer.external.has_saves(transfer.key), "a save that holds blocks ends")
    else:
        producer.step((transfer.sender, 0, 128))
    producer.preempt(transfer.sender)
    producer.step()  # other requests overwrite the blocks
    reader = ContentRead(world, world.consumer, text, 128)
    if world.consumer.card.content_addressed:
        reader.appears_within(WHILE_S)
        wrong = reader.load()
        require(not wrong, f"{num_confirmed} tokens were confirmed before the preemption, then read: {wrong}")
    again = Handover(world, 128, text=text)
    again.run()
    producer.tell_aborted(transfer.key)


@case("quarantine", covers="F1")
def quarantine(setting: Setting) -> None:
    """Once a load's end is reported, by success, failure, cancel or deadline, its blocks are not written any more."""
    with World(setting, deadline_s=SHORT_S) as world:
        if world.consumer.card.kind == "push":
            for num_early in (0, 2):
                _late_write(world, num_early, after_deadline=False)
                _late_write(world, num_early, after_deadline=True)
    with World(setting, HUGE, HUGE) as world:
        for order in legal_orders(world):
            for _ in range(1 if setting.quick else 3):
                _cancel_under_way(world, order, stops=False)
                for _ in range(0 if setting.one_process else MAX_ATTEMPTS):
                    if _cancel_under_way(world, order, stops=True):
                        break


def _late_write(world: World, num_early: int, *, after_deadline: bool) -> None:
    """The producer continues with a ticket that the consumer has given up, by cancel or after its deadline."""
    transfer = Handover(world, 100, chunk=48)
    late = 4 - num_early  # of three chunks and the hand-off
    transfer.take(*transfer.steps[:-late])
    if after_deadline:
        world.runs_until(lambda: transfer.ended, world.passed_s)
    if transfer.ended:
        transfer.require_typed(transfer.wait())
    transfer.drop_receiver()
    world.until(lambda: not world.consumer.has_quarantine, "a cancelled load is answered")
    world.consumer.step()  # other requests write the blocks
    transfer.take(*transfer.steps[-late:])
    world.run_for(WHILE_S)
    world.check_pools()
    transfer.release()


def _cancel_under_way(world: World, order: str, *, stops: bool) -> bool:
    """A big load is cancelled when it has begun; its blocks have new owners as soon as that is answered. The producer
    may be stopped when a part is there, until the blocks have their new owners. Returns whether the stop came in time:
    more was missing than the buffers on the way hold.
    """
    share = 0.0
    transfer = Handover(world, 16 * HUGE_BLOCKS, order=order)
    transfer.take()
    if transfer.is_push:
        world.producer.step()
    if stops:
        world.consumer.wait_written(transfer.receiver, WHILE_S)
        world.stop("p")
        share = world.consumer.share_written(transfer.receiver)
    transfer.drop_receiver()
    if stops:
        # Or what is received waits for the end.
        world.runs_until(lambda: not world.consumer.has_quarantine, world.passed_s)
        world.consumer.step()
        world.resume("p")
    world.until(lambda: not world.consumer.has_quarantine, "a cancelled load is answered")
    world.consumer.step()  # other requests write the blocks
    world.run_for(WHILE_S / 2)
    world.check_pools()
    transfer.release()
    return 0.0 < share < 0.6
