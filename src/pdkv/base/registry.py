"""Plug points by name: shipped classes in a table, third parties by entry point, or "module:Class" directly."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from pdkv.base.options import did_you_mean
from pdkv.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes of one plug point. Nothing is imported before it is used."""

    def __init__(
        self, kind: str, group: str, shipped: Mapping[str, str], base: str, *, unknown: type[ConfigError] = ConfigError
    ) -> None:
        """Args:
        kind: what errors call one of them, such as "connector".
        group: the entry points of third parties.
        shipped: name -> "module:Class" of this distribution's own.
        base: "module:Class" of what all of them extend.
        unknown: raised for a name that stands for nothing.
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
            targets.setdefault(point.name, point.value)  # a third party cannot take a shipped name over
        return targets

    def target(self, name: str) -> str:
        """The "module:Class" that `name` stands for.

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
        raise self._unknown(f'unknown {self.kind} {name!r}{meant}; known: {known}, or "module:Class"')

    def load(self, name: str) -> type[T]:
        """Import and return the class behind `name`.

        Raises:
            ConfigError: no such name, its module or class is missing or imports what is, or it extends something else.
        """
        target = self.target(name)
        try:
            loaded = EntryPoint(name, target, self.group).load()
        except (ImportError, AttributeError) as error:
            exists = isinstance(error, ImportError) and not _is_about(error, target.partition(":")[0])
            raised = ConfigError if exists else self._unknown  # where it exists, what it imports does not
            raise raised(f"{self.kind} {name!r} ({target}) cannot be imported: {error}") from error
        base = EntryPoint("base", self._base, self.group).load()
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise ConfigError(f"{self.kind} {name!r}: {target} is no subclass of {base.__name__}")
        return loaded


def _is_about(error: ImportError, module: str) -> bool:
    """Whether the missing module is `module` itself or a package that it lies in."""
    return error.name is not None and (module == error.name or module.startswith(error.name + "."))
