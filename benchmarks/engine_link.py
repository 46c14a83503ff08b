"""The least client of one engine: Submits over its socket, without a router."""

import secrets
import time
from typing import NamedTuple

import zmq

from pdkv.sampling.params import SamplingParams
from pdkv.wire.engine_server import configure_socket
from pdkv.wire.frames import decode_frame, encode_message, encode_raw_frame
from pdkv.wire.messages import PROTOCOL, Failed, Finished, Hello, Ready, RouterToEngine, Submit, Tokens

TIMEOUT_MS = 30_000


class Timing(NamedTuple):
    """Seconds from before a request was encoded."""

    first_token: float
    end: float


class EngineLink:
    """One more router of the engine, as the engine sees it. A context manager."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_socket(self._socket)
        self._socket.connect(endpoint)
        self._next = 0
        self._send(Hello(router_id=f"link-{secrets.token_hex(4)}", epoch=secrets.token_hex(4), protocol=PROTOCOL))
        while not any(isinstance(message, Ready) for message in self._receive()):
            pass

    def complete(self, prompt: list[int], max_tokens: int) -> Timing:
        """Run a greedy request to its length. Raises RuntimeError where the engine fails it."""
        start, first = time.perf_counter(), 0.0
        name = secrets.token_hex(12)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
        self._send(Submit(request_id=name, transfer_id=name, attempt=0, prompt_token_ids=prompt, params=params))
        while True:
            for message in self._receive():
                match message:
                    case Tokens(request_id=request_id) if request_id == name:
                        first = first or time.perf_counter()
                    case Finished(request_id=request_id) if request_id == name:
                        return Timing(first - start, time.perf_counter() - start)
                    case Failed():
                        raise RuntimeError(message.message)

    def _send(self, message: RouterToEngine) -> None:
        self._socket.send(encode_raw_frame(self._next, [encode_message(message)]))
        self._next += 1

    def _receive(self) -> list[object]:
        if not self._socket.poll(TIMEOUT_MS):
            raise RuntimeError("the engine does not answer")
        return list(decode_frame(self._socket.recv()).messages)

    def __enter__(self) -> "EngineLink":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()
