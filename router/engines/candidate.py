"""The view of an engine that routing policies choose from."""

from typing import Literal, NamedTuple

Side = Literal["prefill", "decode"]


class EngineView(NamedTuple):
    """An engine that may be chosen."""

    name: str
    load: int  # tokens: prefill: of prompts, to be computed; decode: of KV that its requests hold or will hold
