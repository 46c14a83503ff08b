"""Every value of a prompt is stored, however short its answer and however few bytes may be on their way; a server that
hangs costs neither requests nor, for long, their rate.
"""

import pytest
from deployments import Running
from equality import Workload, deployed
from nixl_rig import needs_nixl
from serving_checks import REQUEST_BOUND_S, complete_all
from store_servers import RedisServer
from traffic import wait_until_true

NUM_TOKENS = 512
NUM_VALUES = NUM_TOKENS // 64
PAIR = ("--prefill", "1", "--decode", "1")


def stored(server: RedisServer) -> int:
    """Values that are found by content."""
    import redis

    with redis.Redis(unix_socket_path=server.url.removeprefix("unix://")) as client:
        return len(client.keys("pdkv:*"))


def complete(deployment: Running, number: int, max_tokens: int) -> None:
    """The answer to a prompt of its own."""
    prompt = [(number * 7 + i * i) % 90 + 3 for i in range(NUM_TOKENS + 5)]
    [reply] = complete_all(deployment, [{"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}])
    assert len(reply["choices"][0]["token_ids"]) == max_tokens


BOUND = ("--connector-config", "store.max_save_bytes=1")
"""Of one value."""


def check_every_value_is_stored(server: RedisServer, deployment: Running) -> None:
    """Of prompts with answers of several lengths."""
    for number, length in enumerate((1, 2, 40), 1):
        complete(deployment, number, length)
        wait_until_true(lambda: stored(server) >= number * NUM_VALUES, f"an answer of {length} tokens")  # noqa: B023


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--prefill", "0", "--decode", "1"), id="aggregated", marks=pytest.mark.slow),
        pytest.param((*PAIR, "--connector", "p2p"), id="p2p"),
        pytest.param((*PAIR, "--connector", "nixl"), id="nixl", marks=[needs_nixl, pytest.mark.slow]),
        pytest.param(
            (*PAIR, "--connector", "nixl", "--connector-config", "mode=push"),
            id="nixl-push", marks=[needs_nixl, pytest.mark.slow],
        ),
    ],
)  # fmt: skip
def test_every_value_is_stored_whatever_the_length_of_the_answer(workload: Workload, flags: tuple[str, ...]) -> None:
    """F56."""
    with RedisServer() as server, deployed(workload, *flags, "--kv-store", server.url, *BOUND) as deployment:
        check_every_value_is_stored(server, deployment)


@pytest.mark.parametrize("connector", [pytest.param("store", marks=pytest.mark.slow), "shared_memory"])
def test_a_server_that_hangs_costs_nothing_for_long(workload: Workload, connector: str) -> None:
    """F55, F56: a request that waited for it as long as a call may take would not be answered in time."""
    with RedisServer() as server:
        deadline = f"operation_timeout_s={REQUEST_BOUND_S + 60}"
        tiers = ("--connector-config", f"url={server.url}", deadline) if connector == "store" else (
            "--kv-host-memory", "64MiB", "--kv-store", f"{server.url}?{deadline}", *BOUND
        )  # fmt: skip
        with deployed(workload, *PAIR, "--connector", connector, *tiers) as deployment:
            check_every_value_is_stored(server, deployment)
            with server.stopped():
                for number in range(4, 16):
                    complete(deployment, number, 2)
            check_pools(deployment)


def check_pools(deployment: Running) -> None:
    """No block is held."""
    for engine in deployment.get("/topology").json()["engines"]:
        assert not engine.get("blocks", {}).get("quarantined", 0), engine
