"""An operator looks at what pools and tiers have of a prompt, and moves it: `pd cache` beside a launch."""

import tempfile
from pathlib import Path

import pytest
from deployments import Running
from equality import SMALL_PREFILL_POOL, Workload, check_replies, deployed
from oracle import Expected
from serving_checks import complete_all, read_books, settled_books
from store_servers import RedisServer
from traffic import wait_until_true

from pdkv.cli.main import main

LOOKUP = ["--connector-config", "store.lookup_timeout_s=20"]
FLAGS = [
    "--prefill", "1", "--decode", "1", *SMALL_PREFILL_POOL, "--kv-host-memory", "16MiB",
    *LOOKUP,
]  # fmt: skip
HOST, FILES, REDIS = "multi/1-store/0-host", "multi/1-store/1-file", "multi/1-store/1-redis"


@pytest.fixture
def prompt_of_200(workload: Workload) -> Expected:
    """Three values, and eight tokens."""
    return next(expected for expected in workload.expected if len(expected.prompt) == 200)


class Operator:
    """`pd cache` about one prompt, and requests with it."""

    def __init__(
        self, deployment: Running, prompt: Expected, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(deployment.directory))  # where the launch is looked for
        self._deployment = deployment
        self._prompt = prompt
        self._capsys = capsys
        port = deployment.url.rpartition(":")[2]
        self._names = ["--run", port, "--tokens", ",".join(map(str, prompt.prompt))]

    def cache(self, action: str, *more: str, exit_code: int = 0) -> str:
        """What `pd cache` prints."""
        self._capsys.readouterr()
        assert main(["cache", action, *self._names, *more]) == exit_code
        said = self._capsys.readouterr()
        return said.err if exit_code else said.out

    def tokens_in(self, tier: str, engine: str = "prefill-0") -> int:
        """Of the prompt."""
        cells = [line.split() for line in self.cache("lookup").splitlines()]
        return next(int(row[2]) for row in cells if row[:2] == [engine, tier])

    def computed(self, role: str = "prefill") -> int:
        """Tokens of the prompt that engines of the role compute now; its answer is the right one."""
        before, prompt = read_books(self._deployment), self._prompt.prompt
        body = {"prompt": prompt, "temperature": 0, "max_tokens": len(self._prompt.output), "ignore_eos": True}
        check_replies(complete_all(self._deployment, [body]), [self._prompt])
        after = settled_books(self._deployment, lambda now: (now - before).total(role) >= len(prompt))
        return (after - before).sources(role)["computed"]


def test_a_prompts_kv_is_found_cleared_prefetched_and_pinned(
    workload: Workload,
    prompt_of_200: Expected,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with deployed(workload, *FLAGS, "--kv-store", f"file://{tmp_path}/kv") as deployment:
        operator = Operator(deployment, prompt_of_200, capsys, monkeypatch)
        cache, tokens_in, computed = operator.cache, operator.tokens_in, operator.computed
        assert computed() == 200
        wait_until_true(lambda: tokens_in(HOST) == tokens_in(FILES) == 192, "three values are saved", 20)
        assert tokens_in("pool") == 192
        assert cache("lookup").splitlines()[0] == "200 tokens"

        cache("clear")
        assert {tokens_in(tier) for tier in ("pool", HOST, FILES)} == {0}
        assert computed() == 200, "nothing that is cleared is found"
        wait_until_true(lambda: tokens_in(HOST) == tokens_in(FILES) == 192, "three values are saved anew", 20)

        cache("clear", "--tier", "pool")
        cache("clear", "--tier", "host")
        assert [tokens_in(tier) for tier in ("pool", HOST, FILES)] == [0, 0, 192]
        assert "192" in cache("prefetch")
        assert [tokens_in(tier) for tier in ("pool", HOST)] == [0, 192]
        assert "192" in cache("prefetch", "--tier", "pool", "--engine", "decode-0")
        assert tokens_in("pool", "decode-0") == 192
        assert computed() == 200 - 192

        assert "192" in cache("pin", "--tier", "host", "--ttl-s", "600")
        assert "prefill-0" in cache("unpin", "--tier", HOST)
        assert "no engine has a tier 'tape'; known: pool, multi/1-store/0-host" in cache(
            "lookup", "--tier", "tape", exit_code=2
        )
        assert "there is no engine 'prefill-9'" in cache("pin", "--engine", "prefill-9", exit_code=2)
        assert "pin is not possible for an engine's own blocks" in cache("pin", "--tier", "pool", exit_code=2)


def test_a_prompts_kv_is_moved_down_and_up_again(
    workload: Workload, prompt_of_200: Expected, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it is read from where it went. Either engine may run the prompt, and have it in its host memory."""
    flags = ["--prefill", "0", "--decode", "2", "--kv-host-memory", "16MiB", *LOOKUP]
    with RedisServer() as server, deployed(workload, *flags, "--kv-store", server.url) as deployment:
        operator = Operator(deployment, prompt_of_200, capsys, monkeypatch)
        cache = operator.cache

        def tokens_in(*tiers: str) -> list[set[int]]:
            """As both engines find them, tier by tier."""
            return [{operator.tokens_in(tier, engine) for engine in ("engine-0", "engine-1")} for tier in tiers]

        assert operator.computed("any") == 200
        wait_until_true(lambda: tokens_in(HOST, REDIS) == [{192}, {192}], "three values are saved", 20)
        for source, destination in ((HOST, REDIS), (REDIS, HOST)):
            cache("clear", "--tier", destination)
            cache("clear", "--tier", "pool")
            assert tokens_in(source, destination, "pool") == [{192}, {0}, {0}]
            said = cache("move", "--from", source.rpartition("-")[2], "--tier", destination).splitlines()
            moved = [line.split() for line in said[2:]]
            assert {(row[1], row[4]) for row in moved} == {(destination, "-")}
            assert [row[2:4] for row in moved if row[3] != "0"] == [["192", "3"]], "one engine had all"
            assert tokens_in(source, destination) == [{0}, {192}]
            assert operator.computed("any") == 200 - 192
        assert "name the same tier" in cache("move", "--from", "host", "--tier", "0-host", exit_code=2)
        assert "no engine has a tier 'tape'; known: pool, " in cache(
            "move", "--from", "tape", "--tier", "host", exit_code=2
        )
        server.kill()
        assert "1-redis of engine-" in cache("move", "--from", "host", "--tier", "redis", exit_code=1)
        assert tokens_in(HOST) == [{192}]
