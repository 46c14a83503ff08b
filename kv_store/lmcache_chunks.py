"""LMCache's own chunks of KV in its server, as its engines read and write them: without a marker or a checksum."""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.errors import ConfigError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Arrived, Buffer
from pdkv.kv_store.connections import Channel
from pdkv.kv_store.lmcache_store import (
    EXIST,
    MAX_NAME_BYTES,
    PUT,
    SUCCESS,
    Kind,
    LMCacheServerStore,
    Wanted,
    encode_request,
)
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.pipeline import Command

FORMAT_KV_2LTD = 1
_CHUNK = re.compile(rb"-?[0-9a-f]{1,16}")
DTYPES = {"float16": ("half", 2), "bfloat16": ("bfloat16", 3), "float32": ("float", 4)}
"""By torch's name: LMCache's name in keys, and its number in headers."""


class ChunkForm(NamedTuple):
    """The form of one model's chunks."""

    model: str  # as the serving engine was told it
    world_size: int  # its tensor parallel size
    dtype: str  # torch's name
    shape: tuple[int, int, int, int]  # (2, num_layers, chunk_size, num_heads * head_size) of one worker

    def name(self, key: bytes) -> str:
        """The name of the chunk `<hash>@<worker>`; other keys have names, too, without values."""
        chunk, is_chunk, worker = key.rpartition(b"@")
        if not is_chunk or not _CHUNK.fullmatch(chunk):
            chunk, worker = hashlib.blake2b(key, digest_size=8).hexdigest().encode(), b"0"
        return f"{self.model}@{self.world_size}@{worker.decode()}@{chunk.decode()}@{DTYPES[self.dtype][0]}"


class LMCacheChunks(LMCacheServerStore):
    """Chunks that any engine may have written. Their bytes are not verified; a chunk with another header is a miss.

    `delete` does nothing: chunks belong to others as well.
    """

    def __init__(self, host: str, port: int, options: StoreOptions, form: ChunkForm, *, trailer_bytes: int) -> None:
        """`trailer_bytes`: after a chunk in each buffer, which are neither sent nor filled.

        Raises:
            ConfigError: names would be too long, or could not be told apart.
        """
        super().__init__(host, port, options)
        if "@" in form.model or len(form.name(b"-" + bytes(16) + b"@000").encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"LMCache's keys have at most {MAX_NAME_BYTES} bytes and no further '@': {form.model!r} is not a "
                "valid name"
            )
        self._form = form
        self._kind = Kind(FORMAT_KV_2LTD, DTYPES[form.dtype][1], form.shape)
        self._trailer_bytes = trailer_bytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)

        def receive(channel: Channel, index: int) -> None:
            found[index] = self._read_answer(channel).code == SUCCESS

        commands = [Command([self._request(EXIST, key)]) for key in keys]
        self._run(commands, receive, self._deadline())
        return found

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        found, deadline = [False] * len(keys), self._deadline()

        wanted = [
            Wanted(index, self._form.name(key), buffer[: len(buffer) - self._trailer_bytes], self._kind)
            for index, (key, buffer) in enumerate(zip(keys, out, strict=True))
        ]
        try:
            self._get(wanted, found, deadline, arrived)
        except StoreUnavailable:  # also what a broken chunk looks like: the server ends the connection
            self.contains(keys[:1])
            found[:] = [False] * len(keys)
            for each in wanted:
                try:
                    self._get([each], found, deadline, arrived)
                except StoreUnavailable:
                    continue
                except StoreTimeout:
                    if not any(found):
                        raise
                    break
        return found

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        present = self.contains([key for key, _ in items])
        commands = []
        for (key, value), is_there in zip(items, present, strict=True):
            if not is_there:
                chunk = value[: len(value) - self._trailer_bytes]
                head = self._request(PUT, key, len(chunk), self._kind)
                commands.append(Command([head, chunk, self._request(EXIST, key)], len(chunk)))
        self._run(commands, self._read_done, self._deadline())

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def _request(self, command: int, key: bytes, length: int = 0, kind: Kind | None = None) -> bytes:
        return encode_request(command, self._form.name(key), length, kind or Kind())
