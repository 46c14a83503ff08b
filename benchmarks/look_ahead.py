"""What host memory still has of a conversation at its next turn, by the order in which values go: a simulation.

The segment and its eviction, the tiers and the window over the queue are those of the engine; the trace is that of
`conversations`, with turns in the order in which people would come back. Nothing is computed and no time passes, so a
value that was ordered in time has come in time.
"""

import hashlib
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.conversations import make_turns
from benchmarks.report import Claim, Context
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.store.look_ahead import LookAhead
from pdkv.connectors.store.plan import StoreAhead, StoreCut
from pdkv.engine.outside.external import NUM_PREFETCH_REQUESTS
from pdkv.kv_store.host_segment import PAGE_BYTES
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.tiers import TieredStore
from pdkv.wire.kv import KVLayout

TOKENS = 64
"""Bytes of a value, which takes a page of the segment here."""

CONVERSATIONS, TURNS = 32, 12
SHARES = (0.1, 0.25, 0.5, 0.75)
"""Sizes of host memory, in parts of all values of the trace."""

SIZE = 8  # bytes of a value: what is in it matters to nobody


class Step(NamedTuple):
    """One turn: block keys of what was said before it, and of all that is said after it."""

    before: list[bytes]
    after: list[bytes]


def make_trace(seed: int, num_conversations: int, num_turns: int) -> list[Step]:
    """Turns of all conversations, each time of one that is drawn: some come back soon, some late, none to a queue that
    it is in.
    """
    plan = make_turns(seed, num_conversations, num_turns)
    rng = random.Random(seed)
    tokens, done = [0] * num_conversations, [0] * num_conversations
    queue: deque[int] = deque(maxlen=NUM_PREFETCH_REQUESTS - 1)
    trace: list[Step] = []
    while open_ := [c for c in range(num_conversations) if done[c] < num_turns]:
        talk = rng.choice([c for c in open_ if c not in queue] or open_)
        queue.append(talk)
        turn = plan[talk][done[talk]]
        stop = tokens[talk] + len(turn.question) + turn.answer_len
        trace.append(Step(_chain(talk, tokens[talk]), _chain(talk, stop)))
        tokens[talk], done[talk] = stop, done[talk] + 1
    return trace


def run(context: Context) -> list[Claim]:
    """Hit rate of host memory with LRU / with look-ahead, the worst of all sizes."""
    trace = make_trace(1, *((8, 4) if context.quick else (CONVERSATIONS, TURNS)))
    num_values = len({key for step in trace for key in _values_of(step.after)})
    figures: dict[str, float] = {}
    ratios = []
    for share in SHARES:
        rates = {name: play(trace, int(share * num_values), name) for name in POLICIES}
        figures |= {f"{name} {share:.0%}": rate for name, rate in rates.items()}
        ratios.append(rates["LRU"] / rates["spare"])
    title = f"simulated, {len(trace)} turns, host tier's hit rate, LRU / look-ahead without fetching, worst size"
    return [Claim(title, max(ratios), 1.0, "lower", figures)]


def play(trace: Sequence[Step], num_pages: int, policy: str) -> float:
    """The share of values of what was said before that host memory has when its turn comes."""
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm") as folder:
        host = _make_host(Path(folder), num_pages)
        with TieredStore([host, MemoryStore(None)]) as tiers:
            return POLICIES[policy](_Player(tiers, host), trace)


class _Player:
    """An engine that has nothing but its tiers, and computes at once what they lack."""

    def __init__(self, tiers: TieredStore, host: HostStore) -> None:
        self.tiers = tiers
        self.host = host
        self.num_wanted = self.num_hits = 0

    def turn(self, step: Step, *, is_use: bool = True) -> None:
        """Look what is near, load, and save what is new. `is_use`: what is loaded from host memory stays longer."""
        keys = _values_of(step.before)
        out = [memoryview(bytearray(SIZE)) for _ in keys]
        near = self.host.peek(keys, out)
        self.num_wanted += len(keys)
        self.num_hits += sum(near)
        wanted = keys if is_use else [key for key, is_near in zip(keys, near, strict=True) if not is_near]
        assert all(self.tiers.get(wanted, out[: len(wanted)]))
        self.tiers.put([(key, memoryview(bytes(SIZE))) for key in _values_of(step.after)[len(keys) :]])

    @property
    def hit_rate(self) -> float:
        """The hit rate of values."""
        return self.num_hits / max(self.num_wanted, 1)


def _play_alone(player: _Player, trace: Sequence[Step], *, is_use: bool) -> float:
    for step in trace:
        player.turn(step, is_use=is_use)
    return player.hit_rate


def _play_ahead(player: _Player, trace: Sequence[Step], *, fetches: bool) -> float:
    """The queue has the next turns; what is expected is spared, and fetched where that is part of the game."""
    stored: set[bytes] = set()
    ahead = _make_look_ahead(player.host.look_ahead_bytes, stored)
    for place, step in enumerate(trace):
        queue = [later.before for later in trace[place : place + NUM_PREFETCH_REQUESTS]]
        entered, left = ahead.update(queue)
        _follow(player.tiers, entered, left, fetches=fetches)
        player.turn(step)
        stored.update(step.after)
    return player.hit_rate


def _follow(tiers: TieredStore, entered: list[StoreAhead], left: list[StoreAhead], *, fetches: bool) -> None:
    for order in left:
        tiers.unexpect([value.key for value in order.values])
    for order in entered:
        keys = [value.key for value in order.values]
        tiers.expect(keys)
        if fetches:
            tiers.get(keys, [memoryview(bytearray(SIZE)) for _ in keys])


Policy = Callable[[_Player, Sequence[Step]], float]

POLICIES: dict[str, Policy] = {
    "FIFO": partial(_play_alone, is_use=False),
    "LRU": partial(_play_alone, is_use=True),
    "spare": partial(_play_ahead, fetches=False),
    "spare and fetch": partial(_play_ahead, fetches=True),
}


def _make_look_ahead(max_bytes: int, stored: set[bytes]) -> LookAhead:
    """The engine's, of a model whose values fill a page."""

    def found(keys: Sequence[bytes]) -> int:
        whole = len(keys) * HASH_BLOCK_SIZE // TOKENS
        return next((i for i, key in enumerate(_values_of(keys)) if key not in stored), whole) * TOKENS

    layout = KVLayout(
        num_layers=1,
        num_kv_heads=1,
        head_size=PAGE_BYTES // TOKENS // 4,
        block_size=16,
        dtype="bfloat16",
        dtype_bytes=2,
    )
    config = ConnectorConfig(engine="e", epoch="1", layout=layout, num_blocks=1)
    cut = StoreCut(config, tokens_per_value=TOKENS, layer_groups=1)
    return LookAhead(cut, max_bytes, "e", found)


def _make_host(folder: Path, num_pages: int) -> HostStore:
    """A segment of at least so many pages."""
    return HostStore(folder / "kv", StoreOptions(capacity=max(num_pages, 32) * (PAGE_BYTES + 256)))


def _chain(conversation: int, num_tokens: int) -> list[bytes]:
    return [
        hashlib.blake2b(f"{conversation}/{block}".encode(), digest_size=16).digest()
        for block in range(num_tokens // HASH_BLOCK_SIZE)
    ]


def _values_of(block_keys: Sequence[bytes]) -> Sequence[bytes]:
    """Keys of whole values."""
    units = TOKENS // HASH_BLOCK_SIZE
    return block_keys[units - 1 :: units]
