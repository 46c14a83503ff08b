"""Keys of LMCache's chunks: a hash over the tokens of each chunk and the hash before it.

They are computed as in `lmcache.v1.token_database`: `hash((previous, tokens, ()))` by one of two functions; a digest is
reduced to its first eight bytes, big-endian. The first `previous` is 0 if LMCache runs without vLLM, and otherwise the
same function of vLLM's seed, the text of PYTHONHASHSEED. Python's own `hash` of numbers is the same in every process;
its hash of a text depends on the seed.
"""

import hashlib
import os
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import RequestView, TransferKey

HashName = Literal["builtin", "sha256_cbor"]

MAX_CHUNKS_PER_STEP = 32
"""Chunks hashed in one step: some 2 ms with the slower hash."""

_MAX_REQUESTS = 4096  # requests with remembered keys
_HASH_SEED = "import sys; print(hash(sys.argv[1]))"
_SEED_TIMEOUT_S = 30.0
_WORD = struct.Struct(">BH").pack
_LONG = struct.Struct(">BI").pack


class _Hashed:
    """The keys of a prompt's first chunks."""

    def __init__(self, first: int) -> None:
        self.keys: list[bytes] = []
        self.last = first  # hash: of the last chunk
        self.num_tokens = 0


class ChunkKeys:
    """Keys of requests' prompts, in place of their block keys: a chunk's key is at the position of its last block's
    key.

    Used only by the step thread, which hashes a prompt once, over as many steps as it takes: 3 to 5 us a chunk of 256
    tokens, 50 us by sha256_cbor.
    """

    def __init__(self, chunk_size: int, hash_name: HashName, hash_seed: str) -> None:
        """`hash_seed`: PYTHONHASHSEED of the engines with vLLM; empty: they run without vLLM."""
        self._size = chunk_size
        self._hash: Callable[[int, tuple[int, ...]], int] = _builtin if hash_name == "builtin" else _sha256_cbor
        self._first = first_hash(hash_name, hash_seed) if hash_seed else 0
        self._num_left = MAX_CHUNKS_PER_STEP
        self._of_request: OrderedDict[TransferKey, _Hashed] = OrderedDict()

    def begin_step(self) -> None:
        """Allow this step's number of chunks to be hashed."""
        self._num_left = MAX_CHUNKS_PER_STEP

    def of(self, request: RequestView) -> list[bytes]:
        """The keys, one per hash block of the prompt's whole chunks; those of blocks that end no chunk are empty."""
        hashed = self._hashed(request)
        self._hash_on(hashed, request.prompt_token_ids, len(request.prompt_token_ids))
        return hashed.keys

    def are_ready(self, request: RequestView) -> bool:
        """Whether `of` need not hash any more; otherwise continue hashing within this step's limit."""
        hashed, tokens = self._hashed(request), request.prompt_token_ids
        self._num_left -= self._hash_on(hashed, tokens, self._num_left)
        return len(tokens) - hashed.num_tokens < self._size

    def of_tokens(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of a prompt."""
        hashed = _Hashed(self._first)
        self._hash_on(hashed, tokens, len(tokens))
        return hashed.keys

    def _hashed(self, request: RequestView) -> _Hashed:
        hashed = self._of_request.get(request.transfer_key)
        if hashed is None:
            hashed = self._of_request[request.transfer_key] = _Hashed(self._first)
            if len(self._of_request) > _MAX_REQUESTS:
                self._of_request.popitem(last=False)
        return hashed

    def _hash_on(self, hashed: _Hashed, tokens: Sequence[int], most: int) -> int:
        """Hash up to `most` further chunks; returns their number."""
        num_chunks = min((len(tokens) - hashed.num_tokens) // self._size, most)
        empty = [b""] * (self._size // HASH_BLOCK_SIZE - 1)
        for _ in range(num_chunks):
            start, hashed.num_tokens = hashed.num_tokens, hashed.num_tokens + self._size
            hashed.last = self._hash(hashed.last, tuple(tokens[start : hashed.num_tokens]))
            hashed.keys += [*empty, f"{hashed.last:x}".encode()]
        return num_chunks


def first_hash(hash_name: HashName, seed: str) -> int:
    """vLLM's NONE_HASH as LMCache takes it.

    Raises:
        subprocess.SubprocessError: Python does not accept the seed.
    """
    if hash_name == "sha256_cbor":
        return _folded(_cbor_head(3, len(seed.encode())) + seed.encode())
    command = [sys.executable, "-S", "-c", _HASH_SEED, seed]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=_SEED_TIMEOUT_S
    )
    return int(done.stdout)


def _builtin(previous: int, tokens: tuple[int, ...]) -> int:
    return hash((previous, tokens, ()))


def _sha256_cbor(previous: int, tokens: tuple[int, ...]) -> int:
    """Hash of the canonical CBOR (RFC 8949, 4.2.1) of [previous, [tokens], []]."""
    numbers = b"".join([_WORD(25, t) if 0xFF < t <= 0xFFFF else _cbor_head(0, t) for t in tokens])
    return _folded(b"\x83" + _cbor_head(0, previous) + _cbor_head(4, len(tokens)) + numbers + b"\x80")


def _folded(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def _cbor_head(major: int, number: int) -> bytes:
    """A type and an unsigned number below 2**64 in their shortest form."""
    if number < 24:
        return bytes([major << 5 | number])
    if 0xFFFF < number <= 0xFFFFFFFF:
        return _LONG(major << 5 | 26, number)
    power = max((number.bit_length() - 1).bit_length() - 3, 0)  # of two: 1, 2, 4 or 8 bytes
    return bytes([major << 5 | 24 + power]) + number.to_bytes(1 << power, "big")
