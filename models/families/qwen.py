"""Qwen 2 and 3."""

from typing import ClassVar

from pdkv.models.family import Family
from pdkv.models.json_fields import Fields
from pdkv.models.window_config import WINDOW_FIELDS, windows_from_layer


class Qwen2(Family):
    """Qwen2ForCausalLM."""

    model_type = "qwen2"
    defaults = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
    reads = WINDOW_FIELDS
    attention_bias: ClassVar[bool | None] = True

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return windows_from_layer(fields, num_layers)


class Qwen3(Qwen2):
    """Qwen3ForCausalLM."""

    model_type = "qwen3"
    defaults = {**Qwen2.defaults, "head_dim": 128}
    attention_bias = attention_output_bias = None
    qk_norm = True
