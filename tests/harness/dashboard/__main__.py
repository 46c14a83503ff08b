"""Serve fleets of 2 and 200 engines, open the page, and write pictures and figures.

    PYTHONPATH=tests/harness python -m dashboard --out FOLDER [--engines 2 200] [--pages 10] [--seconds 20]

Prints the browser's times to the first paint, in order, and the router's CPU time while that many clients ask once a
second, less what it takes without them. Engines are objects in the router's process, and silent then.
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from browser import Browser, browser
from busy_fleet import BusyEngine, live
from http_server import connected, get, serving
from small_app import make_app

from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.operations import Operations

VIEWS = {"light": (1440, 900, False), "dark": (1440, 900, True), "phone": (400, 860, False)}


def fleet(num_engines: int) -> tuple[Dispatcher, list[BusyEngine]]:
    rng = random.Random(3)
    dispatcher = Dispatcher(await_all=False)
    num_prefill = max(num_engines * 2 // 5, 1)
    names = [(f"{role}-{i}", role) for role, num in (("prefill", num_prefill), ("decode", num_engines - num_prefill))
             for i in range(num)]  # fmt: skip
    engines = [BusyEngine(name, role, rng) for name, role in names]
    for engine in engines:
        dispatcher.add_backend(engine, engine.role)
    dispatcher.connect()
    for engine in engines:
        engine.start()
        engine.report()
    return dispatcher, engines


async def paints(tab: Browser, url: str, times: int) -> list[float]:
    """Milliseconds to the first paint, without a cache."""
    await tab.look()
    await tab.order("Network.setCacheDisabled", cacheDisabled=True)
    found = []
    for _ in range(times):
        await tab.go(f"{url}/dashboard")
        found.append(await tab.until("performance.getEntriesByName('first-paint')[0]?.startTime"))
    return found


async def pictures(tab: Browser, url: str, num_engines: int, out: Path, secret: str) -> None:
    await tab.look()
    await tab.go(f"{url}/dashboard")
    await tab.until("document.getElementById('key').hidden === false")
    await tab.run(f"secret.value = {secret!r}; document.querySelector('#key button').click()")
    await tab.until("document.querySelector('.cell, .card') !== null")
    await asyncio.sleep(40.0)
    await tab.run("document.querySelector('.s-decode button').click()")
    for name, (width, height, dark) in VIEWS.items():
        await tab.look(width=width, height=height, dark=dark)
        await asyncio.sleep(1.5)
        (out / f"{num_engines}-{name}.png").write_bytes(await tab.picture())
    await tab.look()
    await tab.run("document.querySelector('#requests button').click()")
    await tab.until("document.querySelector('.lane') !== null")
    await tab.run("scrollTo(0, 0)")
    (out / f"{num_engines}-life.png").write_bytes(await tab.picture())
    complaints = [text for text in tab.complaints if "status of 401" not in text]
    assert not complaints, complaints


def admin_key(file: Path) -> tuple[KeyRing, str]:
    secret, lines = make_key("root", admin=True)
    file.write_text(lines)
    file.chmod(0o600)
    return KeyRing(file), secret


async def poll(port: int, num_pages: int, seconds: float, secret: str) -> None:
    """What that many open pages ask."""

    async def page() -> None:
        async with connected(port) as client:
            await asyncio.sleep(random.random())
            while time.monotonic() < end:
                await client.send(get("/admin/overview", f"authorization: Bearer {secret}"))
                assert (await client.reply()).status == 200
                await asyncio.sleep(1.0)

    end = time.monotonic() + seconds
    await asyncio.gather(asyncio.sleep(seconds), *(page() for _ in range(num_pages)))


async def cost(*args: object) -> float:
    """CPU seconds a second of this process while another one runs `poll` with these arguments."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "dashboard", "--poll", *map(str, args))
    await asyncio.sleep(5.0)  # it starts
    began, cpu = time.monotonic(), time.process_time()
    await child.wait()
    return (time.process_time() - cpu) / (time.monotonic() - began)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dashboard-pictures"))
    parser.add_argument("--poll", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--engines", type=int, nargs="*", default=[2, 200])
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--no-pictures", action="store_true")
    args = parser.parse_args()
    if args.poll:
        port, num_pages, seconds, secret = args.poll
        await poll(int(port), int(num_pages), float(seconds), secret)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    keys, secret = admin_key(args.out / "keys")
    for num_engines in args.engines:
        dispatcher, engines = fleet(num_engines)
        operations: Any = Operations(dispatcher, lambda name, _: BusyEngine(name, "any"))
        app = make_app(dispatcher, keys=keys, operations=operations)
        async with serving(app) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with browser() as tab:
                found = ", ".join(f"{ms:.0f}" for ms in sorted(await paints(tab, url, 9)))
                print(f"{num_engines} engines: first paint after {found} ms", flush=True)
                if not args.no_pictures:
                    load = live(dispatcher, engines, app.state.figures.__self__, 4 * num_engines**0.6, 50.0)
                    await asyncio.gather(load, pictures(tab, url, num_engines, args.out, secret))
            alone, with_pages = [await cost(server.port, n, args.seconds, secret) for n in (0, args.pages)]
            print(
                f"{num_engines} engines: {args.pages} pages cost {100 * (with_pages - alone):.2f} % of a core",
                flush=True,
            )
        dispatcher.close()


if __name__ == "__main__":
    uvloop.run(main())
