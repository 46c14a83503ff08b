"""Weights that the engines of a host share: one process lays them out, the others map them (docs/cpu-linears.md).

They lie in a memfd, which ends with the last process that maps it. Each process that has all of them leaves its address
in a private directory of its launch.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

import msgspec
import torch

from pdkv.base.version import VERSION
from pdkv.host.file_lock import FileLock
from pdkv.host.held_file import ADDRESS, HeldFile, held_here, write_address
from pdkv.host.huge_pages import (
    HUGE_BYTES,
    HugeMemory,
    aligned,
    can_share_huge_pages,
    extend_shared,
    map_again,
    map_shared,
)
from pdkv.host.memory_limits import format_bytes
from pdkv.kernels import compiled
from pdkv.kernels.linear import weights_memory
from pdkv.models.config import ModelConfig
from pdkv.models.family import FAMILIES
from pdkv.models.weight_files import Stamp, WeightFiles

logger = logging.getLogger(__name__)

shared_in: ContextVar[Sequence[Path]] = ContextVar("shared_in", default=())
"""Where addresses are looked for; this process leaves its own in the first one. None: its weights are private."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10  # linux/fcntl.h: F_SEAL_FUTURE_WRITE
_MOST_TIMES = 8
"""Weights take at most so many times the bytes of their files, as those of 4 bits computed in float32."""

_WAIT_BASE_S, _WAIT_BYTES_PER_S = 5.0, 100e6
"""How long another process may take to lay the same weights out before this one lays out its own."""

_FOLDERS = Path(__file__).parent, Path(compiled.__file__).parent
_CODE = [(str(p), *Stamp.of(p.stat())) for f in _FOLDERS for p in sorted(f.rglob("*")) if p.suffix in (".py", ".so")]
"""The files that lay weights out, as this process has loaded them: in others they may differ. Families of other
packages have more.
"""


class _Address(HeldFile, frozen=True):
    sizes: list[int]  # in bytes, of all that is laid out there, in order


class _Memory(HugeMemory):
    """Weights in a memfd, laid out by this process or, if it `is_filled`, by another one. What finds no room there lies
    in private memory.
    """

    def __init__(self, fd: int, num_bytes: int, sizes: Sequence[int] | None = None) -> None:
        """Owns the descriptor. `sizes`: of what is laid out. Raises OSError."""
        super().__init__()
        self.is_filled = sizes is not None
        self._fd, self._view, self._is_whole = fd, map_shared(fd, num_bytes, writable=sizes is None), True
        self._expected, self._sizes = sizes, list[int]()
        self._end = self._room = 0  # of what was taken, and what has memory

    def take(self, num_bytes: int) -> memoryview:
        start, self._end = self._end, self._end + aligned(num_bytes)
        self._sizes.append(num_bytes)
        if self._expected is not None:
            at = len(self._sizes)
            assert self._expected[at - 1 : at] == [num_bytes], "weights of one key differ"
        elif self._is_whole and self._end > self._room:
            room = -(-self._end // HUGE_BYTES) * HUGE_BYTES
            try:
                extend_shared(self._fd, self._view, self._room, room)
                self._room = room
            except OSError as error:
                logger.warning("weights are not shared: %s", error.strerror)
                self._is_whole = False
        return self._view[start:][:num_bytes] if self._is_whole else super().take(num_bytes)

    def publish(self, name: str, directory: Path) -> None:
        """Let other processes find all that was taken. Raises OSError."""
        if not self._is_whole:
            return
        if not self.is_filled:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            map_again(self._view, self._fd, writable=False)
        address = _Address(*held_here(self._fd), self._sizes)
        path = write_address(directory, f"{name}-{secrets.token_hex(4)}", address)
        weakref.finalize(self._view.obj, path.unlink, missing_ok=True)
        what = "another engine's" if self.is_filled else "laid out to be shared"
        logger.info("%s of weights are %s", format_bytes(self._end), what)


@contextlib.contextmanager
def shared_weights(files: WeightFiles, facts: str, config: ModelConfig) -> Iterator[None]:
    """Share the weights that are laid out in this context, at whose end the files must have been found unchanged.

    `facts`: what determines the weights besides the files and `config`.
    """
    directories, shipped = shared_in.get(), config.architecture in FAMILIES.shipped
    settled = all(file.is_settled for file in files.files)
    if not (directories and shipped and settled and can_share_huge_pages()):
        yield
        return
    stamps = [(str(file.path), *file.stamp) for file in files.files]
    known = [VERSION, torch.__version__, compiled.isa(), _CODE, stamps, facts, dataclasses.asdict(config)]
    name = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16).hexdigest()
    num_bytes = sum(file.stamp.size for file in files.files)
    memory = None
    with contextlib.ExitStack() as held:
        try:
            directories[0].mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(os.open(directories[0] / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if lock.acquire(_WAIT_BASE_S + num_bytes / _WAIT_BYTES_PER_S):
                held.callback(lock.release)
                memory = _found(name) or _made(_MOST_TIMES * num_bytes)
            else:
                logger.warning("weights are not shared: another process takes too long to lay them out")
        except OSError as error:
            logger.warning("weights are not shared: %s", error)
        if memory is None or memory.is_filled:
            held.close()  # the next one need not wait
        token = weights_memory.set(memory or weights_memory.get())
        try:
            yield
        finally:
            weights_memory.reset(token)
        try:
            if memory is not None:
                memory.publish(name, directories[0])
        except OSError as error:
            logger.warning("weights are not shared: %s", error)


def _made(num_bytes: int) -> _Memory:
    fd = os.memfd_create("pdkv-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return _Memory(fd, num_bytes + (64 << 20))


def _found(name: str) -> _Memory | None:
    """The weights of a living process; None: there are none. Refuses what could change, or is another user's."""
    for path in (path for directory in shared_in.get() for path in directory.glob(f"{name}-*{ADDRESS}")):
        try:
            address = msgspec.json.decode(path.read_bytes(), type=_Address)
            fd = address.open(os.O_RDONLY)
            status = os.fstat(fd)
            is_ours = status.st_uid == os.geteuid() and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if is_ours and min(address.sizes, default=0) >= 0 and sum(map(aligned, address.sizes)) <= status.st_size:
                return _Memory(fd, status.st_size, address.sizes)
            os.close(fd)
            logger.warning("weights at %s are not used: they may change, or are another user's", path)
        except FileNotFoundError:  # the process has ended
            path.unlink(missing_ok=True)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("weights at %s are not used: %s", path, error)
    return None
