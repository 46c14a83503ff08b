"""Cases about KV groups: layers with a window have block tables of their own, of which only the end is present."""

from dataclasses import replace

from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.check.cases_failures import abort_everywhere, load_what_there_is
from pdkv.connector_kit.rig.handover import Handover, legal_orders
from pdkv.connector_kit.rig.protocol import TokenRange
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.world import NotApplicable, Setting, Shape, World, lengths, require
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.wire.kv import KVGroup

GROUPS = (KVGroup((0, 2)), KVGroup((1, 3), 40))
"""Half of the layers see 40 tokens, which may begin anywhere in a block."""

STATES = (KVGroup((0, 2)), KVGroup((1, 3), 2, state=True))
"""Half of the layers have a state in place of KV: one page after each block, of which the last one is handed off."""


def _grouped(setting: Setting) -> Setting:
    if "windows" not in setting.layouts:
        raise NotApplicable("its plan has no windows: it gets one table for all layers, which keep all tokens")
    return replace(setting, groups=GROUPS)


@case("kv_groups")
def kv_groups(setting: Setting) -> None:
    """For layers with a window, the blocks that the next token sees arrive; earlier ones are free, and not sent."""
    with World(_grouped(setting)) as world:
        for order in legal_orders(world):
            for num_tokens, chunk in [*((n, 0) for n in lengths(world.setting)), (115, 24), (337, 48)]:
                _hand_over(Handover(world, num_tokens, order=order, chunk=chunk))
        world.check_pools()


@case("state_groups")
def state_groups(setting: Setting) -> None:
    """For layers with a state, the page after the last token arrives, whole even where the block is not full."""
    if "state" not in setting.layouts:
        raise NotApplicable("its plan has no states: an engine with such layers is refused")
    shape = Shape(groups=STATES, block_size=32)
    with World(setting, shape, shape) as world:
        for order in legal_orders(world):
            for num_tokens, chunk in ((1, 0), (32, 0), (65, 0), (100, 24), (128, 48)):
                _hand_over(Handover(world, num_tokens, order=order, chunk=chunk))


def _hand_over(transfer: Handover) -> None:
    """One transfer, the bytes of which are those of the needed blocks."""
    layout, num_tokens = transfer.consumer.layout, transfer.num_tokens
    transfer.take()
    outcome = transfer.wait()
    transfer.finish()
    stop = -(-num_tokens // layout.block_size)
    needed = sum(stop - first_seen_block(window, num_tokens, layout.block_size) for window in layout.windows)
    require(
        len(transfer.leased) == needed, f"{len(transfer.leased)} blocks stay until the hand-off, but {needed} are seen"
    )
    most = (needed + 1) * layout.block_bytes  # a store's overhead per value is less than a block
    require(
        outcome.num_bytes < most,
        f"{outcome.num_bytes} bytes arrived for {transfer.describe()}, expected {needed} blocks of "
        f"{layout.block_bytes}",
    )


@case("kv_groups_failures", covers="F1 F4")
def kv_groups_failures(setting: Setting) -> None:
    """A failure in one group fails the whole load; given up at any point, both groups' blocks are returned."""
    grouped = _grouped(setting)
    abort_everywhere(grouped)
    with World(grouped) as world:
        if world.producer.card.kind == "push":
            return  # the writer reads its own blocks, which it holds
        for group in range(len(GROUPS)):
            for _ in range(2 if setting.quick else 6):
                _reuse_one_group(Handover(world, 115, chunk=48), group)
                Handover(world, 40).run()


def _reuse_one_group(transfer: Handover, group: int) -> None:
    """One group's handed-off blocks are reused before they are read: no part of the load may count."""
    world, producer = transfer.world, transfer.producer
    transfer.prefill()
    table = transfer.leased_tables[group]
    producer.table.reuse_all([block for block in table if block >= 0])
    tables = [table if i == group else [-1] * len(table) for i in range(len(GROUPS))]
    producer.ask_all(HostedRank.fill, TokenRange([], 0, transfer.num_tokens, tables))
    load_what_there_is(transfer)
    producer.release(transfer.key)
    world.check_pools()
