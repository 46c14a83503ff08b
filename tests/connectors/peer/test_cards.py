"""Peers that cannot be used: what is kept of them."""

import weakref

import pytest
from scripted_engine import make_card

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.cards import PeerCards
from pdkv.errors import IncompatiblePeers
from pdkv.wire.kv import EngineCard, KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_size=4, dtype="float32", dtype_bytes=4, block_size=16)


class Refusing(PeerCards):
    def _accept(self, peer: tuple[str, str], card: EngineCard) -> None:
        raise IncompatiblePeers("another layout")


class Memory:
    """What a caller works on."""


def test_an_error_that_is_kept_keeps_nothing_else_alive() -> None:
    """It is raised again and again, through frames that refer to a peer's memory: that must go when they do (F5)."""
    card = make_card("p", "prefill")
    cards = Refusing(ConnectorConfig(engine="d", epoch="1", layout=LAYOUT, num_blocks=8))
    cards.add(card)

    def ask() -> "weakref.ref[Memory]":
        memory = Memory()
        with pytest.raises(IncompatiblePeers, match="another layout"):
            cards.card(card.engine, card.epoch)
        return weakref.ref(memory)

    assert ask()() is None
    assert ask()() is None
