"""StoreConnector: any KVStore becomes a connector. A subclass says how its store is opened, and no more.

Every engine saves the KV that it has computed, in values of several units under content keys, and finds what any
engine has saved; a hand-off is a lookup whose answer is known. No call of a store runs on the step thread. Whatever the
store gives back is verified before it reaches a block (envelope.py): a store need not be trusted with its memory.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnector,
    KVConnectorMetadata,
    SchedulerConnector,
    WorkerConnector,
)
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.store.options import TransferOptions
from pdkv.connectors.store.plan import StoreCut, StoreMetadata
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.connectors.store.sign_key import make_sealer
from pdkv.connectors.store.values import SealedValues
from pdkv.connectors.store.worker import StoreWorker
from pdkv.errors import StoreUnavailable
from pdkv.kv_store.base import Buffer, KVStore
from pdkv.options import option
from pdkv.wire.messages import ConnectorKind

LAYERWISE_GROUPS = 4

__all__ = ["Buffer", "KVStore", "StoreConnector", "StoreUnavailable", "TransferOptions", "option"]
"""All that a subclass needs."""


class StoreConnector(KVConnector):
    """Public base class of connectors over a KVStore.

    Options of its own are the fields of a subclass of TransferOptions, which `options_type` names; `options` has their
    values.
    """

    kind: ClassVar[ConnectorKind] = "store"
    content_addressed: ClassVar[bool] = True
    metadata_type: ClassVar[type[KVConnectorMetadata]] = StoreMetadata
    options_type: ClassVar[type[TransferOptions]] = TransferOptions
    options: TransferOptions

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        groups = self.options.layer_groups
        if not groups:
            groups = min(LAYERWISE_GROUPS, config.layout.num_layers) if self.options.load == "layerwise" else 1
        self.sealer = make_sealer(sign=self.options.sign, key_file=self.options.sign_key_file)
        self.cut = StoreCut(
            config,
            tokens_per_value=self.options.tokens_per_value,
            layer_groups=groups,
            signer=self.sealer.identity,
        )
        self._store: KVStore | None = None

    @abstractmethod
    def open_store(self) -> KVStore:
        """The store, whose methods may block: they are called on I/O threads. Called once in each process, at start.

        Raises:
            ConfigError: a wrong option, or a package that is missing.
            StoreError: it cannot be opened.
        """

    @property
    def store(self) -> KVStore:
        """What both sides in this process share; opened when first used."""
        if self._store is None:
            self._store = self.open_store()
        return self._store

    def make_scheduler_side(self) -> SchedulerConnector:
        lookups = KeyLookups(
            self.store,
            self.cut.suffixes,
            self.notify,
            timeout_s=self.options.lookup_timeout_s,
            known_for_s=self.options.known_for_s,
        )
        return StoreScheduler(self.config, self.options, self.cut, lookups)

    def make_worker_side(self, rank: int) -> WorkerConnector:
        values = SealedValues(self.store, self.sealer)
        return StoreWorker(self.config, self.options, self.cut, values, self.notify)

    def shutdown(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
