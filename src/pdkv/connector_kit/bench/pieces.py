"""Number of memory pieces in a transfer, by the plan that connectors share."""

from collections.abc import Sequence

from pdkv.connector_kit.rig.world import Shape
from pdkv.connectors.transfer.planning import as_ids, blocks_of, reader_parts, run_starts


def planned_pieces(
    producer: Shape, consumer: Shape, num_tokens: int, source: Sequence[int], target: Sequence[int]
) -> int:
    """Pieces that are contiguous on both sides, over all of the consumer's ranks.

    Args:
        source, target: block tables; the first blocks hold token 0.
    """
    heads = producer.num_heads
    same_heads = producer.layout().num_kv_heads == consumer.layout().num_kv_heads
    if producer.block_size == consumer.block_size:
        count = len(blocks_of(0, num_tokens, consumer.block_size))
        if same_heads:
            return run_starts(as_ids(source[:count]), as_ids(target[:count])).size * consumer.tp
        per_part = 1  # a block's tokens of adjacent heads are contiguous
        segments = count
    else:
        per_part = 0
        segments = len({token for shape in (producer, consumer) for token in range(0, num_tokens, shape.block_size)})
    parts = [
        part for rank in range(consumer.tp) for part in reader_parts(rank, consumer.tp, producer.tp, heads)
    ]  # fmt: skip
    runs = sum(per_part or part.num_heads for part in parts)
    return segments * producer.num_layers * producer.sides * runs
