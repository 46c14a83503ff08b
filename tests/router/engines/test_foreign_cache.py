"""Blocks of a server of another engine as keys of this router's index, from batches of vLLM's and from lies."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.errors import MalformedMessage
from pdkv.router.engines.foreign_cache import ForeignCache
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.wire.messages import KVEvent, KVEvents

RECORDED = [bytes.fromhex(line) for line in (Path(__file__).parent / "vllm_0_32_events.txt").read_text().splitlines()]
"""Of vLLM 0.32: prompts of 80 tokens from 100 on, of 112 from 100 on, and the first one with the salt "abc"."""

PROMPT = list(range(100, 212))


def root_of(salt: str) -> bytes | None:
    return root_key(model="m", layout="", cache_salt=salt) if salt in ("", "abc") else None


def keys_of(tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    root = root_of(salt)
    assert root is not None
    extend_keys(keys, root, tokens)
    return keys


class Rig:
    """A cache and the index that it feeds."""

    def __init__(self, max_keys: int = 64) -> None:
        self.cache, self.index, self.number = ForeignCache(root_of, max_keys), PrefixIndex(), 0
        self.index.add_engine("v", max_keys)
        self.tell(self.cache.clear())

    def tell(self, changes: list[KVEvent]) -> None:
        self.number += 1
        assert self.index.apply("v", KVEvents(self.number, changes))

    def take(self, *events: Any) -> None:
        self.tell(self.cache.take(msgspec.msgpack.encode([0.0, events, 0])))

    def hit(self, tokens: list[int] = PROMPT, salt: str = "") -> int:
        return self.index.match(keys_of(tokens, salt)).get("v")


def stored(hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, **more: Any) -> Any:
    size = len(tokens) // max(len(hashes), 1)
    event = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return {"type": "BlockStored"} | event | {"lora_id": None, "medium": "GPU", "lora_name": None} | more


def removed(*hashes: int, **more: Any) -> Any:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


def test_recorded_batches_make_hits_for_the_salts_that_they_were_made_with() -> None:
    rig, hits = Rig(), []
    for payload in RECORDED:
        rig.tell(rig.cache.take(payload))
        hits.append((rig.hit(), rig.hit(salt="abc")))
    assert hits == [(64, 0), (96, 0), (96, 64)]


def test_rows_mean_what_maps_mean() -> None:
    """SGLang's form, and that of earlier vLLMs."""
    rig = Rig()
    rig.take(["BlockStored", [1, 2], None, PROMPT[:64], 32, None], ["BlockRemoved", [2]])
    assert rig.hit() == 32
    rig.take(["AllBlocksCleared"])
    assert rig.hit() == 0


def test_what_was_removed_is_none_and_its_memory_is_free_again() -> None:
    rig = Rig(max_keys=4)
    rig.take(stored([1, 2], PROMPT[:64]))
    rig.take(removed(2), removed(1, medium="CPU"), removed(7))
    assert (rig.hit(), rig.cache.num_keys) == (32, 2)
    rig.take(stored([3], PROMPT[32:64], parent=1))
    assert rig.hit() == 64
    rig.take({"type": "AllBlocksCleared"})
    assert (rig.hit(), rig.cache.num_keys, rig.index.num_keys_of("v")) == (0, 0, 0)


def test_a_snapshot_makes_an_index_that_lost_it_whole_again() -> None:
    rig = Rig()
    rig.take(stored([1, 2], PROMPT[:64]))
    rig.index.add_engine("v", 64)
    assert rig.hit() == 0
    rig.tell(rig.cache.snapshot())
    assert rig.hit() == 64


@pytest.mark.parametrize(
    "event",
    [
        stored([1], PROMPT[:24]),
        stored([1], PROMPT[:32], parent=9),
        stored([1], PROMPT[:32], medium="CPU"),
        stored([1], PROMPT[:32], lora_id=1),
        stored([1], PROMPT[:32], lora_name="x"),
        stored([1], PROMPT[:32], kv_cache_spec_kind="sliding_window"),
        stored([1], PROMPT[:32], extra_keys=[["unknown salt"]]),
        stored([1], PROMPT[:32], extra_keys=[[["image", 0]]]),
        stored([1], PROMPT[:32], extra_keys=[["abc", "more"]]),
        stored([], [], block_size=16),
    ],
)
def test_what_is_no_prefix_of_a_text_counts_for_nothing(event: Any) -> None:
    rig = Rig()
    rig.take(event, stored([2], PROMPT[32:64], parent=1))
    assert (rig.cache.num_keys, rig.hit()) == (0, 0)


def test_blocks_up_to_an_image_count() -> None:
    rig = Rig()
    rig.take(stored([1, 2], PROMPT[:64], extra_keys=[None, [["image", 40]]]))
    assert rig.hit() == 32


def test_a_hundred_thousand_blocks_and_names_of_others_cost_what_a_cache_may() -> None:
    rig = Rig(max_keys=64)
    for first in range(0, 10**5, 10_000):
        rig.take(stored(list(range(first, first + 10_000)), [7] * 16 * 10_000))
    rig.take(stored([0], PROMPT[:16]))
    assert (rig.cache.num_keys, rig.index.num_keys_of("v"), rig.hit()) == (64, 64, 0)
    assert rig.cache.num_excess > 90_000


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1" * 40,
        b"\x91" * 10_000,
        msgspec.msgpack.encode([0.0, 1]),
        msgspec.msgpack.encode([0.0, [{"type": "Other"}]]),
        msgspec.msgpack.encode([0.0, [stored([1, 2], PROMPT[:33])]]),
        msgspec.msgpack.encode([0.0, [stored([1], [2**40] * 16)]]),
        msgspec.msgpack.encode([0.0, [stored([b"x" * 65], PROMPT[:16])]]),
        msgspec.msgpack.encode([0.0, [stored([1], PROMPT[:16], block_size=0)]]),
    ],
)
def test_what_is_no_batch_is_one_error(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Rig().cache.take(payload)
