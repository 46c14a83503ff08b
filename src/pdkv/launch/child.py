"""How the launcher's children begin. Their imports take seconds, in which no child would notice that the launcher has
been killed; so the kernel kills them then, and the launcher's port is free.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pdkv.host.linux import die_with_parent


def run(launcher: int, module: str, arguments: Sequence[str]) -> int | None:
    """Call `main` of the module, bound to the life of the launcher, a pid, until it binds itself otherwise."""
    die_with_parent()
    return import_module(module).main(*arguments) if os.getppid() == launcher else 0


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
