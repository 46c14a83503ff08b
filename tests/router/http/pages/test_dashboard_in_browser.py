"""The dashboard in a browser: hostile names stay text, keys open it, and a dead router is seen to be dead."""

import asyncio
from pathlib import Path

import pytest
from admin_keys import admin_keys
from browser import browser, needs_browser
from busy_fleet import BusyEngine
from http_server import serving
from small_app import served

from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.generations.dispatch import Dispatcher, GenerateRequest
from pdkv.router.generations.operations import Operations
from pdkv.router.http.app import create_app
from pdkv.sampling.params import SamplingParams

pytestmark = [needs_browser, pytest.mark.processes]

HOSTILE = '<img src=x onerror="hacked=1"></title><script>hacked=1</script>\'`${hacked=1}'


def secret_of(headers: dict[str, str]) -> str:
    return headers["authorization"].removeprefix("Bearer ")


@pytest.mark.parametrize("num_engines", [2, 40], ids=["cards", "grid"])
async def test_a_hostile_deployment_is_shown_as_it_is(num_engines: int, tmp_path: Path) -> None:
    file, root, other = admin_keys(tmp_path)
    dispatcher = Dispatcher(await_all=False, explain_share=1.0)
    engines = [BusyEngine(f"{HOSTILE}{i}", ("prefill", "decode")[i % 2]) for i in range(num_engines)]
    for engine in engines:
        dispatcher.add_backend(engine, engine.role)
    dispatcher.connect()
    for engine in engines:
        engine.start()
        engine.report()
    params = SamplingParams(max_tokens=2, seed=1)
    generation = dispatcher.start(
        GenerateRequest(prompt_token_ids=[5] * 32, params=params, timeout_s=60.0, label=HOSTILE)
    )
    async for _ in generation:
        pass
    for i in range(10_000):
        dispatcher.fleet.events.note(0.0, "refused", f"{HOSTILE}{i}", HOSTILE)
    engines[0].die(HOSTILE)
    operations = Operations(dispatcher, lambda name, _: BusyEngine(name, "any"))
    app = create_app(dispatcher, served(names=[HOSTILE]), keys=KeyRing(file), operations=operations)
    async with browser() as tab:
        async with serving(app) as server:
            await tab.go(f"http://127.0.0.1:{server.port}/dashboard")
            await tab.until("document.getElementById('key').hidden === false")
            for headers, shown in ((other, "document.getElementById('why').textContent.includes('not an admin')"),
                                   (root, "document.querySelector('.card, .cell') !== null")):  # fmt: skip
                secret = secret_of(headers)
                await tab.run(f"secret.value = '{secret}'; document.querySelector('#key button').click()")
                await tab.until(shown)
                assert (await tab.run("document.getElementById('data').hidden")) == (headers is other)
            address = await tab.run("location.href + JSON.stringify(localStorage)")
            assert not any(secret_of(headers) in address for headers in (root, other))
            text = await tab.until("document.querySelector('#requests button') && document.body.textContent")
            assert text.count(HOSTILE) > 60
            assert await tab.run("document.querySelectorAll('#events li').length") <= 200
            await tab.run("document.querySelector('.card, .cell').click()")
            await tab.run("document.querySelector('#requests button').click()")
            assert HOSTILE in await tab.until("document.querySelector('.lanes')?.closest('article').textContent")
            assert "prompt tokens" in await tab.run("document.querySelector('#choices article dl + div').textContent")
            assert await tab.run("document.querySelectorAll('#choices article .scroll td').length") >= num_engines
            assert await tab.run("document.querySelectorAll('img, main script').length") == 0
            assert not await tab.run("'hacked' in window")
            assert not [text for text in tab.complaints if "status of 40" not in text]
            await tab.look(width=400)
            assert await tab.until("document.documentElement.scrollWidth") <= 400
        state = await tab.until(
            "document.body.classList.contains('stale') && document.getElementById('state').textContent"
        )
        assert state.startswith("no answer")
    dispatcher.close()
    await asyncio.sleep(0)
