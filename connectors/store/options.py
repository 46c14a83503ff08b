"""--connector-config that all store connectors have."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import msgspec

from pdkv.connectors.base import LoadMode
from pdkv.option_types import parse_bool, parse_choice, parse_count, parse_natural, parse_seconds


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a store connector cuts, finds, loads and saves."""

    tokens_per_value: int = 64  # stored together; a multiple of 16, equal on all engines that share
    layer_groups: int = 0  # parts by layers of what is stored, equal on all engines; 0: 1, or 4 for layerwise loads
    load: Literal["async", "layerwise"] = "async"  # wait outside the batch, or compute while layers come in
    min_hit_tokens: int = 64  # a shorter find is computed rather than loaded; hand-offs are always loaded
    lookup_timeout_s: float = 1.0  # after it what was asked for is a miss
    transfer_timeout_s: float = 10.0  # deadline of a load or a save, from its start on
    layer_timeout_s: float = 2.0  # a forward pass waits so long for layerwise loads, all layers together
    io_threads: int = 2  # that load
    save_threads: int = 1
    staging_bytes: int = 4 << 20  # of each thread's buffer; at least one value
    max_save_bytes: int = 256 << 20  # KV under way to the store, at most a quarter of the pool; beyond it only
    # hand-offs are saved
    known_for_s: float = 30.0  # so long a value is believed to be stored: it may have been evicted since
    sign: bool = False  # values are signed, and read only where the signature is right; equal on all engines
    sign_key_file: str = ""  # of the secret; empty: it is in PDKV_STORE_SIGN_KEY


CONVERTERS: Mapping[str, Callable[[str], Any]] = {
    "tokens_per_value": parse_count,
    "layer_groups": parse_natural,
    "load": parse_choice(*get_args(LoadMode)),
    "min_hit_tokens": parse_natural,
    "lookup_timeout_s": parse_seconds,
    "transfer_timeout_s": parse_seconds,
    "layer_timeout_s": parse_seconds,
    "io_threads": parse_count,
    "save_threads": parse_count,
    "staging_bytes": parse_count,
    "max_save_bytes": parse_count,
    "known_for_s": parse_seconds,
    "sign": parse_bool,
    "sign_key_file": str,
}
assert set(CONVERTERS) == set(TransferOptions.__struct_fields__)
