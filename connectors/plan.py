"""The plan of a connector with its options: frozen plain data, made once when a deployment is started.

It is part of an engine's spec, so that a connector's class is not asked, nor its options parsed, again.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from math import lcm
from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.wire.kv import ConnectorKind, LayoutKind, Order, Positions

INTERFACE = 2
"""The number of the interface that connectors are written for, incremented when connectors must be changed.
docs/writing-a-transport.md says how.
"""

CARRIED: tuple[LayoutKind, ...] = ("heads", "windows", "latent", "state")
"""Kinds of KV carried by a connector that handles units, blocks and their layout without interpreting them."""

NO_CONNECTOR = "none"
PUSH_ORDERS: tuple[Order, ...] = ("decode_first", "needs_peer_first")


class Requirement(NamedTuple):
    """A package that a connector needs and that not every installation has."""

    modules: tuple[str, ...]  # any of them will do
    install: str  # the command
    when: str = ""  # the options that need it; empty: all

    @property
    def installed(self) -> bool:
        """Whether one of the modules is installed. Imports nothing."""
        return any(find_spec(module) is not None for module in self.modules)


class ConnectorPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A connector with its options. A class's `declares` has the fields that do not depend on options;
    `KVConnector.plan` sets those that do, and the registry fills in name, build and options.
    """

    interface: int  # INTERFACE, as the author knew it
    kind: ConnectorKind
    name: str = ""  # a registry name or "module:Class"
    build: str = ""  # "module:function", as KVConnector.build
    probe: str = ""  # "module:function", (plan) -> why its medium cannot be reached now, or ""
    options: Mapping[str, str] = {}  # as they were given
    orders: tuple[Order, ...] = ()  # legal hand-off orders; empty: those of its kind
    parts: "tuple[ConnectorPlan, ...]" = ()  # of a connector that consists of others, in order of preference
    content_addressed: bool = False  # it finds KV that any engine has saved or holds
    lends: bool = False  # a request that will itself be handed off loads what its `handoff` names, too
    hit_tokens: int = 0  # KV saved by others is found up to multiples of this many tokens; 0: not at all
    codec: str = ""  # the codec of KV that may differ from what was computed; empty: it is exact
    # whether it allocates the KV pool: never, if it may, or always
    own_pool: Literal["none", "offers", "needs"] = "none"
    one_process: bool = False  # its engines share a process: `pd launch` refuses several, and any engine several ranks
    layouts: tuple[LayoutKind, ...] = ("heads",)  # windows: it supports several block tables; else all tokens are kept
    positions: tuple[Positions, ...] = ("rotated", "none")  # KV not among these two is refused, never converted
    wire_version: int = 1  # version of its ranks' messages and cards; 0: peers' versions are not compared
    alike: tuple[
        str, ...
    ] = ()  # parts of the platform that peers must have in one version (src/pdkv/assemble/platform.py)
    requirements: tuple[Requirement, ...] = ()  # in `declares`: including those of some options only

    def __post_init__(self) -> None:
        if not self.orders:
            orders = PUSH_ORDERS if self.kind == "push" else ("prefill_first", "decode_first")
            msgspec.structs.force_setattr(self, "orders", orders)

    @property
    def wire_versions(self) -> dict[str, int]:
        """The versions of the connector and its parts, by name, for the engine's card."""
        return {part.name: part.wire_version for part in self.parts} | {self.name: self.wire_version}

    def on_card(self) -> dict[str, Any]:
        """The part of the plan that an engine's card contains."""
        orders = list(self.orders) if self.name != NO_CONNECTOR else []
        names = ("kind", "content_addressed", "lends")
        return {"connector": self.name, "orders": orders} | {name: getattr(self, name) for name in names}

    def hit_spacing(self, block_size: int) -> int:
        """The distance in tokens between possible ends of hits, for layers with windows; 0: nothing is found by
        content.

        The window that the token after such an end attends to is kept until the connector has been shown it; otherwise
        it could not be saved.
        """
        return lcm(self.hit_tokens, block_size)


NO_PLAN = ConnectorPlan(interface=INTERFACE, kind="store", name=NO_CONNECTOR, wire_version=0)
"""The plan of an engine without a connector, and of a side that is built separately."""
