"""A thousand hostile frames on either end of the wire: nothing ends, all is counted, and what is in order is right.

`python -m soak --frames 100000` sends more of them, to the processes of a deployment.
"""

import asyncio
import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from frame_fuzz import CARD, TO_ENGINE, TO_ROUTER, Mutator, attack_engine
from wire_rig import TIMEOUT_S, Context, Frame, encode_frame, raw_peer

from pdkv.engine.core import EngineCore
from pdkv.errors import MalformedMessage
from pdkv.launch.engine_process import Notifier, serve
from pdkv.router.engines import engine_client
from pdkv.router.engines.engine_client import EngineClient
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.testing.engine import make_core, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.engine_server import EngineServer
from pdkv.wire.frames import BadMessage, decode_frame
from pdkv.wire.messages import PROTOCOL, Finished, Hello, Tokens

NUM_FRAMES = 1000
PROMPT = list(range(100, 110))


@contextmanager
def serving(core: EngineCore, server: EngineServer) -> Iterator[None]:
    """The engine's own loop in a thread."""
    notifier, errors = Notifier(), []

    def loop() -> None:
        try:
            serve(core, server, notifier)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        notifier.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert errors == []


def test_mutations_are_many_and_not_all_of_one_kind() -> None:
    mutator, kinds = Mutator(TO_ENGINE, 1), {"frame": 0, "good": 0, "bad": 0}
    for number in range(2000):
        try:
            messages = decode_frame(mutator.frame(number)).messages
        except MalformedMessage:
            kinds["frame"] += 1
            continue
        num_bad = sum(isinstance(message, BadMessage) for message in messages)
        kinds["bad"] += num_bad
        kinds["good"] += len(messages) - num_bad
    assert min(kinds.values()) > 200, kinds


@pytest.mark.parametrize("fabric", [None, "frame-fuzz"], ids=["no connector", "memory"])
def test_an_engine_stands_hostile_frames_and_serves_on(
    tmp_path: Path, context: Context, caplog: pytest.LogCaptureFixture, fabric: str | None
) -> None:
    core = make_core(num_blocks=64, options=None if fabric is None else {"fabric": fabric})
    server = EngineServer(f"ipc://{tmp_path}/e", core.card)
    with caplog.at_level(logging.CRITICAL):
        try:
            with serving(core, server):
                attack_engine(context, server.endpoint, NUM_FRAMES, seed=5 if fabric is None else 6)
                peer = raw_peer(context, server.endpoint)
                peer.send(encode_frame(Frame(0, [Hello("good", "1", PROTOCOL)])))
                peer.send(encode_frame(Frame(1, [submit(PROMPT, request_id="good", max_tokens=5)])))
                output: list[int] = []
                finished = False
                while not finished:
                    for message in decode_frame(peer.recv()).messages:
                        if isinstance(message, Tokens) and message.request_id == "good":
                            output += message.token_ids
                        finished = finished or isinstance(message, Finished)
                peer.close()
            assert output == expected_tokens(PROMPT, 5)
            assert server.num_dropped > NUM_FRAMES // 10
            core.scheduler.kv.pool.check_integrity()
        finally:
            server.close()
            core.shutdown()


def test_a_router_stands_an_engine_that_sends_hostile_frames(
    tmp_path: Path, context: Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses the connection again and again, and takes the engine back every time."""
    monkeypatch.setattr(engine_client, "RECONNECT_S", 0.0)
    engine = context.socket(zmq.ROUTER)
    engine.rcvtimeo = int(TIMEOUT_S * 1000)
    engine.bind(f"ipc://{tmp_path}/e")
    mutator = Mutator(TO_ROUTER, 7)

    def attack() -> int:
        """Answer each Hello with Ready and hostile frames, until they are all sent; returns the connections."""
        num_connections = sent = 0
        while sent < NUM_FRAMES:
            identity, data = engine.recv_multipart()
            if not any(isinstance(m, Hello) for m in decode_frame(data).messages):
                continue
            num_connections += 1
            engine.send_multipart((identity, encode_frame(Frame(0, [TO_ROUTER[-3]]))))
            whole = num_connections % 4 != 0
            for number in range(1, 50 if whole else 4):
                engine.send_multipart((identity, mutator.frame(number, whole=whole)))
                sent += 1
            engine.send_multipart((identity, b"the end"))
        return num_connections

    async def main() -> int:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))
        dispatcher = Dispatcher()
        client = EngineClient(CARD.engine, f"ipc://{tmp_path}/e", router_id="r", context=context)
        dispatcher.add_backend(client, "any")
        dispatcher.connect()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                num_connections = await asyncio.to_thread(attack)
        finally:
            dispatcher.close()
        assert errors == []
        assert client.num_dropped + dispatcher.counters.dropped_messages > NUM_FRAMES // 10
        return num_connections

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with caplog.at_level(logging.CRITICAL):
        assert asyncio.run(main()) > 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    engine.close(linger=0)
