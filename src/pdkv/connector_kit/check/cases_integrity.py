"""Cases about integrity: received KV is what was sent, or the load fails."""

from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.rig.damage import How
from pdkv.connector_kit.rig.handover import Handover, legal_orders
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.world import NotApplicable, Setting, World, require
from pdkv.errors import KVCorrupted


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
