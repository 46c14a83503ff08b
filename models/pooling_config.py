"""What a model directory says about embeddings: how states are pooled, and whether they may be cut. No torch."""

from pathlib import Path
from typing import Literal, NamedTuple

from pdkv.config import PoolingKind, is_paced
from pdkv.errors import InvalidRequest
from pdkv.models.directory import ModelDirectory

_FILE = "1_Pooling/config.json"
_KINDS: dict[str, Literal["last", "mean"]] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


class Pooling(NamedTuple):
    """How prompts become embeddings."""

    kind: Literal["last", "mean"] | None  # None: as the model's file has it, it is not computed
    modes: str = ""  # of the model's file
    may_cut: bool = False  # the model is trained for fewer dimensions, too
    lengths: tuple[int, ...] = ()  # the only ones; empty: all
    size: int = 0  # of a state

    def checked_kind(self) -> Literal["last", "mean"]:
        """The kind. Raises InvalidRequest if there is none."""
        if self.kind is None:
            raise InvalidRequest(f"{_FILE} of the model asks for {self.modes}: start it with --pooling last or mean")
        return self.kind

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequest for a number of dimensions that the model was not trained for."""
        if dimensions is None:
            return
        if not self.may_cut:
            text = "dimensions must be absent: config.json has neither is_matryoshka nor matryoshka_dimensions"
            raise InvalidRequest(text, param="dimensions")
        if self.lengths and dimensions not in self.lengths:
            text = f"dimensions must be one of {[*self.lengths]}, got {dimensions}"
        elif not 1 <= dimensions <= self.size:
            text = f"dimensions must be in [1, {self.size}], got {dimensions}"
        else:
            return
        raise InvalidRequest(text, param="dimensions")


BY_LAST_TOKEN = Pooling("last")


def read_pooling(path: Path, kind: PoolingKind = "auto") -> Pooling:
    """By the option, else by sentence-transformers' file, else by the last token, as in vLLM. Raises ModelError."""
    if is_paced(path):
        return Pooling("last" if kind == "auto" else kind)
    directory = ModelDirectory(path)
    config, file = directory.config, directory.optional(_FILE)
    modes = [name for name, value in file.items() if name.startswith("pooling_mode_") and value is True]
    theirs = (_KINDS.get(modes[0]) if len(modes) == 1 else None) if modes else "last"
    lengths = config.token_ids("matryoshka_dimensions")
    may_cut = config.flag("is_matryoshka") or bool(lengths)
    chosen = theirs if kind == "auto" else kind
    return Pooling(chosen, " and ".join(modes), may_cut, lengths, config.count("hidden_size"))
