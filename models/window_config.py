"""Which layers attend only to a window of tokens, according to config.json. No torch."""

from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import ModelError
from pdkv.models.json_fields import Fields

_UNIFORM = ("MistralForCausalLM", "Phi3ForCausalLM")
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_SHOWN_CHARS = 80


def read_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """For each layer, how many tokens a query attends to, including its own; None: all up to its own.

    In Qwen models windows begin with layer `max_window_layers`, in others with the first, unless `layer_types` lists
    the layers that have one.

    Raises:
        ModelError: a wrong value; names the field.
    """
    window = _window(fields, architecture)
    types = fields.values.get("layer_types")
    if types:
        windows = _by_type(fields, types, window, num_layers)
        if architecture in _UNIFORM and set(windows) != {window}:
            raise ModelError(
                f"{fields.path}: field 'layer_types' differs from sliding_window {window}, which {architecture} has in "
                "every layer: transformers leaves layer_types out"
            )
        return windows
    first = 0
    if architecture in _QWEN and window is not None:
        value = fields.number("max_window_layers")
        if value < 0 or value != value // 1:
            raise ModelError(
                f"{fields.path}: field 'max_window_layers' must be a whole number from 0 on, got {value!r}"
            )
        first = int(value)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window(fields: Fields, architecture: str) -> int | None:
    """The window in the file or the family's default; Llama has none, and in Qwen it must be switched on."""
    if architecture == "LlamaForCausalLM" or (architecture in _QWEN and not fields.flag("use_sliding_window")):
        return None
    return None if fields.values.get("sliding_window") is None else fields.count("sliding_window")


def _by_type(fields: Fields, types: Any, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    by_type = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= by_type.keys():
        raise ModelError(
            f"{fields.path}: field 'layer_types' must be a list of 'full_attention' and 'sliding_attention', one for "
            f"each of the {num_layers} layers, got {clip(repr(types), _SHOWN_CHARS)}"
        )
    if window is None and "sliding_attention" in types:
        raise ModelError(
            f"{fields.path}: field 'layer_types' has layers with a sliding window, but sliding_window or "
            "use_sliding_window says that there is none"
        )
    return tuple(by_type[kind] for kind in types)
