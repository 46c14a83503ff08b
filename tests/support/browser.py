"""A headless Chromium (Debian: `apt-get install chromium`), by the DevTools protocol over two pipes."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ANSWER_S = 40.0

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")


class Browser:
    """One tab. What the page logs, and the errors that it raises, are in `complaints`."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader, self._write_fd = reader, write_fd
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []

    async def listen(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            asked = self._asked.pop(message.get("id"), None)
            if asked is not None and not asked.done():
                asked.set_result(message)
            elif message.get("method") == "Page.loadEventFired":
                self._loaded.set()
            elif message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(message["params"]))

    async def order(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        text = json.dumps({"id": number, "method": method, "params": params} | session)
        os.write(self._write_fd, text.encode() + b"\0")
        async with asyncio.timeout(ANSWER_S):
            message = await self._asked[number]
        assert "error" not in message, message
        return message["result"]

    async def open_tab(self) -> None:
        target = await self.order("Target.createTarget", url="about:blank")
        attached = await self.order("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.order(f"{domain}.enable")

    async def look(self, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the colors that the system prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.order("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.order("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        self._loaded.clear()
        await self.order("Page.navigate", url=url)
        async with asyncio.timeout(ANSWER_S):
            await self._loaded.wait()

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        result = await self.order("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Its value once it is true."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while not (value := await self.run(expression)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never: {expression}; complaints: {self.complaints}; page: {text}") from None
        return value

    async def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        shot = await self.order("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A tab of a browser of its own, with an empty profile."""
    assert PROGRAM is not None
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="pdkv-browser-", ignore_cleanup_errors=True) as profile:
        # the shell gives the pipes the numbers that Chromium expects
        script = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage", "about:blank"]
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", script, PROGRAM, *options, pass_fds=(their_in, their_out), stderr=asyncio.subprocess.DEVNULL
        )
        os.close(their_in)
        os.close(their_out)
        reader = asyncio.StreamReader(limit=64 << 20)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_in, "rb")
        )
        tab = Browser(reader, our_out)
        listening = asyncio.ensure_future(tab.listen())
        try:
            await tab.open_tab()
            yield tab
        finally:
            listening.cancel()
            transport.close()
            os.close(our_out)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
