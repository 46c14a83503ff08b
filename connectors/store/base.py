"""StoreConnector: any KVStore becomes a connector. A subclass only opens its store.

Every engine saves the KV that it has computed, in values of several units under content keys, and finds what any engine
has saved; a hand-off is a lookup with a known answer. No call of a store runs on the step thread. Everything that the
store returns is verified before use (envelope.py): the store's memory need not be trusted.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import ClassVar

import msgspec

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import unix_time
from pdkv.base.options import option
from pdkv.connectors.base import Built, ConnectorConfig, KVConnector, SchedulerConnector, WorkerConnector
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.store.coding import ValueCoder
from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.store.news import StoreNews
from pdkv.connectors.store.options import StoreConnectorOptions
from pdkv.connectors.store.plan import StoreCut
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.connectors.store.sign_key import make_sealer
from pdkv.connectors.store.values import SealedValues
from pdkv.connectors.store.worker import StoreWorker
from pdkv.errors import StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable, TransferError
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.kv_store.codecs.base import Codec
from pdkv.kv_store.tiers import TieredStore

LAYERWISE_GROUPS = 4
_PROBE_KEYS = [bytes(31) + bytes([number]) for number in range(16)]
"""Several: of a Redis Cluster each node has some."""

__all__ = [
    "Buffer", "KVStore", "StoreConnector", "StoreConnectorOptions", "StoreFull", "StoreReadOnly", "StoreTimeout",
    "StoreUnavailable", "option",
]  # fmt: skip
"""The parts of the package that a subclass needs."""


class StoreConnector(KVConnector):
    """Public base class of connectors over a KVStore.

    `options_type`, a subclass of StoreConnectorOptions, has its options as fields and opens the store that they name.
    """

    declares = ConnectorPlan(
        interface=INTERFACE, kind="store", content_addressed=True,
        # of a block that is not full, tokens are kept, and no whole page
        layouts=("heads", "windows", "latent", "drafter"),
    )  # fmt: skip
    options_type: ClassVar[type[StoreConnectorOptions]] = StoreConnectorOptions
    # how often a store that does not answer is asked again, including at the start
    probe_interval_s: ClassVar[float] = 5.0
    watches: ClassVar[bool] = True  # a server that is silent is checked by asking it
    retry_after_s: float = 1.0  # how long a failed server is left alone at first
    unix_time = staticmethod(unix_time)  # by which stored values expire

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        """Raises ConfigError if the connector cannot be built."""
        self.config, self.notify = config, notify
        self.options = self.options_type.parse(config.plan.options)
        groups = self.options.layer_groups
        if not groups:
            most = min((len(group.layers) for group in config.layout.groups), default=config.layout.model_layers)
            groups = min(LAYERWISE_GROUPS, most) if self.options.load == "layerwise" else 1
        self.sealer = make_sealer(sign=self.options.sign, key_file=self.options.sign_key_file)
        codecs = self.options.make_codecs()
        self.coder = ValueCoder(codecs, config.layout) if codecs[0].identity else None
        self.cut = StoreCut(
            config,
            tokens_per_value=self.options.tokens_per_value,
            layer_groups=groups,
            signer=self.sealer.identity,
            codec=_identity(codecs),
            num_forms=len(codecs),
        )
        self._store: KVStore | None = None

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        parsed = cls.options_type.parse(options)
        codecs = parsed.make_codecs()
        codec = _identity(codecs) if codecs[0].lossy else ""
        probe = f"{cls.__module__}:{cls.__qualname__}.probe"
        own = msgspec.structs.replace(cls.declares, probe=probe, hit_tokens=parsed.tokens_per_value, codec=codec)
        if not codecs[0].identity:
            return own
        return msgspec.structs.replace(own, layouts=tuple(kind for kind in own.layouts if kind != "drafter"))

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        shared = cls(config, notify)
        return Built(shared.make_scheduler_side, shared.make_worker_side, shutdown=shared.shutdown)

    @classmethod
    def probe(cls, plan: ConnectorPlan) -> str:
        """Why the store does not answer; empty: it does. Raises ConfigError for errors that waiting won't cure."""
        try:
            for store in cls.options_type.parse(plan.options).probed_stores():
                with closing(store):
                    for part in store.parts().values():
                        part.contains(_PROBE_KEYS)
        except TransferError as error:
            return f"{error}"
        return ""

    def open_store(self) -> KVStore:
        """The store that the options name."""
        return self.options.open_store()

    @property
    def store(self) -> KVStore:
        """The store shared by both sides in this process; opened on first use. A single server is treated as a tier,
        too: if it does not answer, it is left alone for a while.
        """
        if self._store is None:
            store = self.open_store()
            if store.medium == "store" and not isinstance(store, TieredStore):
                store = TieredStore([store], self.retry_after_s, watches=self.watches, clock=self.config.clock)
            self._store = store
        return self._store

    def make_scheduler_side(self) -> SchedulerConnector:
        news, ahead = StoreNews(self.store, self.cut, self._value_bytes()), self.store.look_ahead_bytes
        lookups = self.make_lookups()
        return StoreScheduler(self.config, self.options, self.cut, lookups, news, ahead, self.unix_time)

    def make_lookups(self) -> KeyLookups:
        """The lookups of a scheduler side."""
        return KeyLookups(
            self.store,
            self.cut.suffixes,
            self.notify,
            timeout_s=self.options.lookup_timeout_s,
            known_for_s=self.options.known_for_s,
            probe_interval_s=self.probe_interval_s,
            clock=self.config.clock,
        )

    def _value_bytes(self) -> int:
        """Bytes that a rank reads for a whole value of the first KV group; 0: as many as its blocks have."""
        if self.coder is None:
            return 0
        num_units = self.cut.value_tokens[0] // HASH_BLOCK_SIZE
        return sum(self.coder.body_bytes(0, part.part, num_units) + ENVELOPE_BYTES for part in self.cut.parts[0])

    def make_worker_side(self) -> WorkerConnector:
        values = SealedValues(self.store, self.sealer, self.unix_time)
        return StoreWorker(self.config, self.options, self.cut, values, self.notify, coder=self.coder)

    def shutdown(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _identity(codecs: Sequence[Codec]) -> str:
    """The identity of all forms of a value together."""
    return "+".join(codec.identity for codec in codecs)
