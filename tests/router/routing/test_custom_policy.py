"""Policies of others: the example in examples/custom_policy as a package of its own, and policies that fail."""

import logging
from pathlib import Path
from typing import Any

import pytest
from chooser_rig import ChooserRig
from example_packages import EXAMPLES, install_example
from scripted_engine import make_request

from pdkv.errors import ConfigError
from pdkv.router.engines.candidate import EngineView
from pdkv.router.routing.policies import Snapshot, find_policy

SEEN: list[Snapshot] = []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example("custom_policy", tmp_path_factory)


def test_the_example_is_found_by_its_name_and_prefers_what_is_soonest(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len((EXAMPLES / "custom_policy/pdkv_fastest.py").read_text().splitlines()) <= 30
    monkeypatch.syspath_prepend(str(installed))
    rig = ChooserRig(3, 1, "fastest")
    assert rig.chooser.num_policy_failures == 0
    speeds, request = rig.fleet.speeds, make_request(1000)
    speeds.computed("prefill-0", 1000, 1.0)
    speeds.computed("prefill-1", 1000, 0.5)
    assert rig.choose_prefill(request) == "prefill-2", "it is measured by being used"
    speeds.computed("prefill-2", 1000, 2.0)
    assert rig.choose_prefill(request) == "prefill-1"
    rig.occupy("prefill-1", prompts=1500)
    assert rig.choose_prefill(request) == "prefill-0"
    speeds.decoded("decode-0", 4, 0.02)
    assert rig.choose_decode(request, "prefill-0") == "decode-0"


def raises(snapshot: Snapshot) -> EngineView:
    SEEN.append(snapshot)
    raise RuntimeError("a bug")


def stranger(snapshot: Snapshot) -> EngineView:
    return EngineView("prefill-7", 0)


def nothing(snapshot: Snapshot) -> Any:
    return None


def spoils(snapshot: Snapshot) -> EngineView:
    snapshot.engines.clear()  # type: ignore[attr-defined]
    return snapshot.engines[0]


NOT_A_FUNCTION = 7


@pytest.mark.parametrize("policy", [raises, stranger, nothing, spoils])
def test_a_policy_that_fails_costs_no_request(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = ChooserRig(2, 1, f"{__name__}:{policy.__name__}")
    rig.occupy("prefill-0", prompts=100)
    with caplog.at_level(logging.ERROR):
        assert [rig.choose_prefill(make_request()) for _ in range(20)] == ["prefill-1"] * 20
    assert rig.chooser.num_policy_failures == 20
    assert len(caplog.records) == 1
    assert "prefix_aware chose in its place" in caplog.text


def test_a_policy_sees_its_side_and_prompt() -> None:
    SEEN.clear()
    rig = ChooserRig(1, 1, f"{__name__}:raises")
    request = make_request(100)
    rig.store("prefill-0", 64, request)
    rig.choose_decode(request, rig.choose_prefill(request))
    assert [(s.side, s.num_tokens, [e.name for e in s.engines]) for s in SEEN] == [
        ("prefill", 100, ["prefill-0"]),
        ("decode", 100, ["decode-0"]),
    ]
    assert SEEN[0].match() == {"prefill-0": 64}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (f"{__name__}:NOT_A_FUNCTION", "is no function"),
        (f"{__name__}:absent", "cannot be imported"),
        ("fastest_of_all", 'or "module:function"'),
    ],
)
def test_what_is_no_policy_is_refused(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        find_policy(name)
