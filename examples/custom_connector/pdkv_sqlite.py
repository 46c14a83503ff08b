"""A KV connector of one's own: all engines share one SQLite file. Nothing in it is about blocks or requests."""
# pip install ./examples/custom_connector && pd launch --connector sqlite --connector-config path=$HOME/kv.db

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from pdkv.connectors.store.base import Buffer, KVStore, StoreConnector, StoreConnectorOptions, StoreUnavailable, option


class SQLiteStore(KVStore):
    """Keys to immutable bytes. Methods may block, on any thread: pdkv calls them on I/O threads only."""

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self._db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
        self._run("PRAGMA journal_mode=WAL", [()])  # other engines read on while one writes
        self._run("CREATE TABLE IF NOT EXISTS kv (key BLOB PRIMARY KEY, value BLOB)", [()])

    def _run(self, statement: str, rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
        """One transaction: it becomes visible whole or not at all. A StoreError is all that a store may raise."""
        try:
            with self._lock, self._db:
                return [self._db.execute(statement, row).fetchall() for row in rows]
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path}: {error}") from error

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(rows) for rows in self._run("SELECT 1 FROM kv WHERE key = ?", [[key] for key in keys])]

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        found = self._run(
            "SELECT value FROM kv WHERE key = ? AND length(value) = ?", zip(keys, map(len, out), strict=True)
        )
        for rows, buffer in zip(found, out, strict=True):
            buffer[:] = rows[0][0] if rows else buffer
        return [bool(rows) for rows in found]

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self._run("INSERT OR IGNORE INTO kv VALUES (?, ?)", items)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._run("DELETE FROM kv WHERE key = ?", [[key] for key in keys])

    def close(self) -> None:
        self._db.close()


class SQLiteOptions(StoreConnectorOptions):
    path: str = option(help="database file that all engines share", metavar="FILE")

    def open_store(self) -> KVStore:
        return SQLiteStore(self.path)


class SQLiteConnector(StoreConnector):
    options_type = SQLiteOptions
