"""A proxy that drives one vLLM prefill and one vLLM decode server over vLLM's own hand-off protocol, and no more.

The prefill server computes the prompt (max_tokens 1, do_remote_decode); the kv_transfer_params of its answer go to
the decode server with the client's request. Needs aiohttp.
"""

import argparse
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

_SESSION = web.AppKey("session", aiohttp.ClientSession)


def make_app(prefill: str, decode: str) -> web.Application:
    """The application; `prefill` and `decode` are base URLs."""

    async def session(app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # idle ones, vLLM may be ending
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as app[_SESSION]:
            yield

    async def completions(request: web.Request) -> web.StreamResponse:
        client = request.app[_SESSION]
        body = await request.json()
        prompt_only = {name: value for name, value in body.items() if name != "stream_options"}
        prompt_only |= {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        async with client.post(prefill + request.path, json=prompt_only) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read())
            body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
        async with client.post(decode + request.path, json=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            return response

    async def health(request: web.Request) -> web.Response:
        for url in (prefill, decode):
            try:
                async with request.app[_SESSION].get(url + "/health") as answer:
                    if answer.status != 200:
                        return web.Response(status=503)
            except aiohttp.ClientError:
                return web.Response(status=503)
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", health)
    return app


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, help="base URL")
    parser.add_argument("--decode", required=True, help="base URL")
    options = parser.parse_args()
    web.run_app(make_app(options.prefill, options.decode), host="127.0.0.1", port=options.port, print=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
