"""The offline API over a small random model: shapes, stops, choices, seeds, errors, and everything given back."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pdkv import LLM, SamplingParams
from pdkv.errors import ConfigError, InvalidRequest
from pdkv.sampling.shape import StructuredOutputs

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    with LLM(model, kv_cache_memory=8 << 20, threads=1) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    yield engine
    engine._engine.settle()
    counts = engine._engine.core.scheduler.kv.pool.counts()
    assert counts.free + counts.cached == counts.total
    assert not engine._engine.core.requests


def test_results_have_the_prompts_order_whatever_form_they_have(llm: LLM) -> None:
    by_text = llm.generate(["hello", "a longer prompt than the first"], GREEDY, use_tqdm=False)
    ids = [output.prompt_token_ids for output in by_text]
    by_ids = llm.generate(ids, GREEDY, use_tqdm=False)
    assert [output.prompt for output in by_text] == ["hello", "a longer prompt than the first"]
    assert [output.prompt for output in by_ids] == [None, None]
    assert [output.outputs for output in by_ids] == [output.outputs for output in by_text]
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs == by_text[0].outputs
    assert llm.generate(ids[0], GREEDY, use_tqdm=False)[0].outputs == by_text[0].outputs
    for output in by_text:
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].finish_reason == "length"


def test_steps_of_a_small_model_leave_the_process_its_threads(model: Path) -> None:
    """Another engine's, above all, which reads their number when it is made."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with LLM(model, device="cpu", kv_cache_memory=8 << 20) as llm:
            llm.generate("hello", GREEDY, use_tqdm=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_greedy_tokens_are_those_of_transformers(llm: LLM, model: Path) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (output,) = llm.generate("The quick brown fox", GREEDY, use_tqdm=False)
    prompt = torch.tensor([output.prompt_token_ids])
    expected = reference.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()


def test_conversations_are_what_the_chat_template_makes_of_them(llm: LLM) -> None:
    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    second = [{"role": "user", "content": "Bye"}]
    texts = ["[system]Be kind.[user]Hello[assistant]", "[user]Bye[assistant]"]
    both = llm.chat([first, second], GREEDY, use_tqdm=False)
    assert [output.outputs for output in both] == [o.outputs for o in llm.generate(texts, GREEDY, use_tqdm=False)]
    (alone,) = llm.chat(first, GREEDY, use_tqdm=False)
    assert alone.prompt_token_ids == both[0].prompt_token_ids
    assert alone.outputs == both[0].outputs
    begun = [*second, {"role": "assistant", "content": "So "}]
    (going_on,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert llm.tokenizer.decode(going_on.prompt_token_ids) == "[user]Bye[assistant]So "


@pytest.mark.parametrize("messages", [[], [[]], ["Hello"], "Hello", 5, [{"content": "x"}], [[{"role": "user"}], "x"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=f"a list of messages with a role.*, got {re.escape(repr(messages))}"
    ) as refused:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest, match="add_generation_prompt=False"):
        llm.chat([{"role": "user", "content": "x"}], continue_final_message=True, use_tqdm=False)


def test_prompts_may_have_the_form_of_mappings(llm: LLM) -> None:
    """F74."""
    [plain] = llm.generate("hello there", GREEDY, use_tqdm=False)
    ids = plain.prompt_token_ids
    for given in ({"prompt": "hello there", "multi_modal_data": None}, {"prompt_token_ids": ids, "prompt": "x"}):
        [alone] = llm.generate(given, GREEDY, use_tqdm=False)
        [listed, other] = llm.generate([given, ids], GREEDY, use_tqdm=False)
        for output in (alone, listed, other):
            assert (output.prompt_token_ids, output.outputs) == (ids, plain.outputs)
        assert (alone.prompt, other.prompt) == (given["prompt"], None)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("seed", 1.5, "a whole number of at least -9,223,372,036,854,775,808 and up to 9,223,372,036,854,775,807"),
        ("temperature", "0", "Expected `float`, got `str`"),
        ("max_tokens", 2.5, "a whole number of at least 1 and below 2,147,483,648"),
        ("n", "2", "Expected `int`, got `str`"),
        ("n", True, "a whole number of at least 1 and up to 128"),
        ("logprobs", "3", "Expected `int`, got `str`"),
        ("ignore_eos", "no", "Expected `bool`, got `str`"),
        ("stop", 5, "a list of non-empty texts with a length of up to 64"),
        ("stop", ("a", 5), "Expected `str`, got `int` - at `$[1]`"),
        ("stop_token_ids", (5.5,), "Expected `int`, got `float` - at `$[0]`"),
        ("allowed_token_ids", "12", "Expected `array`, got `str`"),
        ("logit_bias", {5.5: 1}, "Expected `int`, got `float` - at `key` in `$`"),
        ("logits_processors", {"a": 1}, "Expected `object`, got `int` - at `$[...]`"),
        ("top_k", object, "a value of type type is not allowed"),
        ("output_kind", "all", "Invalid enum value 'all', one of cumulative, delta, final_only was expected"),
        ("structured_outputs", {"choise": ["a"]}, "Object contains unknown field `choise`"),
        ("structured_outputs", StructuredOutputs(regex=5), "Expected `str | null`, got `int` - at `$.regex`"),  # type: ignore[arg-type]
    ],
)
def test_a_parameter_of_another_type_is_refused_by_its_name_and_value(
    llm: LLM, field: str, value: Any, expected: str
) -> None:
    """F73."""
    with pytest.raises(InvalidRequest) as refused:
        llm.generate("hello", msgspec.structs.replace(GREEDY, **{field: value}), use_tqdm=False)
    assert refused.value.param == field
    forms = (f"{field}={value!r}: {expected}", f"{field} must be {expected}, got {value!r}")
    assert str(refused.value) in forms


def test_none_is_the_default_where_vllm_has_it(llm: LLM) -> None:
    fields = ("top_p", "stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors", "seed", "logprobs")
    params = SamplingParams(temperature=0.0, **dict.fromkeys(fields))
    assert llm.generate("hello", params, use_tqdm=False)[0].outputs == (
        llm.generate("hello", SamplingParams(temperature=0.0), use_tqdm=False)[0].outputs
    )


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        max_tokens=np.int32(4),  # type: ignore[arg-type]
        logit_bias={np.int64(9): np.float64(2.0)},
        stop_token_ids=np.array([7]),  # type: ignore[arg-type]
    )
    plain = SamplingParams(temperature=0.5, seed=3, max_tokens=4, logit_bias={9: 2.0}, stop_token_ids=(7,))
    [by_numpy] = llm.generate(np.array([5, 6, 7]), given, use_tqdm=False)
    assert by_numpy.prompt_token_ids == [5, 6, 7]
    assert by_numpy.outputs == llm.generate([5, 6, 7], plain, use_tqdm=False)[0].outputs


def test_one_text_is_one_stop_string_and_one_bad_word(llm: LLM) -> None:
    letters = tuple(llm.tokenizer.encode("ab"))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, allowed_token_ids=letters)
    for field in ("stop", "bad_words"):
        one, listed = (msgspec.structs.replace(params, **{field: value}) for value in ("ab", ("ab",)))
        [choice] = llm.generate("hello", one, use_tqdm=False)[0].outputs
        assert [choice] == llm.generate("hello", listed, use_tqdm=False)[0].outputs
        assert "ab" not in choice.text


@pytest.mark.parametrize(
    ("option", "value"),
    [("continue_final_message", "no"), ("parallel_tool_calls", 0), ("tools", 5), ("tools", ["f"]), ("tool_parser", 5)],
)
def test_a_chat_option_of_another_type_is_refused(llm: LLM, option: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"{option}={value!r}: Expected")):
        llm.chat(
            [{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, add_generation_prompt=False, **{option: value}
        )  # type: ignore[arg-type]


def test_messages_are_read_as_over_http_and_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or () %}{{ c.function.arguments.zone }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "time?"}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"zone": "CET"}'}}
    begun = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "It is "},
    ]
    before = copy.deepcopy(begun)
    with LLM(tmp_path, kv_cache_memory=8 << 20, threads=1) as llm:
        for continues in (False, True):
            options = {"add_generation_prompt": False, "continue_final_message": continues}
            [output] = llm.chat(begun, GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]
            text = llm.tokenizer.decode(output.prompt_token_ids)
            assert text == "<user>What\ntime?<assistant>CET<assistant>It is "
        with pytest.raises(InvalidRequest, match="requires the content of the final message to be a string"):
            llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]
    assert begun == before


def test_params_per_prompt(llm: LLM) -> None:
    params = [msgspec.structs.replace(GREEDY, max_tokens=n) for n in (1, 5)]
    outputs = llm.generate(["x", "y"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]


def test_a_stop_string_is_cut_and_ends_the_request(llm: LLM) -> None:
    letters = llm.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
    params = msgspec.structs.replace(GREEDY, temperature=1.0, seed=1, logit_bias=dict.fromkeys(letters, 100.0))
    whole = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    stop = whole.text[4:6]
    at = whole.text.index(stop)
    choice = llm.generate("hello", msgspec.structs.replace(params, stop=(stop,)), use_tqdm=False)[0].outputs[0]
    assert len(whole.text) == 12
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (whole.text[:at], "stop", stop)
    assert len(choice.token_ids) < 12


def test_a_stop_token_id_is_the_last_token_and_not_in_the_text(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    params = msgspec.structs.replace(GREEDY, stop_token_ids=(stop,))
    choice = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert choice.token_ids == whole.token_ids[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert whole.text.startswith(choice.text)


def test_bad_words_do_not_come_and_only_allowed_tokens_do(llm: LLM) -> None:
    letters = tuple(llm.tokenizer.encode("abc"))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, allowed_token_ids=letters)
    [free] = llm.generate("hello", params, use_tqdm=False)[0].outputs
    assert set(free.text) == set("abc")
    assert "ab" in free.text
    assert "c" in free.text
    without = msgspec.structs.replace(params, bad_words=("ab", "cc"))
    [choice] = llm.generate("hello", without, use_tqdm=False)[0].outputs
    assert len(choice.text) == 60
    assert set(choice.text) == set("abc")
    assert "ab" not in choice.text
    assert "cc" not in choice.text


def test_choices_differ_and_the_seed_decides(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    once, again = (llm.generate("hello there", params, use_tqdm=False)[0] for _ in range(2))
    assert once.outputs == again.outputs
    assert [choice.index for choice in once.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in once.outputs}) == 4
    other = llm.generate("hello there", msgspec.structs.replace(params, seed=8), use_tqdm=False)[0]
    assert other.outputs != once.outputs


def test_a_repeated_prompt_is_cached(llm: LLM) -> None:
    prompt = "A prompt that fills several blocks of sixteen tokens each."
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(second.prompt_token_ids) // 16 * 16
    assert first.outputs == second.outputs
    text = first.outputs[0].text
    third = llm.generate(prompt, msgspec.structs.replace(GREEDY, stop=(text[0],)), use_tqdm=False)[0]
    assert third.outputs[0].stop_reason == text[0]
    assert third.num_cached_tokens == second.num_cached_tokens


def test_logprobs_stand_beside_the_tokens(llm: LLM) -> None:
    params = msgspec.structs.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert [logprob.rank for logprob in entry.values()] == [1, 2]
        assert entry[token_id].logprob == max(logprob.logprob for logprob in entry.values())
        assert [logprob.decoded_token for logprob in entry.values()] == [llm.tokenizer.token_text(i) for i in entry]
    chosen = [entry[i].logprob for i, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token_id, given in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert given is not None
        assert next(iter(given)) == token_id
        assert len(given) == 2 - (given[token_id].rank == 1)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("x", SamplingParams(temperature=-1), "temperature"),
        ([[]], GREEDY, "prompt must not be empty"),
        ("", GREEDY, "prompt must not be empty"),  # as over HTTP, also for a tokenizer that adds a BOS
        ([[1], [100_000]], GREEDY, "token ids"),
        ([[5] * 2000], GREEDY, "2000"),
        ([None], GREEDY, "expected a prompt as a text or a list of token ids, .* got None"),
        ([[1, "2"]], GREEDY, r"prompt_token_ids=\[1, '2'\]: Expected `int`, got `str`"),
        ([[True]], GREEDY, r"prompt_token_ids=\[True\]: Expected `int`, got `bool`"),
        (b"hello", GREEDY, "expected a prompt as a text or a list of token ids, .* got b'hello'"),
        (7, GREEDY, "expected a prompt as a text or a list of token ids, .* got 7"),
        ({"text": "a"}, GREEDY, "or a mapping of prompt or prompt_token_ids to such, got {'text': 'a'}"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY, "got {'prompt': 'a', 'multi_modal_data': "),
        ({"prompt": "a", "cache_salt": 1}, GREEDY, "cache_salt=1: Expected `str"),
        ([{"prompt": None}], GREEDY, "got {'prompt': None}"),
        ({"prompt": 5}, GREEDY, "prompt=5: Expected `str"),
        ({"prompt": ""}, GREEDY, "prompt must not be empty"),
        ("x", {"temperature": 0}, "expected SamplingParams, got {'temperature': 0}"),
        (["x"], [GREEDY, GREEDY], "1 prompts need 1 or 1 SamplingParams, got 2"),
    ],
)
def test_what_can_never_work_is_refused_and_leaves_nothing(
    llm: LLM, prompts: list[str], params: SamplingParams, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_num_seqs", 0, "LLM: max_num_seqs: a whole number of at least 1 was expected, got 0"),
        ("tensor_parallel_size", 0, "LLM: tensor_parallel_size: a whole number of at least 1 was expected, got 0"),
        ("max_num_seq", 2, "LLM: unknown option 'max_num_seq' (did you mean 'max_num_seqs'?)"),
        ("dtype", "float8", "LLM: dtype: one of auto, float32, bfloat16, float16 was expected, got 'float8'"),
        ("max_num_seqs", 1.5, "LLM: max_num_seqs: a whole number of at least 1 was expected, got 1.5"),
        ("logits_processors", 5, "LLM: logits_processors: a list of non-empty texts was expected, got 5"),
        ("max_num_seq", None, "LLM: unknown option 'max_num_seq' (did you mean 'max_num_seqs'?)"),
        ("tokenizer", 5, "LLM: tokenizer 5 is not supported: the tokenizer is that of the model directory"),
    ],
)
def test_a_wrong_field_is_a_config_error(model: Path, field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model, **{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_without_parameters_a_generation_has_the_models_defaults(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 9}'
    )
    said = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=9)
    with LLM(tmp_path, kv_cache_memory=8 << 20, threads=1) as llm:
        assert llm.get_default_sampling_params() == said
        by_default = llm.generate("The quick brown fox", use_tqdm=False)
        assert by_default[0].outputs == llm.generate("The quick brown fox", said, use_tqdm=False)[0].outputs
        assert by_default[0].outputs != llm.generate("The quick brown fox", GREEDY, use_tqdm=False)[0].outputs
    with LLM(tmp_path, kv_cache_memory=8 << 20, threads=1, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
