"""What the starter of an engine and a router say to each other about joining (docs/membership.md)."""

from typing import Literal

import msgspec

from pdkv.wire.types import Id, Message, Natural, Text

MAX_JOIN_BYTES = 4096
"""Longest message of either."""

ALIVE_IVL_S, ALIVE_TIMEOUT_S = 5.0, 20.0
"""How often the connection is checked, and how long the other end may be silent then."""


class Join(Message, frozen=True):
    """An engine of this name listens at this endpoint, or is about to stop. The router connects there to see."""

    name: Id
    endpoint: Text
    protocol: Natural  # of the wire between routers and engines
    starter: Id  # the process that runs the engine, and alone may say that it leaves
    leaving: bool = False
    pool: Id = ""  # of engines that it is to be one of; "": the launch's own


class Verdict(Message, frozen=True):
    """A router's answer. "asked": it wants to hear a Join, again perhaps; "waiting": the engine is not admitted yet;
    "leaving": it is being drained; "left": it has no request any more.
    """

    kind: Literal["asked", "waiting", "admitted", "refused", "leaving", "left"]
    text: Text = ""  # why


join_decoder: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
verdict_decoder: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)
encode = msgspec.msgpack.Encoder().encode
