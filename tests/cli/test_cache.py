"""`pd cache ACTION`: what the router is asked, and what is printed of its answer."""

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdkv.cli import cache
from pdkv.cli.main import main

ANSWER = {
    "prompt_tokens": 200,
    "engines": [
        {
            "name": "prefill-0",
            "role": "prefill",
            "tiers": [{"tier": "multi/1-store/1-redis", "tokens": 192, "values": 3}],
        },
        {
            "name": "decode-0",
            "role": "decode",
            "tiers": [
                {"tier": "multi/1-store/1-redis", "error": {"code": "store_unavailable", "message": "it \x1b[2Jgone"}},
                {"tier": "multi/1-store/2-file", "error": {"code": "store_unable", "message": "never"}},
            ],
        },
    ],
}


class Router:
    """Answers what `pd` asks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def order_cache(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((action, body))
        return ANSWER

    def ask(self, arguments: argparse.Namespace, call: Callable[["Router"], Awaitable[Any]]) -> Any:
        asking = call(self).__await__()
        with pytest.raises(StopIteration) as answer:
            next(asking)
        return answer.value.value


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    router = Router()
    monkeypatch.setattr(cache, "ask_router", router.ask)
    return router


def test_a_move_names_both_tiers_and_shows_what_the_second_has(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["cache", "move", "--tokens", "5,6", "--from", "host", "--tier", "redis"]
    assert main(names) == 0
    assert [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()] == [
        ["200", "tokens"],
        ["ENGINE", "TIER", "TOKENS", "VALUES", "PROBLEM"],
        ["prefill-0", "multi/1-store/1-redis", "192", "3", "-"],
        ["decode-0", "multi/1-store/1-redis", "-", "-", r"it \x1b[2Jgone"],
        ["unchanged:", "decode-0", "multi/1-store/2-file:", "never"],
    ]
    assert main([*names, "--copy", "--engine", "decode-0", "--timeout-s", "60"]) == 0
    body = {"tokens": [5, 6], "from": "host", "tier": "redis", "timeout_s": 10.0}
    assert router.asked == [("move", body), ("move", body | {"copy": True, "engine": "decode-0", "timeout_s": 60.0})]


def test_other_actions_say_nothing_of_where_from(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--all", "--tier", "host"]) == 0
    assert router.asked == [("clear", {"tier": "host", "timeout_s": 10.0})]
    assert capsys.readouterr().out.splitlines()[0].split() == ["ENGINE", "TIER", "VALUES", "PROBLEM"]


def test_the_help_of_an_action_keeps_its_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "move", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Copy a prompt's KV to another tier, then remove it from the first" in shown
