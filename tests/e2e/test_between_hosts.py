"""Deployments of two hosts that are network namespaces: right tokens over TCP, and what a bad network does to them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from deployments import Running
from equality import Workload, check_decode_computed_nothing, check_replies, check_undisturbed, run_all
from hosts import Hosts, hosts_or_skip
from hosts.deployment import deployed_between
from nixl_rig import needs_nixl
from oracle import oracle
from serving_checks import complete_all, serve_directory, settled_books
from traffic import wait_until_true

LENGTHS = (600, 1, 257, 33)
NUM_OUTPUT = 6

P2P = ("--connector", "p2p", "--connector-config", "host={host}", "timeout_s=5")
NIXL = ("--connector", "nixl", "--connector-config", "progress_thread=true", "transfer_timeout_s=5")
CHUNKED = ("--max-num-batched-tokens", "96", "--max-num-seqs", "96")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def workloads(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Sequence[Workload]:
    """Different prompts for one model: no cache has anything of the next one's."""
    model_dir = hf_model("llama", initializer_range=0.2)
    model, path = oracle(model_dir), serve_directory(model_dir, tmp_path_factory.mktemp("llama"))

    def make(seed: int) -> Workload:
        prompts = [[2 + (n * 31 + 7 * i + seed * (i * i + 13)) % 380 for i in range(n)] for n in LENGTHS]
        return Workload(path, [model.expect(lambda p=prompt: p, NUM_OUTPUT) for prompt in prompts])  # type: ignore[misc]

    return [make(seed) for seed in range(5)]


def test_p2p(hosts: Hosts, workloads: Sequence[Workload]) -> None:
    """To a decode engine with two ranks; then in a network that cuts connections, and in one that loses everything."""
    with deployed_between(
        hosts, workloads[0].path, *CHUNKED, connector=P2P, prefill=("--take-over",), decode=("--tp", "2")
    ) as (launch, engine):
        check_tokens_and_cuts(hosts, launch, engine, workloads)
        hosts.wire.after(100_000, "lose")
        check_replies(complete_all(launch, workloads[3].bodies), workloads[3].expected)  # here, as long as it lasts
        hosts.wire.wait("lose")
        hosts.wire.mend()
        wait_until_true(lambda: serve(launch) == ["prefill-0", "decode-b"], "decode-b is used again", 20.0)
        before = hosts.wire.num_bytes()[0]
        check_replies(complete_all(launch, workloads[4].bodies), workloads[4].expected)
        assert hosts.wire.num_bytes()[0] - before > num_kv_bytes(workloads[4])
        settled_books(launch, lambda _: True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [("2", "1"), ("2", "2")], ids="-".join)
def test_p2p_from_two_ranks(hosts: Hosts, workloads: Sequence[Workload], ranks: tuple[str, str]) -> None:
    """To as many or fewer."""
    prefill, decode = ("--prefill-tp", ranks[0]), ("--tp", ranks[1])
    with deployed_between(
        hosts, workloads[0].path, *CHUNKED, connector=P2P, prefill=prefill, decode=decode
    ) as (launch, engine):  # fmt: skip
        check_tokens_and_cuts(hosts, launch, engine, workloads)


@pytest.mark.slow  # tests/connectors/test_between_hosts.py has these transports on a bad wire in every run
@needs_nixl
@pytest.mark.parametrize(("mode", "ranks"), [("pull", "2"), ("push", "1")])
def test_nixl(hosts: Hosts, workloads: Sequence[Workload], mode: str, ranks: str) -> None:
    """The same over UCX's TCP."""
    with deployed_between(
        hosts, workloads[0].path, *CHUNKED, connector=(*NIXL, f"mode={mode}"), decode=("--tp", ranks),
        environment={"UCX_TLS": "tcp,self"},
    ) as (launch, engine):  # fmt: skip
        check_tokens_and_cuts(hosts, launch, engine, workloads, crashes=True)


def check_tokens_and_cuts(
    hosts: Hosts, launch: Running, engine: Running, workloads: Sequence[Workload], *, crashes: bool = False
) -> None:
    """Decode computes no prompt token, and all KV goes over the wire. What is cut in the middle costs no request."""
    before = hosts.wire.num_bytes()[0]
    books = run_all(launch, workloads[0])
    check_decode_computed_nothing(books)
    check_undisturbed(books)
    assert hosts.wire.num_bytes()[0] - before > num_kv_bytes(workloads[0])
    pids = launch.pids()
    hosts.wire.after(num_kv_bytes(workloads[1]) // 2, "cut")
    check_replies(complete_all(launch, workloads[1].bodies), workloads[1].expected)
    hosts.wire.wait("cut")
    # An engine that has come back says at first nothing of what it has counted before.
    settled_books(launch, lambda now: "decode" in now.roles and serve(launch) == ["prefill-0", "decode-b"])
    assert crashes or launch.pids() == pids, f"{launch.log}\n{engine.log}"
    check_decode_computed_nothing(run_all(launch, workloads[2]))


def num_kv_bytes(workload: Workload) -> int:
    """Of the KV of all its prompts."""
    return workload.block_bytes * workload.num_prompt_tokens // 16


def serve(launch: Running) -> list[str]:
    """Engines that the router gives requests to."""
    return [engine["name"] for engine in launch.get("/topology").json()["engines"] if engine["serves"]]
