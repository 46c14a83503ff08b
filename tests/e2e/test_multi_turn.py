"""Turns of a conversation over each connector: what any engine has of it is read, not computed again.

An engine is killed between two turns, and then the two change roles.
"""

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from deployments import Running, launches
from serving_checks import Books, complete_all, read_books, serve_directory, settled_books
from traffic import wait_for_engines

from pdkv import LLM, SamplingParams

BLOCK = 16
NUM_ANSWER = 60
QUESTIONS = [random.Random(f"question {i}").choices(range(2, 258), k=n) for i, n in enumerate((120, 30, 45, 20, 25))]
SMALL_VALUES = (f"tokens_per_value={BLOCK}", f"min_hit_tokens={BLOCK}", "lookup_timeout_s=20")
SMALL_TIER_VALUES = tuple(f"store.{option}" for option in SMALL_VALUES)
OWN_STORE = ("--kv-store", "memory://?capacity=64MiB")
"""Of each process: what others have computed is not found there, only lent."""
CONNECTORS = {
    "shared_memory": ("--connector", "shared_memory", "--connector-config", f"min_hit_tokens={BLOCK}"),
    "nixl": ("--connector", "nixl"),
    "nixl push": ("--connector", "nixl", "--connector-config", "mode=push"),
    "p2p concurrent": ("--connector", "p2p", "--order", "concurrent"),
    "p2p": ("--connector", "p2p", "--order", "needs_peer_first"),
    "store": ("--connector", "store", "--connector-config", "url=file://{directory}/kv", *SMALL_VALUES),
    "nixl, own stores": ("--connector", "nixl", *OWN_STORE),
    "nixl push, own stores": ("--connector", "nixl", *OWN_STORE, "--connector-config", "mode=push"),
    "nixl, host memory": ("--connector", "nixl", "--kv-host-memory", "64MiB", "--connector-config", *SMALL_TIER_VALUES),
}
SLOW = ("p2p concurrent", "nixl", "nixl, host memory", "nixl push", "nixl push, own stores", "p2p", "store")


class Turn(NamedTuple):
    """One turn, and what an engine alone answers."""

    prompt: list[int]
    answer: list[int]
    num_new: int  # tokens that no engine can have


@pytest.fixture(scope="module")
def served(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serve_directory(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def turns(served: Path) -> list[Turn]:
    """The conversation with one aggregated engine."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True)
    found: list[Turn] = []
    history: list[int] = []
    with LLM(served, threads=1, kv_cache_memory=8 << 20) as llm:
        for question in QUESTIONS:
            history = [*history, *question]
            (output,) = llm.generate([history], params, use_tqdm=False)
            answer = list(output.outputs[0].token_ids)
            found.append(Turn(history, answer, len(question)))
            history = [*history, *answer]
    return found


def take(deployment: Running, turn: Turn) -> int:
    """A turn is answered as by one engine; how many of its prompt's tokens were computed."""
    body = {"prompt": turn.prompt, "max_tokens": NUM_ANSWER, "ignore_eos": True, "temperature": 0}
    [reply] = complete_all(deployment, [body])
    assert reply["choices"][0]["token_ids"] == turn.answer
    usage: dict[str, Any] = reply["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def check_reused(deployment: Running, turn: Turn) -> None:
    """It computes what is new, and at most a block more."""
    before = read_books(deployment)
    num_computed = take(deployment, turn)
    after = read_books(deployment)
    if (after - before).num_late_loans:  # a lender without a processor was not waited for
        assert after.num_late_loans == 1, deployment.log
        return
    assert turn.num_new <= num_computed <= turn.num_new + BLOCK, (num_computed, turn.num_new, deployment.log)


def kill(deployment: Running, name: str) -> None:
    """kill -9 of an engine; returns when the next incarnation is ready."""
    pid = deployment.pids()[name]
    os.kill(pid, signal.SIGKILL)
    wait_for_engines(deployment, [pid])


def change_roles(deployment: Running, roles: Sequence[tuple[str, str]]) -> None:
    """As an operator does."""
    (socket,) = deployment.directory.glob("pdkv-*/admin.sock")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://admin", timeout=60) as client:
        for name, role in roles:
            reply = client.post(f"/admin/engines/{name}/role", json={"role": role})
            assert reply.status_code == 200, reply.text


def check_sums(books: Books, turn: Turn) -> None:
    """Each side counts the prompt once; what decode had, prefill read."""
    assert books.total("prefill") == books.total("decode") == len(turn.prompt), books
    assert books.sources("prefill")["store"] > 0 or books.num_late_loans, books
    assert books.sources("decode")["computed"] == 0, books


@pytest.mark.parametrize(
    "connector", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CONNECTORS]
)
def test_a_turn_computes_what_is_new(served: Path, turns: list[Turn], connector: str, tmp_path: Path) -> None:
    first, second, *rest = turns
    own = [flag.format(directory=tmp_path) for flag in CONNECTORS[connector]]
    with launches(served) as launch:
        deployment = launch("--prefill", "1", "--decode", "1", "--kv-reuse", "always", *own)
        assert take(deployment, first) == len(first.prompt)
        before = settled_books(deployment, lambda now: now.total("decode") == len(first.prompt))
        check_reused(deployment, second)
        check_sums(settled_books(deployment, lambda now: (now - before).total("decode") > 0) - before, second)
        kill(deployment, "prefill-0")
        check_reused(deployment, rest[0])
        change_roles(deployment, [("prefill-0", "any"), ("decode-0", "prefill"), ("prefill-0", "decode")])
        for turn in rest[1:]:
            check_reused(deployment, turn)
        books = read_books(deployment)
        assert books.of("kv_load_failures", "prefill") <= books.num_late_loans, deployment.log


@pytest.mark.parametrize("connector", ["nixl", pytest.param("shared_memory", marks=pytest.mark.slow)])
def test_a_turn_goes_to_its_kv(served: Path, turns: list[Turn], connector: str) -> None:
    """The decode engine that has most of it computes the rest, and so does its successor once it has a turn."""
    first, second, third, *rest = turns
    with launches(served) as launch:
        deployment = launch("--prefill", "1", "--decode", "1", "--local-turns", "always", *CONNECTORS[connector])
        take(deployment, first)
        before = settled_books(deployment, lambda now: now.total("decode") == len(first.prompt))
        check_reused(deployment, second)
        check_reused(deployment, third)
        books = settled_books(deployment, lambda now: now.total("decode") > before.total("decode")) - before
        assert books.total("prefill") == 0
        assert num_local_turns(deployment) == 2
        kill(deployment, "decode-0")
        take(deployment, rest[0])  # by measured times: here or by a hand-off
        num_before = num_local_turns(deployment)
        check_reused(deployment, rest[1])
        assert num_local_turns(deployment) == num_before + 1


def num_local_turns(deployment: Running) -> int:
    [line] = [x for x in deployment.get("/metrics").text.splitlines() if x.startswith("pdkv_local_turns_total ")]
    return int(float(line.split()[1]))
