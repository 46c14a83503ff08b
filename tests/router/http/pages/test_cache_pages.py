"""POST /admin/cache/…: what engines are asked, what their answers become, and what is wrong with a body."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from admin_keys import never
from asgi_client import call
from dispatch_rig import System, live
from small_app import make_app, tokenizer

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.router.admission.api_keys import KeyRing, make_key
from pdkv.router.engines.engine_orders import EngineOrders
from pdkv.router.generations.operations import Operations
from pdkv.router.http.pages import cache_pages
from pdkv.router.http.pages.admin import LauncherPages
from pdkv.wire.messages import Submit
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierAnswer

TEXT = "0123456789 " * 6

Answers = Callable[[str, CacheOrder], list[TierAnswer] | None]


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def keys_of(system: System, text: str, salt: str = "") -> list[bytes]:
    card = system.dispatcher.fleet.cards()[0]
    keys: list[bytes] = []
    root = root_key(model=card.model, layout=card.layout.identity, cache_salt=salt)
    extend_keys(keys, root, ids(text))
    return keys


class Operator:
    """Asks, beside engines that answer."""

    def __init__(self, system: System, answers: Answers, keys: KeyRing | None = None) -> None:
        self.system = system
        self.orders: list[tuple[str, CacheOrder]] = []
        self._answers = answers
        app = make_app(system.dispatcher, keys=keys)
        operations = Operations(system.dispatcher, never)
        self._app = LauncherPages(system.dispatcher, operations, app.state.caches).app()

    async def ask(self, action: str, body: object) -> Any:
        asking = asyncio.ensure_future(call(self._app, "POST", f"/admin/cache/{action}", body))
        while not asking.done():
            await asyncio.sleep(0.001)
            for name, backend in self.system.backends.items():
                for order in backend.heard(CacheOrder):
                    if (name, order) not in self.orders:
                        self.orders.append((name, order))
                        tiers = self._answers(name, order)
                        if tiers is not None:
                            backend.say(CacheAnswer(order.order_id, tiers, ["pool", "store/0-host"]))
        return asking.result()

    async def refusal(self, action: str, body: object) -> tuple[int, str | None, str]:
        """(status, param, message)."""
        answer = await self.ask(action, body)
        error = answer.json()["error"]
        return answer.status, error["param"], error["message"]


@contextlib.asynccontextmanager
async def operating(answers: Answers) -> AsyncIterator[Operator]:
    async with live(System(1, 1)) as system:
        yield Operator(system, answers)


async def test_every_engine_says_what_its_tiers_have_of_a_prompt() -> None:
    def answers(name: str, order: CacheOrder) -> list[TierAnswer]:
        failed = TierAnswer("store/1-redis", code="store_unavailable", problem="it is gone")
        return [TierAnswer("pool", 16, 1), failed] if name == "prefill-0" else [TierAnswer("pool")]

    async with operating(answers) as operator:
        answer = await operator.ask("lookup", {"prompt": TEXT, "cache_salt": "s", "return_keys": True})
        keys = keys_of(operator.system, TEXT, "s")
        assert answer.json() == {
            "prompt_tokens": len(ids(TEXT)),
            "keys": [key.hex() for key in keys],
            "engines": [
                {
                    "name": "prefill-0", "role": "prefill",
                    "tiers": [
                        {"tier": "pool", "tokens": 16, "values": 1},
                        {"tier": "store/1-redis", "error": {"code": "store_unavailable", "message": "it is gone"}},
                    ],
                },
                {"name": "decode-0", "role": "decode", "tiers": [{"tier": "pool", "tokens": 0, "values": 0}]},
            ],
        }  # fmt: skip
        assert [(name, order.action, order.keys) for name, order in operator.orders] == [
            ("prefill-0", "lookup", keys), ("decode-0", "lookup", keys)
        ]  # fmt: skip
        assert len({order.order_id for _, order in operator.orders}) == 1


async def test_a_prompt_is_named_in_four_ways_and_all_by_none() -> None:
    async with operating(lambda name, order: [TierAnswer("store/0-host", 32, 2)]) as operator:
        keys = keys_of(operator.system, TEXT)
        bodies: list[dict[str, Any]] = [{"prompt": TEXT}, {"tokens": ids(TEXT)}, {"keys": [k.hex() for k in keys]}]
        for body in bodies:
            assert (await operator.ask("pin", body | {"ttl_s": 5, "tier": "host", "timeout_s": 3})).status == 200
            order = operator.orders[-1][1]
            assert (order.keys, order.ttl_s, order.tier, order.timeout_s) == (keys, 5.0, "host", 3.0)
        await operator.ask("clear", {"messages": [{"role": "user", "content": TEXT}]})
        assert operator.orders[-1][1].keys == keys_of(operator.system, f"user: {TEXT}\n")
        await operator.ask("clear", {"engine": "decode-0"})
        assert operator.orders[-1] == ("decode-0", operator.orders[-1][1])
        assert operator.orders[-1][1].keys is None
        num_orders = len(operator.orders)
        await operator.ask("prefetch", {"prompt": TEXT})
        assert [name for name, _ in operator.orders[num_orders:]] == ["prefill-0"], "one, which all read"


async def test_a_move_says_from_where_to_where_and_asks_one_engine_for_its_host_memory() -> None:
    async with operating(lambda name, order: [TierAnswer("store/1-redis", 32, 2)]) as operator:
        for body, names in (
            ({"from": "host", "tier": "redis"}, ["prefill-0", "decode-0"]),
            ({"from": "redis", "tier": "store/0-host"}, ["prefill-0"]),
            ({"from": "redis", "tier": "host", "engine": "decode-0"}, ["decode-0"]),
            ({"from": "redis", "tier": "file", "copy": True}, ["prefill-0", "decode-0"]),
        ):
            num_orders = len(operator.orders)
            answer = await operator.ask("move", {"prompt": TEXT, "timeout_s": 3} | body)
            assert answer.json()["engines"][0]["tiers"] == [{"tier": "store/1-redis", "tokens": 32, "values": 2}]
            assert [name for name, _ in operator.orders[num_orders:]] == names
            order = operator.orders[-1][1]
            assert (order.source, order.tier, order.copy) == (body["from"], body["tier"], body.get("copy", False))
            assert (order.keys, order.timeout_s) == (keys_of(operator.system, TEXT), 3.0)


async def test_one_move_is_under_way_at_a_time() -> None:
    may_answer: list[str] = []

    def answers(name: str, order: CacheOrder) -> list[TierAnswer] | None:
        return [TierAnswer("store/1-redis")] if name in may_answer else None

    async with operating(answers) as operator:
        body = {"prompt": TEXT, "from": "host", "tier": "redis", "engine": "prefill-0"}
        asking = asyncio.ensure_future(operator.ask("move", body))
        while not operator.orders:
            await asyncio.sleep(0.001)
        may_answer.append("decode-0")
        back = body | {"from": "redis", "tier": "host", "engine": "decode-0"}
        found = await operator.refusal("move", back)
        assert found == (409, None, "another move is in progress: only one at a time is possible")
        assert (await operator.ask("lookup", {"prompt": TEXT, "engine": "decode-0"})).status == 200
        operator.system.backends["prefill-0"].say(CacheAnswer(operator.orders[0][1].order_id, [TierAnswer("r")]))
        assert (await asking).status == 200
        assert (await operator.ask("move", back)).status == 200


async def test_behind_a_move_that_was_late_there_is_none_for_a_while() -> None:
    """Its engine may still be at it."""
    late = TierAnswer("store/1-redis", code="transfer_timeout", problem="late")
    async with operating(lambda name, order: [late]) as operator:
        body = {"prompt": TEXT, "from": "host", "tier": "redis"}
        assert (await operator.ask("move", body)).status == 504
        assert (await operator.refusal("move", body))[0] == 409
        with pytest.MonkeyPatch.context() as patch:
            later = time.monotonic() + 10.0 + cache_pages.MOVE_GRACE_S
            patch.setattr(cache_pages, "MONOTONIC", SimpleNamespace(now=lambda: later))
            assert (await operator.ask("move", body)).status == 504


async def test_the_salt_of_an_api_key_is_that_of_its_requests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(make_key("a")[1])
    file.chmod(0o600)
    keys = KeyRing(file)
    (tenant,) = keys.tenants
    async with live(System(1, 1)) as system:
        operator = Operator(system, lambda name, order: [TierAnswer("pool")], keys)
        assert (await operator.ask("lookup", {"prompt": TEXT, "api_key": "a", "cache_salt": "s"})).status == 200
        assert operator.orders[-1][1].keys == keys_of(system, TEXT, tenant.salted("s")) != keys_of(system, TEXT, "s")
        found = await operator.refusal("lookup", {"prompt": TEXT, "api_key": "b"})
        assert found[:2] == (400, "api_key")


async def test_what_is_prefetched_for_an_api_key_is_kept_on_its_terms(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(make_key("a")[1] + "kv_ttl_s = 60\n")
    file.chmod(0o600)
    keys = KeyRing(file)
    (tenant,) = keys.tenants
    terms = tenant.grant.kv_terms
    assert terms is not None
    async with live(System(1, 1)) as system:
        operator = Operator(system, lambda name, order: [TierAnswer("store/0-host", 16, 1)], keys)
        asked = {"prompt": TEXT, "api_key": "a"}
        for action, told in (("lookup", None), ("prefetch", terms)):
            assert (await operator.ask(action, asked)).status == 200
            assert operator.orders[-1][1].kv_terms == told
        assert (await operator.ask("prefetch", {"prompt": TEXT})).status == 200
        assert operator.orders[-1][1].kv_terms is None
        asking = asyncio.ensure_future(operator.ask("prefetch", asked | {"tier": "pool", "engine": "decode-0"}))
        while not (heard := system.backends["decode-0"].heard(Submit)):
            assert not asking.done()
            await asyncio.sleep(0.001)
        assert heard[0].kv_terms == terms
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("look", {}, 404, None, "there is no /admin/cache/look: expected one of lookup, clear, pin, unpin, prefetch, move"),
    ("lookup", {}, 400, "prompt", "lookup: one of prompt, messages, tokens, keys was expected, got none"),
    ("clear", {"prompt": TEXT, "keys": ["00"]}, 400, "keys", "got prompt and keys"),
    ("lookup", {"prompt": "short"}, 400, "prompt", "tokens; KV is found in blocks of 16, and it has no whole one"),
    ("lookup", {"tokens": [1, 2, 10**6]}, 400, "tokens", "token id 1000000 is not in the vocabulary"),
    ("lookup", {"tokens": [1] * 1000}, 400, "tokens", "the prompt has 1000 tokens, but the model's length is"),
    ("lookup", {"keys": ["00", "xy"]}, 400, "keys[1]", "a block key in hexadecimal was expected, got 'xy'"),
    ("lookup", {"prompt": 5}, 400, "prompt", "prompt: Expected `str | null`, got `int`"),
    ("lookup", {"promt": TEXT}, 400, "promt", "promt is not a known field"),
    ("lookup", {"prompt": TEXT, "ttl_s": 5}, 400, "ttl_s", "ttl_s is only allowed for pin, got it for lookup"),
    ("pin", {"prompt": TEXT, "ttl_s": -1}, 400, "ttl_s", "ttl_s: Expected `float` > 0"),
    ("pin", {"prompt": TEXT, "timeout_s": 0}, 400, "timeout_s", "timeout_s: Expected `float` > 0"),
    ("pin", {"prompt": TEXT, "tools": []}, 400, "tools", "tools is only allowed with messages, and there are none"),
    ("pin", {"prompt": TEXT, "api_key": "a"}, 400, "api_key", "there is no API key named 'a'"),
    ("pin", {"prompt": TEXT, "from": "host"}, 400, "from", "from is only allowed for move, got it for pin"),
    ("clear", {"prompt": TEXT, "copy": True}, 400, "copy", "copy is only allowed for move, got it for clear"),
    (
        "move",
        {"from": "host", "tier": "redis"},
        400,
        "prompt",
        "move: one of prompt, messages, tokens, keys was expected",
    ),
    (
        "move",
        {"prompt": TEXT, "tier": "redis"},
        400,
        "from",
        "move: from: a tier was expected, such as 'host', got none",
    ),
    (
        "move",
        {"prompt": TEXT, "from": "host"},
        400,
        "tier",
        "move: tier: a tier was expected, such as 'host', got none",
    ),
    ("move", {"prompt": TEXT, "from": "x" * 257, "tier": "host"}, 400, "from", "from: Expected `str` of length <= 256"),
    (
        "move",
        {"prompt": TEXT, "from": "pool", "tier": "redis"},
        400,
        "from",
        "move: from: a tier below the engines' own blocks was expected, got 'pool': what engines' own blocks hold is",
    ),
    (
        "move",
        {"prompt": TEXT, "from": "redis", "tier": "pool"},
        400,
        "tier",
        "a tier below the engines' own blocks was expected, got 'pool': "
        "use prefetch with tier 'pool' to bring values there",
    ),
    (
        "move",
        {"prompt": TEXT, "from": "host", "tier": "host"},
        400,
        "tier",
        "move: from and tier: two tiers were expected, got 'host' twice",
    ),
    ("pin", {"prompt": TEXT, "engine": "decode-1"}, 404, "engine", "did you mean 'decode-0'"),
]


async def test_what_is_wrong_with_a_body_is_named() -> None:
    async with operating(lambda name, order: []) as operator:
        for action, body, status, param, message in BAD:
            found = await operator.refusal(action, body)
            assert found[:2] == (status, param), (body, found)
            assert message in found[2], found
        assert not operator.orders


@pytest.mark.parametrize(
    ("tiers", "status", "message"),
    [
        ([], 404, "no engine has a tier 'tape'; known: pool, store/0-host"),
        ([TierAnswer("store/0-host", code="store_full", problem="pinned")], 409, "store/0-host of prefill-0: pinned"),
        ([TierAnswer("store/1-redis", code="store_unable", problem="never")], 400, "store/1-redis of prefill-0: never"),
        ([TierAnswer("store/1-redis", code="store_timeout", problem="late")], 500, "store/1-redis of prefill-0: late"),
        ([TierAnswer("store", code="transfer_timeout", problem="late")], 504, "store of prefill-0: late"),
    ],
)
async def test_what_no_engine_could_do_is_an_error(tiers: list[TierAnswer], status: int, message: str) -> None:
    async with operating(lambda name, order: tiers) as operator:
        found = await operator.refusal("pin", {"prompt": TEXT, "tier": "tape"})
        assert (found[0], found[2]) == (status, message)


async def test_a_move_between_what_are_no_two_tiers_of_one_store_is_refused() -> None:
    bad = [
        ("tape", "host", 404, "from", "no engine has a tier 'tape'; known: pool, store/0-host"),
        ("host", "tape", 404, "tier", "no engine has a tier 'tape'; known: pool, store/0-host"),
        (
            "host",
            "0-host",
            400,
            "tier",
            "move: from and tier: two tiers of one store were expected, got 'host' and '0-host'; "
            "known: pool, store/0-host",
        ),
    ]
    async with operating(lambda name, order: []) as operator:
        for source, tier, *expected in bad:
            assert [*await operator.refusal("move", {"prompt": TEXT, "from": source, "tier": tier})] == expected


async def test_an_engine_that_dies_or_is_silent_is_told_of_beside_the_others() -> None:
    def answers(name: str, order: CacheOrder) -> list[TierAnswer] | None:
        return None if name == "decode-0" else [TierAnswer("pool")]

    async with operating(answers) as operator:
        answer = await operator.ask("lookup", {"prompt": TEXT, "timeout_s": 0.01})
        assert answer.json()["engines"][1]["error"] == {
            "code": "transfer_timeout",
            "message": "no answer within 0.01 s",
        }
        asking = asyncio.ensure_future(operator.ask("lookup", {"prompt": TEXT}))
        while len(operator.orders) < 4:
            await asyncio.sleep(0.001)
        operator.system.backends["decode-0"].die()
        answer = await asking
        assert answer.json()["engines"][1]["error"]["code"] == "engine_died"
        assert (await operator.refusal("lookup", {"prompt": TEXT, "engine": "decode-0"}))[0] == 503
        late = CacheAnswer("nobody's", [])
        operator.system.backends["prefill-0"].say(late)
        assert operator.system.dispatcher.counters.dropped_messages == 1


def test_an_engine_that_goes_before_it_is_asked_is_not_awaited() -> None:
    sent: list[str] = []
    orders = EngineOrders(lambda name, order: sent.append(name), lambda name: False, CacheOrder.failed)
    answers = asyncio.run(orders.ask(["decode-0"], CacheOrder(order_id="", action="clear", timeout_s=300.0)))
    assert not sent
    assert answers["decode-0"].tiers[0].code == "engine_died"


async def test_what_tiers_have_is_loaded_into_an_engines_own_blocks_by_a_request() -> None:
    asked: list[str] = []

    def answers(name: str, order: CacheOrder) -> list[TierAnswer]:
        asked.append(order.action)
        pool = TierAnswer("pool", 32 if len(asked) > 1 else 0, 2)
        return [pool] if order.tier == "pool" else [pool, TierAnswer("store/0-host", 32, 2)]

    async with operating(answers) as operator:
        order = {"prompt": TEXT, "tier": "pool", "engine": "decode-0", "cache_salt": "s"}
        answer = await operator.ask("prefetch", order)
        assert answer.json()["engines"] == [
            {"name": "decode-0", "role": "decode", "tiers": [{"tier": "pool", "tokens": 32, "values": 2}]}
        ]
        backends = operator.system.backends
        (submit,) = backends["decode-0"].heard(Submit)
        assert (submit.prompt_token_ids, submit.kv, submit.cache_salt) == (ids(TEXT)[:33], "local", "s")
        assert submit.params.max_tokens == 1
        assert not backends["prefill-0"].heard(Submit)
        await operator.ask("prefetch", order)
        assert len(backends["decode-0"].heard(Submit)) == 1, "it is there already"
        assert asked == ["lookup"] * 4
        keys = [key.hex() for key in keys_of(operator.system, TEXT)]
        found = await operator.refusal("prefetch", {"keys": keys, "tier": "pool"})
        assert (found[0], found[1]) == (400, "keys")
