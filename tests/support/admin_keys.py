"""A key file with an administrator's key and a tenant's, and operations that add no engine."""

from pathlib import Path
from typing import NamedTuple

from pdkv.router.admission.api_keys import make_key
from pdkv.router.engines.backend import Backend


class AdminKeys(NamedTuple):
    """The file, and the headers of the administrator "root" and the tenant "a"."""

    file: Path
    root: dict[str, str]
    other: dict[str, str]


def admin_keys(folder: Path) -> AdminKeys:
    """Make them in a folder."""
    made = {name: make_key(name, admin=name == "root") for name in ("a", "root")}
    file = folder / "keys"
    file.write_text("\n".join(lines for _, lines in made.values()))
    file.chmod(0o600)
    root, other = ({"authorization": f"Bearer {made[name][0]}"} for name in ("root", "a"))
    return AdminKeys(file, root, other)


def never(name: str, endpoint: str) -> Backend:
    """What makes no backend."""
    raise AssertionError("an engine was added")
