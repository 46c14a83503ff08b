"""Transfers between two hosts, which are network namespaces, beside one bare socket in the same rounds.

The wire is a process that passes packets on (tests/harness/hosts/), so what it carries is far less than a network card
does; the ratios say what a transfer makes of it.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.report import Claim, Context
from benchmarks.support import support_module
from pdkv.connector_kit.bench.turns import Spread, take_turns

DELAYS_MS = (0, 1, 10)
LAYOUT = {"num_layers": 4, "num_heads": 4, "head_size": 64}  # 128 KiB a block of 16 tokens
BLOCK_BYTES = 128 << 10
NUM_BLOCKS = 256
ROUNDS = 9
LIMIT = 0.8
ENVIRONMENT = {"UCX_TLS": "tcp,self"}
WAYS: Mapping[str, Mapping[str, str]] = {
    "p2p": {"timeout_s": "30"},
    "nixl": {"progress_thread": "true", "transfer_timeout_s": "30"},
}


def run(context: Context) -> list[Claim]:
    """One claim for each way and delay. What has arrived is compared with what was sent, byte by byte."""
    machine = support_module("hosts.machine")
    num_blocks = 16 if context.quick else NUM_BLOCKS
    delays = DELAYS_MS[:2] if context.quick else DELAYS_MS
    with machine.two_hosts() as hosts, ExitStack() as stack:
        stream = support_module("hosts.stream").BareStream(hosts, num_blocks * BLOCK_BYTES)
        bare = stack.enter_context(stream)
        pairs = {}
        for name in list(WAYS)[: 1 if context.quick else None]:
            pairs[name] = _Pair(hosts, name, num_blocks)
            stack.callback(pairs[name].close)
        return [
            claim for delay in delays for claim in _compare(hosts, bare, pairs, delay, 2 if context.quick else ROUNDS)
        ]


class _Pair:
    """Two engines without a model; KV of one request goes from the first host to the second, again and again."""

    def __init__(self, hosts: Any, connector: str, num_blocks: int) -> None:
        self._module = support_module("hosts.engine")
        self._blocks = list(range(num_blocks))
        self.num_bytes = num_blocks * BLOCK_BYTES
        self._num_moves = 0
        engines = []
        for host, name in ((hosts.first, "prefill-0"), (hosts.second, "decode-0")):
            own = {"host": host.address} if connector == "p2p" else {}
            options = {**WAYS[connector], **own}
            engines.append(self._module.HostedEngine(
                host, name, connector, options, num_blocks=num_blocks, layout=LAYOUT, environment=ENVIRONMENT
            ))  # fmt: skip
        self._source, self._sink = engines
        self._source.meet(self._sink)
        self._sink.meet(self._source)
        self._source("fill", self._blocks, len(self._blocks) * 16, 0)

    def spoil(self) -> None:
        """Nothing of what has arrived so far is there any more."""
        self._sink("fill", self._blocks, len(self._blocks) * 16, 1)

    def move(self) -> float:
        """Seconds. Raises RuntimeError: it failed."""
        self._num_moves += 1
        name = f"move {self._num_moves}"
        began = time.perf_counter()
        self._module.begin(self._source, self._sink, name, self._blocks, len(self._blocks) * 16)
        ended = self._module.outcomes(self._source, self._sink, name)
        seconds = time.perf_counter() - began
        if any(ended):
            raise RuntimeError(f"a transfer failed: {ended}")
        return seconds

    def check(self) -> None:
        """Raises AssertionError, on the host: other bytes are there than were sent."""
        self._sink("check", self._blocks, len(self._blocks) * 16, 0)

    def close(self) -> None:
        """End both engines."""
        self._source.close()
        self._sink.close()


def _compare(hosts: Any, bare: Any, pairs: Mapping[str, _Pair], delay_ms: int, rounds: int) -> list[Claim]:
    """All by turns, the other way round every second time."""
    hosts.wire.delay(delay_ms / 1000)
    moves = {"bare": bare.move, **{name: pair.move for name, pair in pairs.items()}}
    for pair in pairs.values():
        pair.spoil()
    seconds = take_turns(moves, rounds)  # the first one, which does not count, grows windows
    claims = []
    for name, pair in pairs.items():
        pair.check()
        ratio = Spread.of_ratios(seconds["bare"], seconds[name])
        size = pair.num_bytes
        rates = {each: Spread.of(size / 1e6 / took for took in seconds[each]).median for each in ("bare", name)}
        figures = {"MB/s": rates[name], "bare MB/s": rates["bare"]}
        title = f"{name} over TCP, {size >> 20} MiB, {delay_ms} ms each way, of one bare socket"
        claims.append(Claim.of(title, ratio, LIMIT, "higher", figures))
    return claims
