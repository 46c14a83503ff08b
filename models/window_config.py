"""Which layers attend only to a window of tokens, according to config.json. No torch."""

from typing import Any

from pdkv.base.limits import clip
from pdkv.errors import ModelError
from pdkv.models.json_fields import Fields

WINDOW_FIELDS = "sliding_window use_sliding_window max_window_layers layer_types"
_SHOWN_CHARS = 80

Windows = tuple[int | None, ...]
"""For each layer, how many tokens a query attends to, including its own; None: all up to its own.

The functions below raise ModelError for a wrong value, which names the field.
"""


def no_windows(fields: Fields, num_layers: int) -> Windows:
    """Every layer sees all tokens."""
    return (None,) * num_layers


def windows_of_types(fields: Fields, num_layers: int) -> Windows:
    """Windows in the layers that `layer_types` lists, if it is there, else in every layer."""
    window = _window(fields)
    types = fields.values.get("layer_types")
    return _by_type(fields, types, window, num_layers) if types else (window,) * num_layers


def uniform_windows(fields: Fields, num_layers: int) -> Windows:
    """A window in every layer: `layer_types` must agree, since transformers leaves it out."""
    windows = windows_of_types(fields, num_layers)
    if set(windows) != {_window(fields)}:
        raise ModelError(
            f"{fields.path}: field 'layer_types' differs from sliding_window {_window(fields)}, which this "
            "architecture has in every layer: transformers leaves layer_types out"
        )
    return windows


def windows_from_layer(fields: Fields, num_layers: int) -> Windows:
    """Windows where `use_sliding_window` is true: by `layer_types`, else from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window"):
        fields = Fields(fields.path, {**fields.values, "sliding_window": None})
    windows = windows_of_types(fields, num_layers)
    if fields.values.get("layer_types") or fields.values.get("sliding_window") is None:
        return windows
    value = fields.number("max_window_layers")
    if value < 0 or value != value // 1:
        raise ModelError(f"{fields.path}: field 'max_window_layers' must be a whole number from 0 on, got {value!r}")
    first = min(int(value), num_layers)
    return (None,) * first + windows[first:]


def _window(fields: Fields) -> int | None:
    """The window in the file, or the family's default."""
    return None if fields.values.get("sliding_window") is None else fields.count("sliding_window")


def _by_type(fields: Fields, types: Any, window: int | None, num_layers: int) -> Windows:
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
