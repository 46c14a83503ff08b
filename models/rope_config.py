"""The rotary position embedding in config.json: its base, the part of a head that is rotated, and its scaling.

No torch. Two kinds of scaling depend on a length. transformers uses the sequence's length, which grows while a request
runs, so that later keys are rotated by other frequencies than those in the cache. Here, as in vLLM, the frequencies are
fixed for one length, the engine's `--max-model-len`, and belong to the model's identity (docs/models.md).
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pdkv.errors import ModelError
from pdkv.models.config_fields import check_rope_fields
from pdkv.models.json_fields import Fields

logger = logging.getLogger(__name__)

RopeKind = Literal["linear", "llama3", "dynamic", "yarn", "longrope"]
_BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))
_MAX_FACTOR = 1_000_000
_PHI3_LENGTH = 4096  # Phi-3 was trained with so many positions where its file does not say otherwise
_KINDS = ("linear", "llama3", "dynamic", "yarn", "longrope")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for longer contexts."""

    kind: RopeKind
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as the next
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # positions that the model was trained with; not for linear
    attention_factor: float = 1.0  # yarn and longrope: cosines and sines are multiplied by it
    beta_fast: float = 32.0  # yarn only, as the next two
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope only, as the next; one per frequency
    long_factors: tuple[float, ...] = ()
    length: int = 0  # dynamic and longrope: what the frequencies are for, see `for_length`

    def for_length(self, max_model_len: int) -> "RopeScaling":
        """The same scaling with its frequencies fixed for prompts and outputs of up to this many tokens together.

        Lengths with the same frequencies give equal results, so that their engines can share KV.
        """
        original = self.original_max_position_embeddings
        if self.kind == "dynamic":
            return replace(self, length=max(max_model_len, original))
        if self.kind == "longrope":
            return replace(self, length=original + (max_model_len > original))
        return self


class Rope(NamedTuple):
    """Rotary position embedding as a model's configuration has it."""

    theta: float  # the base
    rotary_size: int  # the first so many values of a head are rotated, the others are left alone
    scaling: RopeScaling | None

    def for_length(self, max_model_len: int) -> "Rope":
        """As `RopeScaling.for_length`."""
        return self if self.scaling is None else self._replace(scaling=self.scaling.for_length(max_model_len))


def read_rope(fields: Fields, head_size: int, *, is_phi3: bool = False, partial: bool = False) -> Rope:
    """Read base, rotated part and scaling; transformers 5 writes all of them under `rope_parameters`, earlier versions
    as separate fields.

    As in transformers, `rope_scaling` replaces `rope_parameters` if it is given.

    Args:
        is_phi3: the names and lengths of Phi-3's first checkpoints count.
        partial: transformers reads partial_rotary_factor in this family.

    Raises:
        ModelError: a field is wrong, unknown, or of an unsupported kind; the message names it and its value.
    """
    values = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise ModelError(f"{fields.path}: RoPE parameters must be an object, got {values!r}")
    rope = Fields(fields.path, values)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1.0:
        raise ModelError(f"{fields.path}: rope_theta must be above 1, got {theta}")
    kind = _kind(rope, is_phi3=is_phi3)
    if kind == "default" and any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{fields.path}: RoPE parameters per layer type are not supported: {values!r}")
    rotary_size = _rotary_size(rope, fields, head_size, partial=partial)
    own_length = fields.values.get("original_max_position_embeddings", _PHI3_LENGTH if is_phi3 else None)
    if own_length is not None:  # as in transformers, this field goes before that of the RoPE parameters
        rope = Fields(fields.path, {**values, "original_max_position_embeddings": own_length})
    scaling = None if kind == "default" else _scaling(kind, rope, fields, rotary_size)
    check_rope_fields(fields.path, kind, values)
    return Rope(theta, rotary_size, scaling)


def _kind(rope: Fields, *, is_phi3: bool) -> Any:
    """The kind of scaling, by its name of today."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "su" or (kind == "yarn" and is_phi3):
        return "longrope"  # as Phi-3's first checkpoints named it
    if kind != "default" and kind not in _KINDS:
        raise ModelError(f"{rope.path}: RoPE scaling {kind!r} is not supported; known: default, {', '.join(_KINDS)}")
    return kind


def _rotary_size(rope: Fields, fields: Fields, head_size: int, *, partial: bool) -> int:
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        logger.warning(
            "%s: partial_rotary_factor %g counts, as in vLLM; transformers leaves it out", fields.path, share
        )
    size = int(head_size * share) if 0.0 < share <= 1.0 else 0
    if size < 2 or size % 2:
        raise ModelError(
            f"{fields.path}: partial_rotary_factor must leave an even number of a head's {head_size} values to rotate, "
            f"got {share}"
        )
    return size


def _scaling(kind: RopeKind, rope: Fields, fields: Fields, rotary_size: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind, _factor(rope))
    if kind == "llama3":
        factor, low, high = _factor(rope), rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not 0.0 < low < high:
            raise ModelError(
                f"{rope.path}: low_freq_factor of the RoPE parameters must be above 0 and below high_freq_factor, "
                f"got {low} and {high}"
            )
        return RopeScaling(kind, factor, low, high, rope.count("original_max_position_embeddings"))
    trained = fields.count("max_position_embeddings")
    if kind == "dynamic":
        if rotary_size < 4:
            raise ModelError(
                f"{fields.path}: RoPE scaling 'dynamic' needs at least 4 rotated values per head, got {rotary_size}"
            )
        return RopeScaling(kind, _factor(rope), original_max_position_embeddings=trained)
    original = rope.count("original_max_position_embeddings", trained)
    if kind == "yarn":
        return _yarn(rope, _factor(rope, default=trained / original), original)
    return _longrope(rope, _factor(rope, default=max(1.0, trained / original)), original, rotary_size)


def _yarn(rope: Fields, factor: float, original: int) -> RopeScaling:
    """YaRN (arXiv 2309.00071): its logarithms want a base above 1 and turns above 0."""
    beta_fast, beta_slow = (rope.number(name) if rope.values.get(name) else default for name, default in _BETAS)
    if not 0.0 < beta_slow <= beta_fast:
        raise ModelError(
            f"{rope.path}: beta_slow of the RoPE parameters must be above 0 and at most beta_fast, "
            f"got {beta_slow} and beta_fast {beta_fast}"
        )
    mscale, mscale_all_dim = (rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale < 0.0 or mscale_all_dim < 0.0:
        raise ModelError(
            f"{rope.path}: mscale and mscale_all_dim of the RoPE parameters must be 0 or more, got {mscale} and "
            f"{mscale_all_dim}"
        )
    default = yarn_magnitude(factor)
    if mscale and mscale_all_dim:
        default = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        attention_factor=rope.positive("attention_factor", default) * _attn_factor(rope),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.flag("truncate", True),
    )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The factor by which YaRN multiplies cosines and sines, or two of them logits."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Fields, factor: float, original: int, rotary_size: int) -> RopeScaling:
    """LongRoPE (arXiv 2402.13753): a factor of its own for each frequency, others for long contexts than for short."""
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=original,
        attention_factor=rope.positive("attention_factor", default),
        short_factors=_factors(rope, "short_factor", rotary_size // 2),
        long_factors=_factors(rope, "long_factor", rotary_size // 2),
    )


def _attn_factor(rope: Fields) -> float:
    """YaRN's second factor, which vLLM multiplies by and transformers leaves out."""
    value = rope.positive("attn_factor", 1.0)
    if value != 1.0:
        logger.warning("%s: attn_factor %g of YaRN counts, as in vLLM; transformers leaves it out", rope.path, value)
    return value


def _factor(rope: Fields, default: float | None = None) -> float:
    factor = rope.number("factor", default)
    if not 1.0 <= factor <= _MAX_FACTOR:
        raise ModelError(
            f"{rope.path}: the factor of the RoPE parameters must be at least 1 and at most {_MAX_FACTOR}, got {factor}"
        )
    return factor


def _factors(rope: Fields, name: str, count: int) -> tuple[float, ...]:
    """One factor above 0 per frequency."""
    values = rope.values.get(name)
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)}" if isinstance(values, list) else repr(values)
        raise ModelError(
            f"{rope.path}: field {name!r} of the RoPE parameters must be a list of {count} numbers, got {got}"
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
            raise ModelError(
                f"{rope.path}: field {name!r} of the RoPE parameters must hold numbers above 0, got {value!r}"
            )
    return tuple(map(float, values))
