"""Logits processors by name: found or refused at the start, asked for or refused by requests, and run offline."""

import random
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import processors
import pytest
from deployments import link_text_model
from oracle import oracle
from random_proposer import RandomProposer

from pdkv import LLM, SamplingParams
from pdkv.assemble.engine import build_engine
from pdkv.base import registry
from pdkv.base.limits import MAX_PROCESSOR_BYTES
from pdkv.base.options import options_of
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.engine.plan import NewRequest
from pdkv.errors import ConfigError, InvalidRequest, LogitsProcessorFailed
from pdkv.launch.check import check_processors
from pdkv.launch.config import Deployment, LaunchConfig
from pdkv.sampling.logits_processors import LOGITS_PROCESSORS

OPTIONS: dict[str, Any] = {"threads": 1, "device": "cpu", "dtype": "float32"}
NAMES = ["no_repeat", "faulty_processors:Faulty"]
WINDOW = 8
PARAMS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, logits_processors={"no_repeat": {"window": WINDOW}}
)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_text_model(tiny_model_dir, tmp_path_factory.mktemp("logits-processors"))


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation's example behind an entry point, the faulty one in a module."""
    points = [EntryPoint("no_repeat", "no_repeat_example:NoRepeat", LOGITS_PROCESSORS.group)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == LOGITS_PROCESSORS.group else [])
    monkeypatch.setitem(sys.modules, "no_repeat_example", processors.example_module())
    monkeypatch.setitem(sys.modules, "faulty_processors", processors)


def expected(model: Path, prompts: list[list[int]]) -> list[list[int] | None]:
    """Of transformers; None where a last digit decides."""
    choose = processors.without_repeats(WINDOW)
    return [oracle(model).generate(prompt, 24, choose) for prompt in prompts]


def test_the_example_of_the_page_gives_what_transformers_gives(model: Path) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randrange(1, 40))] for _ in range(10)]
    with LLM(model, logits_processors=NAMES, kv_cache_memory=4 << 20, **OPTIONS) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
        plain = msgspec.structs.replace(PARAMS, logits_processors={})
        assert outputs != [o.outputs[0].token_ids for o in llm.generate(prompts, plain, use_tqdm=False)]
    clear = [
        (given, right) for given, right in zip(outputs, expected(model, prompts), strict=True) if right is not None
    ]
    assert len(clear) >= 4
    assert [given for given, _ in clear] == [right for _, right in clear]


def test_preemption_steps_ahead_and_guesses_change_nothing(model: Path) -> None:
    """Each of these makes objects anew in the midst of an output, or calls one behind tokens that are taken back."""
    rng = random.Random(8)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    params = [
        msgspec.structs.replace(PARAMS, max_tokens=10 + 5 * i, temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(12)
    ]
    small = {"kv_cache_memory": 20 * 16 * 512, "max_model_len": 128, "max_num_seqs": 8, "in_turn_below_s": 0.0}

    def generate(ahead: int, proposer: RandomProposer | None = None) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pdkv.offline.engine.build_engine", partial(build_engine, proposer=proposer))
            with LLM(model, logits_processors=NAMES, max_steps_ahead=ahead, **small, **OPTIONS) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert llm._engine.core.scheduler.num_preemptions > 0
        return [output.outputs[0].token_ids for output in outputs]

    in_turn = generate(0)
    foreseen = dict(zip(map(tuple, prompts), in_turn, strict=True))

    def foresee(request: NewRequest) -> list[int]:
        return foreseen[tuple(request.prompt_token_ids)]

    assert generate(2) == in_turn
    proposer = RandomProposer(3, foresee, vocab_size=60)
    assert generate(2, proposer) == in_turn
    assert proposer.num_right > 50
    assert proposer.num_wrong > 50


def test_a_fault_ends_its_own_request(model: Path) -> None:
    faulty = {"faulty_processors:Faulty": {"how": "raise", "after": 3}}
    with LLM(model, logits_processors=NAMES, kv_cache_memory=4 << 20, **OPTIONS) as llm:
        with pytest.raises(LogitsProcessorFailed, match="faulty_processors:Faulty failed: RuntimeError: out of luck"):
            llm.generate("hello", msgspec.structs.replace(PARAMS, logits_processors=faulty), use_tqdm=False)
        assert not llm._engine.core.requests
        assert len(llm.generate("hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_repeats": {}}, "'no_repeats' is unknown; this server has no_repeat, faulty_processors:Faulty"),
        ({"no_repeat": {"window": 0}}, r"no_repeat: window must be in \[1, 1024\], got 0"),
        ({"no_repeat": {}}, "no_repeat: missing 'window'"),
        ({"no_repeat": 4}, "Expected `object`, got `int`"),
        ({"no_repeat": {"window": 1 << 70}}, "integers of 64 bits"),
        ({"no_repeat": {"window": "x" * MAX_PROCESSOR_BYTES}}, "at most 16384 bytes"),
        ({str(i): {} for i in range(9)}, "at most 8 entries, got 9"),
    ],
)
def test_what_a_request_may_not_ask_for_is_refused(arguments: Any, message: str, model: Path) -> None:
    with (
        LLM(model, logits_processors=NAMES, kv_cache_memory=1 << 20, **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match=message) as refused,
    ):
        llm.generate("hello", msgspec.structs.replace(PARAMS, logits_processors=arguments), use_tqdm=False)
    assert refused.value.param == "logits_processors"


def test_names_that_stand_for_nothing_are_refused_at_the_start(model: Path) -> None:
    for names, message in (
        (["no_repeats"], "unknown logits processor 'no_repeats' .did you mean 'no_repeat'"),
        (["json:loads"], "json:loads is not a subclass of LogitsProcessor"),
        (["a", ""], "a list of non-empty texts was expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model, logits_processors=names, **OPTIONS)
    assert options_of(EngineConfig)["logits_processors"].convert(" a,b:C") == ("a", "b:C")


def test_prefill_and_decode_must_have_the_same() -> None:
    def deployment(prefill: str, decode: str, num_prefill: int = 1) -> Deployment:
        return Deployment(
            launch=LaunchConfig(prefill=num_prefill),
            handoff=HandoffConfig(),
            prefill=EngineConfig(logits_processors=tuple(prefill.split(","))),
            decode=EngineConfig(logits_processors=tuple(decode.split(","))),
        )

    check_processors(deployment("no_repeat,json:Any", "json:Any,no_repeat"))
    check_processors(deployment("no_repeat", "json:Any", num_prefill=0))
    with pytest.raises(ConfigError, match="give both the same"):
        check_processors(deployment("no_repeat", "no_repeat,json:Any"))
    with pytest.raises(ConfigError, match="unknown logits processor"):
        check_processors(deployment("missing", "missing"))
