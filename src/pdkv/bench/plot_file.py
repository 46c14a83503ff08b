"""A plot that is drawn when the measurements are done, in a file that is checked before they begin."""

from importlib import import_module
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError


class PlotFile:
    """A matplotlib figure and the file for it."""

    def __init__(self, path: Path, width: float, height: float) -> None:
        """Raises ConfigError before anything is measured: matplotlib, the format or the folder is missing."""
        try:
            self.figure: Any = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        except ImportError:
            raise ConfigError("--plot needs matplotlib: pip install 'pdkv[plot]'") from None
        known = self.figure.canvas.get_supported_filetypes()
        if path.suffix[1:].lower() not in known:
            raise ConfigError(f"--plot: a file that ends in one of {', '.join(sorted(known))} was expected, got {path}")
        if not path.parent.is_dir():
            raise ConfigError(f"--plot: there is no folder {path.parent}")
        self._path = path

    def write(self) -> None:
        """Write the figure. Raises ConfigError: the file cannot be written."""
        try:
            self.figure.savefig(self._path)
        except OSError as error:
            raise ConfigError(f"--plot: {self._path}: {error.strerror}") from error
