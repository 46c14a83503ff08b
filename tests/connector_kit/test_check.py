"""The conformance kit passes for every shipped connector, and finds each broken one in the case that is meant."""

import glob
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from nixl_rig import HAS_NIXL
from store_servers import lmcache_server, mooncake_server, redis_server, s3_server
from warm import PYTHON, WarmPopen

from pdkv.cli.main import main
from pdkv.connector_kit.check.report import Report, all_cases, check
from pdkv.connector_kit.rig.processes import Zygote

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"

SHIPPED: Sequence[tuple[str, dict[str, str]]] = [
    ("memory", {"mode": "pull"}),
    ("memory", {"mode": "push"}),
    ("memory", {"mode": "store"}),
    ("shared_memory", {}),
    ("shared_storage", {}),
    ("store", {}),
    ("store", {"load": "layerwise"}),
    ("store", {"url": "host://{directory}"}),
    ("p2p", {}),
    ("nixl", {"mode": "pull"}),
    ("nixl", {"mode": "push"}),
    ("multi", {}),
    ("multi", {"connectors": "shared_memory,p2p"}),
    ("pdkv_sqlite:SQLiteConnector", {"path": "{directory}/kv.db"}),
    ("pdkv_sockets:SocketConnector", {"timeout_s": "2"}),
]

SERVERS: Mapping[str, Callable[[], AbstractContextManager[str]]] = {
    "redis": redis_server,
    "lmcache": lmcache_server,
    "mooncake": partial(mooncake_server, 1 << 30),
    "s3": s3_server,
}

OF_OTHERS = ("content_identity", "aborts", "kv_groups")
"""In `make test`; `memory` that pulls passes all cases there, and so do all connectors in `make matrix`."""

OF_EACH_KIND = {
    "shared_memory": ("later_attempts", "restarted_peer", "latent_rows", "state_groups"),
    "p2p": ("attempts", "restarted_peer", "step_thread"),
    "store": ("replay", "lower_tiers", "step_thread", "latent_rows"),
    "nixl-pull": ("latent_rows", "state_groups"),
}
"""Besides, of each kind of way for KV: memory that is read in place, connections, content that is found by its keys."""

BROKEN: Sequence[tuple[str, str]] = [
    ("shared:DropsTheLastLayer", "content_identity"),
    ("inside:VisibleBeforeComplete", "partial_writes"),
    ("shared:HeadSlicesSwapped", "unequal_ranks[2,4]"),
    ("shared:DividesLatentRows", "latent_rows"),
    ("shared:LeavesOutTheEndOfAPage", "state_groups"),
    ("shared:TailOffByOne", "content_identity"),
    ("inside:IgnoresTheAttempt", "attempts"),
    ("inside:LooksForItsOwnAttempt", "later_attempts"),
    ("inside:FreesAtTheDeadline", "quarantine"),
    ("shared:BlocksInMatch", "step_thread"),
    ("shared:PostsOnTheStepThread", "step_thread"),
    ("inside:KeepsADeadEpochsDescriptors", "restarted_peer"),
    ("shared:OneRanksSuccessIsAll", "all_ranks"),
    ("inside:ServesPoisonOnReplay", "replay"),
    ("inside:FillsOneGroupsBlocksWithAnothers", "kv_groups"),
    ("inside:ChecksTheFirstGroupOnly", "kv_groups_failures"),
    ("inside:TellsOneKeyForFourBlocks", "lower_tiers"),
]


OPTIONS: Mapping[str, dict[str, str]] = {
    "inside": {"transfer_timeout_s": "0.8"},
    "shared": {"load_timeout_s": "2"},
    "pushing": {"timeout_s": "4"},
}

SLOW_BROKEN: Sequence[tuple[str, str]] = [
    ("shared:LeaksABufferOnAbort", "leaks"),
    ("pushing:GivesBackWhatIsStillWritten", "quarantine"),
]
"""Memory has to grow three times in a row; a sender has to be stopped in the middle of what it sends."""


def name_of(connector: str, options: dict[str, str]) -> str:
    words = [value.partition("://")[0] for value in options.values()]
    return "-".join([connector.partition(":")[0], *(word for word in words if "/" not in word)])


def assert_passed(report: Report) -> None:
    failed = {case.name: case.detail for case in report.cases if case.status == "failed"}
    assert not failed
    assert report.failed == 0
    assert report.passed == sum(case.status == "passed" for case in report.cases) > 0


def test_a_fork_server_whose_kit_has_gone_says_nothing() -> None:
    kit, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kit.close()
    code = f"from pdkv.connector_kit.rig import zygote; zygote.PRELOADED = (); zygote.main({control.fileno()})"
    done = subprocess.run([*PYTHON, "-c", code], pass_fds=[control.fileno()], stderr=subprocess.PIPE, timeout=60)
    control.close()
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The broken connectors and the examples, here and in the kit's processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        for name in ("custom_connector", "socket_connector"):
            patch.syspath_prepend(EXAMPLES / name)
        yield


@pytest.fixture(scope="module")
def zygote(importable: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One for all runs of the kit here."""
    with Zygote(tmp_path_factory.mktemp("zygote")) as started:
        yield started


def need(connector: str) -> None:
    if connector == "nixl" and not HAS_NIXL:
        pytest.skip("the nixl wheel is not installed")


@pytest.mark.parametrize(("connector", "options"), SHIPPED, ids=[name_of(*row) for row in SHIPPED])
def test_the_kit_passes_for_what_is_shipped(connector: str, options: dict[str, str], zygote: Zygote) -> None:
    """F1, F2, F3, F4, F5, F9, F10, F17, F19, F20, F24, as each case says."""
    need(connector)
    is_first = (connector, options) == SHIPPED[0]
    names = () if is_first else (*OF_OTHERS, *OF_EACH_KIND.get(name_of(connector, options), ()))
    assert_passed(check(connector, options=options, names=names, quick=True, zygote=zygote))


@pytest.mark.slow
@pytest.mark.parametrize(("connector", "options"), SHIPPED, ids=[name_of(*row) for row in SHIPPED])
def test_the_whole_kit_passes_for_what_is_shipped(connector: str, options: dict[str, str], zygote: Zygote) -> None:
    need(connector)
    assert_passed(check(connector, options=options, zygote=zygote))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_the_whole_kit_passes_for_stores_in_servers(name: str, tmp_path: Path) -> None:
    """Its processes have the environment that clients of the server need."""
    with SERVERS[name]() as url, Zygote(tmp_path) as zygote:
        assert_passed(check("store", options={"url": url}, zygote=zygote))


@pytest.mark.parametrize(
    ("connector", "case"),
    [
        pytest.param(*row, id=row[0].partition(":")[2], marks=pytest.mark.slow if row in SLOW_BROKEN else ())
        for row in (*BROKEN, *SLOW_BROKEN)
    ],
)
def test_a_broken_connector_fails_in_the_case_that_is_meant(connector: str, case: str, zygote: Zygote) -> None:
    """F70, for one that writes into blocks which it has given back."""
    options = OPTIONS[connector.partition(":")[0]]
    report = check(f"broken.{connector}", options=options, names=[case], quick=True, zygote=zygote)
    assert [(found.name, found.status) for found in report.cases] == [(case, "failed")]
    assert report.cases[0].detail
    assert (report.passed, report.failed) == (0, 1)


@pytest.fixture
def left_behind(importable: None) -> Iterator[str]:
    """Paths in /dev/shm that begin so are removed afterwards; broken connectors leave such."""
    from broken.shared import LEFT_BEHIND

    yield LEFT_BEHIND
    for path in glob.glob(f"{LEFT_BEHIND}*"):
        os.unlink(path)


@pytest.mark.slow
def test_shared_memory_counts_as_left_behind_when_it_is_each_time(left_behind: str, zygote: Zygote) -> None:
    """F24: a stranger on the same host, who left a file while the connector was being checked, is no fault of it."""
    strangers = Path(f"{left_behind}stranger")
    stranger = threading.Timer(1.0, strangers.touch)
    stranger.start()
    try:
        assert_passed(check("shared_memory", options={}, names=["leaks"], zygote=zygote))
    finally:
        stranger.join()
    assert strangers.exists()
    (case,) = check("broken.shared:LeavesSharedMemory", options={}, names=["leaks"], zygote=zygote).cases
    assert case.status == "failed"
    assert Path(left_behind).name in case.detail


def test_every_case_says_what_it_proves() -> None:
    for case in all_cases().values():
        assert case.summary.endswith("."), case.name
        assert all(row[0] == "F" and row[1:].isdecimal() for row in case.covers)


def test_the_command_prints_a_line_per_case_and_says_by_its_exit_code_whether_one_failed(
    capsys: pytest.CaptureFixture[str], zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdkv.connector_kit.check.report.Zygote", lambda _: nullcontext(zygote))
    command = ["connector", "check", "memory", "--quick", "--case", "content_identity", "--case", "all_ranks"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["passed", "content_identity"], ["refused", "all_ranks"]]
    assert lines[2] == "memory: 1 passed, 0 failed, 1 refused"
    name = "broken.shared:DropsTheLastLayer"
    assert main(["connector", "check", name, "--quick", "--case", "content_identity", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["connector"], report["passed"], report["failed"]) == (name, 0, 1)
    (case,) = report["cases"]
    assert (case["name"], case["status"]) == ("content_identity", "failed")
    assert "layers 2, K and V" in case["detail"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["teleport"], "unknown connector 'teleport'; known: lmcache, memory"),
        (["no.such.module:Class"], "cannot be imported"),
        (["memory", "--case", "levitation"], "unknown case 'levitation'; known: content_identity"),
        (["memory", "--connector-config", "mode=loud"], "one of pull, push, store was expected, got 'loud'"),
        (["memory", "--connector-config", "mode"], "KEY=VALUE was expected"),
        (["memory", "--timeout", "0"], "--timeout"),
        (["store", "--connector-config", "url=memory://"], "memory:// is each process's own"),
        (["shared_storage", "--connector-config", "pth=x"], "unknown option 'pth' (did you mean 'path'?)"),
    ],
)
def test_a_wrong_name_or_option_is_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connector", "check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_process_outlives_a_kit_that_is_killed(tmp_path: Path) -> None:
    """F24: hosts, even stopped ones, die with their zygote, and that one with the kit."""
    code = f"""
import sys, time
from pathlib import Path
from pdkv.connector_kit.rig.processes import Zygote
zygote = Zygote(Path({str(tmp_path)!r}))
hosts = [zygote.fork() for _ in range(2)]
hosts[0].stop()
print(zygote.pid, *(host.pid for host in hosts), flush=True)
time.sleep(60)
"""
    kit = WarmPopen([*PYTHON, "-c", code], stdout=subprocess.PIPE, text=True)
    assert kit.stdout is not None
    watched = [os.pidfd_open(int(pid)) for pid in kit.stdout.readline().split()]
    assert len(watched) == 3
    kit.send_signal(signal.SIGKILL)
    kit.wait()
    kit.stdout.close()
    for pidfd in watched:
        assert select.select([pidfd], [], [], 20)[0], "a process lives on"
        os.close(pidfd)
