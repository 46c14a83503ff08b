"""Sampling defaults of a model's generation_config.json: what requests get where they say nothing. No torch."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pdkv.errors import InvalidRequest, ModelError
from pdkv.models.json_fields import Fields, read_json
from pdkv.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

Source = Literal["auto", "none"]
"""`--generation-config`: the model's file, or none."""

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLE_NUMBERS: Mapping[str, str] = {"top_k": "top_k", "max_new_tokens": "max_tokens"}
"""By their names in the file: those in SamplingParams."""

SAMPLING_DEFAULTS = frozenset({*_NUMBERS, *_WHOLE_NUMBERS.values()})
"""The fields of SamplingParams for which a model may have a default."""


def read_sampling_defaults(path: Path, source: Source = "auto") -> dict[str, Any]:
    """The fields of SamplingParams that a model directory's generation_config.json sets; those that vLLM takes.

    Raises:
        ModelError: the file cannot be read, or a value is none that a request could have; names the field.
    """
    file = path / "generation_config.json"
    if source == "none" or not file.exists():
        return {}
    fields = Fields(file, read_json(file))
    defaults: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS if fields.values.get(name) is not None}
    for name, ours in _WHOLE_NUMBERS.items():
        if fields.values.get(name) is not None:
            value = fields.number(name)
            if value != value // 1:
                raise ModelError(f"{file}: field {name!r} must be a whole number, got {value!r}")
            defaults[ours] = int(value)
    try:
        SamplingParams(**defaults).validate()
    except InvalidRequest as error:
        raise ModelError(f"{file}: {error}; --generation-config none leaves such fields out") from None
    return defaults


def log_sampling_defaults(path: Path, defaults: Mapping[str, Any]) -> None:
    """Say what was taken where it changes anything; once, where requests come in."""
    usual = SamplingParams()
    changed = [f"{name}={value!r}" for name, value in defaults.items() if value != getattr(usual, name)]
    if changed:
        logger.warning(
            "%s: requests that do not say otherwise get %s; --generation-config none turns this off",
            path / "generation_config.json", ", ".join(changed),
        )  # fmt: skip
