"""Hostile frames on the sockets of a deployment's engines: no process ends, memory is bounded, answers stay right."""

import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
import zmq
from deployments import Running, launches
from frame_fuzz import attack_door, attack_engine
from serving_checks import serve_directory
from small_models import make_hf_model
from traffic import wait_for_rest, wait_until_true

from pdkv.connector_kit.rig.sockets import listeners

MAX_GROWTH_BYTES = 64 << 20
"""What one process may take more than before."""

CONNECTORS: Mapping[str, tuple[str, ...]] = {
    "shared_memory": ("--connector", "shared_memory"),
    "p2p": ("--connector", "p2p"),
    "nixl": ("--connector", "nixl"),
}
SHORT = ("--kv-load-timeout-s", "3", "--lease-timeout-s", "5")
"""Leases of a router that said no goodbye end at their deadline."""

PROMPTS = [f"Frame {i} says what it likes, and nobody minds. " * (1 + i % 4) for i in range(8)]


def main(num_frames: int, seed: int) -> int:
    """So many frames to the engines of one deployment per connector. Returns 1 where something did not hold."""
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        work = Path(folder)
        model = serve_directory(make_hf_model(work / "model", "llama", "float32", initializer_range=0.2), work)
        for name, flags in CONNECTORS.items():
            try:
                with launches(model) as launch:
                    report = attack(launch("--prefill", "1", "--decode", "1", *SHORT, *flags), num_frames, seed)
            except AssertionError as error:
                num_failed += 1
                report = f"FAILED: {error}"
            print(f"{name}: {report}", flush=True)
    return 1 if num_failed else 0


def attack(deployment: Running, num_frames: int, seed: int) -> str:
    """Attack both engines; what was seen, in a line.

    Raises:
        AssertionError: a process ended or took too much memory, or an answer is another one than before.
    """
    doors = [door for pid in deployment.pids().values() for door in listeners(pid) if door.family == socket.AF_INET]
    answers = _answers(deployment)  # which makes links, with listeners of Gloo's that come and go
    pids = {**deployment.pids(), "router": deployment.child_pid("pd router")}
    before = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
    (run_dir,) = deployment.directory.glob("pdkv-*")
    with zmq.Context() as context:
        for index, name in enumerate(deployment.pids()):
            attack_engine(context, f"ipc://{run_dir / name}", num_frames // 2, seed + index)
    for index, door in enumerate(doors):
        assert isinstance(door.address, tuple)
        attack_door(door.address, num_frames // len(doors), seed + index)
    wait_for_rest(deployment)
    assert {**deployment.pids(), "router": deployment.child_pid("pd router")} == pids, deployment.log[-4000:]
    growth = {name: psutil.Process(pid).memory_info().rss - before[name] for name, pid in pids.items()}
    assert max(growth.values()) <= MAX_GROWTH_BYTES, growth
    wait_until_true(lambda: deployment.get("/health").status_code == 200, "health")
    assert _answers(deployment) == answers
    return f"{num_frames} frames, {len(doors)} doors with as many greetings, no process ended, bytes taken {growth}"


def _answers(deployment: Running) -> list[list[int]]:
    """What the deployment says to the prompts, greedily."""
    replies = [deployment.complete(prompt, max_tokens=16, ignore_eos=True, return_token_ids=True) for prompt in PROMPTS]
    assert [reply.status_code for reply in replies] == [200] * len(PROMPTS), replies[0].text
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), 0))
