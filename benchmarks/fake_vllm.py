"""A server that routers take for vLLM's or SGLang's and that computes nothing: prompts take their time, one after the
other, and their prefixes are kept until others need the room. Needs aiohttp.

POST /fault/error, /fault/reset, /fault/hang: so it treats requests from then on, while its /health stays well.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

BLOCK = 16  # tokens


class Cache:
    """Blocks of prompts' tokens by their prefixes, the least recently used one goes first."""

    def __init__(self, num_blocks: int) -> None:
        self._most, self._blocks = num_blocks, OrderedDict[int, None]()

    def take(self, tokens: list[Any]) -> tuple[int, list[dict[str, Any]]]:
        """Have a prompt. The number of its tokens that were there, and vLLM's events of what changed."""
        names, name = [0], 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            name = hash((name, *tokens[start : start + BLOCK]))
            names.append(name)
        num = next((i for i, name in enumerate(names[1:]) if name not in self._blocks), len(names) - 1)
        events = [_stored(tokens, i, pair) for i, pair in enumerate(pairwise(names)) if i >= num]
        self._blocks |= dict.fromkeys(names[1:])
        for name in reversed(names[1:]):
            self._blocks.move_to_end(name)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._most)]
        return num * BLOCK, events + ([{"type": "BlockRemoved", "block_hashes": gone}] if gone else [])


def _stored(tokens: list[Any], at: int, names: tuple[int, int]) -> dict[str, Any]:
    own = tokens[at * BLOCK : (at + 1) * BLOCK]
    event = {"type": "BlockStored", "block_hashes": [names[1]], "parent_block_hash": names[0] or None}
    return event | {"token_ids": own, "block_size": BLOCK, "lora_id": None}


class Fake:
    """One server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._cache, self._fault = options, Cache(options.cache // BLOCK), ""
        self._turn, self._num_events = asyncio.Lock(), 0
        self._counts = {"requests": 0, "prompt": 0, "cached": 0}
        self._socket = zmq.asyncio.Context().socket(zmq.PUB)
        if options.events:
            self._socket.bind(f"tcp://127.0.0.1:{options.events}")

    def app(self) -> web.Application:
        """The pages that it serves."""
        app = web.Application(client_max_size=1 << 26)
        models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": self._options.owner}]}
        pages = {"/health": {}, "/v1/models": models, "/version": {"version": "0"}, "/counts": self._counts}
        for path, page in (pages | {key: {} for key in ("/server_info", "/get_server_info", "/model_info")}).items():
            app.router.add_get(path, lambda _, page=page: asyncio.sleep(0, web.json_response(page)))
        app.router.add_post("/fault/{name}", self._set_fault)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _set_fault(self, request: web.Request) -> web.Response:
        self._fault = request.match_info["name"]
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._counts["requests"] += 1
        if self._fault == "error":
            return web.json_response({"error": {"message": "a fault", "code": 500}}, status=500)
        if self._fault == "reset" and request.transport is not None:
            request.transport.abort()
        if self._fault == "hang":
            await asyncio.sleep(3600)
        await self._compute(body["prompt"])
        return await self._answer(request, body, 1 if self._options.role == "prefill" else body["max_tokens"])

    async def _compute(self, prompt: str | list[int]) -> None:
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        async with self._turn:
            num, events = self._cache.take(tokens)
            self._counts["prompt"] += len(tokens)
            self._counts["cached"] += num
            if self._options.rate:
                await asyncio.sleep((len(tokens) - num) / self._options.rate)
        if self._options.events and events:
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            await self._socket.send_multipart([b"", self._num_events.to_bytes(8, "big"), payload])
            self._num_events += 1

    async def _answer(self, request: web.Request, body: dict[str, Any], most: int) -> web.StreamResponse:
        ids = {"token_ids": [5]} if body.get("return_token_ids") else {}
        usage = {"prompt_tokens": 1, "completion_tokens": most, "total_tokens": most + 1}
        whole = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
        if not body.get("stream"):
            choice = {"index": 0, "text": "a" * most, "finish_reason": "length", "logprobs": None}
            params = {"remote_engine_id": "e", "remote_block_ids": [1], "remote_host": "h", "remote_port": 1}
            return web.json_response(whole | {"choices": [choice], "usage": usage, "kv_transfer_params": params})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for i in range(most):
            choice = {"index": 0, "text": "a", "logprobs": None, **ids}
            choice["finish_reason"] = "length" if i + 1 == most else None
            await reply.write(b"data: " + json.dumps(whole | {"choices": [choice]}).encode() + b"\n\n")
        await reply.write(b"data: " + json.dumps(whole | {"choices": [], "usage": usage}).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", choices=["any", "prefill", "decode"], default="any")
    parser.add_argument("--owner", default="vllm", help="who owns the model, by which some routers know the kind")
    parser.add_argument("--events", type=int, default=0, help="port of KV events; 0: none")
    parser.add_argument("--rate", type=float, default=0.0, help="prompt tokens a second; 0: without bounds")
    parser.add_argument("--cache", type=int, default=1 << 16, help="tokens")

    async def make() -> web.Application:
        return Fake(options).app()

    options = parser.parse_args()
    web.run_app(make(), host="127.0.0.1", port=options.port, print=None, access_log=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
