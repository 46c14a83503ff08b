"""What a step computes behind a layerwise load that fails is void: a pull beside the store makes no digests of it."""

from contextlib import closing
from pathlib import Path

import pytest

from pdkv.connectors.multi.scheduler import MultiScheduler
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.testing.engine import InProcessEngine, SideBySide, of_type, output_of, submit
from pdkv.wire.messages import Finished, HandedOff

PROMPT = [5 + i * 7 % 200 for i in range(150)]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_tokens_computed_behind_a_failed_layerwise_load_are_handed_off_undamaged(
    num_steps: int, tiny_model_dir: Path
) -> None:
    """A value goes between its look-up and its load: the tokens before it stay in their blocks, those behind it are
    computed again in the same blocks. `num_steps` are planned before the load fails.
    """
    own = {"url": f"memory://void-digests-{num_steps}", "tokens_per_value": "16", "load": "layerwise"}
    earlier = InProcessEngine.of_model(tiny_model_dir, "store", own)
    options = {"connectors": "shared_memory,store", **{f"store.{name}": value for name, value in own.items()}}
    sides = SideBySide.of_model(tiny_model_dir, "multi", options, max_num_batched_tokens=64)
    with closing(earlier), sides as engines:
        earlier.ask(submit(PROMPT[:97], max_tokens=1))
        prefill, decode = engines.prefill, engines.decode
        core, now = prefill.core, prefill.clock.now
        core.handle("r", submit(PROMPT, until="first_token", kv="handoff"), now())
        plans = [core.plan_step(now())]
        while not plans[-1].scheduled:  # it waits for the store's answer
            core.finish_step(core.executor.execute(plans.pop()), now())
            core.wake()
            plans = [core.plan_step(now())]
        multi = core.external.connector
        assert isinstance(multi, MultiScheduler)
        store = multi._schedulers[1]
        assert isinstance(store, StoreScheduler)
        value = core.requests["a", 0].hash_keys[2]
        store.lookups._store.delete([value + suffix for suffix in store._cut.suffixes])
        plans += [core.plan_step(now()) for _ in range(num_steps - 1)]
        for plan in plans:
            core.finish_step(core.executor.execute(plan), now())
        prefill.run_until(lambda: bool(of_type(prefill.sent, HandedOff)))
        (handed,) = of_type(prefill.sent, HandedOff)
        assert handed.sources.store == 32
        first = output_of(prefill.sent, "a")
        decode.tell(submit(PROMPT, kv="await_peer", output_token_ids=first, handoff=handed.handoff))
        decode.run_until(lambda: bool(of_type(decode.sent, Finished)))
        (finished,) = of_type(decode.sent, Finished)
        assert (finished.sources.remote, finished.sources.recomputed) == (150, 0)
