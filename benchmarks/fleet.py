"""What a router pays for a fleet's size, over engines that compute nothing: a decision, an engine's start, its death.

CPU time of one thread, each case in a process of its own. Half of the engines run prompts. Each holds a prompt's first
16 blocks of 64, and 20 of them all of it. The fakes encode what they are sent; no socket is involved.

    python -m benchmarks.run fleet
    python -m cProfile -s tottime -m benchmarks.fleet decision 1000 pairs

Its memory is that of a process with a dispatcher and a connection to each engine, once each engine has been told of all
others; there, the fakes are sockets of another process.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import zmq

from benchmarks.report import Claim, Context
from benchmarks.router_alone import own_memory_kib
from pdkv.host.sockets import raise_open_files_limit
from pdkv.router.engines.engine_client import EngineClient, EngineListener, make_context
from pdkv.router.generations.dispatch import Dispatcher, GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.wire.frames import encode_message, encode_raw_frame
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import PROTOCOL, BlockStored, CacheCleared, KVEvents, Ready, RouterToEngine

NUM_BLOCKS, NUM_COMMON, NUM_WHOLE = 64, 16, 20
DECISION_LIMITS_US = {10: 150.0, 1_000: 300.0, 10_000: 500.0}
HOLD_LIMIT_MS = 20.0
MAX_PAIRS = 250_000
STREAMS, DEAD_BLOCKS = 512, 1 << 20
MEMORY_LIMITS_MIB = {200: 150.0, 1_000: 400.0}
OWN_BLOCKS = 128
JOIN_LIMIT_MIB, KEY_LIMIT_BYTES = 24.0, 300.0
PAIRS = ("plain", "pairs", "failing")  # of engines: none used yet, all used, one of them failing


class Fake:
    """An engine that takes messages and says nothing: what is sent to it is encoded, as for a socket."""

    sent: ClassVar[deque[tuple[str, int]]] = deque(maxlen=1 << 20)  # (engine, bytes) of the messages to all of them

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.num_dropped = 0
        self.listener: EngineListener | None = None

    def card(self, epoch: str = "e") -> EngineCard:
        layout = KVLayout(num_layers=8, num_kv_heads=8, head_size=64, block_size=16, dtype="bfloat16", dtype_bytes=2)
        return EngineCard(
            engine=self.name, role=self.role, epoch=epoch, pid=1, connector="nixl", kind="pull",
            content_addressed=False, orders=["prefill_first"], model="m", layout=layout, hash_block_size=16,
            num_blocks=DEAD_BLOCKS, max_model_len=1 << 17, max_num_seqs=1 << 10, rank_blobs=[bytes(1024)],
            wire_versions={"nixl": 1}, lends=True, peer_changes=True,
        )  # fmt: skip

    def connect(self, listener: EngineListener) -> None:
        self.listener = listener

    def send(self, message: RouterToEngine) -> None:
        Fake.sent.append((self.name, len(encode_message(message))))

    def close(self) -> None:
        self.listener = None


def make_request(first: int = 0, num_blocks: int = NUM_BLOCKS) -> GenerateRequest:
    tokens = [first, *range(1, num_blocks * 16), 7]
    return GenerateRequest(prompt_token_ids=tokens, params=SamplingParams(max_tokens=64, seed=1), timeout_s=1e9)


def make_fleet(num_engines: int) -> tuple[Dispatcher, list[Fake]]:
    """A dispatcher whose engines are all ready, and hold what they are said to."""
    dispatcher = Dispatcher(await_all=False)
    fakes = [Fake(f"{role}-{i}", role) for i in range(num_engines // 2) for role in ("prefill", "decode")]
    peers, dispatcher.listener._send_peers = dispatcher.listener._send_peers, lambda *_: None  # type: ignore[method-assign]
    for fake in fakes:
        dispatcher.add_backend(fake, fake.role)
    dispatcher.connect()
    keys = dispatcher_keys(dispatcher, fakes, make_request())
    for i, fake in enumerate(fakes):
        held = keys if i < NUM_WHOLE else keys[:NUM_COMMON]
        dispatcher.listener.engine_messages(fake.name, [KVEvents(0, [CacheCleared(), BlockStored(list(held), None)])])
    dispatcher.listener._send_peers = peers  # type: ignore[method-assign]
    if news := dispatcher.driver.news:  # all are told of each other, once
        for name in list(news.behind):
            news.take(name)
    return dispatcher, fakes


def dispatcher_keys(dispatcher: Dispatcher, fakes: list[Fake], request: GenerateRequest) -> list[bytes]:
    for fake in fakes:
        if not dispatcher.fleet.is_ready(fake.name):
            dispatcher.listener.engine_up(fake.name, fake.card())
    return list(dispatcher.holdings.of(request, 0.0).keys)


async def decision(num_engines: int, case: str) -> float:
    """CPU seconds from a request to its Submit, and to its end by an abort; its keys are known."""
    dispatcher, fakes = make_fleet(num_engines)
    now = dispatcher._clock()
    prefills, decodes = ([f.name for f in fakes if f.role == role] for role in ("prefill", "decode"))
    if case == "pairs":
        num_each = min(len(prefills), MAX_PAIRS // len(decodes))
        for prefill in prefills[:num_each]:
            for decode in decodes:
                dispatcher.fleet.pairs.loaded(prefill, decode, True, now)
    if case == "failing":
        dispatcher.fleet.pairs.loaded(prefills[0], decodes[0], False, now)
    requests = [make_request(i % 2) for i in range(64)]
    for request in requests:
        dispatcher.holdings.of(request, now)
    await asyncio.sleep(0)

    def once(request: GenerateRequest) -> None:
        assert dispatcher.has_room()
        dispatcher.start(request).abort()

    for request in requests[:8]:
        once(request)
    times = []
    for request in requests:
        start = time.thread_time()
        once(request)
        times.append(time.thread_time() - start)
    dispatcher.close()
    return median(times)


async def longest_hold(work: Callable[[], object]) -> float:
    """The longest CPU time between two turns of the event loop, from `work` on until nothing is left to do."""
    loop, worst = asyncio.get_running_loop(), 0.0
    loop.call_soon(work)
    for _ in range(400):  # turns with nothing to do end it sooner than any deadline would
        start = time.thread_time()
        await asyncio.sleep(0)
        worst = max(worst, time.thread_time() - start)
    return worst


async def start(num_engines: int, case: str) -> float:
    """An engine's restart."""
    dispatcher, fakes = make_fleet(num_engines)
    dispatcher.listener.engine_down(fakes[0].name, "a benchmark")
    await longest_hold(lambda: None)
    seconds = await longest_hold(partial(dispatcher.listener.engine_up, fakes[0].name, fakes[0].card("f")))
    dispatcher.close()
    return seconds


async def death(num_engines: int, case: str) -> float:
    """The death of an engine with STREAMS prompts of 4,096 tokens and DEAD_BLOCKS blocks."""
    dispatcher, fakes = make_fleet(num_engines)
    for i in range(STREAMS):
        dispatcher.start_on(fakes[0].name, make_request(i + 100, 256))
    for number in range(1, DEAD_BLOCKS // 4096):
        keys = [(number * 4096 + i).to_bytes(16) for i in range(4096)]
        dispatcher.listener.engine_messages(fakes[0].name, [KVEvents(number, [BlockStored(keys, None)])])
        while dispatcher.index.has_work:
            dispatcher.index.work()
    await longest_hold(lambda: None)
    seconds = await longest_hold(partial(dispatcher.listener.engine_down, fakes[0].name, "a benchmark"))
    dispatcher.close()
    return seconds


async def join(num_engines: int, case: str) -> dict[str, float]:
    """What the start of one more engine costs until all are told: messages, bytes, and CPU."""
    dispatcher, _ = make_fleet(num_engines)
    await asyncio.sleep(0)
    Fake.sent.clear()
    new = Fake("prefill-new", "prefill")
    began = time.thread_time()
    dispatcher.add_backend(new, new.role)
    dispatcher.listener.engine_up(new.name, new.card())
    while dispatcher.driver.news.behind:
        await asyncio.sleep(0.01)
    seconds = time.thread_time() - began
    own = sum(size for name, size in Fake.sent if name == new.name)
    total = sum(size for _, size in Fake.sent)
    dispatcher.close()
    return {"calls": len(Fake.sent), "own_bytes": own, "bytes": total, "cpu_ms": 1e3 * seconds}


async def index(num_engines: int, case: str) -> dict[str, float]:
    """MiB of an index of OWN_BLOCKS blocks that each engine alone has, and CPU microseconds for each of them."""
    dispatcher, fakes = make_fleet(num_engines)
    before, began, number = own_memory_kib(os.getpid()), time.thread_time(), 1 << 32
    for fake in fakes:
        keys = [(number + i).to_bytes(16) for i in range(OWN_BLOCKS)]
        number += OWN_BLOCKS
        dispatcher.listener.engine_messages(fake.name, [KVEvents(1, [BlockStored(keys, None)])])
        while dispatcher.index.has_work:
            dispatcher.index.work()
    num_keys, seconds = num_engines * OWN_BLOCKS, time.thread_time() - began
    num_bytes = 1024 * (own_memory_kib(os.getpid()) - before)
    dispatcher.close()
    return {"mib": num_bytes / 2**20, "bytes_a_key": num_bytes / num_keys, "us_a_key": 1e6 * seconds / num_keys}


async def memory(num_engines: int, case: str) -> float:
    """MiB of this process that are its own, with so many engines over sockets."""
    names = [f"{role}-{i}" for i in range(num_engines // 2) for role in ("prefill", "decode")]
    with tempfile.TemporaryDirectory() as folder:
        others = multiprocessing.get_context("spawn").Process(target=_answer, args=(folder, names), daemon=True)
        others.start()
        raise_open_files_limit()
        dispatcher, context = Dispatcher(await_all=False), make_context()
        for name in names:
            client = EngineClient(name, f"ipc://{folder}/{name}", router_id="r", context=context)
            dispatcher.add_backend(client, name.partition("-")[0])
        dispatcher.connect()
        async with asyncio.timeout(180):
            while dispatcher.driver.news.behind or len(dispatcher.fleet.cards()) < num_engines:
                await asyncio.sleep(0.1)
        num_mib = own_memory_kib(os.getpid()) / 1024
        dispatcher.close()
        others.kill()
        others.join()
    return num_mib


def _answer(folder: str, names: list[str]) -> None:
    """The engines' sockets: each answers the first frame of the router, and drops the others."""
    raise_open_files_limit()
    context, poller, greeted = make_context(), zmq.Poller(), set[object]()
    cards = {}
    for name in names:
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{folder}/{name}")
        poller.register(socket, zmq.POLLIN)
        cards[socket] = Fake(name, name.partition("-")[0]).card()
    while True:
        for socket, _ in poller.poll():
            router = socket.recv_multipart()[0]
            if socket not in greeted:
                greeted.add(socket)
                ready = encode_message(Ready(cards[socket], PROTOCOL))
                socket.send_multipart([router, encode_raw_frame(0, [ready], begun=1, handled=1)])


CASES: dict[str, Any] = {
    "join": join, "index": index, "decision": decision, "start": start, "death": death, "memory": memory,
}  # fmt: skip


def run(context: Context) -> list[Claim]:
    """Decisions at each size of a fleet, and the longest holds of the event loop by a start and by a death."""
    sizes = {10: DECISION_LIMITS_US[10]} if context.quick else DECISION_LIMITS_US
    claims = [
        Claim(f"decision, {n} engines, {case}, us", 1e6 * _child("decision", n, case), limit, "lower", {})
        for n, limit in sizes.items()
        for case in PAIRS
    ]
    for what in ("start", "death"):
        hold_ms = 1e3 * _child(what, 10 if context.quick else 1_000, PAIRS[0])
        claims.append(Claim(f"longest hold by an engine's {what}, ms", hold_ms, HOLD_LIMIT_MS, "lower", {}))
    for n, limit in [] if context.quick else MEMORY_LIMITS_MIB.items():
        claims.append(Claim(f"memory, {n} engines, MiB", _child("memory", n, PAIRS[0]), limit, "lower", {}))
    return claims


def run_large(context: Context) -> list[Claim]:
    """What one more engine, each block that an engine has, and a decision cost among 10,000 engines."""
    n = 10 if context.quick else 10_000
    joined, held, decision_s = (_child(what, n, PAIRS[0]) for what in ("join", "index", "decision"))
    return [
        Claim("one more engine, MiB sent", joined["bytes"] / 2**20, JOIN_LIMIT_MIB, "lower", joined),
        Claim("one more engine, messages", joined["calls"], n + 1, "lower", {}),
        Claim("index, bytes a block of one engine", held["bytes_a_key"], KEY_LIMIT_BYTES, "lower", held),
        Claim("decisions a second, with their requests' ends", 1 / decision_s, 2000.0, "higher", {}),
    ]


def _child(what: str, num_engines: int, case: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.fleet", what, str(num_engines), case]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("engines", type=int)
    parser.add_argument("case", nargs="?", default="plain", choices=PAIRS)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(CASES[args.what](args.engines, args.case))))


if __name__ == "__main__":
    main()
