"""The safetensors files of a model directory, held open: their tensors, the tensors' places, and whether the files stay
unchanged.

No torch, since identities are also computed in processes without it.
"""

import json
import logging
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from pdkv.base.clock import unix_time
from pdkv.errors import ModelError
from pdkv.host.processor import flags
from pdkv.models.json_fields import LFS_POINTER, read_json

logger = logging.getLogger(__name__)

SINGLE_NAME = "model.safetensors"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EIGHT_BITS = frozenset({"F8_E4M3", "I8"})
INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MAX_DIMENSIONS = 8
_MIN_AGE_S = 2.0  # more than the tick of any file system's clock


class Stamp(NamedTuple):
    """The attributes by which a changed file is recognized: it was written, replaced, truncated or renamed."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The stamp of an open file or a path."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class StoredTensor(NamedTuple):
    """A tensor in its file."""

    name: str
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes [begin, end) of the file
    end: int


class WeightFile:
    """One open file, to be closed by its opener."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Raises:
            ModelError: it is missing, not a regular file, or not a whole safetensors file.
        """
        self.path = path.absolute()
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO is refused, not awaited
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path}: is not a regular file")
            self.opened_at = unix_time()
            self.stamp = Stamp.of(status)
            self.tensors = _read_header(self.fd, path, status.st_size)
        except BaseException:
            self.close()
            raise

    @property
    def is_settled(self) -> bool:
        """Whether a later change would show: not while the file is so young that one within the same tick of its clock
        could leave the stamp as it is.
        """
        return self.opened_at - self.stamp.ctime_ns / 1e9 > _MIN_AGE_S

    @property
    def reopen_path(self) -> str:
        """A path to this same file, whatever its name refers to by now."""
        return f"/proc/self/fd/{self.fd}"

    def check_unchanged(self) -> None:
        """Raise ModelError if the file was changed or replaced since it was opened."""
        try:
            here, there = Stamp.of(os.fstat(self.fd)), Stamp.of(os.stat(self.path))
        except OSError as error:
            raise ModelError(f"{self.path}: was removed while it was read: {error.strerror}") from None
        if there[:2] != self.stamp[:2]:
            raise ModelError(f"{self.path}: was replaced by another file while it was read; start again")
        if here != self.stamp:
            raise ModelError(f"{self.path}: was changed while it was read; start again when it is not being written")

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class WeightFiles:
    """All weight files of a model; a context manager.

    `holders` maps each tensor to the file that it is read from: the one named by the index, else model.safetensors, as
    in transformers, else the last file that has it.
    """

    def __init__(self, path: Path) -> None:
        """Open all weight files.

        Raises:
            ModelError: no weights, or a file or an index that is missing or broken; the message names it.
        """
        self.path = path
        weight_map = read_index(path)
        self.files: list[WeightFile] = []
        try:
            for name in _file_names(path, weight_map):
                self.files.append(WeightFile(path / name))
            self.holders = _find_holders(path, self.files, weight_map)
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        """Raise ModelError, which names the file, if one was changed or replaced since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Idempotent."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def stored_dtype(path: Path) -> str | None:
    """The dtype of the floating-point tensors in the first file; None: there are no weights, or none in floating point.

    Raises:
        ModelError: it has several, or a file is broken.
    """
    if next(path.glob("*.safetensors"), None) is None:
        return None
    with WeightFiles(path) as files:
        first = files.files[0]
    found = sorted({_DTYPES[tensor.dtype] for tensor in first.tensors if tensor.dtype in _DTYPES})
    if len(found) > 1:
        raise ModelError(
            f"{path / 'config.json'}: field 'dtype' is missing, and {first.path.name} has tensors of {', '.join(found)}"
        )
    return found[0] if found else None


def loaded_bytes(path: Path, quantization: str | None = None) -> int:
    """Upper estimate of the bytes that an engine needs for its weights: twice the files' size, as for bfloat16 computed
    in float32. Weights of 8 bits count once where they stay so, and all where they are quantized to int8 as they are
    loaded. 0: there are no weights.

    Raises:
        ModelError: a file is broken.
    """
    if next(path.glob("*.safetensors"), None) is None:
        return 0
    with WeightFiles(path) as files:
        tensors = [tensor for file in files.files for tensor in file.tensors]
    once = [quantization or ("amx_bf16" not in flags() and t.dtype in _EIGHT_BITS) for t in tensors]
    return sum((t.end - t.begin) * (1 if is_once else 2) for t, is_once in zip(tensors, once, strict=True))


def read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name; None: there is no index."""
    index = path / INDEX_NAME
    if not index.exists():
        return None
    if (path / SINGLE_NAME).exists():
        logger.warning("%s: as in transformers, %s is read, and not what %s names", path, SINGLE_NAME, INDEX_NAME)
        return None
    weight_map = read_json(index).get("weight_map")
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not names or any("/" in name or name.startswith(".") for name in names):
        raise ModelError(f"{index}: field 'weight_map' must map tensor names to files of the directory")
    return {name: str(file) for name, file in dict(weight_map or {}).items()}


def _file_names(path: Path, weight_map: Mapping[str, str] | None) -> Sequence[str]:
    if weight_map is None:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if SINGLE_NAME in names and len(names) > 1:
            others = ", ".join(name for name in names if name != SINGLE_NAME)
            logger.warning("%s: without %s, %s is read alone, and not %s", path, INDEX_NAME, SINGLE_NAME, others)
            names = [SINGLE_NAME]
        if not names:
            found = sorted({file.name for pattern in _OTHER_FORMATS for file in path.glob(pattern)})
            hint = ", which transformers writes: save_pretrained; not read: " + ", ".join(found[:3]) if found else ""
            raise ModelError(f"{path}: no *.safetensors file{hint}")
        return names
    names = sorted(set(weight_map.values()))
    for name in names:
        if not os.path.exists(path / name):  # which says no of a name that no file can have
            raise ModelError(f"{path / INDEX_NAME} names {name}, which does not exist")
    return names


def _find_holders(
    path: Path, files: Sequence[WeightFile], weight_map: Mapping[str, str] | None
) -> dict[str, WeightFile]:
    if weight_map is None:
        return {tensor.name: file for file in files for tensor in file.tensors}
    by_path = {file.path: (file, {tensor.name for tensor in file.tensors}) for file in files}
    holders = {}
    for name, file_name in weight_map.items():
        file, names = by_path[(path / file_name).absolute()]
        if name not in names:
            raise ModelError(f"{path / INDEX_NAME} places tensor {name!r} in {file_name}, which does not have it")
        holders[name] = file
    return holders


def _read_header(fd: int, path: Path, size: int) -> list[StoredTensor]:
    """The tensors in the order of their bytes, which are all of the file behind the header."""
    broken = f"{path}: cannot be read as safetensors"
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    start = _LENGTH_BYTES + length
    if os.pread(fd, len(LFS_POINTER), 0) == LFS_POINTER:
        raise ModelError(f"{path}: is a git-lfs pointer instead of the file: fetch the file with `git lfs pull`")
    if not 2 <= length <= _MAX_HEADER_BYTES or start > size:
        raise ModelError(f"{broken}: the header should have {length} bytes, but the file has {size}")
    try:
        header = json.loads(os.pread(fd, length, _LENGTH_BYTES), object_pairs_hook=_without_twins)
        header.pop("__metadata__", None)
        tensors = sorted(
            (_read_entry(name, entry, start) for name, entry in header.items()), key=lambda t: (t.begin, t.end)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{broken}: its header is broken: {error!r}") from None
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            raise ModelError(f"{broken}: tensor {tensor.name!r} begins at byte {tensor.begin} instead of {at}")
        at = tensor.end
    if at != size:
        raise ModelError(f"{broken}: its tensors end at byte {at}, the file at {size}")
    return tensors


def _read_entry(name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    """Raises ValueError, TypeError or KeyError for what is none."""
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    numbers = (begin, end, *shape)
    is_whole = len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in numbers)
    if not isinstance(dtype, str) or not is_whole or begin > end:
        raise ValueError(f"tensor {name!r:.80} is {entry!r:.200}")
    if (math.prod(shape) == 0) != (begin == end):
        raise ValueError(f"tensor {name!r} of shape {shape} has {end - begin} bytes")
    return StoredTensor(name, dtype, shape, start + begin, start + end)


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers of a JSON object with a name twice might take different ones."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name appears twice")
    return values
