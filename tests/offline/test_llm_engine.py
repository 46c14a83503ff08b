"""`LLMEngine`: requests one by one, outputs by step; and what vLLM's programs say that changes something here."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deployments import link_text_model
from script_answers import MODEL, QUESTIONS, greedy_text

from pdkv import LLM, BeamSearchParams, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from pdkv.errors import ConfigError, InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def of_module() -> Iterator[LLM]:
    with LLM(MODEL, kv_cache_memory=16 << 20, threads=1, device="cpu") as llm:
        yield llm


@pytest.fixture
def engine(of_module: LLM) -> Iterator[LLM]:
    yield of_module
    assert not of_module.has_unfinished_requests()
    of_module._engine.settle()
    counts = of_module._engine.core.scheduler.kv.pool.counts()
    assert counts.free + counts.cached == counts.total
    assert not of_module._engine.core.requests


def finish(engine: LLMEngine) -> dict[str, str]:
    """The texts of all requests, by name."""
    texts = {}
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
    return texts


def test_a_request_that_fails_fails_alone(engine: LLM) -> None:
    engine.add_request("good", QUESTIONS[0], GREEDY)
    engine.add_request("bad", {"prompt_token_ids": [5, 100_000]}, GREEDY)
    engine.add_request("worse", [7] * 5000, GREEDY)
    engine.add_request("also good", QUESTIONS[1], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add_request("empty", "", GREEDY)
    errors, texts = [], {}
    while engine.has_unfinished_requests():
        try:
            texts |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
        except InvalidRequest as error:
            errors.append((error.request_id, "token ids" in str(error), "5000" in str(error)))
    assert errors == [("bad", True, False), ("worse", False, True)]
    assert texts == {"good": greedy_text(QUESTIONS[0], 6), "also good": greedy_text(QUESTIONS[1], 6)}


def test_names_are_unique_while_a_request_is_live(engine: LLM) -> None:
    engine.add_request("a", QUESTIONS[0], GREEDY)
    with pytest.raises(InvalidRequest, match="request_id must be unique: 'a' is running"):
        engine.add_request("a", QUESTIONS[1], GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    assert list(finish(engine)) == ["a"]
    engine.add_request("a", QUESTIONS[1], GREEDY, arrival_time=7.5)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.metrics.arrival_time for output in outputs} == {7.5}
    assert engine.step() == []


def counts_of(llm: LLM) -> dict[str, float]:
    """The metrics without vLLM's prefix."""
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics()}  # type: ignore[attr-defined]


def test_metrics_count_what_a_stop_string_ended_and_no_failure(engine: LLM) -> None:
    before = counts_of(engine)
    [output] = engine.generate(QUESTIONS[0], msgspec.structs.replace(GREEDY, stop="82"), use_tqdm=False)
    with pytest.raises(InvalidRequest):
        engine.generate([[7] * 5000], GREEDY, use_tqdm=False)
    found = {name: value - before[name] for name, value in counts_of(engine).items()}
    assert output.outputs[0].stop_reason == "82"
    assert found["prompt_tokens"] == found["prefix_cache_queries"] == len(output.prompt_token_ids)
    assert found["generation_tokens"] == output.metrics.num_generation_tokens == len(output.outputs[0].token_ids)
    assert found["request_success"] == 1


def test_metrics_count_a_preempted_prompt_and_no_guess_behind_a_stop_string() -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": "false"}
    fields = {"kv_cache_memory": 8 << 16, "max_model_len": 96, "speculative_config": guesses}
    prompts, longer = ["Codes: fox=4821, fox="] * 4, msgspec.structs.replace(GREEDY, max_tokens=60, ignore_eos=True)
    with LLM(MODEL, threads=1, device="cpu", max_num_seqs=8, **fields) as llm:
        outputs = llm.generate(prompts, longer, use_tqdm=False)
        stopping = llm.generate(prompts[0], msgspec.structs.replace(longer, stop="4821,"), use_tqdm=False)
        found = counts_of(llm)
    assert found["num_preemptions"] > 0
    assert found["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs + stopping)
    assert len(stopping[0].outputs[0].token_ids) == 5
    assert found["generation_tokens"] == 4 * 60 + 5


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_have_what_output_kind_says(engine: LLM, kind: RequestOutputKind) -> None:
    engine.add_request("a", QUESTIONS[0], msgspec.structs.replace(GREEDY, output_kind=kind))
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    text = greedy_text(QUESTIONS[0], 6)
    assert (text if kind != RequestOutputKind.DELTA else "") == (texts[-1] if kind != RequestOutputKind.DELTA else "")
    assert ("".join(texts) == text) == (kind != RequestOutputKind.CUMULATIVE)
    assert (len(texts) == 1) == (kind == RequestOutputKind.FINAL_ONLY)


def test_calls_of_the_llm_go_on_beside_requests_of_its_engine(engine: LLM) -> None:
    engine.add_request("endless", QUESTIONS[2], ENDLESS)
    [output] = engine.generate(QUESTIONS[0], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == greedy_text(QUESTIONS[0], 6)
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.generate([QUESTIONS[0], [100_000]], GREEDY, use_tqdm=False)
    [mine] = engine.step()
    assert (mine.request_id, mine.finished) == ("endless", False)
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("endless")


def test_ctrl_c_in_a_step_loses_no_output(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    take = engine._engine.core.take_messages
    interrupts = iter([False, True] * 100)

    def taken(now: float) -> Any:
        messages = take(now)
        if messages and next(interrupts):
            signal.raise_signal(signal.SIGINT)
        return messages

    monkeypatch.setattr(engine._engine.core, "take_messages", taken)
    monkeypatch.setattr(engine._engine, "settle", lambda: None)
    delta = msgspec.structs.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
    for name, question in enumerate(QUESTIONS):
        engine.add_request(str(name), question, delta)
    texts, num_interrupted = ["", "", ""], 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while engine.has_unfinished_requests():
            try:
                for output in engine.step():
                    texts[int(output.request_id)] += output.outputs[0].text
            except KeyboardInterrupt:
                num_interrupted += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert texts == [greedy_text(question, 6) for question in QUESTIONS]
    assert num_interrupted >= 2


def test_an_engine_that_failed_says_so_in_every_step() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(MODEL, kv_cache_memory=16 << 20, threads=1, device="cpu"))
    engine.add_request("a", QUESTIONS[0], GREEDY)
    engine.close()
    for _ in range(2):
        with pytest.raises(Exception, match="the engine was closed"):
            engine.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("x", use_tqdm="no"), "use_tqdm='no': Expected `bool`"),
        (lambda llm: llm.generate(), "one of prompts and prompt_token_ids must be given"),
        (lambda llm: llm.generate("x", prompt_token_ids=[5]), "one of prompts and prompt_token_ids must be given"),
        (lambda llm: llm.generate([[{"prompt": "x"}]], GREEDY), "Expected `int`, got `object`"),
        (lambda llm: llm.generate(["x", "y"], GREEDY, priority=[1]), r"2 prompts need as many priorities, got \[1\]"),
        (lambda llm: llm.generate("x", GREEDY, priority=[2**40]), "priority="),
        (lambda llm: llm.generate("x", GREEDY, priority=[]), r"1 prompts need as many priorities, got \[\]"),
        (lambda llm: llm.score("x", 5), "data_2=5: Expected `array`"),
        (lambda llm: llm.score(["x", 5], ["x", "y"]), "data_1=.*: Expected `str`, got `int`"),
        (lambda llm: llm.add_request("q", "x", GREEDY, priority="high"), "priority='high': Expected `int`"),
        (lambda llm: llm.add_request(5, "x", GREEDY), "request_id must be a text of 1 to 256 characters, got 5"),
        (lambda llm: llm.generate("x", samplng_params=GREEDY), "generate has no 'samplng_params'"),
        (lambda llm: llm.chat(CHAT, GREEDY, chat_template="{% if"), "chat_template: .* broken"),
        (lambda llm: llm.chat(CHAT, GREEDY, chat_template=5), "chat_template=5"),
        (lambda llm: llm.chat(CHAT, GREEDY, chat_template_kwargs=5), "chat_template_kwargs must be a mapping, got 5"),
        (lambda llm: llm.chat(CHAT, GREEDY, chat_template_content_format="x"), "chat_template_content_format='x'"),
        (lambda llm: llm.chat(CHAT, GREEDY, toolz=[]), "chat has no 'toolz' .did you mean 'tools'"),
        (lambda llm: llm.add_request("q", "x", GREEDY, arrival_time="now"), "arrival_time='now'"),
        (lambda llm: llm.beam_search("x", GREEDY), "params must be BeamSearchParams, got SamplingParams"),
        (lambda llm: llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=2)), "beam_width=11: .* <= 10"),
        (lambda llm: llm.beam_search("", BeamSearchParams(beam_width=2, max_tokens=2)), "must not be empty"),
        (lambda llm: SamplingParams(max_token=1), "SamplingParams has no 'max_token' .did you mean 'max_tokens'"),
    ],
)
def test_a_call_that_is_wrong_is_refused_by_the_name_of_its_argument(engine: LLM, call: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        call(engine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 3}, "best_of must be n (1): all choices are returned, got 3"),
        ({"extra_args": {"a": 1}}, "extra_args must be empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 (as many as fit) or at least 1, got 0"),
        ({"detokenize": False, "stop": "a"}, "detokenize must be true with stop strings"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "guided_decoding must be absent"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "whitespace_pattern is not supported"),
    ],
)
def test_fields_that_only_python_has_are_checked(engine: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.generate("x", SamplingParams(**fields), use_tqdm=False)
    assert message in str(refused.value)


def test_what_changes_nothing_is_accepted(engine: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=6, best_of=1, seed=-1, extra_args={}, length_penalty=1.0, flat_logprobs=False
    )
    [output] = engine.generate(
        QUESTIONS[0], params, use_tqdm=False, lora_request=[None], tokenization_kwargs={}, priority=None
    )
    assert output.outputs[0].text == greedy_text(QUESTIONS[0], 6)
    assert SamplingParams(seed=-1).checked().seed is None
    assert SamplingParams(max_tokens=None).checked().max_tokens is None
    assert SamplingParams(logprobs=True, prompt_logprobs=True).checked() == SamplingParams(
        logprobs=1, prompt_logprobs=1
    )


def test_beams_end_where_the_model_ends_and_at_its_length(engine: LLM) -> None:
    question = QUESTIONS[0]
    [ended] = engine.beam_search(question, BeamSearchParams(beam_width=2, max_tokens=12))
    best = ended.sequences[0]
    assert best.finish_reason == "stop"
    assert best.text == engine.tokenizer.decode(best.tokens[:-1], skip_special_tokens=False)
    assert best.text is not None
    assert best.text.endswith(question + greedy_text(question, 12))
    [shown] = engine.beam_search(
        [question], BeamSearchParams(beam_width=2, max_tokens=12, include_stop_str_in_output=True)
    )
    assert shown.sequences[0].text == engine.tokenizer.decode(best.tokens, skip_special_tokens=False)
    [full] = engine.beam_search([[7] * 4094], BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
    assert [len(beam.tokens) for beam in full.sequences] == [4096, 4096]
    assert engine.beam_search([], BeamSearchParams(beam_width=2, max_tokens=9)) == []


def test_a_length_that_the_kv_pool_limits_is_that_of_beams_and_of_prompts_that_are_cut() -> None:
    with LLM(MODEL, kv_cache_memory=4 << 16, threads=1, device="cpu") as llm:
        assert llm.card.max_model_len == 64
        [beams] = llm.beam_search([7] * 61, BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True))
        cut = msgspec.structs.replace(GREEDY, truncate_prompt_tokens=-1)
        [output] = llm.generate([[*range(5, 105)]], cut, use_tqdm=False)
    assert [len(beam.tokens) for beam in beams.sequences] == [64, 64]
    assert output.prompt_token_ids == [*range(42, 105)]


def test_beams_of_a_salted_prompt_leave_nothing_that_others_find(engine: LLM) -> None:
    prompt = {"prompt_token_ids": [*range(60, 100)], "cache_salt": "mine"}
    engine.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
    [unsalted] = engine.generate(prompt["prompt_token_ids"], GREEDY, use_tqdm=False)
    [salted] = engine.generate(prompt, GREEDY, use_tqdm=False)
    assert (unsalted.num_cached_tokens, salted.num_cached_tokens) == (0, 32)


def test_prefix_caching_that_is_off_finds_nothing_and_leaves_stores_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = link_text_model(tiny_model_dir, tmp_path / "model") if (tmp_path / "model").mkdir() is None else tmp_path
    prompt = [list(range(5, 85))]
    options: dict[str, Any] = {"threads": 1, "kv_cache_memory": 8 << 20, "device": "cpu"}
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
        counts = llm._engine.core.scheduler.kv.pool.counts()
        assert (first.num_cached_tokens, second.num_cached_tokens, counts.cached) == (0, 0, 0)
        assert first.outputs == second.outputs
    store = {"connector": "shared_storage", "connector_config": {"path": str(tmp_path / "kv")}}
    for cached in (0, 64):
        with LLM(model, enable_prefix_caching=False, **store, **options) as llm:
            [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert (output.num_cached_tokens >= cached, output.num_cached_tokens > 0) == (True, cached > 0)
            assert output.outputs == first.outputs


def test_a_seed_or_a_tokenizer_that_is_none_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="seed: a whole number was expected, got 'x'"):
        LLM("/nowhere", seed="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokenizer"):
        LLM("/nowhere", tokenizer="another")
    for wrong in (None, 5):
        with pytest.raises(
            ConfigError, match=f"LLM: model: a directory or a name on the hub was expected, got {wrong}"
        ):
            LLM(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="connector_config: a mapping was expected, got 5"):
        LLM("/nowhere", connector="store", connector_config=5)  # type: ignore[arg-type]
