"""`pd connector show`, and what is said of a connector before anything is loaded."""

import re
from pathlib import Path

import pytest

from pdkv.base.options import options_of
from pdkv.cli.main import main
from pdkv.connectors import plan, registry
from pdkv.connectors.plan import Requirement
from pdkv.errors import ConfigError


def show(name: str, capsys: pytest.CaptureFixture[str], *config: str) -> str:
    assert main(["connector", "show", name, *(["--connector-config", *config] if config else [])]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", registry.SHIPPED)
def test_every_shipped_connector_shows_all_of_its_options_with_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(name, capsys)
    words = " ".join(text.split())
    for item in options_of(registry.load_connector(name).options_type).values():
        assert item.help, item.name
        assert f"  {item.name}={item.metavar}\n" in text
        assert item.help in words
        assert not item.required or f"{item.help} (required)" in words
    assert registry.SHIPPED[name] in text
    assert re.search(r"^needs +\S", text, re.MULTILINE)
    assert re.search(r"^kind", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) < 250


def test_what_options_choose_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("nixl", capsys)
    assert re.search(r"^kind +pull; push with mode=push$", text, re.MULTILINE)
    assert re.search(r"^orders .*; decode_first, needs_peer_first, concurrent with mode=push$", text, re.MULTILINE)
    assert "  mode={pull,push}\n" in text
    assert re.search(r"^kind +push$", show("nixl", capsys, "mode=push"), re.MULTILINE)
    text = show("multi", capsys, "connectors=memory,store", "store.url=memory://")
    assert re.search(r"^kind +pull$", text, re.MULTILINE)


def test_a_package_that_is_missing_is_shown_and_ends_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = plan.find_spec
    monkeypatch.setattr(plan, "find_spec", lambda name: None if name == "redis" else find_spec(name))
    assert "(not installed: pip install 'pdkv[redis]')" in show("store", capsys)
    with pytest.raises(ConfigError, match=r"connector store needs redis, which is not installed: pip install 'pdkv\["):
        registry.check_connector("store", {"url": "redis://localhost:1"})
    registry.check_connector("store", {"url": "memory://"})  # which needs none
    with pytest.raises(ConfigError, match="connector multi needs redis"):
        registry.check_connector("multi", {"connectors": "memory,store", "store.url": "redis://localhost:1"})


def test_any_of_several_modules_will_do() -> None:
    assert Requirement(("no_such_module_1", "json"), "").installed
    assert not Requirement(("no_such_module_1", "no_such_module_2"), "").installed


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("store", {"uri": "redis://h"}, r"connector store: unknown option 'uri' \(did you mean 'url'\?\); known: "),
        ("store", {}, r"connector store: requires the option url=URL"),
        ("store", {"url": "memory://", "ttl_s": "5"}, "memory://: unknown option 'ttl_s'"),
        ("store", {"url": "redis://h", "pipeline": "0"}, "option pipeline: a whole number of at least 1 .* got '0'"),
        ("shared_storage", {"path": "x"}, "connector shared_storage: option path: an absolute path was expected"),
        ("nixl", {"mode": "pul"}, "connector nixl: option mode: one of pull, push was expected, got 'pul'"),
        ("memory", {"transfer_timeout_s": "nan"}, "connector memory: option transfer_timeout_s: a number of seconds"),
        ("multi", {"connectors": "store", "0.uri": "x"}, r"unknown option '0.uri' \(did you mean '0.url'\?\)"),
        ("multi", {"connectors": "store", "0.url": "x", "store.url": "y"}, "'url' of child 'store' is given twice"),
    ],
)
def test_options_are_checked_without_a_model(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.check_connector(name, options)


def test_a_store_that_cannot_be_reached_says_so(tmp_path: Path) -> None:
    options = {"url": "redis://127.0.0.1:1", "connect_timeout_s": "1"}
    assert "127.0.0.1:1" in registry.probe_connector(registry.check_connector("store", options))
    options = {"url": "memory://"}
    assert registry.probe_connector(registry.check_connector("store", options)) == ""
    options = {"path": str(tmp_path / "store")}
    assert registry.probe_connector(registry.check_connector("shared_storage", options)) == ""
    both = registry.check_connector("multi", {"connectors": "memory,store", "store.url": "redis://127.0.0.1:1"})
    assert registry.probe_connector(both).startswith("store: redis at 127.0.0.1:1")


def test_looking_for_stores_takes_no_segment_of_host_memory(tmp_path: Path) -> None:
    """An engine looks on a thread that may still be at it when its own store wants the segment."""
    options = {"url": f"host://{tmp_path}/kv,redis://127.0.0.1:1", "connect_timeout_s": "1"}
    assert "127.0.0.1:1" in registry.probe_connector(registry.check_connector("store", options))
    assert not (tmp_path / "kv").exists()
