"""The p2p connector between engines of any shape: the right bytes at the right place, or a typed error."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from push_rig import PushEngine, full_kv, make_layout, view

from pdkv.connectors.p2p import P2PConnector

torch.set_num_threads(1)

Engines = Callable[..., PushEngine]


@pytest.fixture
def make_engine() -> Iterator[Engines]:
    made: list[PushEngine] = []

    def make(name: str, **arguments: Any) -> PushEngine:
        made.append(PushEngine(P2PConnector, name, **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def pair(make_engine: Engines, tp: tuple[int, int] = (1, 1), sizes: tuple[int, int] = (16, 16), **rest: Any) -> Any:
    """A prefill and a decode engine that know each other."""
    layouts = rest.pop("layouts", {})
    prefill = make_engine("p", tp=tp[0], layout=make_layout(tp[0], sizes[0], **layouts), **rest)
    decode = make_engine("d", tp=tp[1], layout=make_layout(tp[1], sizes[1], **layouts), **rest)
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    return prefill, decode


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (1, 8), (8, 2)], ids=str)
def test_tokens_arrive_in_the_blocks_of_every_rank(
    make_engine: Engines, tp: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """F20: any pair of ranks and block sizes, in chunks, behind a hit of decode's, with a partial tail."""
    prefill, decode = pair(make_engine, tp, sizes)
    start, num_tokens = 32, 150
    kv = full_kv(num_tokens, prefill.layout)
    source = [i * 7 % 64 for i in range(3, 3 + -(-num_tokens // sizes[0]))]
    target = [i * 11 % 64 for i in range(5, 5 + -(-num_tokens // sizes[1]))]
    prefill.fill(source, kv)
    before = [pool.clone() for pool in decode.pools]

    ticket = decode.want(view("t", kv="await_peer", num_tokens=num_tokens), target, start)
    request = view("t", kv="handoff", num_tokens=num_tokens, ticket=ticket)
    holds = prefill.give(request, source, 96, last=False) + prefill.give(request, source, num_tokens)
    assert [hold.key for hold in holds] == [("t/1", 1), ("t/2", 1)]

    received = decode.outcome("receiving", ("t", 1))
    assert received.code == ""
    assert prefill.outcome("sending", ("t", 1)).code == ""
    for hold in holds:
        assert prefill.outcome("sending", hold.key).code == ""
    decode.check(target, kv, start)
    untouched = [b for b in range(64) if b not in target[start // sizes[1] :]]
    for pool, old in zip(decode.pools, before, strict=True):
        assert torch.equal(pool[untouched], old[untouched])
    assert not decode.unread
    assert not prefill.unread
