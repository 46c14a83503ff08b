"""Which tests `make check` runs: of the folders whose files have changed since a commit, and the lints of the tree.

python tests/support/changed.py [COMMIT]
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[2]
ALWAYS = ("tests/pdkv", "tests/test_pages.py", "tests/test_field_failures.py", "tests/test_no_processes.py")


def changed(since: str) -> list[str]:
    """Paths of files that are not as they were in that commit, new ones included."""
    new = ("ls-files", "--others", "--exclude-standard")
    return [path for command in (("diff", "--name-only", since), new) for path in git(*command)]


def git(*command: str) -> list[str]:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def folders_of(paths: Iterable[str]) -> list[str]:
    """Folders and files of tests, none of which lies in another."""
    found = {
        *ALWAYS,
        *(test for path in paths if path.endswith((".py", ".c", ".h", ".toml")) for test in _mirrors(path)),
    }
    return sorted(test for test in found if not found & {str(parent) for parent in PurePath(test).parents})


def _mirrors(path: str) -> Iterator[str]:
    """The folder that mirrors the file's, or the nearest one above it."""
    if path.startswith("tests/"):
        if PurePath(path).name.startswith("test_") and (ROOT / path).exists():
            yield path
        return
    folders = [PurePath("tests", folder) for folder in PurePath(path.removeprefix("src/pdkv/")).parents]
    yield from (str(folder) for folder in [f for f in folders[:-1] if (ROOT / f).is_dir()][:1])


if __name__ == "__main__":
    print(*folders_of(changed(*sys.argv[1:] or ["HEAD"])))
