"""The library is loaded without what takes longer to import than all else, where nobody else could miss it."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pdkv.grammar import vocabulary
{first}
vocabulary.load_xgrammar().TokenizerInfo
print("transformers" in sys.modules)
from transformers import PreTrainedTokenizerBase
print(PreTrainedTokenizerBase.__module__)
"""


@pytest.mark.parametrize(("first", "imported"), [("vocabulary.own_process()", False), ("", True)])
def test_transformers_stays_out_of_processes_of_ones_own(first: str, imported: bool) -> None:
    """Whoever imports it later gets the real one."""
    command = [sys.executable, "-P", "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(imported), "transformers.tokenization_utils_base"]
