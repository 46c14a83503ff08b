"""Engines that are drained, added, removed and given other roles while requests run."""

import asyncio
from pathlib import Path

import pytest
from dispatch_rig import InProcessBackend, System, check_right, collect, live
from scripted_engine import ScriptedEngine, expected_output, make_request

from pdkv.errors import InvalidRequest
from pdkv.router.generations.operations import Operations
from pdkv.wire.messages import Submit


def operations(system: System, marks_file: Path | None = None) -> Operations:
    """Over a system; engines that are added are scripted ones, which the test starts."""

    def connect(name: str, endpoint: str) -> InProcessBackend:
        system.backends[name] = InProcessBackend(ScriptedEngine(name, system.kind))  # type: ignore[arg-type]
        return system.backends[name]

    return Operations(system.dispatcher, connect, marks_file)


async def turns(count: int = 20) -> None:
    """Let whatever is under way come to rest."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
async def test_a_drained_engine_gets_nothing_new_while_what_it_has_goes_on(name: str) -> None:
    async with live(System(2, 2)) as system:
        ops = operations(system)
        backends = system.backends
        backends[name].held = True
        running = [system.dispatcher.start(make_request(20 + i)) for i in range(4)]
        await turns()
        assert ops.describe(name)["requests"] == 2
        drained = asyncio.create_task(ops.wait(name, "drained", 20.0))
        ops.drain(name)
        before = len(backends[name].heard(Submit))
        for number in range(4):
            await check_right(system, make_request(30 + number))
        assert len(backends[name].heard(Submit)) == before
        assert (ops.describe(name)["draining"], ops.describe(name)["drained"]) == (True, False)
        assert not drained.done()
        backends[name].release()
        for number, generation in enumerate(running):
            tokens, _ = await collect(generation)
            assert tokens == expected_output(make_request(20 + number))
        assert await drained
        assert system.dispatcher.topology()["engines"][1 if "prefill" in name else 3]["drained"] is True
        ops.resume(name)
        for number in range(4):
            await check_right(system, make_request(40 + number))
        assert len(backends[name].heard(Submit)) > before


async def test_what_a_drained_engine_still_has_goes_on_elsewhere() -> None:
    async with live(System(1, 2)) as system:
        ops = operations(system)
        requests = [make_request(20 + i, max_tokens=9) for i in range(4)]
        running = [system.dispatcher.start(request) for request in requests]
        first = [(await anext(generation)).token_ids for generation in running]
        system.backends["decode-1"].held = True
        ops.drain("decode-1")
        assert ops.describe("decode-1")["requests"] == 2
        ops.move_away("decode-1")
        assert await ops.wait("decode-1", "drained", 20.0)
        for tokens, generation, request in zip(first, running, requests, strict=True):
            assert tokens + (await collect(generation))[0] == expected_output(request)
            assert generation.decode_engine == "decode-0"
        system.backends["decode-1"].release()


async def test_a_stream_outlives_any_number_of_restarts() -> None:
    """Moves that an operator wants count for no limit."""
    assert len(expected_output(make_request(29, max_tokens=40))) == 40
    async with live(System(1, 2)) as system:
        ops = operations(system)
        request = make_request(29, max_tokens=40)
        generation = system.dispatcher.start(request)
        tokens = (await anext(generation)).token_ids
        for number in range(6):
            name = generation.decode_engine
            ops.drain(name)
            ops.move_away(name)
            system.backends[name].die()
            system.backends[name].start(system.card(name, epoch=f"e{number + 1}"))
            ops.resume(name)
            tokens += (await anext(generation)).token_ids
        assert tokens + (await collect(generation))[0] == expected_output(request)


async def test_a_lease_that_is_still_read_keeps_its_engine_from_being_drained() -> None:
    """The prompt is done, and decode has not loaded it yet."""
    async with live(System(2, 2)) as system:
        ops = operations(system)
        prefill = system.backends["prefill-1"]
        for decode in ("decode-0", "decode-1"):
            system.backends[decode].held = True
        running = [system.dispatcher.start(make_request(20 + i)) for i in range(2)]
        await turns()
        ops.drain("prefill-1")
        assert len(prefill.engine.leases) == 1
        assert not prefill.engine.tasks
        assert system.dispatcher.fleet.engines["prefill-1"].books.requests == 0
        assert not await ops.wait("prefill-1", "drained", 0.0)
        for decode in ("decode-0", "decode-1"):
            system.backends[decode].release()
        assert await ops.wait("prefill-1", "drained", 20.0)
        assert not prefill.engine.leases
        for generation in running:
            await collect(generation)


async def test_nobody_is_drained_who_is_the_last_of_a_role() -> None:
    async with live(System(1, 1)) as system:
        ops = operations(system)
        with pytest.raises(InvalidRequest, match="draining decode-0 would leave no engine that can decode") as caught:
            ops.drain("decode-0")
        assert caught.value.status == 409
        with pytest.raises(InvalidRequest, match="the role prefill for decode-0 would leave no engine that can decode"):
            ops.set_role("decode-0", "prefill")
        await check_right(system, make_request())
        ops.set_role("decode-0", "any")
        ops.drain("prefill-0")
        generation = await check_right(system, make_request(21))
        assert (generation.prefill_engine, generation.decode_engine) == ("decode-0", "decode-0")
        ops.drain("decode-0", force=True)
        assert "decode-0 is draining" in system.dispatcher.fault
        assert not system.dispatcher.listener.ready
        waiting = system.dispatcher.start(make_request())
        await turns()
        assert len(system.dispatcher.recovery.parked) == 1
        ops.resume("decode-0")
        assert (await collect(waiting))[0] == expected_output(make_request())
        ops.drain("decode-0", force=True)
        with pytest.raises(InvalidRequest, match="there is no engine 'decode-9' \\(did you mean 'decode-0'") as caught:
            ops.drain("decode-9")
        assert caught.value.status == 404


async def test_a_role_is_changed_under_requests_without_a_restart() -> None:
    async with live(System(1, 2)) as system:
        ops = operations(system)
        system.backends["decode-1"].held = True
        running = [system.dispatcher.start(make_request(20 + i)) for i in range(2)]
        await turns()
        ops.set_role("decode-1", "prefill")
        system.backends["decode-1"].release()
        for number, generation in enumerate(running):
            assert (await collect(generation))[0] == expected_output(make_request(20 + number))
        used = [await check_right(system, make_request(30 + i)) for i in range(4)]
        assert {g.decode_engine for g in used} == {"decode-0"}
        assert {g.prefill_engine for g in used} == {"prefill-0", "decode-1"}
        system.backends["prefill-0"].held = True
        late = [system.dispatcher.start(make_request(41 + i, 2)) for i in range(2)]
        score = system.dispatcher.fleet.engines["prefill-0"].score
        num_paces = score.num_paces
        ops.set_role("prefill-0", "decode")
        system.backends["prefill-0"].release()
        for generation in late:
            await collect(generation)
        assert score.num_paces == num_paces, "its prompts are not compared with tokens"
        system.backends["decode-1"].die()
        system.backends["decode-1"].start(system.card("decode-1", epoch="e1"))
        assert ops.describe("decode-1")["role"] == "prefill", "its card says decode"


async def test_engines_come_and_go_while_requests_run() -> None:
    async with live(System(1, 1)) as system:
        ops = operations(system)
        ops.add("decode-1", "decode", "ipc://decode-1")
        ops.add("decode-1", "decode", "ipc://decode-1")  # said twice
        ready = asyncio.create_task(ops.wait("decode-1", "ready", 20.0))
        await turns(1)
        assert not ready.done()
        system.backends["decode-1"].start(system.card("decode-1"))
        assert await ready
        used = {(await check_right(system, make_request(20 + i))).decode_engine for i in range(4)}
        assert used == {"decode-0", "decode-1"}
        system.backends["decode-1"].held = True
        running = [system.dispatcher.start(make_request(30 + i)) for i in range(2)]
        await turns()  # until they are handed off
        with pytest.raises(InvalidRequest, match="decode-1 still has 1 requests: drain it first"):
            ops.remove("decode-1")
        ops.remove("decode-1", force=True)
        ops.remove("decode-1")
        gone = system.backends.pop("decode-1")
        assert gone.listener is None
        for number, generation in enumerate(running):  # one begins again elsewhere
            assert (await collect(generation))[0] == expected_output(make_request(30 + number))
        assert [e["name"] for e in system.dispatcher.topology()["engines"]] == ["prefill-0", "decode-0"]


async def test_a_request_outlives_the_engine_that_ran_its_prompt() -> None:
    async with live(System(2, 1)) as system:
        ops = operations(system)
        system.backends["decode-0"].engine.max_tokens_per_step = 1
        request = make_request(20, max_tokens=40)
        generation = system.dispatcher.start(request)
        tokens = (await anext(generation)).token_ids
        name = generation.prefill_engine
        while ops.describe(name)["requests"]:  # the lease ends some turns after the first token
            await asyncio.sleep(0)
        ops.drain(name)
        ops.remove(name)
        del system.backends[name]
        assert tokens + (await collect(generation))[0] == expected_output(request)


async def test_a_restarted_router_knows_what_was_said(tmp_path: Path) -> None:
    async with live(System(2, 2)) as system:
        ops = operations(system, tmp_path / "engines.json")
        ops.drain("prefill-1")
        ops.set_role("decode-1", "any")
        ops.drain("decode-0")
        ops.resume("decode-0")
    async with live(System(2, 2)) as system:
        operations(system, tmp_path / "engines.json")
        said = {e["name"]: (e["role"], e["draining"]) for e in system.dispatcher.topology()["engines"]}
        assert said == {
            "prefill-0": ("prefill", False), "prefill-1": ("prefill", True),
            "decode-0": ("decode", False), "decode-1": ("any", False),
        }  # fmt: skip


async def test_a_file_of_marks_that_cannot_be_read_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engines.json").write_text("{")
    async with live(System(2, 2)) as system:
        operations(system, tmp_path / "engines.json")
        await check_right(system, make_request())
    assert "engines.json" in caplog.text
