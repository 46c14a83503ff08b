"""Host memory: the least of the machine's and each cgroup's is available; what does not fit is refused."""

from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.host import memory_limits
from pdkv.host.memory_limits import MemoryBound, available_memory, check_host_memory, format_bytes, num_oom_kills

GIB = 1 << 30


def machine(root: Path, *, available: int, cgroup: str = "0::/\n", files: dict[str, str] | None = None) -> MemoryBound:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    bound = available_memory(root / "proc", root / "sys")
    assert bound is not None
    return bound


def test_without_cgroups_the_machines_memory_counts(tmp_path: Path) -> None:
    assert machine(tmp_path, available=8 * GIB) == (8 * GIB, "MemAvailable")


def test_a_limit_of_cgroup_v2_counts_with_its_droppable_cache(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{4 * GIB}", "a/memory.current": f"{3 * GIB}", "a/memory.stat": f"inactive_file {GIB}\n"}
    bound = machine(tmp_path, available=8 * GIB, cgroup="0::/a\n", files=files)
    assert bound == (2 * GIB, str(tmp_path / "sys/a/memory.max"))


def test_an_ancestors_limit_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": f"{GIB}", "a/memory.current": "0", "a/memory.stat": "",
        "a/b/memory.max": "max", "a/b/memory.current": "0",
    }  # fmt: skip
    assert machine(tmp_path, available=8 * GIB, cgroup="0::/a/b\n", files=files).available_bytes == GIB


def test_a_limit_of_cgroup_v1_counts_and_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "memory/x/memory.limit_in_bytes": f"{2 * GIB}", "memory/x/memory.usage_in_bytes": f"{3 * GIB}",
        "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5",
    }  # fmt: skip
    cgroup = "8:cpu:/x\n4:cpuset,memory:/x\n"
    assert machine(tmp_path, available=8 * GIB, cgroup=cgroup, files=files).available_bytes == 0
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_what_does_not_fit_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "available_memory", lambda: MemoryBound(10 * GIB, "MemAvailable"))
    check_host_memory(9 * GIB, "2 KV pools")
    with pytest.raises(ConfigError, match=r"^2 KV pools need 9\.9 GiB of host memory, but only 9\.7 GiB can be used"):
        check_host_memory(int(9.9 * GIB), "2 KV pools")
    monkeypatch.setattr(memory_limits, "available_memory", lambda: None)  # nobody says: nothing is refused
    check_host_memory(10**18, "2 KV pools")


def test_sizes_for_people() -> None:
    sizes = [12, 8 << 20, 3 * GIB // 2, 1000 * GIB]
    assert [format_bytes(size) for size in sizes] == ["12 bytes", "8 MiB", "1.5 GiB", "1000.0 GiB"]


def test_the_kernels_kills_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 3\n")
    assert num_oom_kills(tmp_path, tmp_path / "cgroups") == 3
    assert num_oom_kills(tmp_path / "none", tmp_path / "cgroups") is None


@pytest.mark.parametrize(
    ("line", "file"), [("0::/a/b", "a/b/memory.events"), ("5:memory:/a/b", "memory/a/b/memory.oom_control")]
)
def test_another_groups_kills_are_not_counted(line: str, file: str, tmp_path: Path) -> None:
    """Of the whole machine's, each one explained the next death here, whatever its cause."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    events = tmp_path / "cgroups" / file
    events.parent.mkdir(parents=True)
    events.write_text("oom 7\noom_kill 1\n")
    assert num_oom_kills(tmp_path, tmp_path / "cgroups") == 1
