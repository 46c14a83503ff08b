"""The reason why an engine is refused, which the launcher passes to routers in a file in the private run directory."""

import contextlib
import os
from pathlib import Path

MAX_BYTES = 4096


class RefusalNote:
    """One engine's file; if it is absent, the engine is not refused. The file outlives routers, so that the next one
    knows, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, reason: str) -> None:
        """Refuse the engine, for this reason. Raises OSError."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_bytes(reason.encode()[:MAX_BYTES])
        os.replace(fresh, self.path)

    def clear(self) -> None:
        """Admit the engine, as far as this reason is concerned. Idempotent. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def read(self) -> str | None:
        """The reason; None: there is none, or it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace")
        except OSError:
            return None
