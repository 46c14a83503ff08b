"""An operator looks at what pools and tiers have of a prompt, and moves it: `pd cache` beside a launch."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from equality import SMALL_PREFILL_POOL, Workload, deployed, greedy_workload
from serving_checks import complete_all, read_books, settled_books
from traffic import wait_until_true

from pdkv.cli.main import main

FLAGS = [
    "--prefill", "1", "--decode", "1", *SMALL_PREFILL_POOL, "--kv-host-memory", "16MiB",
    "--connector-config", "store.lookup_timeout_s=20",
]  # fmt: skip
HOST, FILES = "multi/1-store/0-host", "multi/1-store/1-file"


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


def test_a_prompts_kv_is_found_cleared_prefetched_and_pinned(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(workload.expected[0].prompt[:200])
    flags = [*FLAGS, "--kv-store", f"file://{tmp_path}/kv"]
    with deployed(workload, *flags) as deployment:
        monkeypatch.setattr(tempfile, "tempdir", str(deployment.directory))  # where it is looked for
        names = ["--run", deployment.url.rpartition(":")[2], "--tokens", ",".join(map(str, prompt))]

        def cache(action: str, *more: str, exit_code: int = 0) -> str:
            capsys.readouterr()
            assert main(["cache", action, *names, *more]) == exit_code
            said = capsys.readouterr()
            return said.err if exit_code else said.out

        def tokens_in(tier: str, engine: str = "prefill-0") -> int:
            cells = [line.split() for line in cache("lookup").splitlines()]
            return next(int(row[2]) for row in cells if row[:2] == [engine, tier])

        def computed() -> int:
            """Tokens of the prompt that prefill computes now."""
            before = read_books(deployment)
            complete_all(deployment, [{"prompt": prompt, "temperature": 0, "max_tokens": 2, "ignore_eos": True}])
            after = settled_books(deployment, lambda now: (now - before).total("prefill") >= len(prompt))
            return (after - before).sources("prefill")["computed"]

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
        assert "pin: not of an engine's own blocks" in cache("pin", "--tier", "pool", exit_code=2)
