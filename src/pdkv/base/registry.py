"""Plug points by name: shipped ones in a table, third parties by entry point, or "module:Class" directly."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from pdkv.base.options import did_you_mean
from pdkv.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes of one plug point, which are imported on first use."""

    def __init__(
        self, kind: str, group: str, shipped: Mapping[str, str], base: str, *, unknown: type[ConfigError] = ConfigError
    ) -> None:
        """Args:
        kind: the name of one of them in errors, such as "connector".
        group: the entry points of third parties.
        shipped: name -> "module:Class" of this distribution's own.
        base: "module:Class" of their common base class; "": they are functions.
        unknown: raised for an unknown name.
        """
        self.kind = kind
        self.group = group
        self.shipped = shipped
        self._base = base
        self._unknown = unknown

    def targets(self) -> dict[str, str]:
        """All known names with their "module:Class", shipped ones first."""
        targets = dict(self.shipped)
        for point in entry_points(group=self.group):
            targets.setdefault(point.name, point.value)  # a third party cannot take over a shipped name
        return targets

    def target(self, name: str) -> str:
        """The "module:Class" behind `name`.

        Raises:
            ConfigError: neither a known name nor of the form "module:Class".
        """
        module, separator, attribute = name.partition(":")
        if separator and module and attribute:
            return name
        if name in self.shipped:  # neither needs the scan of all installed distributions
            return self.shipped[name]
        targets = self.targets()
        if name in targets:
            return targets[name]
        meant = did_you_mean(name, targets)
        known = ", ".join(sorted(targets))
        form = "module:Class" if self._base else "module:function"
        raise self._unknown(f'unknown {self.kind} {name!r}{meant}; known: {known}, or "{form}"')

    def load(self, name: str) -> type[T]:
        """Import and return the class behind `name`.

        Raises:
            ConfigError: unknown name, its module or class or one of its imports is missing, or it has another base
                class.
        """
        loaded = self._import(name)
        base = EntryPoint("base", self._base, self.group).load()
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise ConfigError(f"{self.kind} {name!r}: {self.target(name)} is not a subclass of {base.__name__}")
        return loaded

    def load_function(self, name: str) -> Any:
        """Import and return the function behind `name`. Raises ConfigError as `load`, or if it cannot be called."""
        loaded = self._import(name)
        if not callable(loaded):
            raise ConfigError(f"{self.kind} {name!r}: {self.target(name)} is no function")
        return loaded

    def _import(self, name: str) -> Any:
        target = self.target(name)
        try:
            return EntryPoint(name, target, self.group).load()
        except (ImportError, AttributeError) as error:
            exists = isinstance(error, ImportError) and not _is_about(error, target.partition(":")[0])
            raised = ConfigError if exists else self._unknown  # the module exists, but one of its imports does not
            raise raised(f"{self.kind} {name!r} ({target}) cannot be imported: {error}") from error


def _is_about(error: ImportError, module: str) -> bool:
    """Whether the missing module is `module` itself or a package that contains it."""
    return error.name is not None and (module == error.name or module.startswith(error.name + "."))
