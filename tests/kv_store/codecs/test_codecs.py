"""What codecs promise: errors within bounds, no value taken for another's, damage that is an error and no crash."""

import numpy as np
import pytest
import torch
from codec_cases import SHAPE, as_bytes, as_numbers, draw, empty

from pdkv.errors import ConfigError, KVCorrupted, KVNotCodable
from pdkv.kv_store.codecs.base import HEADER_BYTES, Codec, PartShape
from pdkv.kv_store.codecs.registry import CODECS, make_codec

NAMES = tuple(CODECS.shipped)
LOSSY = tuple(name for name in NAMES if CODECS.load(name).lossy)
RELATIVE_ERRORS = {"raw": 0.0, "int8": 0.02, "fp8": 0.11, "cachegen": 0.15}
"""Root mean square of the error of each layer's K and V, over that of its spread around the channels' means."""


def relative_error(decoded: torch.Tensor, numbers: torch.Tensor) -> float:
    """That of the layer and side where it is the largest."""
    errors = (decoded.float() - numbers.float()).square().mean((0, 3, 4, 5)).sqrt()
    spread = (numbers.float() - numbers.float().mean((0, 4), keepdim=True)).square().mean((0, 3, 4, 5)).sqrt()
    return float((errors / spread).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_units", "sides"), [(1, 2), (4, 2), (4, 1)])
def test_what_comes_back_is_near(name: str, dtype: str, num_units: int, sides: int) -> None:
    shape = SHAPE._replace(dtype=dtype, num_units=num_units, sides=sides)
    numbers, codec, out = draw(shape, outlier=1.0), make_codec(name), empty(shape)
    coded = codec.encode(as_bytes(numbers), shape)
    codec.decode(coded, shape, out)
    assert relative_error(as_numbers(out, numbers), numbers) <= RELATIVE_ERRORS[name]
    assert coded.size <= codec.max_bytes(shape)
    assert codec.lossy == (name != "raw")
    assert (as_numbers(out, numbers) != numbers).any() == codec.lossy


def test_raw_is_the_images_themselves() -> None:
    images = as_bytes(draw(SHAPE))
    codec = make_codec("raw")
    assert codec.encode(images, SHAPE) is images
    assert codec.identity == ""  # the keys of stores without a codec


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", [0.0, -3.0, 60000.0])
def test_constant_kv_comes_back(name: str, fill: float) -> None:
    shape = SHAPE._replace(dtype="float16")
    numbers, codec, out = torch.full_like(draw(shape), fill), make_codec(name), empty(shape)
    codec.decode(codec.encode(as_bytes(numbers), shape), shape, out)
    assert (as_numbers(out, numbers) - numbers).abs().max() <= abs(fill) / 100


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_no_code_can_say_is_refused(name: str, poison: float) -> None:
    numbers = draw(SHAPE)
    numbers[1, 2, 1, 1, 5, 7] = poison
    with pytest.raises(KVNotCodable, match=name):
        make_codec(name).encode(as_bytes(numbers), SHAPE)


@pytest.mark.parametrize("name", LOSSY)
def test_a_value_is_of_one_codec_level_and_shape(name: str) -> None:
    codec = make_codec(name)
    coded = codec.encode(as_bytes(draw(SHAPE)), SHAPE)
    others: list[tuple[Codec, PartShape]] = [
        (codec, SHAPE._replace(num_units=2)),
        (codec, SHAPE._replace(num_heads=1, head_size=64)),
        (codec, SHAPE._replace(dtype="float16")),
        (codec, SHAPE._replace(first_layer=6, total_layers=12)),
        *((make_codec(other, level), SHAPE) for other in LOSSY for level in CODECS.load(other).levels),
    ]
    for other, shape in others:
        if (other.identity, shape) != (codec.identity, SHAPE):
            with pytest.raises(KVCorrupted, match="not a value of"):
                other.decode(coded, shape, empty(shape))


def test_identities_differ() -> None:
    identities = [make_codec(name, level).identity for name in NAMES for level in CODECS.load(name).levels]
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_damage_is_an_error_or_finite(name: str, dtype: str) -> None:
    shape = SHAPE._replace(dtype=dtype, num_layers=2)
    numbers, codec = draw(shape), make_codec(name)
    sound = codec.encode(as_bytes(numbers), shape)
    rng = np.random.default_rng(0)
    found = 0
    for number in range(300):
        coded = sound.copy()
        match number % 3:
            case 0:
                at = int(rng.integers(coded.size))
                coded[at] ^= np.uint8(1 << int(rng.integers(8)))
            case 1:
                at = int(rng.integers(HEADER_BYTES, coded.size))
                coded[at : at + 64] = rng.integers(0, 256, coded[at : at + 64].size)
            case _:
                coded = coded[: int(rng.integers(coded.size))]
        out = empty(shape)
        try:
            codec.decode(coded, shape, out)
        except KVCorrupted:
            found += 1
        else:
            assert as_numbers(out, numbers).isfinite().all()
    assert found >= 100  # all that are too short


@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_another_size_are_refused(name: str) -> None:
    codec = make_codec(name)
    images = as_bytes(draw(SHAPE))
    with pytest.raises(ValueError, match="expected"):
        codec.encode(images[:-2], SHAPE)
    with pytest.raises(ValueError, match="expected"):
        codec.decode(codec.encode(images, SHAPE), SHAPE, empty(SHAPE)[:-2])


def test_unknown_codecs_and_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"known: .*cachegen"):
        make_codec("zip")
    with pytest.raises(ConfigError, match="levels 0 to 4, got 5"):
        make_codec("cachegen", 5)
