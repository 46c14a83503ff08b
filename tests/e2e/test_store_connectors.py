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
    Workload,
    check_decode_computed_nothing,
    check_replies,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
    run_until_preempted,
)
from serving_checks import complete_all, complete_one, read_books, settled_books
from store_servers import RedisServer, lmcache_server, mooncake_server, redis_server, s3_server
from traffic import wait_until_true

TOPOLOGIES = {"1P1D": ("--prefill", "1", "--decode", "1"), "2P2D": ("--prefill", "2", "--decode", "2")}
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


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


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
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)
        (tier,) = deployment.get("/topology").json()["router"]["tiers"]
        engines = deployment.get("/topology").json()["engines"]
        assert tier["engines"] == sorted(engine["name"] for engine in engines)
        assert tier["keys"] > 0
        assert "pdkv_refused_tier_events_total 0.0" in deployment.get("/metrics").text


@pytest.mark.parametrize(
    ("topology", "blocks", "options"),
    [
        pytest.param("1P1D", "16-16", (), marks=pytest.mark.slow),
        ("2P2D", "16-32", ()),
        ("2P2D", "32-16", LAYERWISE),
        ("1P1D", "16-16", (*LAYERWISE, "tokens_per_value=16")),
    ],
)
def test_tokens_over_files(
    workload: Workload, urls: Callable[[str], str], topology: str, blocks: str, options: Sequence[str]
) -> None:
    """F8, F9, F10."""
    flags = over("store", f"url={urls('file')}", *options)
    check_both_passes(workload, [*TOPOLOGIES[topology], *BLOCK_SIZES[blocks], *CHUNKED, *flags])


@pytest.mark.parametrize(
    ("kind", "topology"),
    [("redis", "2P2D"), *(pytest.param(kind, "1P1D", marks=pytest.mark.slow) for kind in SERVERS)],
)
def test_tokens_over_servers(workload: Workload, urls: Callable[[str], str], kind: str, topology: str) -> None:
    """F22: real servers, several units per value."""
    check_both_passes(workload, [*TOPOLOGIES[topology], *CHUNKED, *over("store", f"url={urls(kind)}")])


@pytest.mark.parametrize("codec", ["int8", "raw"])
def test_usage_says_what_a_codec_may_have_changed(workload: Workload, urls: Callable[[str], str], codec: str) -> None:
    """All of a prompt: it is handed over through the store. Over exact KV nothing is said."""
    prompt = max((e.prompt for e in workload.expected), key=len)
    store = over("store", f"url={urls('file')}", f"codec={codec}", PATIENT)
    with deployed(workload, *TOPOLOGIES["1P1D"], *store) as deployment:
        answers = [deployment.complete(prompt, max_tokens=4, temperature=0).json() for _ in range(2)]
        books = settled_books(deployment, lambda now: now.total("decode") >= 2 * len(prompt))
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert [d.get("lossy_tokens") for d in details] == ([len(prompt)] * 2 if codec == "int8" else [None] * 2)
    assert [d["cached_tokens"] > 0 for d in details] == [False, True]
    assert books.sources("decode")["computed"] == 0


@pytest.mark.slow  # a row of the matrix has them in every run
def test_tokens_over_tiers(workload: Workload, urls: Callable[[str], str]) -> None:
    tiers = over("store", f"url=memory://tier,{urls('file')}", "capacity=64MiB")
    check_both_passes(workload, [*TOPOLOGIES["1P1D"], *tiers])


@pytest.mark.slow  # like tiers
def test_tokens_over_shared_storage(workload: Workload, tmp_path: Path) -> None:
    storage = over("shared_storage", f"path={tmp_path}/kv", "capacity=64MiB")
    check_both_passes(workload, [*TOPOLOGIES["2P2D"], *storage])


def test_preempted_requests_say_the_right_tokens(workload: Workload, urls: Callable[[str], str]) -> None:
    """F9, F12."""
    flags = [*TOPOLOGIES["1P1D"], *PREEMPTING, *over("store", f"url={urls('file')}")]
    with deployed(workload, *flags) as deployment:
        run_until_preempted(deployment, workload)


def test_flipped_bits_in_redis_change_no_token(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack 2: what one deployment has saved, signed, is damaged before the next one reads it."""
    import redis

    monkeypatch.setenv("PDKV_STORE_SIGN_KEY", "a secret of the test's own")
    with redis_server() as url:
        flags = [*TOPOLOGIES["1P1D"], *over("store", f"url={url}", "sign=true", PATIENT)]
        with deployed(workload, *flags) as deployment:
            run_all(deployment, workload)
        with redis.Redis(unix_socket_path=url.removeprefix("unix://")) as client:
            keys = list(client.scan_iter())
            for key in keys:
                middle = client.strlen(key) // 2 | 3  # an exponent's bit
                client.setrange(key, middle, bytes([client.getrange(key, middle, middle)[0] ^ 0x40]))
            client.config_set("min-replicas-to-write", 1)  # nobody can put a right value in a damaged one's place
        with deployed(workload, *flags) as deployment:
            check_replies(complete_all(deployment, workload.bodies), workload.expected)
            books = settled_books(deployment, lambda now: now.total("prefill") >= workload.num_prompt_tokens)
    assert keys
    assert books.of("kv_damaged_values", "prefill") > 0
    assert books.sources("prefill")["store"] == 0, "not one of them was taken"
    assert "secret of the test" not in deployment.log


# --- what is found ------------------------------------------------------------------------------------------------


def test_the_next_turn_finds_what_decode_has_generated(workload: Workload, urls: Callable[[str], str]) -> None:
    flags = [*TOPOLOGIES["1P1D"], *over("store", f"url={urls('file')}", "min_hit_tokens=16", PATIENT)]
    prompt = workload.expected[0].prompt[:100]
    with deployed(workload, *flags) as deployment:
        output, _ = complete_one(deployment, prompt=prompt, max_tokens=160)
        turn = [*prompt, *output, *workload.expected[1].prompt, 7, 8, 9]
        _, books = complete_one(deployment, prompt=turn, max_tokens=4)
    assert books.sources("prefill")["local_hit"] == 96
    assert books.sources("prefill")["store"] == 256 - 96  # whole values of 259 tokens, the last one not cached
    check_decode_computed_nothing(books)


def test_another_prefill_engine_finds_it_but_not_with_another_salt(
    workload: Workload, urls: Callable[[str], str]
) -> None:
    """F8, F23."""
    store = over("store", f"url={urls('file')}", PATIENT)
    flags = ["--prefill", "2", "--decode", "1", "--policy", "round_robin", *store]
    prompt = workload.expected[2].prompt[:300]
    with deployed(workload, *flags) as deployment:
        output, first = complete_one(deployment, prompt=prompt, max_tokens=4)
        again, second = complete_one(deployment, prompt=prompt, max_tokens=4)
        apart, salted = complete_one(deployment, prompt=prompt, max_tokens=4, cache_salt="tenant")
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

    def run() -> dict[str, int]:
        with deployed(workload, *flags) as deployment:
            check_replies(complete_all(deployment, bodies), whole)
            books = settled_books(deployment, lambda now: True)
        check_decode_computed_nothing(books)
        return {**books.sources("prefill"), "damaged": books.of("kv_damaged_values", "prefill")}

    # A repeated prompt is found in the store or, if it comes late enough, in the engine's own cache.
    total = sum(len(e.prompt) for e in whole)
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


def line_of_prefill(deployment: Running, text: str) -> int:
    """Which line of the log prefill-0 says it in first."""

    def found() -> list[int]:
        return [i + 1 for i, line in enumerate(deployment.lines) if text in line and "prefill-0" in line]

    return int(wait_until_true(found, text)[0])


def test_a_store_that_is_down_at_the_start_is_said_at_once_until_it_is_up(workload: Workload) -> None:
    """Before weights are loaded, and in /topology and /health without any request."""
    with RedisServer() as server:
        server.send(signal.SIGKILL)
        flags = [*TOPOLOGIES["1P1D"], *over("store", f"url={server.url}", "lookup_timeout_s=0.2")]
        with deployed(workload, *flags) as deployment:
            assert line_of_prefill(deployment, "until it can be reached, prompts are computed instead") < (
                line_of_prefill(deployment, "loading weights")
            )

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


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_does_not_answer_costs_hits_and_nothing_else(workload: Workload, number: signal.Signals) -> None:
    """F7, F13: its hand-offs are computed by decode, loudly, within the deadlines."""
    short = workload.expected[-6:]
    bodies = [{"prompt": e.prompt, "max_tokens": len(e.output), "ignore_eos": True, "temperature": 0} for e in short]
    deadlines = ("lookup_timeout_s=0.2", "transfer_timeout_s=0.5", "operation_timeout_s=0.5", "connect_timeout_s=0.5")
    with RedisServer() as server:
        flags = [*TOPOLOGIES["1P1D"], *over("store", f"url={server.url}", *deadlines)]
        with deployed(workload, *flags) as deployment:
            check_replies(complete_all(deployment, bodies), short)
            server.send(number)
            changed = [{**body, "cache_salt": "other"} for body in bodies]
            check_replies(complete_all(deployment, changed), short)
            settled_books(deployment, lambda now: now.of("kv_load_failures", "decode") > 0)
            if number == signal.SIGSTOP:
                server.send(signal.SIGCONT)
            else:
                server.restart()
            salts = map(str, itertools.count())

            def load() -> int:
                before, salt = read_books(deployment), next(salts)
                check_replies(complete_all(deployment, [{**body, "cache_salt": salt} for body in bodies]), short)
                return (settled_books(deployment, lambda now: True) - before).sources("decode")["remote"]

            wait_until_true(load, "loads again: the first ones may meet a connection that is still broken")
