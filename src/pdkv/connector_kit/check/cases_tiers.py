"""Cases about tiers below the cache: what a connector reports about them."""

from collections.abc import Sequence

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.handover import Handover, new_name
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.request import TextRequest
from pdkv.connector_kit.rig.world import NotApplicable, Setting, World, lengths, require
from pdkv.connectors.base import MatchedTokens
from pdkv.wire.tiers import TierEvents


@case("lower_tiers")
def lower_tiers(setting: Setting) -> None:
    """Any request finds what is reported as stored, a prompt's beginning first; a partial tail is never reported."""
    with World(setting) as world:
        tiers = {events.medium: events for events in _take(world.producer)}
        if not tiers:
            raise NotApplicable("it reports no tier below the cache")
        for events in tiers.values():
            size = events.tokens_per_key
            require(
                size % HASH_BLOCK_SIZE == 0, f"{events.medium}: a key for {size} tokens, which are not whole blocks"
            )
        num_told = 0
        for num_tokens in [*lengths(world.setting), 300]:
            transfer = Handover(world, num_tokens)
            transfer.run()
            world.check_rest()  # a hand-off may be over before its KV is saved
            num_told += _check(transfer, tiers, _take(world.producer))
            _check(transfer, tiers, _take(world.consumer))
        require(num_told > 0, "no saved key was reported")
        require(not _take(world.producer), "events without news")
        world.check_pools()


def _take(engine: Engine) -> Sequence[TierEvents]:
    return engine.ask(HostedRank.take_events)


def _check(transfer: Handover, tiers: dict[str, TierEvents], events: Sequence[TierEvents]) -> int:
    """Check events after one prompt; returns how many of its tokens they report."""
    keys = transfer.sender.hash_keys
    most = 0
    for told in events:
        known = tiers.setdefault(told.medium, told)
        require(
            (told.shared, told.tokens_per_key) == (known.shared, known.tokens_per_key),
            f"{told.medium}: {told.shared}, {told.tokens_per_key} tokens a key; before {known.shared}, "
            f"{known.tokens_per_key}",
        )
        named = [*told.stored, *told.removed]
        require(len(set(named)) == len(named), f"{told.medium}: a key is reported twice in one call")
        step = told.tokens_per_key // HASH_BLOCK_SIZE
        ends = keys[step - 1 :: step]
        num_stored = len(told.stored)
        require(
            set(told.stored) == set(ends[:num_stored]),
            f"{told.medium}: {num_stored} keys are reported, but not those that end the prompt's first {num_stored} "
            f"times {told.tokens_per_key} tokens",
        )
        most = max(most, num_stored * told.tokens_per_key)
    found = _found(transfer, most) if most else 0
    require(found >= most, f"{most} tokens are reported of {transfer.describe()}, but {found} can be loaded")
    return most


def _found(transfer: Handover, num_tokens: int) -> int:
    """Tokens of the prompt's beginning that a request of another transfer finds."""
    consumer = transfer.consumer
    reader = TextRequest(
        transfer.sender.text, num_tokens + 1, kv="local", transfer_id=new_name(), attempt=0, layout=consumer.layout
    )
    found: list[MatchedTokens] = []

    def known() -> bool:
        found[:] = [consumer.external.match(reader, 0)]
        return not found[0].ask_again

    transfer.world.until(known, f"the connector knows what it has of {transfer.describe()}")
    return found[0].num_tokens
