"""The library is loaded without what takes longer to import than all else, where nobody else could miss it."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pdkv.grammar import library
{first}
library.load_xgrammar().TokenizerInfo
print("transformers" in sys.modules)
from transformers import PreTrainedTokenizerBase
print(PreTrainedTokenizerBase.__module__)
"""


@pytest.mark.parametrize(("first", "imported"), [("library.own_process()", False), ("", True)])
def test_transformers_stays_out_of_processes_of_ones_own(first: str, imported: bool) -> None:
    """Whoever imports it later gets the real one."""
    command = [sys.executable, "-P", "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(imported), "transformers.tokenization_utils_base"]


CRASH = """
import faulthandler, os, signal, threading
from pdkv.grammar import library
{first}
loading = threading.Thread(target=library.load_xgrammar)
loading.start()
loading.join()
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize(("first", "error"), [("", ""), ("faulthandler.enable()", "Fatal Python error")])
def test_a_crash_ends_the_process_as_if_the_library_were_not_there(first: str, error: str) -> None:
    """Its own handler allocates, so that a process that crashes in malloc would hang instead."""
    command = [sys.executable, "-P", "-c", CRASH.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith(error)
    assert bool(done.stderr) == bool(error)
