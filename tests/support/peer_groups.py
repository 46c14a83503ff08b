"""KV groups of the stand-in's two layers."""

from collections.abc import Sequence

from pdkv.wire.kv import KVGroup

FULL_AND_WINDOW = (KVGroup((0,)), KVGroup((1,), 6))
ALL_WINDOW = (KVGroup((0, 1), 6),)
TWO_WINDOWS = (KVGroup((1,), 3), KVGroup((0,), 9))


def layer_windows(groups: Sequence[KVGroup]) -> list[int]:
    """By layer."""
    return [next(group.window for group in groups if layer in group.layers) for layer in range(2)]
