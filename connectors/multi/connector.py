"""The `multi` connector: several connectors at once; the longest match loads, all save and hand off.

The allowed combinations of children, and the resulting kind:

- stores only: kind store;
- any number of pulling connectors, with stores or without: kind pull;
- one pushing connector, with stores or with pulling ones that also find content: kind push. Hand-offs then go by the
  push and through the stores; the pulling ones only contribute what they find by content.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import lcm
from typing import TYPE_CHECKING

import msgspec

from pdkv.base.options import Options, OptionTexts, option
from pdkv.connectors.base import Built, ConnectorConfig, KVConnector
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.multi.scheduler import MultiScheduler
from pdkv.connectors.multi.worker import MultiWorker
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.registry import build_connector, load_connector, plan_connector
from pdkv.connectors.transfer.planning import Ids
from pdkv.errors import ConfigError
from pdkv.wire.kv import ConnectorKind, Order

if TYPE_CHECKING:
    import torch


def plan_children(options: Mapping[str, str]) -> list[ConnectorPlan]:
    """The children named by --connector-config, each with its options, in order.

    Raises:
        ConfigError: none is named, an option belongs to no child or could belong to several, or its child refuses it.
        UnknownConnector: a child's name is unknown.
    """
    names = [name.strip() for name in options.get("connectors", "").split(",") if name.strip()]
    if not names:
        raise ConfigError("connector multi requires the option connectors=NAME,NAME,…, in order of preference")
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
    for name in names:
        if issubclass(load_connector(name), MultiConnector):
            raise ConfigError(f"connector multi cannot hold another multi ({name!r})")
    return [
        plan_connector(name, OptionTexts(texts, "connector multi", prefix=prefix))
        for name, texts, prefix in zip(names, own, prefixes, strict=True)
    ]


def _owner(option: str, names: Sequence[str]) -> tuple[int, str]:
    """(child, the child's name for it) of an option with a prefix."""
    prefix, _, rest = option.partition(".")
    if prefix.isdecimal() and int(prefix) < len(names) and rest:
        return int(prefix), rest
    owners = [(i, option[len(name) + 1 :]) for i, name in enumerate(names) if option.startswith(f"{name}.")]
    if len(owners) == 1 and owners[0][1]:
        return owners[0]
    known = ", ".join(f"{i}. or {name}." for i, name in enumerate(names))
    problem = "is several children's" if owners else "is no child's"
    raise ConfigError(f"connector multi: option {option!r} {problem}; prefixes are: {known}")


def kind_of(children: Sequence[ConnectorPlan]) -> ConnectorKind:
    """The kind that results from the children.

    Raises:
        ConfigError: they cannot work together.
    """
    pushing = [child.name for child in children if child.kind == "push"]
    pulling = [child for child in children if child.kind == "pull"]
    if len(pushing) > 1:
        raise ConfigError(f"connector multi: only one child can push into decode's blocks, got {' and '.join(pushing)}")
    if pushing:
        idle = [child.name for child in pulling if not child.content_addressed]
        if idle:
            raise ConfigError(
                f"connector multi: {pushing[0]} needs decode first and {idle[0]} needs prefill first, so {idle[0]} "
                "would never be used"
            )
        return "push"
    return "pull" if pulling else "store"


def orders_of(children: Sequence[ConnectorPlan]) -> tuple[Order, ...]:
    """The orders that are legal with all children, or with the pushing child if there is one.

    Raises:
        ConfigError: there is none.
    """
    deciding = [child for child in children if child.kind == "push"] or children
    orders = tuple(o for o in deciding[0].orders if all(o in child.orders for child in deciding))
    if not orders:
        said = "; ".join(f"{child.name}: {', '.join(child.orders)}" for child in deciding)
        raise ConfigError(f"connector multi: no hand-off order suits all children ({said})")
    return orders


def compose(children: Sequence[ConnectorPlan]) -> ConnectorPlan:
    """The plan of `multi` with these children, in order of preference.

    Raises:
        ConfigError: they cannot work together.
    """
    kind = kind_of(children)
    hits = [child.hit_tokens for child in children if child.hit_tokens]
    owners = [child.name for child in children if child.own_pool == "needs"]
    if len(owners) > 1:
        raise ConfigError(f"connector multi: both {owners[0]} and {owners[1]} would allocate the KV pool")
    return msgspec.structs.replace(
        MultiConnector.declares,
        name="multi",
        build=f"{__name__}:{MultiConnector.__name__}.build",
        kind=kind,
        orders=orders_of(children),
        parts=tuple(children),
        content_addressed=all(child.content_addressed for child in children),
        lends=any(child.lends for child in children if child.kind == kind),
        hit_tokens=lcm(*hits) if hits else 0,
        codec="+".join(sorted({child.codec for child in children} - {""})),
        own_pool=max((child.own_pool for child in children), key=("none", "offers", "needs").index),
        one_process=any(child.one_process for child in children),
        layouts=tuple(layout for layout in children[0].layouts if all(layout in c.layouts for c in children)),
        positions=tuple(kind for kind in children[0].positions if all(kind in c.positions for c in children)),
        requirements=tuple(requirement for child in children for requirement in child.requirements),
    )


class MultiOptions(Options):
    """Options of `multi` itself; others belong to its children and have a prefix."""

    connectors: str = option(
        help="the children, in order of preference; an option of a child is prefixed with its name or its number, "
        "counted from 0, as in store.url=… or 1.url=…",
        metavar="NAME[,NAME…]",
    )


class MultiConnector(KVConnector):
    """Several connectors as one. Its properties follow from its children."""

    declares = ConnectorPlan(interface=INTERFACE, kind="pull")
    options_type = MultiOptions

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        return compose(plan_children(options))

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        """Build the children. All follow the pool's writes, either in a block table of their own or, for stores,
        through another child's.
        """
        parts = config.plan.parts
        made: dict[int, Built] = {}
        tables: list[BlockTable] = []
        with ExitStack() as stack:
            for i in sorted(range(len(parts)), key=lambda i: parts[i].kind == "store"):
                table = tables[0] if tables else config.block_table
                made[i] = build_connector(msgspec.structs.replace(config, plan=parts[i], block_table=table), notify)
                stack.callback(made[i].shutdown)
                tables += [own for own in [made[i].block_table] if own is not None]
            shutdown = stack.pop_all().close
        children = [made[i] for i in range(len(parts))]

        def kv_cache() -> "torch.Tensor | None":
            """The pool of the child that requires its own, else of the first one that offers one."""
            by_need = sorted(zip(parts, children, strict=True), key=lambda child: child[0].own_pool != "needs")
            return next((pool for _, child in by_need if (pool := child.kv_cache()) is not None), None)

        return Built(
            lambda: MultiScheduler(config, [child.scheduler() for child in children]),
            lambda: MultiWorker(parts, [child.worker() for child in children]),
            BlockTables(tables) if len(tables) > 1 else next(iter(tables), None),
            kv_cache,
            shutdown,
        )


class BlockTables(BlockTable):
    """Several tables of one pool. Each child reads its own; all follow every reuse and every block's content."""

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
