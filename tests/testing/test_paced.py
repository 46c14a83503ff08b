"""Paced engines: their answers depend on the KV that is found, and their steps end when their profile says."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Event
from typing import Any

import numpy as np
import pytest
import torch
from deployments import launches

from pdkv import LLM, SamplingParams
from pdkv.cli.main import EXIT_USAGE, main
from pdkv.config import EngineConfig
from pdkv.connectors.base import NO_TRANSFERS, KVConnectorMetadata
from pdkv.engine.plan import NewRequest, ScheduledRequest, StepPlan
from pdkv.engine.worker.kv_cache import allocate_pool
from pdkv.errors import ConfigError, ModelError
from pdkv.models.config import load_model_config
from pdkv.testing import VirtualClock
from pdkv.testing.paced import PROFILES, expected, read_profile
from pdkv.testing.paced_engine import PacedExecutor
from pdkv.wire.types import RequestKey

MODEL = Path("paced:h100")
H100 = read_profile(MODEL)


class NoPause(VirtualClock):
    """Whoever waits moves it."""

    def wait(self, event: Event | Condition, until: float | None = None) -> bool:
        assert until is not None
        self.advance(max(until - self.now(), 0.0))
        return False


class Engine:
    """A paced executor, its pool, and plans by hand; requests are named by letters."""

    def __init__(self, model: Path = MODEL, worker: Any = None, **config: Any) -> None:
        self.clock = NoPause()
        made = EngineConfig(model=model, kv_cache_memory=16 << 20, **config)
        self.executor = PacedExecutor(load_model_config(model), made, max_num_batched_tokens=2048, clock=self.clock)
        self.pool = allocate_pool(self.executor.layout, self.executor.num_blocks, torch.device("cpu"))
        self.executor.attach(self.pool, worker)
        self.steps = 0
        self.lengths: dict[RequestKey, int] = {}

    def step(
        self,
        *shares: tuple[str, int, int],
        new: Sequence[NewRequest] = (),
        ended: str = "",
        meta: KVConnectorMetadata | None = None,
    ) -> dict[str, int]:
        """Run (name, tokens computed before, tokens in it)s. The answers by name of those whose prompt ends."""
        self.lengths |= {each.key: len(each.prompt_token_ids) for each in new}
        scheduled = [
            ScheduledRequest((name, 0), start, count, [], start + count >= self.lengths[name, 0])
            for name, start, count in shares
        ]
        self.steps += 1
        output = self.executor.execute(StepPlan(self.steps, list(new), scheduled, [(n, 0) for n in ended], meta))
        return {name: sampled.token_ids[0] for (name, _), sampled in output.sampled.items()}

    def decode(self, name: str, start: int, count: int) -> list[int]:
        """So many single tokens of one request."""
        return [self.step((name, start + i, 1))[name] for i in range(count)]


def request(name: str, prompt: list[int], blocks: Sequence[int], **params: Any) -> NewRequest:
    return NewRequest((name, 0), 0, prompt, [], SamplingParams(**{"temperature": 0.0, **params}), [list(blocks)])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(H100.vocab_size), k=length)


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("block_size", [16, 48])
def test_answers_are_a_function_of_the_prompt(length: int, block_size: int) -> None:
    engine, prompt = Engine(block_size=block_size), prompt_of(length)
    first = engine.step(("a", 0, length), new=[request("a", prompt, range(5, 15))])["a"]
    assert [first, *engine.decode("a", length, 40)] == expected(H100, prompt, 41)


def test_neither_chunks_nor_neighbours_change_an_answer() -> None:
    engine, prompts = Engine(), [prompt_of(100, seed) for seed in range(3)]
    requests = [request(name, prompts[i], range(8 * i, 8 * i + 8)) for i, name in enumerate("abc")]
    engine.step(("a", 0, 30), new=requests[:1])
    engine.step(("b", 0, 100), ("a", 30, 7), new=requests[1:2])
    found = engine.step(("a", 37, 63), ("b", 100, 1), ("c", 0, 100), new=requests[2:])
    assert found == {
        "a": expected(H100, prompts[0], 1)[0],
        "b": expected(H100, prompts[1], 2)[1],
        "c": expected(H100, prompts[2], 1)[0],
    }


def test_parameters_of_sampling_are_the_real_ones_and_leave_the_answer_where_they_allow_it() -> None:
    engine, prompt = Engine(), prompt_of(20)
    hot = {"temperature": 2.0, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 0}
    answer = expected(H100, prompt, 1)[0]
    requests = [request("a", prompt, [0, 1], **hot), request("b", prompt, [2, 3], allowed_token_ids=[answer ^ 1])]
    assert engine.step(("a", 0, 20), ("b", 0, 20), new=requests) == {"a": answer, "b": answer ^ 1}


# --- wrong KV -----------------------------------------------------------------------------------------------------

Plant = Callable[[torch.Tensor], None]


def flip(pool: torch.Tensor) -> None:
    pool.view(torch.int64)[2, 3, 1, 5, 9, 4] ^= 1


def zero(pool: torch.Tensor) -> None:
    pool[1] = 0


def zero_a_layer(pool: torch.Tensor) -> None:
    pool[3, 2] = 0


def another_request(pool: torch.Tensor) -> None:
    pool[2] = pool[10]


def stale_rows(pool: torch.Tensor) -> None:
    """Half of a block is that of the request before."""
    pool[3, :, :, :, :8] = pool[11, :, :, :, :8]


def swapped(pool: torch.Tensor) -> None:
    pool[[1, 2]] = pool[[2, 1]]


def layers_swapped(pool: torch.Tensor) -> None:
    pool[0, [0, 1]] = pool[0, [1, 0]]


PLANTS = [flip, zero, zero_a_layer, another_request, swapped, layers_swapped]


def arrives(plant: Plant) -> tuple[list[int], list[int]]:
    """20 tokens of a request that finds 64 tokens of its prompt, among which something was planted; and the right."""
    engine, prompt = Engine(), prompt_of(70)
    others = [request("a", prompt[:64], range(4)), request("b", prompt_of(64, 1), range(8, 12))]
    engine.step(("a", 0, 64), ("b", 0, 64), new=others)
    plant(engine.pool)
    first = engine.step(("c", 64, 6), new=[request("c", prompt, range(7))], ended="ab")["c"]
    return [first, *engine.decode("c", 70, 19)], expected(H100, prompt, 20)


def test_kv_that_is_found_gives_the_same_answer() -> None:
    found, right = arrives(lambda pool: None)
    assert found == right


@pytest.mark.parametrize("plant", PLANTS)
def test_wrong_kv_that_a_request_comes_with_shows_in_its_first_token(plant: Plant) -> None:
    found, right = arrives(plant)
    assert found[0] != right[0]
    assert found != right


def test_rows_that_are_wrong_in_all_layers_show_within_a_block_of_tokens() -> None:
    found, right = arrives(stale_rows)
    assert found[:16] != right[:16]


def test_wrong_kv_in_the_middle_of_a_prompt_shows_at_its_end() -> None:
    engine, prompt = Engine(), prompt_of(100)
    engine.step(("a", 0, 64), new=[request("a", prompt[:64], range(4))])
    flip(engine.pool)
    assert engine.step(("b", 64, 20), new=[request("b", prompt, range(7))], ended="a") == {}
    assert engine.step(("b", 84, 16))["b"] != expected(H100, prompt, 1)[0]


def test_a_block_that_another_request_writes_shows_in_the_answer_that_runs() -> None:
    engine, prompt = Engine(), prompt_of(64)
    first = engine.step(("a", 0, 64), new=[request("a", prompt, range(6))])["a"]
    assert [first, *engine.decode("a", 64, 5)] == expected(H100, prompt, 6)
    engine.step(("b", 0, 16), new=[request("b", prompt_of(16, 3), [2])])
    assert engine.decode("a", 69, 10)[0] != expected(H100, prompt, 7)[6]


# --- steps --------------------------------------------------------------------------------------------------------


def took(engine: Engine, *shares: tuple[str, int, int], **more: Any) -> float:
    before = engine.clock.now()
    engine.step(*shares, **more)
    return engine.clock.now() - before


def test_a_step_takes_what_the_curve_says_of_its_rows_prompt_tokens_and_context() -> None:
    engine = Engine()
    requests = [request(name, prompt_of(100, i), range(8 * i, 8 * i + 8)) for i, name in enumerate("abc")]
    assert took(engine, ("a", 0, 100), ("b", 0, 60), new=requests[:2]) == pytest.approx(H100.seconds(0, 160, 160))
    assert took(engine, ("a", 100, 1), ("b", 60, 40)) == pytest.approx(H100.seconds(1, 40, 201))
    assert took(engine, ("a", 101, 1), ("b", 100, 1)) == pytest.approx(H100.seconds(2, 0, 203))


def test_a_step_in_which_nothing_is_computed_takes_no_time() -> None:
    assert took(Engine()) == 0.0


def test_the_curve_is_a_sum_of_its_parts() -> None:
    assert H100.seconds(3, 5, 7) == pytest.approx(
        H100.step_s + 3 * H100.row_s + 5 * H100.prompt_token_s + 7 * H100.context_token_s
    )


class Worker:
    """A connector's worker side whose layers are there at once, but for one; notes when it is called."""

    def __init__(self, late_layer: int = -1, late_s: float = 0.0) -> None:
        self.clock: VirtualClock | None = None
        self.late = late_layer, late_s
        self.asked: list[float] = []
        self.saved: list[int] = []

    def wait_for_layer_load(self, layer: int) -> None:
        assert self.clock is not None
        self.asked.append(self.clock.now())
        if layer == self.late[0]:
            self.clock.advance(self.late[1])

    def save_kv_layer(self, layer: int, pool: torch.Tensor, meta: KVConnectorMetadata) -> None:
        self.saved.append(int(np.count_nonzero(pool.view(torch.int64)[0, layer])))

    def get_finished(self) -> Any:
        return NO_TRANSFERS

    def handshake(self) -> bytes:
        return b""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_layer_hooks_are_called_throughout_the_step_which_is_longer_by_what_a_layer_waits(late_s: float) -> None:
    worker = Worker(1, late_s)
    engine = Engine(worker=worker)
    worker.clock = engine.clock
    engine.pool.zero_()
    began, whole_s = engine.clock.now(), H100.seconds(0, 16, 16)
    meta = KVConnectorMetadata(step_id=1, needs_layer_hooks=True)
    found = engine.step(("a", 0, 16), new=[request("a", prompt_of(16), [0])], meta=meta)
    layers = range(H100.num_layers)
    assert worker.asked == pytest.approx([began + whole_s * i / len(layers) + late_s * (i > 1) for i in layers])
    assert engine.clock.now() - began == pytest.approx(whole_s + late_s)
    assert len(set(worker.saved)) == 1  # each layer was whole when it was saved
    assert worker.saved[0] > 0
    assert found["a"] == expected(H100, prompt_of(16), 1)[0]


def test_an_executor_that_shuts_down_waits_for_no_step() -> None:
    engine = Engine()
    engine.executor.shutdown()
    assert engine.executor.pace.closing.is_set()


# --- profiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_profiles_that_are_shipped_can_be_read(path: Path) -> None:
    profile = read_profile(Path(f"paced:{path.stem}"))
    assert profile == read_profile(Path(f"paced:{path}"))
    assert load_model_config(Path(f"paced:{path.stem}")).num_positions == profile.max_model_len


def test_the_digest_of_a_profile_is_the_models_identity() -> None:
    assert H100.identity == dataclasses.replace(H100).identity
    others = [dataclasses.replace(H100, step_s=H100.step_s * 2), dataclasses.replace(H100, num_layers=5)]
    assert len({H100.identity, *(other.identity for other in others)}) == 3


def text_of(**values: object) -> str:
    merged = dataclasses.asdict(H100) | values
    return "\n".join(f"{name} = {value}" for name, value in merged.items() if value is not None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (text_of(step_s="-1"), ["step_s", "above 0", "-1"]),
        (text_of(row_s='"much"'), ["row_s", "a number", "'much'"]),
        (text_of(head_size=20), ["head_size", "a multiple of 8", "20"]),
        (text_of(num_layers=None), ["num_layers", "missing"]),
        (text_of(num_layer=4), ["num_layer", "did you mean 'num_layers'"]),
        ("step_s =", ["malformed"]),
        ("step_s = " + "[" * 10_000, ["malformed"]),
    ],
)
def test_a_bad_profile_is_refused_by_the_name_of_the_file_and_the_field(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ModelError) as raised:
        read_profile(Path(f"paced:{file}"))
    assert all(word in str(raised.value) for word in [str(file), *words]), raised.value


@pytest.mark.parametrize("command", [["launch"], ["generate", "a"]])
def test_an_unknown_profile_is_refused_with_the_names_that_there_are(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--model", "paced:h1000"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "'h1000'" in error
    assert all(path.stem in error for path in PROFILES.glob("*.toml"))


@pytest.mark.parametrize(
    ("name", "value"), [("tp", 2), ("check_finite", True), ("kv_cache_dtype", "fp8"), ("device", "cuda")]
)
def test_what_a_paced_engine_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Engine(**{name: value})


def test_a_hit_is_found_again_in_the_next_turn(tmp_path: Path) -> None:
    """Through the real scheduler and block pool, with a profile of one's own."""
    fast = dataclasses.replace(H100, step_s=1e-4, row_s=0.0, prompt_token_s=0.0, context_token_s=0.0)
    file = tmp_path / "fast.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in dataclasses.asdict(fast).items()))
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(f"paced:{file}", kv_cache_memory=4 << 20) as llm:
        prompt = prompt_of(50)
        [first] = llm.generate([prompt], params)
        answer = list(first.outputs[0].token_ids)
        [second] = llm.generate([[*prompt, *answer]], params)
    assert answer == expected(fast, prompt, 20)
    assert list(second.outputs[0].token_ids) == expected(fast, [*prompt, *answer], 20)


@pytest.mark.parametrize(
    "shape", ["shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aggregated", "store"))]
)
def test_a_deployment_of_paced_engines_gives_the_right_answers(shape: str, tmp_path: Path) -> None:
    flags = {
        "aggregated": ["--prefill", "0", "--decode", "1"],
        "shared_memory": [],
        "store": ["--connector", "store", "--connector-config", f"url=file://{tmp_path}/kv"],
    }
    prompts = [prompt_of(length, length) for length in (5, 16, 100, 300)]
    own = ["--no-check-finite", "--served-model-name", "served", *flags[shape]]
    with launches(MODEL) as launch:
        running = launch(*own)
        for prompt in [*prompts, prompts[-1]]:
            reply = running.complete(prompt, max_tokens=30, return_token_ids=True).json()["choices"][0]
            assert reply["token_ids"] == expected(H100, prompt, 30)
            assert reply["text"]
