"""CPU lists and the default number of threads."""

import os
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.launch import cpus
from pdkv.launch.cpus import default_threads, nodes_of, numa_node, parse_cpu_list, spin_rounds, split_cpu_bind


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_threads_share_the_cpus_and_are_at_least_one() -> None:
    assert [default_threads(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert cpus.available_cpus() == 8


@pytest.mark.parametrize(("text", "expected"), [("0", {0}), ("0-2", {0, 1, 2}), ("0,2", {0, 2}), ("0-1, 5", {0, 1, 5})])
def test_lists_and_ranges(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


@pytest.mark.parametrize("text", ["", "a", "2-1", "0,,1", "-1", "0-", "1;2"])
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a list such as 0-1 or 0,2 was expected"):
        parse_cpu_list(text)


def test_a_cpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="CPU 8 cannot be used here"):
        parse_cpu_list("7-9")


def test_one_list_serves_all_and_several_serve_one_each() -> None:
    assert split_cpu_bind(None, 2) == [None, None]
    assert split_cpu_bind("0-1", 2) == [{0, 1}, {0, 1}]
    assert split_cpu_bind("0|1,2", 2) == [{0}, {1, 2}]


def test_engines_take_numa_nodes_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    for node, text in enumerate(("0-1,8-9", "2,3", "", "5-7", "4")):  # one without CPUs, one with others' only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(text + "\n")
    assert [numa_node(index, tmp_path) for index in range(4)] == [{0, 1}, {2, 3}, {4}, {0, 1}]


def test_one_numa_node_binds_no_engine(tmp_path: Path) -> None:
    assert numa_node(0, tmp_path) is None
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0/cpulist").write_text("0-7\n")
    assert numa_node(0, tmp_path) is None


def test_cpus_are_told_apart_by_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "_NODES", tmp_path)
    assert nodes_of([0]) == "", "the kernel names none"
    for node, text in enumerate(("0-3", "4-7", "")):
        assert nodes_of([0]) == "" or node == 2, "there is one"
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(text + "\n")
    assert [nodes_of(each) for each in ([1], [2, 3], [5], [3, 4], None)] == ["0", "0", "1", "0,1", ""]


def test_another_number_of_lists_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one CPU list or 3 separated by \| were expected, got '0\|1'"):
        split_cpu_bind("0|1", 3)


def test_threads_look_for_work_only_where_each_has_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert spin_rounds([2, 2]) == spin_rounds([4]) > 0
    assert spin_rounds([2, 3]) == spin_rounds([1] * 5) == 0
