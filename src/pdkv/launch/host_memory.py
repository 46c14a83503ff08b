"""Segments of host memory for the engines of a launch. The launcher holds them, so that an engine that dies and is
restarted finds its own KV. Engines find them by the addresses that it leaves in a directory (kv_store/host_store.py).
"""

import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Self

from pdkv.errors import ConfigError
from pdkv.host.held_file import HeldFile, held_here, write_address
from pdkv.host.memory_limits import format_bytes
from pdkv.launch.specs import EngineSpec

DIRECTORY = "kv"
"""Directory within the run directory."""

_BYTES_OF_BLOCK = 512  # unit of st_blocks


class HostMemory:
    """A context manager. Each rank of an engine has a segment, an equal part of the engine's memory."""

    def __init__(self, run_dir: Path, num_bytes: int | None) -> None:
        """`num_bytes`: bytes per engine; None: there is no such memory, and `keep` has no effect."""
        self.directory = run_dir / DIRECTORY
        self._num_bytes = num_bytes
        self._segments: dict[str, list[_Segment]] = {}  # by engine, one for each rank

    def keep(self, spec: EngineSpec) -> None:
        """Make an engine's segments. Idempotent: existing ones stay as they are.

        Raises:
            ConfigError: there is no memory for their index.
        """
        if self._num_bytes is None or spec.name in self._segments:
            return
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._segments[spec.name] = []
        try:
            for rank in range(spec.config.tp):
                segment = _Segment(self.directory, f"{spec.name}.{rank}", self._num_bytes // spec.config.tp)
                self._segments[spec.name].append(segment)
        except OSError as error:
            self.give_back(spec.name)
            size = format_bytes(self._num_bytes)
            raise ConfigError(f"{spec.name}: {size} of host memory (--kv-host-memory): {error.strerror}") from None

    def give_back(self, name: str) -> None:
        """Release the memory of an engine that is gone for good, with its content. Idempotent."""
        for segment in self._segments.pop(name, ()):
            segment.close()

    @property
    def num_promised_bytes(self) -> int:
        """Bytes that the segments may use but have not used yet."""
        return sum(segment.num_untouched_bytes for own in self._segments.values() for segment in own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._segments):
            self.give_back(name)


class _Segment:
    """A memfd of fixed size, and its address."""

    def __init__(self, directory: Path, name: str, num_bytes: int) -> None:
        """Raises OSError if there is no memory."""
        from pdkv.kv_store.host_segment import format_segment  # numpy: only launches with host memory need it

        self._fd = os.memfd_create(f"pdkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            format_segment(self._fd, num_bytes)
            # who maps it can rely on its size, and nobody seals it against its writer
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            address = HeldFile(*held_here(self._fd))
            self._address = write_address(directory, f"{name}-{secrets.token_hex(4)}", address)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def num_untouched_bytes(self) -> int:
        """Bytes that the segment may use but has not used yet."""
        status = os.fstat(self._fd)
        return max(status.st_size - status.st_blocks * _BYTES_OF_BLOCK, 0)

    def close(self) -> None:
        """Close the segment: it is no longer found, and its memory is free at once, even if others still map it."""
        self._address.unlink(missing_ok=True)
        with mmap.mmap(self._fd, 0) as memory:
            memory.madvise(mmap.MADV_REMOVE)  # to readers a segment of zeros holds nothing
        os.close(self._fd)
