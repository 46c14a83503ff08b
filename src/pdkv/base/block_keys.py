"""Block keys: a chained cryptographic hash that names KV content the same way in every process."""

import hashlib
from array import array
from collections.abc import Sequence

HASH_BLOCK_SIZE = 16
"""Tokens per key; one constant of a deployment. A KV block is a multiple of it."""

_DIGEST_BYTES = 16


def root_key(*, model: str, layout: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """The parent of a chain's first key: everything that KV depends on, except the tokens."""
    parts = "".join(f"{len(part)}:{part}" for part in (model, layout, adapter, cache_salt))  # unambiguous
    data = parts.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"pdkv-root").digest()


def extend_keys(
    keys: list[bytes], root: bytes, token_ids: Sequence[int], *, hash_block_size: int = HASH_BLOCK_SIZE
) -> None:
    """Append to `keys` the keys of the full hash blocks of `token_ids` that it does not have yet.

    Key i = BLAKE2b-128(key i-1, tokens [i * size, (i + 1) * size) as little-endian int32).
    """
    parent = keys[-1] if keys else root
    for start in range(len(keys) * hash_block_size, len(token_ids) - hash_block_size + 1, hash_block_size):
        tokens = array("i", token_ids[start : start + hash_block_size]).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
        keys.append(parent)
