"""Block keys name content the same way in every process, and nothing else by the same name (F8, F23)."""

import subprocess
import sys

from pdkv.base.block_keys import extend_keys, root_key

TOKENS = list(range(100, 148))


def keys_of(root: bytes, tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens)
    return keys


def test_one_key_per_full_hash_block_and_none_for_a_tail() -> None:
    root = root_key(model="m", layout="l")
    assert [len(keys_of(root, TOKENS[:n])) for n in (0, 15, 16, 17, 31, 32, 48)] == [0, 0, 1, 1, 1, 2, 3]


def test_extending_gives_what_hashing_at_once_gives() -> None:
    root = root_key(model="m", layout="l")
    keys: list[bytes] = []
    for stop in (7, 20, 33, 48):
        extend_keys(keys, root, TOKENS[:stop])
    assert keys == keys_of(root, TOKENS)


def test_a_key_depends_on_all_tokens_before_it() -> None:
    root = root_key(model="m", layout="l")
    changed = [TOKENS[0] + 1, *TOKENS[1:]]
    assert not set(keys_of(root, TOKENS)) & set(keys_of(root, changed))


def test_salt_adapter_model_and_layout_each_part_the_keys() -> None:
    """Also where their texts run together to the same string."""
    roots = [
        root_key(model="m", layout="l"),
        root_key(model="m", layout="l", cache_salt="a"),
        root_key(model="m", layout="l", cache_salt="\ud800"),
        root_key(model="m", layout="l", adapter="a"),
        root_key(model="m", layout="l", adapter="a\0", cache_salt="b"),
        root_key(model="m", layout="l", adapter="a", cache_salt="\0b"),
        root_key(model="ml", layout=""),
        root_key(model="", layout="ml"),
    ]
    assert len(set(roots)) == len(roots)


def test_another_process_finds_the_same_keys() -> None:
    """F8: Python's own hash differs between processes."""
    program = (
        "from pdkv.base.block_keys import *\nkeys = []\n"
        "extend_keys(keys, root_key(model='m', layout='l', cache_salt='s'), list(range(100, 148)))\n"
        "print(keys[-1].hex())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == keys_of(root_key(model="m", layout="l", cache_salt="s"), TOKENS)[-1].hex()
