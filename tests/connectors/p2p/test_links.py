"""Links of p2p, as strangers and relays see them: nothing lands that was not authenticated."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from push_rig import PushEngine, full_kv, make_layout, view

from pdkv.connector_kit.rig.sockets import listeners
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.p2p.wire import Address

torch.set_num_threads(1)

Engines = Callable[..., PushEngine]
SOCKETS = pytest.mark.parametrize("sockets", ["unix", "tcp"])
WIDE = {"num_layers": 4, "head_size": 64}  # 128 KiB a block


@pytest.fixture
def make_engine() -> Iterator[Engines]:
    made: list[PushEngine] = []

    def make(name: str, **arguments: Any) -> PushEngine:
        made.append(PushEngine(P2PConnector, name, **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def pair(make_engine: Engines, **rest: Any) -> tuple[PushEngine, PushEngine]:
    """A prefill and a decode engine that know each other."""
    prefill, decode = (make_engine(name, layout=make_layout(**WIDE), **rest) for name in ("p", "d"))
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    return prefill, decode


def begin(prefill: PushEngine, decode: PushEngine, name: str, blocks: list[int]) -> torch.Tensor:
    """Begin to move a request in blocks of the same numbers; returns its KV."""
    kv = full_kv(16 * len(blocks), prefill.layout, seed=sum(name.encode()))
    prefill.fill(blocks, kv)
    ticket = decode.want(view(name, kv="await_peer", num_tokens=len(kv)), blocks)
    prefill.give(view(name, kv="handoff", num_tokens=len(kv), ticket=ticket), blocks, len(kv))
    return kv


def move(prefill: PushEngine, decode: PushEngine, name: str, blocks: list[int]) -> None:
    """Move a request and look at it."""
    kv = begin(prefill, decode, name, blocks)
    assert decode.outcome("receiving", (name, 1)).code == ""
    assert prefill.outcome("sending", (name, 1)).code == ""
    decode.check(blocks, kv)


def address_of(engine: PushEngine) -> Address:
    return msgspec.msgpack.decode(engine.card.rank_blobs[0], type=Address)


@SOCKETS
def test_nothing_listens_for_a_link_but_what_authenticates_its_peers(make_engine: Engines, sockets: str) -> None:
    """B6: there used to be a second socket on either side, into which whoever came first could write KV."""
    before = set(listeners(os.getpid()))
    prefill, decode = pair(make_engine, sockets=sockets)
    move(prefill, decode, "t", [1, 5, 3])
    doors = set(listeners(os.getpid())) - before
    addresses = [address_of(engine) for engine in (prefill, decode)]
    known = {f"\0{address.unix_name}" for address in addresses} | {(a.host, a.port) for a in addresses}
    assert {door.address for door in doors} == known
