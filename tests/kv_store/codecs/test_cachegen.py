"""`cachegen`: the compiled coder against numpy, sizes by level, and steps by layer."""

import hashlib

import numpy as np
import pytest
import torch
from codec_cases import SHAPE, as_bytes, as_numbers, draw, empty

from pdkv.errors import KVCorrupted
from pdkv.kernels import cachegen
from pdkv.kv_store.codecs.base import HEADER_BYTES, PartShape
from pdkv.kv_store.codecs.registry import make_codec
from pdkv.kv_store.codecs.symbol_model import symbol_model

compiled = pytest.mark.skipif(not cachegen.available(), reason="no compiler when pdkv was installed")
CHANNELS = PartShape(num_units=4, num_layers=6, num_heads=4, head_size=128, dtype="bfloat16")


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_size", [32, 24])
def test_compiled_and_numpy_have_the_same_bytes(
    isa: str, dtype: str, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPE._replace(dtype=dtype, head_size=head_size, num_units=3)
    numbers = draw(shape, outlier=300.0)
    numbers[:, 1] = 0
    numbers[:, 2, :, :, 3:5] *= 1e-3
    numbers[2, 3, 1, 1, 2, 7] *= 3e4 if dtype == "float16" else 1e12
    numbers.clamp_(-65000, 65000) if dtype == "float16" else None
    results = []
    for library in (cachegen._library(), None):
        monkeypatch.setattr(cachegen, "_library", lambda library=library: library)
        out = empty(shape)
        coded = make_codec("cachegen").encode(as_bytes(numbers), shape)
        make_codec("cachegen").decode(coded, shape, out)
        results.append((coded.tobytes(), out.tobytes()))
    assert results[0] == results[1]


def test_tables_are_the_same_everywhere() -> None:
    """Others would decode what is stored to other numbers: they need another version of the codec."""
    model = symbol_model()
    digest = hashlib.sha256(model.tables.slots.tobytes() + model.means.tobytes() + model.limits.tobytes())
    assert digest.hexdigest()[:16] == "662c46c7c372e642"


def test_levels_trade_size_for_error() -> None:
    images, sizes, errors = as_bytes(draw(CHANNELS)), [], []
    for level in make_codec("cachegen").levels:
        codec, out = make_codec("cachegen", level), empty(CHANNELS)
        coded = codec.encode(images, CHANNELS)
        codec.decode(coded, CHANNELS, out)
        sizes.append(coded.size)
        errors.append(float((as_numbers(out, draw(CHANNELS)).float() - draw(CHANNELS).float()).square().mean()) ** 0.5)
        assert coded.size <= codec.max_bytes(CHANNELS)
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert sizes[1] * 3.5 <= CHANNELS.num_bytes


def test_early_layers_and_keys_have_finer_steps() -> None:
    shape = CHANNELS._replace(first_layer=0, total_layers=6)
    numbers = torch.randn(draw(shape).shape, generator=torch.Generator().manual_seed(0)).bfloat16()

    def errors(part: PartShape, images: torch.Tensor) -> list[float]:
        """By layer of the part: of K, then of V."""
        out = empty(part)
        codec = make_codec("cachegen")
        codec.decode(codec.encode(as_bytes(images), part), part, out)
        return (as_numbers(out, images).float() - images.float()).square().mean((0, 3, 4, 5)).flatten().tolist()

    whole = errors(shape, numbers)
    assert whole[::2][::2] == sorted(whole[::2][::2])
    assert whole[1::2][::2] == sorted(whole[1::2][::2])
    assert all(k < v for k, v in zip(whole[::2], whole[1::2], strict=True))
    last = numbers[:, 4:].contiguous()
    assert errors(shape._replace(num_layers=2, first_layer=4), last) == whole[8:]  # wherever layers are cut


def test_no_value_is_larger_than_the_bound() -> None:
    """Few numbers that are not 0: for them the tables are at their worst, and steps must get coarser."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(draw(CHANNELS).shape, generator=generator)
    sparse = torch.where(torch.rand(numbers.shape, generator=generator) > 0.9, numbers.sign(), 0).bfloat16()
    for level in make_codec("cachegen").levels:
        codec, out = make_codec("cachegen", level), empty(CHANNELS)
        coded = codec.encode(as_bytes(sparse), CHANNELS)
        assert coded.size <= codec.max_bytes(CHANNELS)
        codec.decode(coded, CHANNELS, out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 2e30])
def test_steps_that_no_encoder_makes_are_damage(value: float) -> None:
    codec = make_codec("cachegen")
    coded = codec.encode(as_bytes(draw(SHAPE)), SHAPE)
    at = HEADER_BYTES + 4 * SHAPE.num_layers + 8
    coded[at : at + 4] = np.frombuffer(np.float32(value).tobytes(), np.uint8)
    with pytest.raises(KVCorrupted, match="step"):
        codec.decode(coded, SHAPE, empty(SHAPE))


def test_numbers_of_words_that_do_not_add_up_are_damage() -> None:
    codec = make_codec("cachegen")
    coded = codec.encode(as_bytes(draw(SHAPE)), SHAPE)
    counts = coded[HEADER_BYTES : HEADER_BYTES + 4 * SHAPE.num_layers].view(np.uint32)
    counts[0], counts[1] = counts[0] + 0x10000, counts[1]
    with pytest.raises(KVCorrupted, match="words"):
        codec.decode(coded, SHAPE, empty(SHAPE))
    counts[0], counts[1] = counts[0] - 0x10000 - 3, counts[1] + 3
    with pytest.raises(KVCorrupted, match="words"):
        codec.decode(coded, SHAPE, empty(SHAPE))
