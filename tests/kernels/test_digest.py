"""The digest of KV: the compiled kernel against numpy, and what a digest must tell apart."""

import numpy as np
import numpy.typing as npt
import pytest

from pdkv.kernels import digest, host
from pdkv.kernels.digest import add_digests, hash_rows, seeds_of

compiled = pytest.mark.skipif(not digest.available(), reason="no compiler when pdkv was installed")

Bytes = npt.NDArray[np.uint8]


def random_bytes(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def digests_of(pool: Bytes, units: list[int], *, sizes: list[int] | None = None, target: Bytes | None = None) -> Bytes:
    """Of a pool (units, sides, heads, bytes), by head; where a target is given, unit i is copied to its unit i."""
    _, sides, heads, size = pool.shape
    unit = sides * heads * size
    rows = host.Rows(sides, heads * size, heads * size, heads, size, size, size)
    result = np.zeros((len(units), heads), dtype=np.uint64)
    add_digests(
        result,
        seeds_of(range(sides // 2), range(heads)),
        pool.reshape(-1),
        np.array(units, dtype=np.int64) * unit,
        rows,
        sizes=None if sizes is None else np.array(sizes, dtype=np.int64),
        target=None if target is None else target.reshape(-1),
        target_offsets=None if target is None else np.arange(len(units), dtype=np.int64) * unit,
    )
    return result.view(np.uint8)


@pytest.fixture(params=[pytest.param("compiled", marks=compiled), "numpy"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(digest, "_library", lambda: None)


@compiled
@pytest.mark.parametrize("size", [1, 8, 63, 64, 65, 128, 1000, 1024, 4096, 16384])
def test_compiled_and_numpy_have_the_same_bits(isa: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = random_bytes(7, 4, 3, size)
    sizes = [size, max(size // 3, 1), max(size - 1, 1)]
    results = []
    for library in (digest._library(), None):
        monkeypatch.setattr(digest, "_library", lambda library=library: library)
        target = np.zeros((3, *pool.shape[1:]), dtype=np.uint8)
        results.append([digests_of(pool, [5, 0, 6], sizes=sizes, target=target), digests_of(pool, [5, 0, 6]), target])
        assert np.array_equal(target, pool[[5, 0, 6]])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_bits_do_not_change_from_one_version_to_the_next() -> None:
    """Engines of two versions compare them."""
    rows = np.arange(200, dtype=np.uint8).reshape(2, 100)
    seeds = seeds_of(range(3, 4), range(5, 6)).reshape(-1)
    assert [hex(value) for value in hash_rows(rows, seeds)] == ["0xcdec1a456ad7f56d", "0xbf69551547bd5a0d"]


@pytest.mark.usefixtures("_kernel")
def test_each_single_flipped_bit_changes_the_digest() -> None:
    pool = random_bytes(1, 2, 2, 72)
    for content in (pool, np.zeros_like(pool), np.full_like(pool, 255)):
        seen = {digests_of(content, [0]).tobytes()}
        for byte in range(0, content.size, 5):
            for bit in range(8):
                content.reshape(-1)[byte] ^= 1 << bit
                seen.add(digests_of(content, [0]).tobytes())
                content.reshape(-1)[byte] ^= 1 << bit
        assert len(seen) == 1 + len(range(0, content.size, 5)) * 8


@pytest.mark.usefixtures("_kernel")
def test_what_is_exchanged_within_a_unit_changes_the_digest() -> None:
    """Two sides of a layer, two layers, two heads, two tokens, two stripes, two words."""
    pool = random_bytes(1, 4, 2, 256)
    whole = digests_of(pool, [0]).view(np.uint64)
    views = [pool[0], pool[0].reshape(2, -1), pool[0].swapaxes(0, 1)]
    views += [pool[0, 0, 0].reshape(-1, width) for width in (8, 16, 64)]
    for view in views:
        view[[0, 1]] = view[[1, 0]]
        assert int(whole.sum()) != int(digests_of(pool, [0]).view(np.uint64).sum())
        view[[0, 1]] = view[[1, 0]]
    assert np.array_equal(whole, digests_of(pool, [0]).view(np.uint64))


@pytest.mark.usefixtures("_kernel")
def test_a_shorter_row_has_another_digest_even_where_the_rest_is_zero() -> None:
    pool = np.zeros((1, 2, 1, 128), dtype=np.uint8)
    seen = {digests_of(pool, [0], sizes=[size]).tobytes() for size in range(1, 129)}
    assert len(seen) == 128


def test_seeds_differ_by_layer_side_and_head() -> None:
    assert np.unique(seeds_of(range(40), range(16))).size == 80 * 16
    assert np.array_equal(seeds_of(range(40), range(16))[6:10, 3:5], seeds_of(range(3, 5), range(3, 5)))


@pytest.mark.usefixtures("_kernel")
def test_no_unit_changes_nothing() -> None:
    assert not digests_of(random_bytes(1, 2, 1, 64), []).size
