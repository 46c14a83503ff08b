"""Sampling defaults of a model's generation_config.json, used for parameters that a request leaves out. No torch."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pdkv.errors import InvalidRequest, ModelError
from pdkv.models.json_fields import read_json
from pdkv.sampling.params import PARAMS_OF_MODELS, SamplingParams

logger = logging.getLogger(__name__)

Source = Literal["auto", "none"]
"""`--generation-config`: the model's file, or none."""

_THEIRS = {"max_tokens": "max_new_tokens"}
"""Parameters that the file calls otherwise."""


def read_sampling_defaults(path: Path, source: Source = "auto") -> dict[str, Any]:
    """The fields of SamplingParams that a model directory's generation_config.json sets, restricted to those that vLLM
    uses.

    Raises:
        ModelError: the file cannot be read, or a value would be invalid in a request; names the field.
    """
    file = path / "generation_config.json"
    if source == "none" or not file.exists():
        return {}
    values = read_json(file)
    given = {name: value for name in PARAMS_OF_MODELS if (value := values.get(_THEIRS.get(name, name))) is not None}
    try:
        params = SamplingParams(**given).checked()
    except InvalidRequest as error:
        name = error.param or ""
        text = str(error).replace(name, _THEIRS.get(name, name), 1)
        raise ModelError(f"{file}: {text}; generation_config none ignores the file") from None
    return {name: getattr(params, name) for name in given}


def log_sampling_defaults(path: Path, defaults: Mapping[str, Any]) -> None:
    """Log the defaults that change anything. Called once, in the process that receives requests."""
    usual = SamplingParams()
    changed = [f"{name}={value!r}" for name, value in defaults.items() if value != getattr(usual, name)]
    if changed:
        logger.warning(
            "%s: requests that do not say otherwise get %s; generation_config none turns this off",
            path / "generation_config.json", ", ".join(changed),
        )  # fmt: skip
