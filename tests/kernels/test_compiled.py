"""Compiled libraries are found once: a process that can open no file any more still has them."""

import subprocess
import sys

import pytest
from isas import kernels_of

from pdkv.errors import ConfigError
from pdkv.kernels import block_keys, host, linear
from pdkv.kernels.compiled import isa, levels

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


@pytest.mark.skipif(not levels(), reason="no compiler when pdkv was installed")
def test_a_level_is_used_where_it_is_named_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in levels():
        with kernels_of(name):
            assert isa() == name
            assert f"_linear_{name}." in linear._library()._name  # the others have no level of their own for bfloat16
    with kernels_of("v5"), pytest.raises(ConfigError, match=rf"PDKV_ISA=v5: this host has {', '.join(levels())}"):
        host.available()
    monkeypatch.delenv("PDKV_ISA", raising=False)
    isa.cache_clear()
    assert isa() == levels()[-1]
