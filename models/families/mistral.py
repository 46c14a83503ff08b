"""Mistral and Ministral: Llama with sliding windows."""

from pdkv.models.family import Family
from pdkv.models.json_fields import Fields
from pdkv.models.window_config import WINDOW_FIELDS, uniform_windows, windows_of_types


class Mistral(Family):
    """MistralForCausalLM."""

    model_type = "mistral"
    defaults = {"num_key_value_heads": 8, "eos_token_id": 2, "sliding_window": 4096}
    reads = WINDOW_FIELDS

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return uniform_windows(fields, num_layers)


class Ministral(Mistral):
    """MinistralForCausalLM."""

    model_type = "ministral"

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return windows_of_types(fields, num_layers)
