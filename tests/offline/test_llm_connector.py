"""LLMs that hand KV to one another: two in one process, and the example's two scripts in a process each."""

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import warm
from recall import make_question

from pdkv import LLM, SamplingParams
from pdkv.connectors.store.base import Buffer, KVStore, StoreConnector
from pdkv.errors import ConfigError, UnknownConnector
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.offline import engine as engine_module

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_prefill_decode"
PARAMS = SamplingParams(temperature=0, max_tokens=8)
QUESTIONS = [make_question(seed, 40) for seed in range(3)]  # 285 tokens each
PROMPTS = [question.prompt for question in QUESTIONS]
ANSWERS = [question.answer for question in QUESTIONS]


def make_llm(connector: str | None = None, **connector_config: str) -> LLM:
    return LLM(connector=connector, connector_config=connector_config, kv_cache_memory=32 << 20, threads=1)


def answers_of(llm: LLM) -> tuple[list[str], list[int]]:
    """Texts, and how many tokens of each prompt were not computed."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].text for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    ("connector", "options"),
    [("shared_storage", {"path": "{}"}), ("store", {"url": "file://{}"}), ("store", {"url": "memory://llm,file://{}"})],
)
def test_what_one_has_computed_another_one_loads(connector: str, options: dict[str, str], tmp_path: Path) -> None:
    options = {name: value.format(tmp_path / "kv") for name, value in options.items()} | {"lookup_timeout_s": "60"}
    with make_llm(connector, **options) as first:
        assert answers_of(first) == (ANSWERS, [0, 0, 0])
        with make_llm(connector, **options) as second:  # all is saved when `generate` returns
            assert answers_of(second) == (ANSWERS, [256, 256, 256])
    with make_llm(connector, **options) as third:
        assert answers_of(third) == (ANSWERS, [256, 256, 256])


def test_a_prompt_of_whole_values_comes_back_but_for_its_last_block(tmp_path: Path) -> None:
    """As it would be found in the pool: all but the block of the token that is computed."""
    prompt = [5 + number % 200 for number in range(512)]
    options = {"url": f"file://{tmp_path / 'kv'}", "lookup_timeout_s": "60"}
    found = []
    for _ in range(2):
        with make_llm("store", **options) as llm:
            outputs = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for _ in range(2)]
        found.append([output.num_cached_tokens for output in outputs])
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert found == [[0, 496], [496, 496]]


def test_llms_of_one_process_read_each_others_memory() -> None:
    with make_llm("shared_memory") as first, make_llm("shared_memory") as second:
        second.set_peers([first.card])
        assert answers_of(first) == (ANSWERS, [0, 0, 0])
        assert answers_of(second) == (ANSWERS, [272, 272, 272])
    with make_llm("shared_memory") as third:
        third.set_peers([first.card])  # it is closed
        assert answers_of(third) == (ANSWERS, [0, 0, 0])


class StuckStore(MemoryStore):
    """Saves wait until the test lets them go on, or for ever."""

    begun = threading.Event()
    may_go_on = threading.Event()

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.begun.set()
        self.may_go_on.wait(60.0)
        super().put(items)


class StuckConnector(StoreConnector):
    def open_store(self) -> KVStore:
        return StuckStore("stuck")


def test_a_save_that_does_not_end_does_not_hold_generate_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "SAVE_TIMEOUT_S", 0.0)
    monkeypatch.setitem(sys.modules, "stuck_connector", sys.modules[__name__])
    StuckStore.begun.clear()
    StuckStore.may_go_on.clear()
    with make_llm("stuck_connector:StuckConnector", transfer_timeout_s="0.1") as llm:
        with caplog.at_level(logging.WARNING):
            assert answers_of(llm)[0] == ANSWERS
        assert StuckStore.begun.wait(60.0)
        assert "saves have not ended within 0 s" in caplog.text
        StuckStore.may_go_on.set()
        monkeypatch.setattr(engine_module, "SAVE_TIMEOUT_S", 60.0)
        assert answers_of(llm)[0] == ANSWERS  # it goes on
        assert llm._engine.core.external.is_idle


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"connector": "teleport"}, UnknownConnector, "unknown connector 'teleport'"),
        ({"connector": "p2p"}, ConfigError, "'p2p' carries KV between two engines that a router brings together"),
        ({"connector": "shared_storage"}, ConfigError, "path"),
        ({"connector": "store", "connector_config": {"uri": "memory://"}}, ConfigError, "uri"),
        ({"connector_config": {"path": "/tmp/kv"}}, ConfigError, "requires a connector"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    arguments: dict[str, object], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "build_engine", pytest.fail)
    with pytest.raises(error, match=message):
        LLM(**arguments)  # type: ignore[arg-type]


def test_the_example_of_two_scripts(tmp_path: Path) -> None:
    printed = []
    for script in ("prefill.py", "decode.py"):
        printed.append(warm.run([*warm.PYTHON, str(EXAMPLE / script), str(tmp_path)]).stdout)
    assert printed[0] == "prefilled 3 prompts of [145, 145, 145] tokens\n"
    codes = ["0365", "3548", "9952"]
    assert printed[1].splitlines() == [f"{code}  (128 of 145 tokens loaded)" for code in codes]
