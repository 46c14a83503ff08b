"""Plant defects one by one in a checkout, and say which of them its tests find.

    python -m planted
    python -m planted --root OTHER_CHECKOUT --only nixl,store/lookup

Each defect is one substitution in one file, judged by the tests that cover that file. A checkout of another commit is
judged by its own tests, so that two suites can be compared. Files that are changed must be as they were committed, and
are restored after each defect.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
_BOUND_S = 300.0


class Defect(NamedTuple):
    """What the regular expression `pattern` finds, exactly once, becomes `planted`; these files in tests/ notice it."""

    file: str
    pattern: str
    planted: str
    tests: str


DEFECTS = {
    "a matcher is not rolled back behind guesses": Defect(
        "grammar/matching/worker.py", r"row\.matcher\.rollback\(count\)", "pass", "grammar/matching/test_host.py"
    ),
    "a drafter's KV is freed late": Defect(
        "engine/worker/draft_model.py",
        r"self\._free \+= drafted\.blocks",
        'self._free, self._late = self._free + getattr(self, "_late", []), drafted.blocks',
        "offline/test_llm_speculation.py",
    ),
    "a queued transfer has no deadline": Defect(
        "connectors/transfer/worker.py",
        r"if job\.deadline <= now and not",
        "if job.deadline <= now - 1e9 and not",
        "connectors/transfer/test_worker.py connectors/peer/test_pull.py",
    ),
    "blocks are given back while they are read": Defect(
        "connectors/transfer/worker.py",
        r" and job\.let_go and not job\.num_users",
        " and job.let_go",
        "connectors/transfer/test_worker.py connectors/peer/test_pull.py",
    ),
    "a silent stranger stays": Defect(
        "connectors/peer/auth_listener.py",
        r"\.deadline <= now:",
        ".deadline <= now - 1e9:",
        "connectors/peer/test_auth.py",
    ),
    "an offer for which no load comes is never refused": Defect(
        "connectors/nixl/receiver.py", "now - _GRACE_S", "now - 1e9", "connectors/nixl/test_nixl.py"
    ),
    "a lookup has no deadline": Defect(
        "connectors/store/lookup.py",
        r"if lookup\.deadline <= now\]",
        "if lookup.deadline <= now - 1e9]",
        "connectors/store/test_look_ahead.py connectors/store/test_failures.py connectors/store/test_misses.py",
    ),
    "a damaged value is asked for again at once": Defect(
        "connectors/store/lookup.py",
        r"(until = .*) \+ BARRED_S",
        r"\1",
        "connectors/store/test_damage.py connectors/store/test_misses.py",
    ),
    "a tier that hangs is not left alone": Defect(
        "kv_store/tier_watch.py",
        r"( +)(self\._judge\(tier, StoreTimeout\()",
        r"\1if False: \2",
        "kv_store/test_tiers.py",
    ),
    "a copy brings back what was deleted": Defect(
        "kv_store/backfill.py",
        r"for tier in self\._tiers\[policy\] if deleted else \(\):",
        "for tier in ():",
        "kv_store/test_tiers.py kv_store/test_write_policies.py",
    ),
    "a beat is not hastened by a late step": Defect(
        "src/pdkv/wire/heartbeat.py",
        r"min\(late_in_s \+ 0\.001, BEAT_S\)",
        "BEAT_S",
        "wire/test_step_watch.py wire/test_engine_server.py",
    ),
    "a step of the device has no deadline": Defect(
        "engine/worker/readback.py",
        r"now\(\) > self\._deadline|monotonic\(\) > self\._deadline",
        "now is None",
        "engine/test_step_waits.py",
    ),
    "a load from outside has no deadline": Defect(
        "engine/outside/loads.py",
        r"x\.deadline <= now and",
        "x.deadline <= now - 1e9 and",
        "decode/test_decode_role.py",
    ),
    "a lease has no deadline": Defect(
        "prefill/leases.py", r"if lease\.deadline <= now\]", "if lease.deadline <= now - 1e9]", "prefill"
    ),
    "a request of an engine has no deadline": Defect(
        "engine/request_book.py", r"while self\.next_deadline\(\) <= now:", "while False:", "engine/test_core.py"
    ),
    "only the first child of a multi connector is looked at": Defect(
        "connectors/multi/scheduler.py",
        r"range\(len\(self\._schedulers\)\)\n        if",
        "range(1)\n        if",
        "connectors/multi/test_multi.py",
    ),
    "all choices of a prompt have one number": Defect(
        "router/http/answer/fanout.py",
        "index=index, seed=seed, sibling",
        "index=first, seed=seed, sibling",
        "router/http/test_app.py router/http/read/test_job.py router/http/answer/test_sse.py",
    ),
    "a request that goes on has forgotten its output": Defect(
        "router/generations/flow.py",
        r"output_token_ids=list\(self\.output\.token_ids\),",
        "output_token_ids=[],",
        "router/generations/test_flow.py router/generations/test_recovery.py",
    ),
    "a request waits in the router's queue for ever": Defect(
        "router/admission/admission_queue.py",
        r"request\.patience_s, _expire",
        "1e9, _expire",
        "router/admission/test_admission_queue.py",
    ),
    "a client that does not read keeps its connection": Defect(
        "router/http/server/protocol.py",
        r"else:\n            self\.evict\(\)",
        "else:\n            pass",
        "router/http/server/test_protocol.py",
    ),
    "a launch leaves its directory": Defect(
        "src/pdkv/launch/run_dir.py",
        r"shutil\.rmtree\(self\.path, ignore_errors=True\)",
        "pass",
        "launch/test_run_dir.py",
    ),
}
"""By what they are."""


def planted(text: str, defect: Defect) -> str:
    """The file's text with the defect.

    Raises:
        ValueError: the pattern is not found exactly once.
    """
    changed, number = re.subn(defect.pattern, defect.planted, text)
    if number != 1 or changed == text:
        raise ValueError(f"{defect.file}: {defect.pattern!r} is found {number} times, not once")
    return changed


def judge(root: Path, tests: str, bound_s: float) -> str:
    """The first test of a checkout that fails; "" if none does."""
    python = root / ".venv" / "bin" / "python"
    command = [python if python.exists() else sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not gpu and not slow", *(f"tests/{name}" for name in tests.split())]
    own = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # else a defect may outlive its file's change of a second
    process = subprocess.Popen(command, cwd=root, env=own, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=bound_s)
    except subprocess.TimeoutExpired:
        return f"no end within {bound_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with status {process.returncode}:\n{output}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return "" if process.returncode == 0 else failed[1] if failed else "an unknown test"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("planted", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to judge, installed in its .venv")
    parser.add_argument("--only", default="", help="defects of files whose paths have one of these words in them")
    parser.add_argument("--bound-s", type=float, default=_BOUND_S, help="after so long a defect counts as found")
    options = parser.parse_args(arguments)
    chosen = {n: d for n, d in DEFECTS.items() if any(word in d.file for word in options.only.split(","))}
    missed = 0
    for name, defect in chosen.items():
        file = options.root.resolve() / defect.file
        if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", file], cwd=options.root, check=False).returncode:
            raise SystemExit(f"{file} is not as it was committed")
        sound = file.read_text()
        try:
            file.write_text(planted(sound, defect))
            found = judge(options.root, defect.tests, options.bound_s)
        finally:
            file.write_text(sound)
        missed += not found
        print(f"{'found ' if found else 'MISSED'} {name}: {found or defect.tests}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
