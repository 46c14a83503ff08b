"""Compiled libraries are found once: a process that can open no file any more still has them."""

import subprocess
import sys

import pytest

from pdkv.kernels import block_keys

SCRIPT = """
import resource, sys
from pdkv.kernels import block_keys, block_runs, host
from pdkv.kernels.compiled import load_all

if sys.argv[1] == "early":
    load_all()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
assert block_keys.available() and block_runs.available() and host.available()
"""


@pytest.mark.skipif(not block_keys.available(), reason="no compiler when pdkv was installed")
@pytest.mark.parametrize("when", ["early", "late"])
def test_what_was_loaded_is_found_without_descriptors(when: str) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, when], capture_output=True, text=True, timeout=60)
    assert (run.returncode == 0) == (when == "early"), run.stderr
