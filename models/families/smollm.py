"""SmolLM3: Llama with layers that rotate nothing."""

from pdkv.errors import ModelError
from pdkv.models.families.llama import Llama
from pdkv.models.json_fields import Fields
from pdkv.models.rope_config import Rope
from pdkv.models.window_config import Windows


class SmolLM3(Llama):
    """SmolLM3ForCausalLM."""

    model_type = "smollm3"
    defaults = {
        "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "eos_token_id": 128001,
        "no_rope_layer_interval": 4,
    }  # fmt: skip
    reads = "no_rope_layers no_rope_layer_interval sliding_window max_window_layers"  # use_sliding_window is refused

    @classmethod
    def layer_ropes(cls, fields: Fields, rope: Rope, windows: Windows) -> tuple[Rope | None, ...]:
        interval, rotates = fields.count("no_rope_layer_interval"), fields.values.get("no_rope_layers")
        if rotates is None:
            rotates = [int((i + 1) % interval != 0) for i in range(len(windows))]
        if not isinstance(rotates, list) or len(rotates) < len(windows) or not all(i in (0, 1) for i in rotates):
            raise ModelError(
                f"{fields.path}: field 'no_rope_layers' must have 1 (rotated) or 0 for each of the {len(windows)} "
                f"layers, got {rotates!r:.80}"
            )
        return tuple(rope if rotated else None for rotated in rotates[: len(windows)])
