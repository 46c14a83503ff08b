"""Every process of a run imports every file of tests: what takes long is imported by the tests that need it."""

import re
from pathlib import Path

from rows import check_each

TESTS = Path(__file__).parents[1]
HEAVY = re.compile(
    r"^(?:import|from) (?:helm_python|kubernetes_validate|openai|redis|transformers|triton|pdkv\.\S+_triton)\b",
    re.MULTILINE,
)
NOT_COLLECTED = ("clients", "scripts", "interpreted_floats.py", "lmcache_peer.py")


def test_no_file_imports_what_its_tests_alone_need() -> None:
    files = [path for path in TESTS.rglob("*.py") if not path.name.startswith("cases_")]
    files = [path for path in files if not {*NOT_COLLECTED} & {*path.parts}]
    assert len(files) > 500

    def check(path: Path) -> None:
        assert not HEAVY.findall(path.read_text())

    check_each(files, check)
    assert HEAVY.findall((TESTS / "support" / "lmcache_peer.py").read_text()), "it finds none anywhere"
