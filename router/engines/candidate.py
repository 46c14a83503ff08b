"""The view of an engine that routing policies choose from."""

from typing import Literal, NamedTuple

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")


class EngineView(NamedTuple):
    """An engine that may be chosen."""

    name: str
    load: int  # tokens: prefill: of prompts, to be computed; decode: of KV that its requests hold or will hold
    pace: float = 1.0  # how many times as long as its peers it takes for as much; 1: not measured

    @property
    def cost(self) -> float:
        """The load in tokens of a peer of usual speed."""
        return self.load * self.pace
