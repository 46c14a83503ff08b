"""What a request passes in a router between its HTTP bytes and its first message to an engine: files, functions, forms.

A form is a class whose object holds the whole request or its prompt. In one process, over an engine that computes
nothing; what happens once per process, such as an import, is done by a request before.

    python -m benchmarks.request_path
"""

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pdkv
from benchmarks.fleet import Fake
from pdkv.config import ModelFiles
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.http.app import create_app
from pdkv.router.http.server.connections import Connections
from pdkv.router.process import HttpServer, model_of, server_config
from pdkv.router.spec import RouterSpec
from pdkv.wire.messages import RouterToEngine, Submit

_ROOT = Path(pdkv.__file__).parents[2]
_HOLDS = ("flow", "prompt", "prompt_lengths", "prompt_token_ids", "prompts", "request", "token_ids")
_BODY = b'{"prompt": "Once upon a time", "max_tokens": 2}'
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class _Engine(Fake):
    """Notes that a request has come, and what was called until then."""

    def __init__(self) -> None:
        super().__init__("engine-0", "any")
        self.came = asyncio.Event()

    def send(self, message: RouterToEngine) -> None:
        super().send(message)
        if isinstance(message, Submit):
            sys.setprofile(None)
            self.came.set()


class _Path:
    """What was called."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()  # of the project, by file and name
        self.forms: dict[str, None] = {}

    def note(self, frame: FrameType, event: str, value: Any) -> None:
        """A call, or its end (`sys.setprofile`)."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(_ROOT)) and "site-packages" not in code.co_filename:
            self.functions[code.co_filename.removeprefix(f"{_ROOT}/"), code.co_qualname] += 1
        for each in (value, frame.f_locals.get("self")) if event == "return" else ():
            if type(each).__module__.startswith("pdkv.") and any(hasattr(each, name) for name in _HOLDS):
                self.forms[type(each).__qualname__] = None


async def _follow() -> _Path:
    dispatcher, engine = Dispatcher(), _Engine()
    dispatcher.add_backend(engine, "any")
    dispatcher.connect()
    assert engine.listener is not None
    engine.listener.engine_up(engine.name, engine.card())
    spec = RouterSpec(router_id="r", engines=[], model=ModelFiles(), served_model_names=["m"])
    app, limits, path = create_app(dispatcher, model_of(spec)), spec.config.http, _Path()
    server = HttpServer(server_config(app, limits, app.state.bodies, Connections(64)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve_on(listener))
        for is_last in (False, True):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            sys.setprofile(path.note if is_last else None)
            writer.write(_POST % (len(_BODY), _BODY))
            async with asyncio.timeout(60.0):
                await engine.came.wait()
            engine.came.clear()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        dispatcher.close()
        server.stop()
        await serving
    return path


def main() -> int:
    """Print it."""
    path = asyncio.run(_follow())
    files = sorted({file for file, _ in path.functions} - {"benchmarks/request_path.py", "benchmarks/fleet.py"})
    for file in files:
        print(f"{sum(n for (f, _), n in path.functions.items() if f == file):5} {file}")
    print(f"{len(files)} files, {len(path.functions)} functions, {len(path.forms)} forms: {', '.join(path.forms)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
