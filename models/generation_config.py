"""Sampling defaults of a model's generation_config.json. No torch."""

import logging
from collections.abc import Mapping
from pathlib import Path

from pdkv.models.json_fields import read_json

logger = logging.getLogger(__name__)

SAMPLING_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
"""Fields of generation_config.json that vLLM takes as defaults of requests, and the values by which it says nothing."""


def log_ignored_defaults(path: Path) -> None:
    """Say which sampling defaults of generation_config.json requests do not get; once, where requests come in.

    Raises:
        ModelError: the file is there and cannot be read.
    """
    generation = path / "generation_config.json"
    values = read_json(generation) if generation.exists() else {}
    ignored = {name: values[name] for name, said in SAMPLING_DEFAULTS.items() if values.get(name) not in (None, said)}
    if ignored:
        listed = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        logger.warning("%s: sampling defaults are not applied: %s; requests must ask for them", generation, listed)
