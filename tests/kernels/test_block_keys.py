"""Block keys of many tokens at once are those that are computed one by one."""

import random

import pytest

from pdkv.base.block_keys import extend_keys
from pdkv.kernels import block_keys
from pdkv.kernels.block_keys import as_tokens, keys_behind

PARENT = bytes(range(16))


@pytest.fixture(params=["compiled", "hashlib"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "hashlib":
        monkeypatch.setattr(block_keys, "_library", lambda: None)
    elif not block_keys.available():
        pytest.skip("no compiler when pdkv was installed")


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("hash_block_size", [1, 4, 16, 28, 29, 60, 61, 200])
def test_keys_are_those_of_the_chain(hash_block_size: int) -> None:
    """28 tokens and a parent fill one compression of BLAKE2b, 60 two."""
    generator = random.Random(hash_block_size)
    for num_tokens in (0, hash_block_size - 1, 9 * hash_block_size, 40 * hash_block_size + 1):
        tokens = [generator.choice((0, 1, 2**31 - 1, generator.randrange(2**31))) for _ in range(num_tokens)]
        expected: list[bytes] = []
        extend_keys(expected, PARENT, tokens, hash_block_size=hash_block_size)
        assert keys_behind(PARENT, tokens, hash_block_size=hash_block_size) == expected
        assert keys_behind(PARENT, as_tokens(tokens), hash_block_size=hash_block_size) == expected


@pytest.mark.usefixtures("form")
def test_a_chain_goes_on_behind_its_last_key() -> None:
    tokens = list(range(640))
    keys = keys_behind(PARENT, tokens, hash_block_size=16)
    assert keys_behind(keys[19], tokens[320:], hash_block_size=16) == keys[20:]


@pytest.mark.usefixtures("form")
def test_a_token_beyond_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        keys_behind(PARENT, [2**31] * 320, hash_block_size=16)
    with pytest.raises(OverflowError):
        as_tokens([1, 2**31])
