"""The `multi` connector: several connectors at once; the longest match loads, all save and hand off.

What kinds of children go together, and what comes of it:

- stores only: kind store;
- any number of pulling connectors, with stores or without: kind pull;
- one pushing connector, with stores or with pulling ones that also find content: kind push. Hand-offs then go by the
  push and through the stores; the pulling ones only contribute what they find by content.
"""

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from pdkv.base.options import Options, OptionTexts, option
from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnector,
    KVConnectorMetadata,
    Requirement,
    SchedulerConnector,
    WorkerConnector,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.multi.scheduler import MultiScheduler
from pdkv.connectors.multi.wire import Child, MultiMetadata
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.registry import load_connector
from pdkv.connectors.transfer.planning import Ids
from pdkv.errors import ConfigError
from pdkv.wire.kv import ConnectorKind, Order

if TYPE_CHECKING:
    import torch


class ChildSpec(NamedTuple):
    """A child before it is built."""

    name: str
    connector: type[KVConnector]
    options: Mapping[str, str]


def parse_children(options: Mapping[str, str]) -> list[ChildSpec]:
    """The children that --connector-config names, each with its options.

    Raises:
        ConfigError: none is named, an option is nobody's or could be several children's, or its child refuses it;
            UnknownConnector for a name.
    """
    names = [name.strip() for name in options.get("connectors", "").split(",") if name.strip()]
    if not names:
        raise ConfigError("connector multi: needs the option connectors=NAME,NAME,…: in order of preference")
    own: list[dict[str, str]] = [{} for _ in names]
    prefixes = [f"{name}." if names.count(name) == 1 else f"{i}." for i, name in enumerate(names)]
    for typed, value in options.items():
        if typed == "connectors":
            continue
        index, name = _owner(typed, names)
        if name in own[index]:
            raise ConfigError(f"connector multi: option {name!r} of child {names[index]!r} is given twice")
        own[index][name] = value
        prefixes[index] = typed.removesuffix(name)
    classes = [load_connector(name) for name in names]
    for name, connector in zip(names, classes, strict=True):
        if issubclass(connector, MultiConnector):
            raise ConfigError(f"connector multi cannot hold another multi ({name!r})")
    texts = [OptionTexts(own[i], "connector multi", prefix=prefixes[i]) for i in range(len(names))]
    return [
        ChildSpec(name, connector.for_options(values), values)
        for name, connector, values in zip(names, classes, texts, strict=True)
    ]


def _owner(option: str, names: Sequence[str]) -> tuple[int, str]:
    """(child, its own name for it) of an option with a prefix."""
    prefix, _, rest = option.partition(".")
    if prefix.isdecimal() and int(prefix) < len(names) and rest:
        return int(prefix), rest
    owners = [(i, option[len(name) + 1 :]) for i, name in enumerate(names) if option.startswith(f"{name}.")]
    if len(owners) == 1 and owners[0][1]:
        return owners[0]
    known = ", ".join(f"{i}. or {name}." for i, name in enumerate(names))
    problem = "is several children's" if owners else "is no child's"
    raise ConfigError(f"connector multi: option {option!r} {problem}; prefixes are: {known}")


def kind_of(children: Sequence[ChildSpec]) -> ConnectorKind:
    """The kind that the children make together.

    Raises:
        ConfigError: they cannot work together.
    """
    pushing = [child.name for child in children if child.connector.kind == "push"]
    pulling = [child for child in children if child.connector.kind == "pull"]
    if len(pushing) > 1:
        raise ConfigError(f"connector multi: only one child can push into decode's blocks, not {' and '.join(pushing)}")
    if pushing:
        idle = [child.name for child in pulling if not child.connector.content_addressed]
        if idle:
            raise ConfigError(
                f"connector multi: {pushing[0]} needs decode first and {idle[0]} needs prefill first: "
                f"beside {pushing[0]}, {idle[0]} would never be used"
            )
        return "push"
    return "pull" if pulling else "store"


def orders_of(children: Sequence[ChildSpec]) -> list[Order]:
    """The orders that are legal with all children, or, where one pushes, with that one.

    Raises:
        ConfigError: there is none.
    """
    deciding = [child for child in children if child.connector.kind == "push"] or children
    orders = [o for o in deciding[0].connector.orders() if all(o in child.connector.orders() for child in deciding)]
    if not orders:
        said = "; ".join(f"{child.name}: {', '.join(child.connector.orders())}" for child in deciding)
        raise ConfigError(f"connector multi: no hand-off order suits all children ({said})")
    return orders


class MultiOptions(Options):
    """Those of `multi` itself; the others are its children's, behind a prefix."""

    connectors: str = option(
        help="the children, in order of preference; their options begin with NAME. or with the child's number from 0, "
        "such as store.url=… or 1.url=…",
        metavar="NAME[,NAME…]",
    )


class MultiConnector(KVConnector):
    """Several connectors as one. Its flags follow from its children: each combination is a subclass."""

    kind: ClassVar[ConnectorKind] = "pull"
    metadata_type: ClassVar[type[KVConnectorMetadata]] = MultiMetadata
    options_type = MultiOptions
    options: MultiOptions
    specs: ClassVar[Sequence[ChildSpec]] = ()
    legal_orders: ClassVar[Sequence[Order]] = ("prefill_first", "decode_first")

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        self.children: list[Child] = []
        try:
            for spec in self.specs:
                child_config = msgspec.structs.replace(
                    config, options=spec.options, wire_version=spec.connector.wire_version
                )
                self.children.append(Child(spec.name, spec.connector(child_config, notify)))
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def parse_options(cls, options: Mapping[str, str]) -> MultiOptions:
        return MultiOptions(connectors=options.get("connectors", ""))  # the others are the children's

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> "type[MultiConnector]":
        specs = parse_children(options)
        connectors = [spec.connector for spec in specs]
        kind = kind_of(specs)
        flags: dict[str, Any] = {
            "specs": specs,
            "kind": kind,
            "legal_orders": orders_of(specs),
            "content_addressed": all(c.content_addressed for c in connectors),
            "concurrent": any(c.concurrent for c in connectors),
            "lends": any(c.lends for c in connectors if c.kind == kind),
            "kv_groups": all(c.kv_groups for c in connectors),
            "one_process": any(c.one_process for c in connectors),
        }
        return type(cls.__name__, (cls,), flags)

    @classmethod
    def wire_versions(cls, name: str) -> dict[str, int]:
        return {spec.name: spec.connector.wire_version for spec in cls.specs} | super().wire_versions(name)

    @classmethod
    def hit_tokens(cls, options: Mapping[str, str], block_size: int) -> int:
        return lcm(*(n for spec in cls.specs if (n := spec.connector.hit_tokens(spec.options, block_size))), 1)

    @classmethod
    def kv_codec(cls, options: Mapping[str, str]) -> str:
        codecs = {spec.connector.kv_codec(spec.options) for spec in cls.specs}
        return "+".join(sorted(codecs - {""}))

    @classmethod
    def requirements(cls, options: Mapping[str, str]) -> Sequence[Requirement]:
        return [requirement for spec in cls.specs for requirement in spec.connector.requirements(spec.options)]

    @classmethod
    def probe(cls, options: Mapping[str, str]) -> str:
        problems = {spec.name: spec.connector.probe(spec.options) for spec in cls.specs}
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)

    @classmethod
    def orders(cls) -> list[Order]:
        return list(cls.legal_orders)

    def make_block_table(self) -> BlockTable:
        """What the pool writes goes to the table of every child that has one."""
        own = [
            child.connector.make_block_table()
            for child in self.children
            if type(child.connector).make_block_table is not KVConnector.make_block_table
        ]
        table = BlockTables(own) if len(own) > 1 else own[0] if own else super().make_block_table()
        for child in self.children:  # the others read what all write
            if type(child.connector).make_block_table is KVConnector.make_block_table:
                child.connector.block_table = table
        return table

    def allocate_kv_cache(self) -> "torch.Tensor | None":
        """The pool of the one child that needs its own, else of the first one that offers one.

        Raises:
            ConfigError: two children need their own.
        """
        owner, pool = "", None
        for child in sorted(self.children, key=lambda child: not child.connector.needs_own_pool):
            if pool is not None and not child.connector.needs_own_pool:
                continue
            own = child.connector.allocate_kv_cache()
            if own is not None and pool is not None:
                raise ConfigError(f"connector multi: both {owner} and {child.name} would allocate the KV pool")
            if own is not None:
                owner, pool = child.name, own
        return pool

    def make_scheduler_side(self) -> SchedulerConnector:
        schedulers = [child.connector.make_scheduler_side() for child in self.children]
        return MultiScheduler(self.config, self.kind, self.children, schedulers)

    def make_worker_side(self, rank: int) -> WorkerConnector:
        return MultiWorker(self.children, [child.connector.make_worker_side(rank) for child in self.children])

    def shutdown(self) -> None:
        for child in self.children:
            child.connector.shutdown()


class BlockTables(BlockTable):
    """Several tables of one pool. Each child reads its own; all hear of every reuse and every block's content."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self._tables = tables

    def generation(self, block_id: int) -> int:
        return self._tables[0].generation(block_id)

    def generations_of(self, block_ids: Sequence[int] | Ids) -> Ids:
        return self._tables[0].generations_of(block_ids)

    def reuse(self, block_id: int) -> None:
        for table in self._tables:
            table.reuse(block_id)

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        for table in self._tables:
            table.publish(block_id, keys)

    def reuse_all(self, block_ids: Sequence[int]) -> None:
        for table in self._tables:
            table.reuse_all(block_ids)

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        for table in self._tables:
            table.publish_all(block_ids, keys)
