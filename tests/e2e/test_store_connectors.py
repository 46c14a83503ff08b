"""Engines that share a KV store: the tokens are transformers', decode computes no prompt token, turns are found."""

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from deployments import Running
from equality import (
    CHUNKED,
    PREEMPTING,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_replies,
    deployed,
    run_twice,
    run_until_preempted,
)
from kills import kill_engines
from serving_checks import Books, complete_all, complete_one, read_books, settled_books
from store_servers import RedisServer, lmcache_server, mooncake_server, redis_server, s3_server
from traffic import wait_until_true

BLOCK_SIZES: dict[str, tuple[str, ...]] = {
    "16-16": (),
    "16-32": ("--decode-block-size", "32"),
    "32-16": ("--prefill-block-size", "32"),
}
LAYERWISE = ("load=layerwise", "layer_timeout_s=20")
"""No load fails where a busy machine takes its time."""

SERVERS = ("redis", "lmcache", "mooncake", "s3")
PATIENT = "lookup_timeout_s=20"
"""Where the number of hits is asserted, a busy machine makes no miss."""


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Makes the URL of a store by its kind; servers end with the test."""
    with ExitStack() as stack:
        servers = {"redis": redis_server, "lmcache": lmcache_server, "mooncake": mooncake_server, "s3": s3_server}

        def make(kind: str) -> str:
            return f"file://{tmp_path}/kv" if kind == "file" else stack.enter_context(servers[kind]())

        yield make


def over(connector: str, *options: str) -> list[str]:
    """Flags for a connector and its options."""
    return ["--connector", connector, *(x for option in options for x in ("--connector-config", option))]


def check_both_passes(workload: Workload, flags: Sequence[str]) -> None:
    """Forty prompts twice: corruption would hit the second pass, which reads what the first has saved."""
    with deployed(workload, *flags) as deployment:
        run_twice(deployment, workload)
        (tier,) = deployment.get("/topology").json()["router"]["tiers"]
        engines = deployment.get("/topology").json()["engines"]
        assert tier["engines"] == sorted(engine["name"] for engine in engines)
        assert tier["keys"] > 0
        assert "pdkv_refused_tier_events_total 0.0" in deployment.get("/metrics").text


@pytest.mark.parametrize(
    ("topology", "blocks", "options"),
    [
        ("1P1D", "32-16", (*LAYERWISE, "tokens_per_value=32")),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("1P1D", "16-16", ()),
                ("2P2D", "16-32", ()),
                ("2P2D", "32-16", LAYERWISE),
                ("1P1D", "16-16", (*LAYERWISE, "tokens_per_value=16")),
            )
        ),
    ],
)
def test_tokens_over_files(
    workload: Workload, urls: Callable[[str], str], topology: str, blocks: str, options: Sequence[str]
) -> None:
    """F8, F9, F10."""
    flags = over("store", f"url={urls('file')}", *options)
    check_both_passes(workload, [*TOPOLOGIES[topology], *BLOCK_SIZES[blocks], *CHUNKED, *flags])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_tokens_over_servers(workload: Workload, urls: Callable[[str], str], kind: str) -> None:
    """F22: real servers, several units per value."""
    check_both_passes(workload, [*TOPOLOGIES["1P1D"], *CHUNKED, *over("store", f"url={urls(kind)}")])


def usages(deployment: Running, prompt: list[int], salt: str) -> list[dict[str, int]]:
    """What two answers to a new prompt say of its tokens."""
    fields = {"max_tokens": 4, "temperature": 0, "cache_salt": salt}
    return [deployment.complete(prompt, **fields).json()["usage"]["prompt_tokens_details"] for _ in range(2)]


def test_usage_says_what_a_codec_may_have_changed(
    workload: Workload, urls: Callable[[str], str], pair: Running
) -> None:
    """All of a prompt: it is handed over through the store. Over exact KV nothing is said."""
    prompt = max((e.prompt for e in workload.expected), key=len)
    store = over("store", f"url={urls('file')}", "codec=int8", PATIENT)
    with deployed(workload, *TOPOLOGIES["1P1D"], *store) as deployment:
        lossy = usages(deployment, prompt, "")
        books = settled_books(deployment, lambda now: now.total("decode") >= 2 * len(prompt))
    exact = usages(pair, prompt, "usage")
    assert [said.get("lossy_tokens") for said in (*lossy, *exact)] == [len(prompt)] * 2 + [None] * 2
    assert [said["cached_tokens"] > 0 for said in (*lossy, *exact)] == [False, True] * 2
    assert books.sources("decode")["computed"] == 0


def test_preempted_requests_say_the_right_tokens(workload: Workload, urls: Callable[[str], str]) -> None:
    """F9, F12."""
    flags = [*TOPOLOGIES["1P1D"], *PREEMPTING, *over("store", f"url={urls('file')}")]
    with deployed(workload, *flags) as deployment:
        run_until_preempted(deployment, workload)


def test_flipped_bits_in_redis_change_no_token(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack 2, F22: what engines have saved, signed, in a real server is damaged before the next ones read it."""
    import redis

    monkeypatch.setenv("PDKV_STORE_SIGN_KEY", "a secret of the test's own")
    with redis_server() as url:
        flags = [*TOPOLOGIES["2P2D"], *CHUNKED, *over("store", f"url={url}", "sign=true", PATIENT)]
        with deployed(workload, *flags) as deployment:
            run_twice(deployment, workload)
            with redis.Redis(unix_socket_path=url.removeprefix("unix://")) as client:
                keys = list(client.scan_iter())
                for key in keys:
                    middle = client.strlen(key) // 2 | 3  # an exponent's bit
                    client.setrange(key, middle, bytes([client.getrange(key, middle, middle)[0] ^ 0x40]))
                client.config_set("min-replicas-to-write", 1)  # nobody can put a right value in a damaged one's place
            kill_engines(deployment)
            check_replies(complete_all(deployment, workload.bodies), workload.expected)
            books = settled_books(deployment, lambda now: now.total("prefill") >= workload.num_prompt_tokens)
    assert keys
    assert books.of("kv_damaged_values", "prefill") > 0
    assert books.sources("prefill")["store"] == 0, "not one of them was taken"
    assert "secret of the test" not in deployment.log


@pytest.fixture(scope="module")
def pair(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two prefill engines, in turn, and a decode engine over files."""
    store = over("store", f"url=file://{tmp_path_factory.mktemp('pair')}/kv", "min_hit_tokens=16", PATIENT)
    with deployed(workload, "--prefill", "2", "--decode", "1", "--policy", "round_robin", *store) as deployment:
        yield deployment


def test_the_next_turn_finds_what_decode_has_generated(workload: Workload, pair: Running) -> None:
    prompt = workload.expected[0].prompt[:100]
    output, _ = complete_one(pair, prompt=prompt, max_tokens=160)
    complete_one(pair, prompt=[5, 6, 7], max_tokens=2)  # by the other one
    turn = [*prompt, *output, *workload.expected[1].prompt, 7, 8, 9]
    _, books = complete_one(pair, prompt=turn, max_tokens=4)
    sources = books.sources("prefill")
    assert sources["local_hit"] + sources["store"] == 256  # whole values of 259 tokens, the last one not cached
    assert sources["store"] >= 256 - 96
    check_decode_computed_nothing(books)


def test_another_prefill_engine_finds_it_but_not_with_another_salt(workload: Workload, pair: Running) -> None:
    """F8, F23."""
    prompt = workload.expected[2].prompt[:300]
    output, first = complete_one(pair, prompt=prompt, max_tokens=4)
    again, second = complete_one(pair, prompt=prompt, max_tokens=4)
    apart, salted = complete_one(pair, prompt=prompt, max_tokens=4, cache_salt="tenant")
    assert output == again == apart
    assert first.sources("prefill")["computed"] == salted.sources("prefill")["computed"] == len(prompt)
    assert second.sources("prefill")["store"] == 256


def test_the_store_outlives_the_engines_and_damaged_files_are_computed_again(
    workload: Workload, tmp_path: Path
) -> None:
    """F4, F10, F13: in the end every file is cut short, and all of it is computed and saved again, counted."""
    flags = [*TOPOLOGIES["1P1D"], *over("shared_storage", f"path={tmp_path}/kv", PATIENT)]
    whole = [e for e in workload.expected if len(e.prompt) >= 200]
    bodies = [{"prompt": e.prompt, "max_tokens": len(e.output), "ignore_eos": True, "temperature": 0} for e in whole]
    total = sum(len(e.prompt) for e in whole)

    def run() -> dict[str, int]:
        """By new engines, which are killed then."""
        check_replies(complete_all(deployment, bodies), whole)
        books = settled_books(deployment, lambda now: now.total("prefill") >= total <= now.total("decode"))
        check_decode_computed_nothing(books)
        kill_engines(deployment)
        return {**books.sources("prefill"), "damaged": books.of("kv_damaged_values", "prefill")}

    with deployed(workload, *flags) as deployment:
        # A repeated prompt is found in the store or, if it comes late enough, in the engine's own cache.
        first, second = run(), run()
        for path in (tmp_path / "kv").rglob("*.safetensors"):
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 1)
        third, fourth = run(), run()
    assert first["damaged"] == second["damaged"] == fourth["damaged"] == 0
    assert third["damaged"] > 0
    assert third["store"] == 0
    assert third["recomputed"] > 0
    for found in (second, fourth):
        assert found["store"] > 0
        assert found["store"] + found["local_hit"] > 0.7 * total


def is_said_by_prefill(deployment: Running, text: str) -> bool:
    """Whether a line of the log of prefill-0 says it."""
    return any(text in line and "prefill-0" in line for line in deployment.lines)


@pytest.fixture(scope="module")
def failing(workload: Workload) -> Iterator[tuple[RedisServer, Running]]:
    """A store that was down when its deployment started."""
    deadlines = ("lookup_timeout_s=0.2", "transfer_timeout_s=0.5", "operation_timeout_s=0.5", "connect_timeout_s=0.5")
    with RedisServer() as server:
        server.send(signal.SIGKILL)
        flags = [*TOPOLOGIES["1P1D"], *over("store", f"url={server.url}", *deadlines)]
        with deployed(workload, *flags) as deployment:
            yield server, deployment


def test_a_store_that_is_down_at_the_start_is_named_until_it_is_up(failing: tuple[RedisServer, Running]) -> None:
    """In the log, /topology and /health without any request."""
    server, deployment = failing
    text = "until it can be reached, prompts are computed instead"
    wait_until_true(lambda: is_said_by_prefill(deployment, text), text)

    def problems() -> int:
        engines = deployment.get("/topology").json()["engines"]
        return sum(engine["connector_problem"] is not None for engine in engines)

    wait_until_true(lambda: problems() == 2, "both engines say that the store is down")
    health = deployment.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["connector_problems"].keys() == {"prefill-0", "decode-0"}
    server.restart()
    wait_until_true(lambda: problems() == 0, "both engines say that the store answers")
    assert deployment.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_store_that_does_not_answer_costs_hits_and_nothing_else(
    workload: Workload, failing: tuple[RedisServer, Running], number: signal.Signals
) -> None:
    """F7, F13: its hand-offs are computed by decode, loudly, within the deadlines."""
    server, deployment = failing
    short = workload.expected[-6:]
    bodies = [{"prompt": e.prompt, "max_tokens": len(e.output), "ignore_eos": True, "temperature": 0} for e in short]
    salts = (f"{number} {attempt}" for attempt in itertools.count())

    def count() -> Books:
        """What they cost, all at once, when no cache has anything of them."""
        before, salt = read_books(deployment), next(salts)
        check_replies(complete_all(deployment, [{**body, "cache_salt": salt} for body in bodies]), short)
        num_tokens = sum(len(e.prompt) for e in short)
        return settled_books(deployment, lambda now: (now - before).total("decode") >= num_tokens) - before

    def loads() -> int:
        return count().sources("decode")["remote"]

    server.restart()
    wait_until_true(loads, "loads: the first ones may meet a connection that is still broken")
    server.send(number)
    assert count().of("kv_load_failures", "decode") > 0
    if number == signal.SIGSTOP:
        server.send(signal.SIGCONT)
    else:
        server.restart()
    wait_until_true(loads, "loads again")
