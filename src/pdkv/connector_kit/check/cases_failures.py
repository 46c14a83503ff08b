"""Cases about failures: requests given up at any point; peers that stop, die, return, or never appear; damage."""

from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.rig.damage import How
from pdkv.connector_kit.rig.handover import Handover, legal_orders, new_text
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.world import (
    AMPLE_S,
    SHORT_S,
    TRANSFER_POLL_S,
    NotApplicable,
    Refused,
    Setting,
    World,
    require,
)
from pdkv.errors import KVCorrupted


@case("aborts", covers="F1 F2 F3")
def aborts(setting: Setting) -> None:
    """A request that is given up after any of its steps leaves nothing behind, and its next attempt is right."""
    abort_everywhere(setting)


def abort_everywhere(setting: Setting) -> None:
    """Give requests up after any of their steps, in every legal order."""
    with World(setting) as world:
        for order in legal_orders(world):
            chunk = 32 if setting.quick else 16
            num_steps = len(Handover(world, 52, order=order, chunk=chunk).steps)
            for num_taken in range(num_steps + 1):
                _abort_after(world, order, chunk, num_taken)
        world.check_pools()


def _abort_after(world: World, order: str, chunk: int, num_taken: int) -> None:
    transfer = Handover(world, 52, order=order, chunk=chunk)
    for step in transfer.steps[:num_taken]:
        step()
    transfer.abort()
    live = world.live_engines()
    world.until(lambda: all(engine.is_idle for engine in live), f"aborted after {num_taken} steps, it comes to rest")
    for engine in live:
        engine.step()
        require(not engine.num_held, f"aborted after {num_taken} steps: {engine.describe_rest()}")
    again = Handover(world, 52, order=order, chunk=chunk, transfer_id=transfer.key.transfer_id, attempt=1)
    again.run()


@case("expiry", covers="F1")
def expiry(setting: Setting) -> None:
    """Every wait ends with a typed error: for a peer that never sends, never receives, or is gone without a word."""
    with World(setting, deadline_s=SHORT_S) as world:
        if world.consumer.card.kind == "push":
            _nobody_sends(world)
    with World(setting, deadline_s=AMPLE_S) as world:
        if world.consumer.card.kind == "push":
            _nobody_receives(world)
        else:
            _producer_gone(world, met_before=True)
    with World(setting, deadline_s=SHORT_S) as world:
        if world.consumer.card.kind != "push":
            _producer_gone(world, met_before=False)


def _nobody_sends(world: World) -> None:
    """The consumer waits for a prompt that is never computed, until its connector or its engine gives up."""
    transfer = Handover(world, 52)
    transfer.take(*transfer.steps[:3])
    world.runs_until(lambda: transfer.ended, world.passed_s)
    if not transfer.ended:
        transfer.drop_receiver()
    outcome = transfer.wait()
    require(bool(outcome.code), "a load without a source has succeeded")
    transfer.require_typed(outcome)
    transfer.end()


def _nobody_receives(world: World) -> None:
    """The consumer has died with an open ticket; the producer does not know yet."""
    transfer = Handover(world, 52)
    transfer.take(*transfer.steps[:4])
    world.kill("d")
    transfer.prefill()
    world.until(lambda: transfer.key in world.producer.sent, "a send to a dead peer ends")
    transfer.require_typed(world.producer.sent[transfer.key])
    transfer.release()


def _producer_gone(world: World, *, met_before: bool) -> None:
    """The producer has died after its hand-off; the consumer does not know yet."""
    if met_before:
        Handover(world, 40).run()
    transfer = Handover(world, 52)
    transfer.prefill()
    world.kill("p")
    load_what_there_is(transfer)


def load_what_there_is(transfer: Handover) -> None:
    """Ask and load: nothing found, a typed failure, or the right content."""
    transfer.num_external = transfer.ask_until_known(0)
    if transfer.num_external:
        transfer.take(transfer.allocate, transfer.start)
        transfer.settle()


@case("stopped_peer")
def stopped_peer(setting: Setting) -> None:
    """A peer that is stopped (SIGSTOP) costs only its own transfers; when it resumes, everything works again."""
    with World(setting, deadline_s=AMPLE_S) as world:
        for name in ("p", "d"):
            for order in legal_orders(world):
                Handover(world, 40, order=order).run()
                _stop_under_way(world, order, name)
                world.check_pools()
                Handover(world, 40, order=order).run()


def _stop_under_way(world: World, order: str, name: str) -> None:
    """Stop one side while the other needs it; the other ends what it can, and gives up the rest."""
    transfer = Handover(world, 100, order=order, chunk=48)
    if not transfer.is_push:
        if order == "decode_first":
            transfer.reserve()
        transfer.prefill()
        _stop_for_pull(world, transfer, name)
    elif name == "p":
        transfer.take(*transfer.steps[:-2])
        world.stop("p")
        _give_up_on_sender(world, transfer)
    else:
        transfer.take(*transfer.steps[:-2])
        world.stop("d")
        if order != "needs_peer_first":  # some of its steps would be the stopped side's
            world.run_for(TRANSFER_POLL_S)
            world.resume("d")
            transfer.abort()
            return
        transfer.take(*transfer.steps[-2:])
        world.runs_until(lambda: transfer.key in world.producer.sent, world.timeout_s / 2)
        world.resume("d")
        require(transfer.key in world.producer.sent, "a send to a stopped peer does not end")
        if world.producer.sent[transfer.key].code:
            transfer.require_typed(world.producer.sent[transfer.key])
            transfer.abort()
        else:
            transfer.finish()


def _stop_for_pull(world: World, transfer: Handover, name: str) -> None:
    """Stop the producer before it is read, and the consumer in the middle; it resumes after the source was reused."""
    if name == "p":
        world.stop("p")
        if transfer.receiver.block_ids:
            transfer.take(transfer.find, transfer.start)
            transfer.wait()
        else:
            load_what_there_is(transfer)
        world.resume("p")
    else:
        transfer.num_external = transfer.ask_until_known(0)
        if not transfer.receiver.block_ids:
            transfer.allocate()
        transfer.start()
        world.stop("d")
        world.producer.release(transfer.key)
        world.producer.step()
        world.run_for(TRANSFER_POLL_S)
        world.resume("d")
    if transfer.receiver.block_ids:
        transfer.settle()
    transfer.release()


def _give_up_on_sender(world: World, transfer: Handover) -> None:
    """The consumer's deadline passes: its cancel is answered, or, at the latest, the teardown of the connection is.

    If that cannot stop a writer (within a host the kernel copies for it), the end of its process does.
    """
    world.runs_until(lambda: transfer.ended, world.passed_s)
    transfer.drop_receiver()
    consumer = world.consumer
    if not world.runs_until(lambda: not consumer.has_quarantine, world.timeout_s / 4):
        consumer.update_peers([])
        if not world.runs_until(lambda: not consumer.has_quarantine, world.timeout_s / 4):
            world.kill("p")
            world.until(lambda: not consumer.has_quarantine, "the blocks come back when the stopped sender has ended")
            consumer.step()  # other requests write them
            transfer.release()
            world.revive("p")
            return
    consumer.step()  # other requests write them
    world.resume("p")
    if transfer.sender.block_ids:
        transfer.take(*transfer.steps[-2:])
    world.run_for(2 * TRANSFER_POLL_S)
    world.check_pools()
    transfer.release()
    world.introduce()


@case("restarted_peer", covers="F5")
def restarted_peer(setting: Setting) -> None:
    """After kill -9 and a new epoch of either side, old names reach nothing and new transfers work at once."""
    for name in ("p", "d"):
        with World(setting, deadline_s=AMPLE_S) as world:
            for order in legal_orders(world):
                Handover(world, 100, order=order).run()
                _restart_under_way(world, order, name)
                Handover(world, 100, order=order).run()
                world.check_pools()


def _restart_under_way(world: World, order: str, name: str) -> None:
    """Act on what was agreed with the old incarnation although the new one exists."""
    transfer = Handover(world, 100, order=order)
    if transfer.is_push:
        transfer.take(transfer.find, transfer.allocate, transfer.start)
    else:
        transfer.prefill()
    world.restart(name)
    survivor = world.engines["d" if name == "p" else "p"]
    if name == "d" and transfer.is_push:
        transfer.bring_ticket()
        transfer.prefill()
        world.until(lambda: transfer.key in survivor.sent, "a send to a dead incarnation ends")
        require(bool(survivor.sent[transfer.key].code), "a send to a dead incarnation has succeeded")
        transfer.require_typed(survivor.sent[transfer.key])
        transfer.release()
    elif name == "d":
        transfer.release()
    elif transfer.is_push:
        transfer.drop_receiver()
        world.until(lambda: not survivor.has_quarantine, "blocks exposed to a dead incarnation come back")
        transfer.release()
    else:
        other = Handover(world, 100)
        other.prefill_as(transfer)
        load_what_there_is(transfer)
        other.abort()
    survivor.step()
    world.check_pools()


@case("others_untouched", covers="F5")
def others_untouched(setting: Setting) -> None:
    """The death of one peer, even in the middle of a transfer, does not touch transfers between others."""
    with World(setting, deadline_s=AMPLE_S) as world:
        try:
            world.boot("e", world.shapes["d"])
            world.introduce()
        except Refused as error:
            raise AssertionError(f"a third engine is refused: {error}") from error
        for order in legal_orders(world)[:1]:
            dying = Handover(world, 100, order=order, consumer="e")
            living = Handover(world, 100, order=order)
            dying.take(*dying.steps[:-1])
            living.take(*living.steps[:-1])
            world.kill("e")
            living.take(living.steps[-1])
            living.finish()
            dying.abort()
            world.revive("e")
            Handover(world, 100, order=order, consumer="e", text=new_text(101)).run()
            Handover(world, 100, order=order).run()


@case("damage", covers="F26")
def damage(setting: Setting) -> None:
    """A bit flip or a misplaced block on the way fails the load; without damage the next load is right."""
    with World(setting) as world:
        if not world.producer.built.has_digests:
            raise NotApplicable("it hands KV off without digests of its own")
        ways: tuple[How, ...] = ("flip", "swap")
        for order in legal_orders(world):
            for how in ways:
                _damage(world, order, how)


def _damage(world: World, order: str, how: How) -> None:
    world.producer.ask_all(HostedRank.spoil, how)
    transfer = Handover(world, 52, order=order, is_told=True)
    transfer.take()
    outcome = transfer.wait()
    require(outcome.code == KVCorrupted.code, f"after a {how} on the way the load ended with {outcome.code!r}")
    transfer.end()
    count = sum(done.num_digests for done in world.producer.ask_all(HostedRank.unspoil))
    require(count > 0, "nothing was damaged: the digests were made elsewhere")
    Handover(world, 52, order=order).run()
