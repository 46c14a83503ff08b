"""Choices are made again from their records alone, and cost no computed token where one request runs at a time."""

import json
import logging
import random
from itertools import takewhile

import msgspec
import pytest
from chooser_rig import ChooserRig
from dispatch_rig import System, check_right, live
from scripted_engine import make_request

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.router.engines.candidate import EngineView
from pdkv.router.request import GenerateRequest
from pdkv.router.routing.decision import Choice, hindsight, replay
from pdkv.router.routing.policies import POLICIES, Snapshot
from pdkv.wire.messages import BlockStored, CacheCleared, KVEvents


def decode(line: str) -> list[Choice]:
    """The choices of a logged line."""
    return msgspec.convert(json.loads(line)["choices"], list[Choice])


def busy_rig(policy: str, rng: random.Random) -> ChooserRig:
    """Engines with unequal work, speeds and KV."""
    rig = ChooserRig(4, 3, policy, lends=rng.random() < 0.5)
    for name, engine in rig.fleet.engines.items():
        rig.occupy(name, prompts=rng.randrange(3000), kv=rng.randrange(3000))
        rig.store(name, 16 * rng.randrange(40), make_request(1024))
        engine.pace = rng.choice([1.0, 1.0, 2.0])
        rig.fleet.speeds.computed(name, 1000, rng.random())
        rig.fleet.speeds.decoded(name, 2, rng.random() / 10)
        rig.fleet.speeds.loaded(1 << 16, rng.random() / 10, ("prefill-0", name))
    return rig


@pytest.mark.parametrize("policy", [*POLICIES, f"{__name__}:fails"])
def test_records_reproduce_every_choice(policy: str) -> None:
    """By JSON, as they are logged; of each policy, with objectives, siblings and requests that stay on one engine."""
    rng, reasons = random.Random(1), set()
    for number in range(40):
        rig = busy_rig(policy, rng)
        request = make_request(
            rng.choice([20, 300, 1024]), explain=True,
            near=rng.choice(["", "", "prefill-2"]), affinity=rng.choice(["", "key"]),
            slo_ttft_s=rng.choice([0.0, 0.5]), slo_tpot_s=rng.choice([0.0, 0.05]),
        )  # fmt: skip
        prompt = rig.holdings.of(request, 1.0)
        route = rig.chooser.choose(prompt, 1.0, may_stay=number % 2 == 0)
        if not route.decode:
            assert rig.chooser.choose_decode(prompt, route.prefill, 1.0) == prompt.choices[-1].chosen
        choices = msgspec.json.decode(msgspec.json.encode(prompt.choices), type=list[Choice])
        assert [replay(choice) for choice in choices] == [choice.chosen for choice in prompt.choices]
        assert choices[0].chosen == route.prefill or route.aggregated
        reasons |= {choice.reason for choice in choices}
    assert {"sibling", "objective", "default" if ":" in policy else "policy"} <= reasons
    assert "sooner" in reasons or policy != "prefix_aware"


def fails(snapshot: Snapshot) -> EngineView:
    """A policy that is no good."""
    raise ZeroDivisionError


def test_nothing_is_recorded_that_was_not_asked_for() -> None:
    rig = ChooserRig(2, 2, "prefix_aware")
    prompt = rig.holdings.of(make_request(100), 0.0)
    rig.chooser.choose(prompt, 0.0)
    assert prompt.choices is None


def test_hindsight_names_the_engine_that_would_have_computed_least() -> None:
    rig, request = ChooserRig(3, 1, "round_robin"), make_request(1024, explain=True)
    rig.store("prefill-2", 960, request)
    prompt = rig.holdings.of(request, 0.0)
    assert rig.chooser.choose(prompt, 0.0).prefill == "prefill-0"
    assert prompt.choices is not None
    seen = hindsight(prompt.choices, "prefill-0", 1024, {"prefill-1": 1024, "prefill-2": 64})
    assert seen == {"engine": "prefill-2", "computed_tokens": 64, "regret_tokens": 960}
    assert hindsight([], "prefill-0", 1024, {}) is None


async def test_one_request_at_a_time_has_no_regret(caplog: pytest.LogCaptureFixture) -> None:
    """By an oracle that knows the caches; the records of the log are chosen from again."""
    caplog.set_level(logging.INFO, "pdkv.decisions")
    rng = random.Random(2)
    async with live(System(4, 2, policy="prefix_aware", explain_share=1.0)) as system:
        for i in range(4):
            system.backends[f"prefill-{i}"].say(KVEvents(0, [CacheCleared()]))
        caches: dict[str, list[bytes]] = {f"prefill-{i}": [] for i in range(4)}
        num_events = dict.fromkeys(caches, 1)
        for _ in range(40):
            request = make_request(16 * rng.randrange(2, 7) + 5, cache_salt=f"{rng.randrange(3)}")
            keys = keys_of(system, request)
            hits = {name: sum(1 for _ in takewhile(held.__contains__, keys)) for name, held in caches.items()}
            name = (await check_right(system, request)).prefill_engine
            assert hits[name] == max(hits.values()), "another engine would have computed less"
            system.backends[name].say(KVEvents(num_events[name], [BlockStored(keys, None)]))
            num_events[name] += 1
            caches[name] += keys
    lines = [record.getMessage() for record in caplog.records if record.name == "pdkv.decisions"]
    assert len(lines) == 40
    for choices in map(decode, lines):
        assert {choice.side for choice in choices} == {"prefill", "decode"}
        assert [replay(choice) for choice in choices] == [choice.chosen for choice in choices]


def keys_of(system: System, request: GenerateRequest) -> list[bytes]:
    """Keys of all full blocks of the prompt."""
    card, keys = system.card("prefill-0"), list[bytes]()
    root = root_key(model=card.model, layout=card.layout.identity, cache_salt=request.cache_salt)
    extend_keys(keys, root, request.prompt_token_ids)
    return keys
