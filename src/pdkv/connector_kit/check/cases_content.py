"""Cases about content: every byte that the consumer gets is the producer's, whatever the shapes and orders."""

import itertools
from dataclasses import replace

from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.rig.handover import Handover, legal_orders
from pdkv.connector_kit.rig.world import TRANSFER_POLL_S, NotApplicable, Setting, Shape, World, lengths, require
from pdkv.connectors.base import TransferKey
from pdkv.errors import IncompatiblePeers

RANK_PAIRS = ((1, 2), (2, 1), (2, 4), (4, 1))
BLOCK_PAIRS = ((16, 32), (32, 16))
NUM_CONCURRENT = 100


@case("content_identity")
def content_identity(setting: Setting) -> None:
    """KV arrives exactly as computed, for all lengths, orders, chunks and scattered block tables."""
    with World(setting) as world:
        hand_over_all(world)


def hand_over_all(world: World, *, num_hit_blocks: int = 0) -> None:
    """One transfer after the other, of every length in every legal order, in one chunk or several."""
    block_size = world.consumer.block_size
    chunks = itertools.cycle((0, 24))
    for order in legal_orders(world):
        for num_tokens in lengths(world.setting, block_size):
            hit = min(num_hit_blocks, num_tokens // block_size)
            Handover(world, num_tokens, order=order, chunk=next(chunks), num_hit_blocks=hit).run()
            world.check_pools()


@case("local_hits")
def local_hits(setting: Setting) -> None:
    """Blocks that the consumer already has are never written; only the rest is loaded."""
    with World(setting) as world:
        hand_over_all(world, num_hit_blocks=1)
        for num_tokens in (33, 64, 95):
            for order in legal_orders(world):
                Handover(world, num_tokens, order=order, num_hit_blocks=num_tokens // 16).run()
        world.check_pools()


@case("order_of_calls")
def order_of_calls(setting: Setting) -> None:
    """Questions change nothing, steps may be planned ahead, and unknown keys are ignored (F2)."""
    unknown = TransferKey("unknown", 7)
    with World(setting) as world:
        for engine in world.engines.values():
            engine.cancel(unknown, "send")
            engine.cancel(unknown, "receive")
            engine.tell_aborted(unknown)
            engine.step()
            ahead = [engine.plan(), engine.plan()]
            for plan in ahead:
                engine.execute(plan)
            engine.update_peers([other.card for other in world.engines.values()])
        for order in legal_orders(world):
            asked = Handover(world, 40, order=order, chunk=16)
            for step in asked.steps:
                if step == asked.allocate:
                    break  # found, and given up before anything was allocated
                step()
                asked.consumer.external.match(asked.receiver, 0)
            asked.abort()
            _ask_often(world, order)


def _ask_often(world: World, order: str) -> None:
    """Ask again and again, as an engine without room does; the answers must agree, and the load must be right in the
    end.
    """
    transfer = Handover(world, 40, order=order, chunk=16)
    for step in transfer.steps:
        step()
        if step == transfer.find:
            again = [transfer.consumer.external.match(transfer.receiver, 0) for _ in range(3)]
            require(len(set(again)) == 1, f"the same question got different answers: {again}")
        if step != transfer.start:
            ahead = [engine.plan() for engine in world.engines.values() for _ in range(2)]
            for engine, plan in zip([e for e in world.engines.values() for _ in range(2)], ahead, strict=True):
                engine.execute(plan)
    transfer.finish()


@case("wake_up", covers="F19")
def wake_up(setting: Setting) -> None:
    """An idle engine is told of a result by notify (or the connector says that it needs steps), without others."""
    with World(setting) as world:
        for order in legal_orders(world):
            transfer = Handover(world, 40, order=order)
            transfer.take()
            world.poll_s = 2 * world.timeout_s  # no unrequested step
            announced = world.runs_until(lambda transfer=transfer: transfer.ended, world.timeout_s / 4)  # type: ignore[misc]
            world.poll_s = TRANSFER_POLL_S
            require(announced, f"nothing announced the end of the load of {transfer.describe()}")
            transfer.finish()


@case("concurrent_transfers")
def concurrent_transfers(setting: Setting) -> None:
    """A hundred transfers at once, begun and served in any order, all arrive."""
    shape = Shape(num_blocks=4 * NUM_CONCURRENT, num_layers=2)
    with World(setting, shape, shape) as world:
        order = legal_orders(world)[0]
        transfers = [Handover(world, 17 + i % 32, order=order) for i in range(NUM_CONCURRENT)]
        for steps in itertools.zip_longest(*(transfer.steps for transfer in transfers)):
            for step in steps:
                if step is not None:
                    step()
        for transfer in reversed(transfers):
            transfer.finish()


def _unequal(setting: Setting, producer: Shape, consumer: Shape) -> None:
    with World(setting, producer, consumer) as world:
        hand_over_all(world)
        hand_over_all(world, num_hit_blocks=1)


def _register_pairs() -> None:
    for ranks in RANK_PAIRS:

        def unequal_ranks(setting: Setting, pair: tuple[int, int] = ranks) -> None:
            """Ranks exchange the right heads, replicated ones too; or the pair is refused from the cards."""
            _unequal(setting, Shape(tp=pair[0]), Shape(tp=pair[1]))
            if max(pair) == RANK_PAIRS[2][1] and not setting.quick:
                _unequal(setting, Shape(tp=pair[0], num_heads=2), Shape(tp=pair[1], num_heads=2))

        case(f"unequal_ranks[{ranks[0]},{ranks[1]}]", covers="F20")(unequal_ranks)
    for sizes in BLOCK_PAIRS:

        def unequal_blocks(setting: Setting, pair: tuple[int, int] = sizes) -> None:
            """Blocks of unequal size, with tails and hits at every place; or the pair is refused from the cards."""
            _unequal(setting, Shape(block_size=pair[0]), Shape(block_size=pair[1]))

        case(f"unequal_blocks[{sizes[0]},{sizes[1]}]")(unequal_blocks)


_register_pairs()


@case("latent_rows")
def latent_rows(setting: Setting) -> None:
    """Rows of one side, shared by all ranks and without positions: each rank gets every row, from any sender."""
    if "latent" not in setting.layouts:
        raise NotApplicable("its plan has no latent rows: an engine with such KV is refused")
    shape = Shape(sides=1, num_heads=1, head_size=36, positions="none")
    others = (
        []
        if setting.one_process
        else [(replace(shape, tp=2), replace(shape, block_size=32)), (shape, replace(shape, tp=2))]
    )
    for producer, consumer in [(shape, shape), *others]:
        _unequal(setting, producer, consumer)


@case("all_ranks", covers="F20")
def all_ranks(setting: Setting) -> None:
    """A transfer ends only when all ranks have their part: one rank is stopped while the others succeed."""
    setting_of_ranks = ((2, 1), (1, 2))
    for pair in setting_of_ranks:
        with World(setting, Shape(tp=pair[0]), Shape(tp=pair[1])) as world:
            world.need_processes("one rank cannot be stopped alone")
            for order in legal_orders(world):
                _stop_one_rank(world, order)


def _stop_one_rank(world: World, order: str) -> None:
    """Stop the last rank of the side with two before its part is done, and resume it later."""
    transfer = Handover(world, 100, order=order)
    stopped = world.producer if len(world.producer.hosts) > 1 else world.consumer
    for step in transfer.steps[:-1]:
        step()
    if transfer.is_push and stopped is world.producer:
        transfer.steps[-1]()
        world.producer.step()
    stopped.hosts[-1].stop()
    if stopped is world.consumer and not transfer.is_push:
        world.run_for(TRANSFER_POLL_S)
        stopped.hosts[-1].resume()
        transfer.steps[-1]()
    elif not transfer.is_push or stopped is world.consumer:
        transfer.steps[-1]()
    world.run_for(2 * TRANSFER_POLL_S)
    require(not transfer.wrong, f"reported as finished although a rank's part is missing: {transfer.wrong}")
    stopped.hosts[-1].resume()
    outcome = transfer.wait()
    require(not transfer.wrong, f"reported as finished although a rank's part is missing: {transfer.wrong}")
    if outcome.code:
        transfer.abort()
    else:
        transfer.finish()


@case("incompatible_peers")
def incompatible_peers(setting: Setting) -> None:
    """A peer with unusable KV is refused from its card, with both sides' values, and harms no other engine."""
    with World(setting) as world:
        own, other = world.consumer, world.producer.card
        layout = other.layout
        strange = type(layout)(layout.num_layers + 2, layout.num_kv_heads, layout.head_size, 16, "float32", 4)
        fields = {name: getattr(other, name) for name in other.__struct_fields__}
        card = type(other)(**{**fields, "engine": "stranger", "epoch": "stranger.0", "layout": strange})
        try:
            refusals = own.update_peers([world.producer.card, card])
        except IncompatiblePeers as error:
            refusals = [str(error)]
        require(bool(refusals), f"a peer with {strange} is not refused by an engine with {layout}")
        both = [str(layout.num_layers), str(strange.num_layers)]
        require(all(value in refusals[0] for value in both), f"the refusal lacks a side's value: {refusals[0]}")
        world.introduce()
        Handover(world, 40).run()
