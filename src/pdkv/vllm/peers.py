"""How vLLM processes with pdkv inside find one another: a directory of engine cards. There is no router."""

import contextlib
import os
from pathlib import Path

import msgspec

from pdkv.base.clock import unix_time
from pdkv.errors import ConfigError, MalformedMessage
from pdkv.host.private_directory import PrivateDirectory
from pdkv.vllm.staging import PeerChange
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard

_SUFFIX = ".card"
_cards = msgspec.msgpack.Decoder(EngineCard)
_MAX_CARD_BYTES = 1 << 20
_UNSETTLED_S = 1.0
"""Nanoseconds in which a directory that has just changed may change again within the same time stamp."""


class CardDirectory:
    """Cards of all engines of this user that name the same directory. One thread.

    Raises:
        ConfigError: it cannot be created, or other users could write to it (PrivateDirectory).
    """

    def __init__(self, path: Path, engine: str) -> None:
        self.num_malformed = 0  # files that are not cards
        self._known: dict[str, EngineCard] = {}  # by epoch
        self._seen_ns = -1
        self._own = f"{engine}{_SUFFIX}"
        self._directory: PrivateDirectory | None = PrivateDirectory(path, "peers_dir")

    def publish(self, card: EngineCard) -> None:
        """Show this engine's card to the others. Raises OSError."""
        assert self._directory is not None, "withdrawn"
        self._directory.write(self._own, msgspec.msgpack.encode(card))

    def withdraw(self) -> None:
        """Remove this engine's card, since the engine ends. Idempotent."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.remove(self._own)
            directory.close()

    def poll(self) -> PeerChange | None:
        """Changes since the last call; None: there are none. Costs one stat without changes."""
        directory = self._directory
        if directory is None:
            return None
        try:
            directory.reopen_if_removed()
            changed_ns = os.fstat(directory.fd).st_mtime_ns
            if changed_ns == self._seen_ns and unix_time() - changed_ns / 1e9 > _UNSETTLED_S:
                return None
            with directory.entries() as entries:
                found_names = [entry.name for entry in entries if entry.name.endswith(_SUFFIX)]
        except (FileNotFoundError, ConfigError):  # removed, with another process's in its place
            return None
        self._seen_ns = changed_ns
        names = sorted(name for name in found_names if name != self._own)
        found = {card.epoch: card for name in names if (card := self._read(directory, name))}
        added = [card for epoch, card in found.items() if epoch not in self._known]
        removed = [card for epoch, card in self._known.items() if epoch not in found]
        self._known = found
        return PeerChange(added, removed) if added or removed else None

    @property
    def cards(self) -> list[EngineCard]:
        """The peers now known."""
        return list(self._known.values())

    def _read(self, directory: PrivateDirectory, name: str) -> EngineCard | None:
        """A living peer's card; that of a dead one is removed."""
        try:
            fd = directory.open(name)
            if fd is None:
                raise MalformedMessage(f"{name} is not a regular file of this user")
            with os.fdopen(fd, "rb") as file:
                card = decode_total(_cards, file.read(_MAX_CARD_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, MalformedMessage):
            self.num_malformed += 1
            return None
        if not Path(f"/proc/{card.pid}").exists():
            with contextlib.suppress(OSError):
                directory.remove(name)
            return None
        return card
