"""The identity of a model: one digest of everything that determines its KV. No torch.

It covers every byte of every tensor, the index that says which file a tensor is read from, all of config.json except a
few fields that only name things, and the format of KV. It is computed on its own thread while the weights are loaded
from the same open files (docs/kv-identity.md).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from pdkv.base.service_thread import ServiceThread
from pdkv.errors import ModelError
from pdkv.host.file_lock import FileLock
from pdkv.models.config import ModelConfig
from pdkv.models.digest_cache import DigestCache
from pdkv.models.json_fields import read_json
from pdkv.models.weight_files import StoredTensor, WeightFile, WeightFiles

KV_FORMAT_VERSION = 1
"""To be raised when the same model, tokens and layout give other KV bytes than before."""

NEUTRAL_FIELDS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Fields of config.json that change nothing that is computed. All others count, unknown ones too."""

_CHUNK_BYTES = 1 << 20  # stays in the second-level cache between the copy and the digest
_LOCK_BASE_S, _LOCK_BYTES_PER_S = 5.0, 100e6
"""How long another process may take for the same file before this one takes the digests itself."""


class ModelSource:
    """A model's open weight files, and its identity, which a thread computes in the meantime. A context manager."""

    def __init__(self, path: Path, config: ModelConfig | None = None, *, cache: Path | None = None) -> None:
        """Open the files and begin.

        Args:
            config: the configuration that the model code reads from the directory's JSON files, if it is known.
            cache: the directory of cached digests; None: the user's own.

        Raises:
            ModelError: a file is missing or broken; the message names it.
        """
        self._facts = [f"format {KV_FORMAT_VERSION}", _describe_config(path, config)]
        quantized = config is not None and config.quantization is not None and config.quantization.method == "int8"
        self._suffix = "-int8" if quantized else ""  # for people: the facts have it, too
        self.files = WeightFiles(path)
        self._cache = DigestCache(cache)  # of the thread, once that runs
        self._waits_for: FileLock | None = None
        self._result: Future[str] = Future()
        self._thread = ServiceThread(self._run, self._give_up_waiting, "pdkv-identity")
        try:
            known = self._known_digests()
            if known is not None:
                self._result.set_result(self._combine(known))
            else:
                self._thread.start()
        except BaseException:
            self.close()
            raise

    def known(self) -> str | None:
        """The identity if it was cached, so that no weights had to be read; it is certain only once `identity` has
        confirmed it.
        """
        return self._result.result() if self._result.done() and self._result.exception() is None else None

    def identity(self) -> str:
        """Wait for the identity. To be called when the weights are loaded, so that it covers exactly what was loaded.

        Raises:
            ModelError: a file changed or was replaced since it was opened, or cannot be read; the message names it.
        """
        identity = self._result.result()
        self.files.check_unchanged()
        return identity

    def close(self) -> None:
        """Cancel the computation if it is not done, and close the files. Idempotent."""
        self._thread.stop(threading.TIMEOUT_MAX)
        self._cache.close()
        self.files.close()

    def _give_up_waiting(self) -> None:
        lock = self._waits_for
        if lock is not None:
            lock.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _known_digests(self) -> dict[Path, Sequence[bytes]] | None:
        """The digests of all files, from the cache."""
        known: dict[Path, Sequence[bytes]] = {}
        for file in self.files.files:
            digests = self._cache.get(file)
            if digests is None:
                return None
            known[file.path] = digests
        return known

    def _run(self, stopping: threading.Event) -> None:
        try:
            self._result.set_result(self._combine({file.path: self._digests(file) for file in self.files.files}))
        except BaseException as error:  # whoever asks for the identity gets it
            self._result.set_exception(error)

    def _digests(self, file: WeightFile) -> Sequence[bytes]:
        """From the cache, or taken now by one of all the processes that want them."""
        with self._turn(file) as others_may_have:
            digests = self._cache.get(file) if others_may_have else None
            if digests is None:
                digests = self._read_digests(file)
                file.check_unchanged()
                self._cache.put(file, digests)
            return digests

    @contextlib.contextmanager
    def _turn(self, file: WeightFile) -> Iterator[bool]:
        """Wait until no other process reads this file, within a bound; yields whether the cache is worth a look."""
        lock = self._cache.lock(file) if self._cache.keeps(file) else None
        if lock is None:
            yield self._cache.keeps(file)
            return
        self._waits_for = lock
        if self._thread.stopping.is_set():
            lock.give_up()
        locked = lock.acquire(_LOCK_BASE_S + file.stamp.size / _LOCK_BYTES_PER_S)
        try:
            yield True
        finally:
            self._waits_for = None
            if locked:
                lock.release()

    def _read_digests(self, file: WeightFile) -> list[bytes]:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, file.stamp.size))))
        return [self._digest(file, tensor, buffer) for tensor in file.tensors]

    def _digest(self, file: WeightFile, tensor: StoredTensor, buffer: memoryview) -> bytes:
        """xxh3-128 of the tensor's bytes. Reading, and digesting what is larger than a few KiB, release the GIL."""
        digest = xxhash.xxh3_128()
        at = tensor.begin
        while at < tensor.end:
            if self._thread.stopping.is_set():
                raise ModelError(f"{file.path}: reading was cancelled")
            try:
                num_read = os.preadv(file.fd, [buffer[: tensor.end - at]], at)
            except OSError as error:
                raise ModelError(f"{file.path}: cannot be read: {error.strerror}") from None
            if num_read == 0:
                raise ModelError(f"{file.path}: was truncated while it was read")
            digest.update(buffer[:num_read])
            at += num_read
        return digest.digest()

    def _combine(self, digests: Mapping[Path, Sequence[bytes]]) -> str:
        """One digest of all facts. How tensors are spread over files is none of them, but which copy is read is."""
        facts = list(self._facts)
        for number, file in enumerate(self.files.files):
            for tensor, digest in zip(file.tensors, digests[file.path], strict=True):
                read = self.files.holders.get(tensor.name) is file
                where = "" if read else f"not read, file {number}"  # pdkv leaves it out; another loader may not
                facts.append(f"{where}\0{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{digest.hex()}")
        combined = hashlib.blake2b(digest_size=16, person=b"pdkv-model")
        for fact in sorted(facts):
            data = fact.encode("utf-8", "surrogatepass")
            combined.update(len(data).to_bytes(8, "little") + data)
        return combined.hexdigest() + self._suffix


def model_identity(path: Path, config: ModelConfig | None = None, *, cache: Path | None = None) -> str:
    """The identity of the model in a directory. It is equal in every process that reads the same model, for copies of
    it and for other divisions into files, and differs for any other weights, configuration or KV format.

    Raises:
        ModelError: a file is missing, broken, or changed while it was read; the message names it.
    """
    with ModelSource(path, config, cache=cache) as source:
        return source.identity()


def _describe_config(path: Path, config: ModelConfig | None) -> str:
    """config.json without neutral fields, and what was made of it before: if both differ it was changed in between."""
    fields = {name: value for name, value in read_json(path / "config.json").items() if name not in NEUTRAL_FIELDS}
    resolved = None if config is None else _resolved(config)
    return json.dumps({"config.json": fields, "resolved": resolved}, sort_keys=True)


def _resolved(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration. What a model may lack, and does, is left out: older versions do not know it."""
    values = dataclasses.asdict(config)
    kept = {field.name for field in dataclasses.fields(config) if field.default != getattr(config, field.name)}
    return {name: value for name, value in values.items() if name in kept or name == "quantization"}
