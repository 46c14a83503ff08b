"""Clients that ask for much and never read it, leave in the middle of what they say, or reset their connections."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

NUM_CLIENTS = 12
_NUM_TOKENS = 800
_RECEIVE_BYTES = 2048  # so small a window that the router's own buffers fill
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


async def be_rude(url: str, seed: str, seconds: float) -> int:
    """All of them at once; they are gone after `seconds`. Returns how many were connected."""
    rng = random.Random(seed)
    kinds = [rng.choice(_KINDS) for _ in range(NUM_CLIENTS)]
    return sum(await asyncio.gather(*(_one(url, kind, f"{seed}/{i}", seconds) for i, kind in enumerate(kinds))))


async def _one(url: str, kind: Callable[[socket.socket, bytes, float], Awaitable[None]], salt: str, s: float) -> bool:
    address = urlsplit(url)
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        try:
            async with asyncio.timeout(s):
                await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
        except (OSError, TimeoutError):  # its router is being started
            return False
        with contextlib.suppress(OSError):
            await kind(client, _request(salt), s)
    return True


def _request(salt: str) -> bytes:
    body = {
        "model": "served", "prompt": "Much is asked for and nothing read. ", "max_tokens": _NUM_TOKENS, "n": 2,
        "ignore_eos": True, "stream": True, "logprobs": 5, "cache_salt": salt,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-pd-timeout-s: 10\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def _never_read(client: socket.socket, request: bytes, seconds: float) -> None:
    await asyncio.get_running_loop().sock_sendall(client, request)
    await asyncio.sleep(seconds)


async def _leave_in_the_middle(client: socket.socket, request: bytes, seconds: float) -> None:
    await asyncio.get_running_loop().sock_sendall(client, request[: -len(request) // 3])
    await asyncio.sleep(seconds)


async def _reset(client: socket.socket, request: bytes, seconds: float) -> None:
    """As soon as it is answered."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    await asyncio.get_running_loop().sock_sendall(client, request)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_recv(client, 1)


async def _half_closed(client: socket.socket, request: bytes, seconds: float) -> None:
    """It says that nothing more comes, and waits."""
    await asyncio.get_running_loop().sock_sendall(client, request)
    client.shutdown(socket.SHUT_WR)
    await asyncio.sleep(seconds)


_KINDS = (_never_read, _never_read, _leave_in_the_middle, _reset, _half_closed)
