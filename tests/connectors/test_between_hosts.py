"""Transports between two hosts, which are network namespaces, when the wire between them is slow, cut or dead."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hosts import Host, Hosts, hosts_or_skip
from hosts.engine import HostedEngine, begin, outcomes
from traffic import wait_until_true

NUM_BLOCKS = 512
LAYOUT = {"num_layers": 4, "head_size": 64}  # 64 KiB a block
SMALL, LARGE = list(range(0, 12, 2)), list(range(100, 400))
TOKENS = {len(SMALL): 90, len(LARGE): 16 * len(LARGE)}
LARGE_BYTES = len(LARGE) << 17
MOST_LATE = 10
"""Transfers over UCX, two seconds each: what it sends on a connection that TCP found dead waits for the next of TCP's
attempts, which come ever later.
"""

NIXL = {"progress_thread": "true", "transfer_timeout_s": "2"}
WAYS = {
    "p2p": ("p2p", {"timeout_s": "2", "handshake_timeout_s": "2"}),
    "nixl pull": ("nixl", NIXL),
    "nixl push": ("nixl", {"mode": "push", **NIXL}),
}

Pair = tuple[HostedEngine, HostedEngine]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def engines(hosts: Hosts) -> Iterator[Pair]:
    """A source on the first host and a sink on the second, started once for all ways."""
    with ExitStack() as stack:
        first, second = (
            HostedEngine(
                host, name, *options_of(host, "p2p"), num_blocks=NUM_BLOCKS, layout=LAYOUT,
                environment={"UCX_TLS": "tcp,self"},
            )
            for host, name in ((hosts.first, "prefill-0"), (hosts.second, "decode-0"))
        )  # fmt: skip
        for engine in (first, second):
            stack.callback(engine.close)
        yield first, second


@pytest.fixture(scope="module", params=["p2p", "nixl pull", pytest.param("nixl push", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, hosts: Hosts, engines: Pair) -> Pair:
    """The two over a connector, each with the other one's card."""
    source, sink = engines
    for engine, host in zip(engines, (hosts.first, hosts.second), strict=True):
        engine.become(*options_of(host, request.param))
    source.meet(sink)
    sink.meet(source)
    source("fill", LARGE, TOKENS[len(LARGE)], 1)
    return source, sink


def options_of(host: Host, way: str) -> tuple[str, dict[str, str]]:
    """The connector and its options there."""
    connector, options = WAYS[way]
    return connector, options | ({"host": host.address} if connector == "p2p" else {})


def move(pair: Pair, name: str, seed: int, *, may_be_late: bool = False) -> bool:
    """A small transfer, which must succeed; or, if it `may_be_late`, says whether it did."""
    source, sink = pair
    source("fill", SMALL, TOKENS[len(SMALL)], seed)
    begin(source, sink, name, SMALL, TOKENS[len(SMALL)])
    found = outcomes(source, sink, name)
    if may_be_late and "transfer_timeout" in found:
        return False
    assert found == ("", "")
    sink("check", SMALL, TOKENS[len(SMALL)], seed)
    return True


def test_a_large_transfer_arrives_whole(hosts: Hosts, pair: Pair) -> None:
    source, sink = pair
    hosts.wire.delay(0.001)
    begin(source, sink, "whole", LARGE, TOKENS[len(LARGE)])
    assert outcomes(source, sink, "whole") == ("", "")
    hosts.wire.delay(0.0)
    sink("check", LARGE, TOKENS[len(LARGE)], 1)


@pytest.mark.parametrize("pair", ["p2p"], indirect=True)  # UCX may end the process: docs/between-hosts.md
def test_what_is_cut_in_the_middle_fails_at_both_ends_and_the_next_one_succeeds(hosts: Hosts, pair: Pair) -> None:
    source, sink = pair
    move(pair, "before the cut", 2)
    hosts.wire.after(LARGE_BYTES // 3, "cut")
    begin(source, sink, "cut", LARGE, TOKENS[len(LARGE)])
    hosts.wire.wait("cut")
    assert set(outcomes(source, sink, "cut")) <= {"peer_gone", "transfer_timeout", "transfer_cancelled"}
    move(pair, "after the cut", 3)


def test_a_dead_wire_is_a_timeout_at_both_ends_and_nothing_lands_when_it_is_mended(
    request: pytest.FixtureRequest, hosts: Hosts, pair: Pair
) -> None:
    source, sink = pair
    move(pair, "before", 4)
    is_p2p = request.node.callspec.params["pair"] == "p2p"
    kept = 0 if is_p2p else 1  # UCX keeps the socket of a connection that it was told to close: docs/between-hosts.md
    before = [[files + kept, threads] for files, threads in (source("held"), sink("held"))]
    sink("fill", LARGE, TOKENS[len(LARGE)], 5)  # so that what lands late is seen
    hosts.wire.after(LARGE_BYTES // 3, "lose")
    begin(source, sink, "dead", LARGE, TOKENS[len(LARGE)])
    hosts.wire.wait("lose")
    assert set(outcomes(source, sink, "dead")) <= {"peer_gone", "transfer_timeout", "transfer_cancelled"}
    landed = sink("sum")
    hosts.wire.mend()
    for number in range(1 if is_p2p else MOST_LATE):  # the same into the same blocks as before
        if move(pair, f"after {number}", 4, may_be_late=not is_p2p):
            break
        before = [[files + 1, threads] for files, threads in before]
    else:
        pytest.fail("no transfer succeeds on the mended wire")
    wait_until_true(lambda: _is_silent(hosts), "what the source's kernel had is sent")
    assert sink("sum") == landed
    wait_until_true(lambda: _within([source("held"), sink("held")], before), "what it held is given back")


def _is_silent(hosts: Hosts) -> bool:
    """Nothing has passed for longer than a retransmission takes to be repeated."""
    before = hosts.wire.num_bytes()
    threading.Event().wait(0.5)
    return hosts.wire.num_bytes() == before


def _within(now: list[list[int]], before: list[list[int]]) -> bool:
    return all(a <= b for ours, theirs in zip(now, before, strict=True) for a, b in zip(ours, theirs, strict=True))
