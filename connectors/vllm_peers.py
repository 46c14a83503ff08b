"""How vLLM processes with pdkv inside find each other: a directory of engine cards. There is no router."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from pdkv.connectors.vllm_staging import PeerChange
from pdkv.decoding import decode_total
from pdkv.errors import ConfigError, MalformedMessage
from pdkv.messages import EngineCard

_SUFFIX = ".card"
_cards = msgspec.msgpack.Decoder(EngineCard)
_UNSETTLED_S = 1.0
"""A directory that changed so recently may change again within the same time stamp."""


class CardDirectory:
    """Cards of all engines of this user that name the same directory. One thread.

    Raises:
        ConfigError: it cannot be made, or others may write to it.
    """

    def __init__(self, path: Path, engine: str) -> None:
        self.num_malformed = 0  # files that are no cards
        self._path = path
        self._engine = engine
        self._known: dict[str, EngineCard] = {}  # by epoch
        self._seen_ns = -1
        self._own = path / f"{engine}{_SUFFIX}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"peers_dir {path}: {error.strerror}") from None
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"peers_dir {path}: it must be this user's, and nobody else may write to it")

    def publish(self, card: EngineCard) -> None:
        """Show this engine's card to the others."""
        draft = self._own.with_suffix(".draft")
        draft.write_bytes(msgspec.msgpack.encode(card))
        draft.rename(self._own)

    def withdraw(self) -> None:
        """This engine ends. Idempotent."""
        self._own.unlink(missing_ok=True)

    def poll(self) -> PeerChange | None:
        """What changed since the last call; None: nothing. Costs one stat while nothing does."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if changed_ns == self._seen_ns and time.time() - changed_ns / 1e9 > _UNSETTLED_S:
            return None
        self._seen_ns = changed_ns
        found = {card.epoch: card for path in sorted(self._path.glob(f"*{_SUFFIX}")) if (card := self._read(path))}
        added = [card for epoch, card in found.items() if epoch not in self._known]
        removed = [card for epoch, card in self._known.items() if epoch not in found]
        self._known = found
        return PeerChange(added, removed) if added or removed else None

    @property
    def cards(self) -> list[EngineCard]:
        """The peers now known."""
        return list(self._known.values())

    def _read(self, path: Path) -> EngineCard | None:
        """A living peer's card; that of a dead one is removed."""
        if path == self._own:
            return None
        try:
            card = decode_total(_cards, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, MalformedMessage):
            self.num_malformed += 1
            return None
        if not Path(f"/proc/{card.pid}").exists():
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return card
