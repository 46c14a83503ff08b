"""Model directories as they are published: tokens, ids and chat ids are those of transformers, or it is said why."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jinja2
import model_directories
import pytest
import torch
from safetensors.torch import save_file

from pdkv.config import EngineConfig
from pdkv.errors import InvalidRequest, ModelError
from pdkv.models.config import load_model_config
from pdkv.models.directory import ModelDirectory
from pdkv.models.identity import model_identity
from pdkv.models.weight_files import WeightFiles
from pdkv.text import Tokenizer
from tests.engine.worker.step_driver import StepDriver

TEXTS = [
    *model_directories.SAMPLE,
    "",
    " a",
    "<s>[INST] who </s> [/INST]",
    "x<|im_end|>\n y",
    "<|end|> the [PAD] fox",
    "é",
]
CHAT = [
    {"role": "user", "content": " Who is the fox? "},
    {"role": "assistant", "content": "A fox é"},
    {"role": "user", "content": "the <|im_start|> 123"},
]
NAMES = list(model_directories.directories())
WRITTEN = {  # a LlamaTokenizer of transformers 5 reads vocabularies of bytes as SentencePiece's
    "DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-0528-Qwen3-8B",
}  # fmt: skip
NOT_IN_TRANSFORMERS = {"DeepSeek-R1-0528-Qwen3-8B"}  # attn_factor, which transformers leaves out


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One directory by its name, made once."""
    root, made = tmp_path_factory.mktemp("published"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = model_directories.write(root / name, model_directories.directories()[name])
        return Path(made[name])

    return get


def their_tokenizer(path: Path) -> Any:
    import transformers

    kind = transformers.PreTrainedTokenizerFast if path.name in WRITTEN else transformers.AutoTokenizer
    return kind.from_pretrained(path)


@pytest.mark.parametrize("name", NAMES)
def test_ids_texts_and_chat_ids_are_those_of_transformers(published: Any, name: str) -> None:
    path = published(name)
    ours, theirs = Tokenizer.from_dir(path), their_tokenizer(path)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == wanted
    assert ours.special_tokens == theirs.special_tokens_map
    if theirs.chat_template is None and (path / "chat_template.json").exists():
        theirs.chat_template = json.loads((path / "chat_template.json").read_text())["chat_template"]
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        if theirs.chat_template is not None:
            wanted = theirs.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True, tokenize=False)
            assert ours.render_chat(CHAT, tools=tools) == wanted
            ids = theirs.encode(wanted, add_special_tokens=False)
            assert ours.encode(ours.render_chat(CHAT, tools=tools), add_special_tokens=False) == ids


@pytest.mark.parametrize("family", model_directories.CHATS)
def test_chat_ids_of_each_family_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    import transformers

    path = model_directories.write_chat(tmp_path, family)
    ours, theirs = Tokenizer.from_dir(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    system = {"role": "system", "content": "the fox\n"}
    tools = [{"type": "function", "function": {"name": "f", "description": "löscht <alles>", "parameters": {}}}]
    for messages in (CHAT, CHAT[:2], [system, *CHAT[:1]]):
        for prompt, given in ((True, None), (False, None), (True, tools)):
            try:
                text = theirs.apply_chat_template(messages, tools=given, add_generation_prompt=prompt, tokenize=False)
            except jinja2.TemplateError:
                with pytest.raises(InvalidRequest):
                    ours.render_chat(messages, tools=given, add_generation_prompt=prompt)
                continue
            found = ours.render_chat(messages, tools=given, add_generation_prompt=prompt)
            assert found == text
            assert ours.encode(found, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "name", ["SmolLM2-1.7B-Instruct", "Llama-2-7b-chat-hf", "Qwen2.5-7B-Instruct", "Mistral-7B-Instruct-v0.3"]
)
def test_without_a_model_type_the_class_of_the_tokenizer_counts(published: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shutil.copytree(published(name), path)
    config = json.loads((path / "config.json").read_text())
    del config["model_type"]
    (path / "config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_dir(path), their_tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_a_tokenizer_that_cannot_encode_is_broken(published: Any, tmp_path: Path) -> None:
    """Its library panics, which is no Exception."""
    path = tmp_path / "model"
    shutil.copytree(published("DeepSeek-R1-Distill-Qwen-7B"), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"SpecialToken": {"id": "absent", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"tokenizer\.json: broken: "):
        Tokenizer.from_dir(path)


@pytest.mark.parametrize("name", ["DeepSeek-R1-Distill-Qwen-7B", "Hermes-2-Pro-Llama-3-8B", "Phi-4-mini-instruct"])
def test_two_tokens_of_one_id_are_refused(published: Any, tmp_path: Path, name: str) -> None:
    """The library counts such tokens otherwise than transformers, so that added tokens would get other ids."""
    path = tmp_path / "model"
    shutil.copytree(published(name), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["~"] = tokenizer["model"]["vocab"]["!"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"tokenizer\.json: broken: two tokens of model\.vocab have the same id"):
        Tokenizer.from_dir(path)


@pytest.mark.parametrize("name", ["DeepSeek-R1-Distill-Qwen-7B", "Hermes-2-Pro-Llama-3-8B", "Phi-4-mini-instruct"])
@pytest.mark.parametrize("changed", ["vocabulary", "added"])
def test_the_end_token_has_the_id_that_encoding_gives_it(
    published: Any, tmp_path: Path, changed: str, name: str
) -> None:
    """The library numbers added tokens itself: behind a vocabulary with a gap, and where the file's ids have one."""
    path = tmp_path / "model"
    shutil.copytree(published(name), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    if changed == "vocabulary":
        del tokenizer["model"]["vocab"]["~"]
    for token in tokenizer["added_tokens"] if changed == "added" else ():
        token["id"] += 7
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours, directory = Tokenizer.from_dir(path), ModelDirectory(path)
    [number] = ours.encode(directory.special_tokens["eos_token"], add_special_tokens=False)
    assert directory.eos_token_id() == number == their_tokenizer(path).eos_token_id


@pytest.mark.parametrize("name", ["Qwen2.5-7B-Instruct", "Llama-2-7b-chat-hf", "Llama-3.1-8B-Instruct"])
def test_special_tokens_that_no_list_has_are_added_in_transformers_order(
    published: Any, tmp_path: Path, name: str
) -> None:
    """By their first mention; the last one says how they match."""
    path = tmp_path / name
    shutil.copytree(published(name), path)
    said = json.loads((path / "tokenizer_config.json").read_text())
    said |= {"added_tokens_decoder": {}, "eos_token": {"__type": "AddedToken", "content": "<b>", "lstrip": True}}
    said |= {"pad_token": "<a>", "sep_token": "<b>", "extra_special_tokens": ["<c>", "<a>", "<b>"]}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    ours, theirs = Tokenizer.from_dir(path), their_tokenizer(path)
    for text in ("x <b><a> <c>", " <|im_end|><a>"):
        assert ours.encode(text) == theirs.encode(text)
    assert ModelDirectory(path).eos_token_id() == theirs.eos_token_id


B_LEFT, B_PLAIN = ({"__type": "AddedToken", "content": "<b>", "lstrip": x, "special": True} for x in (True, False))


@pytest.mark.parametrize(
    "changes",
    [
        {"unk_token": B_LEFT, "pad_token": B_PLAIN, "extra_special_tokens": [B_LEFT]},  # the third is not new
        {"unk_token": B_PLAIN, "extra_special_tokens": [B_LEFT]},
        {"unk_token": "<b>", "extra_special_tokens": [B_LEFT | {"special": False}]},
        {"extra_special_tokens": [B_PLAIN, B_LEFT, B_PLAIN | {"rstrip": True}]},
        {"image_token": B_LEFT},
        {"image_token": {"content": "<b>"}},  # of no type: no token
    ],
)
@pytest.mark.parametrize("name", ["Llama-2-7b-chat-hf", "Phi-4-mini-instruct"])
def test_of_a_text_that_is_named_twice_the_last_new_form_counts(
    published: Any, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(published(name), tmp_path / name))
    said = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(said | changes))
    ours, theirs = Tokenizer.from_dir(path), their_tokenizer(path)
    ids = theirs.encode("x <b> y")
    assert ours.encode("x <b> y") == ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["add_eos_token", "add_bos_token", "audio_token"])
@pytest.mark.parametrize("model", ["Phi-4-mini-instruct", "Llama-3.1-8B-Instruct"])
def test_a_text_under_the_name_of_a_flag_is_no_token(published: Any, tmp_path: Path, model: str, name: str) -> None:
    path = tmp_path / "model"
    shutil.copytree(published(model), path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, name: "x"}))
    ours, theirs = Tokenizer.from_dir(path), their_tokenizer(path)
    assert ours.encode("the fox") == theirs.encode("the fox")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_end_tokens_are_those_of_transformers(published: Any, name: str) -> None:
    import transformers

    path = published(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    prompt = [int(i) for i in torch.randint(0, 480, (90,), generator=torch.Generator().manual_seed(1))]
    config = load_model_config(path)
    ends = model.generation_config.eos_token_id
    wanted_ends = {*(ends if isinstance(ends, list) else [ends]), their_tokenizer(path).eos_token_id} - {None}
    assert {*config.eos_token_ids} == wanted_ends
    assert config.dtype == str(model.dtype).removeprefix("torch.")
    if name in NOT_IN_TRANSFORMERS:
        return
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        for _ in range(24):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    driver = StepDriver(path, check_finite=True)
    key = driver.add("a", prompt)
    assert driver.run({key: 24})[key] == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("DeepSeek-R1-Distill-Llama-8B", "tokenizer.json counts as it is written; transformers makes a LlamaTokenizer"),
        ("Llama-2-7b-chat-hf", "as in transformers, normalizer and pre_tokenizer of tokenizer.json gives way"),
        (
            "SmolLM2-1.7B-Instruct",
            "as in transformers, pre_tokenizer of tokenizer.json gives way to that of GPT2Tokenizer",
        ),
        ("an-unsloth-finetune", "lacks special tokens, which transformers adds: <|finetune_right_pad_id|>"),
        ("Mistral-Nemo-Instruct-2407", "chat_template.json, which is a processor's, has the only chat template"),
    ],
)
def test_what_counts_by_transformers_and_not_by_a_file_is_warned_of(
    published: Any, name: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    Tokenizer.from_dir(published(name))
    assert warning in caplog.text
    caplog.clear()
    Tokenizer.from_dir(published("Qwen3-8B"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- what is no model directory, or not to be read as one ----------------------------------------------------------

SMALL = {**model_directories.SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 988097824\n"


def small(path: Path, **changes: Any) -> Path:
    """A directory with a config.json alone."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return path


def too_long() -> str:
    """Not made where the test is only collected."""
    return '{"x":"' + "y" * (33 << 20) + '"}'


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, r"adapter_config\.json: .*\(LoRA\)"),
        ({"config.json": SMALL, "adapter_config.json": "{}"}, r"this is an adapter .*merged already"),
        ({"model-q4.gguf": "GGUF"}, r"model-q4\.gguf: this is a GGUF model: name the directory of .* safetensors"),
        ({"params.json": "{}", "consolidated.safetensors": ""}, "Mistral's own format"),
        ({"model_index.json": "{}"}, "diffusion pipeline"),
        ({"config.json": POINTER}, r"config\.json: is a git-lfs pointer .* `git lfs pull`"),
        ({"config.json": SMALL, "generation_config.json": POINTER}, r"generation_config\.json: is a git-lfs pointer"),
        ({"config.json": '{"a":' * 100_000}, r"config\.json: cannot be read as JSON"),
        ({"config.json": "[" * 100_000 + "]" * 100_000}, r"config\.json: cannot be read as JSON"),
        ({"config.json": SMALL, "tokenizer_config.json": too_long},
         r"tokenizer_config\.json: at most 32 MiB were expected, got 346\d+ bytes"),
        ({"config.json": SMALL, "special_tokens_map.json": {"add_bos_token": False}, "tokenizer.json": "{}"},
         r"special_tokens_map\.json: field 'add_bos_token' = False is not a special token"),
        ({"config.json": {**SMALL, "hidden_size": float("inf")}}, "'hidden_size' must be a finite number, got inf"),
        ({"config.json": {**SMALL, "rms_norm_eps": float("nan")}}, "'rms_norm_eps' must be a finite number, got nan"),
        ({"config.json": {**SMALL, "rms_norm_eps": -1}}, "'rms_norm_eps' must be above 0, got -1"),
        ({"config.json": {**SMALL, "vocab_size": 10**400}}, "'vocab_size' must be a finite number, got 1000"),
        ({"config.json": {**SMALL, "num_hidden_layers": 10**9}}, "'num_hidden_layers' must be at most 10000"),
        ({"config.json": {**SMALL, "torch_dtype": ["x"]}}, "dtype .* is not supported"),
        ({"config.json": {**SMALL, "architectures": [["x"]]}}, "'architectures' must be a list of names"),
        ({"config.json": {**SMALL, "model_type": "mistral"}}, "model_type 'mistral' is not that of"),
        ({"config.json": {**SMALL, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
                          "layer_types": ["full_attention"] * 2}}, "'layer_types' differs from sliding_window 4096"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_what_is_no_model_to_be_read_is_named_for_what_it_is(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    for name, content in files.items():
        content = content() if callable(content) else content
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=says):
        load_model_config(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("GGUF")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match=r"m\.gguf is a file: a GGUF model"):
        load_model_config(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"model\.safetensors is a file: name the directory"):
        load_model_config(tmp_path / "model.safetensors")


def test_a_pipe_is_refused_and_not_awaited_and_a_link_is_followed(tmp_path: Path) -> None:
    """The hub's cache has links to files outside of the directory."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json: is not a regular file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "blob").write_text(json.dumps(SMALL))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to("../blob")
    assert load_model_config(tmp_path / "snapshot").vocab_size == 480
    (tmp_path / "snapshot" / "generation_config.json").symlink_to("/proc/self/mem")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_model_config(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"pytorch_model.bin": "x"}, r"no \*\.safetensors file, which transformers writes.*pytorch_model\.bin"),
        ({"m.gguf": "x"}, r"no \*\.safetensors file.*m\.gguf"),
        ({}, r"no \*\.safetensors file$"),
        ({"model.safetensors": POINTER}, r"model\.safetensors: is a git-lfs pointer"),
        ({"model.safetensors.index.json": '{"weight_map": {"x": "../other.safetensors"}}'}, "files of the directory"),
        ({"model.safetensors.index.json": '{"weight_map": {"x": "/etc/hostname"}}'}, "files of the directory"),
        ({"model.safetensors.index.json": '{"weight_map": {"x": 5}}'}, "which does not exist"),
    ],
)
def test_weights_of_other_kinds_are_named(tmp_path: Path, files: dict[str, str], says: str) -> None:
    small(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        WeightFiles(tmp_path)


def test_of_one_file_and_an_index_transformers_takes_the_file(
    published: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    path = Path(shutil.copytree(published("Qwen3-8B"), tmp_path / "model"))
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "nowhere.safetensors"}}')
    with WeightFiles(path) as files:
        assert [file.path.name for file in files.files] == ["model.safetensors"]
    assert "model.safetensors is read, and not what model.safetensors.index.json names" in caplog.text
    transformers.AutoModelForCausalLM.from_pretrained(path)


def test_unknown_fields_are_named_all_at_once_and_ignored_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small(tmp_path, my_training_run="v3", base_data=[1], final_logit_softcapping=30.0)
    with pytest.raises(ModelError) as refused:
        load_model_config(path)
    for text in ("'my_training_run' = 'v3'", "'base_data' = [1]", "'final_logit_softcapping' = 30.0"):
        assert text in str(refused.value)
    assert "--ignore-config-fields my_training_run,base_data,final_logit_softcapping" in str(refused.value)
    config = EngineConfig(model=path, ignore_config_fields=("my_training_run", "base_data"))
    with pytest.raises(ModelError, match=r"not supported .*: field 'final_logit_softcapping' = 30\.0\.") as refused:
        load_model_config(path, ignored_fields=config.ignore_config_fields)
    assert "base_data" not in str(refused.value)
    small(tmp_path, my_training_run="v3", base_data=[1])
    assert load_model_config(path, ignored_fields=config.ignore_config_fields) == load_model_config(
        small(tmp_path / "b")
    )
    assert "ignored, as --ignore-config-fields has it: my_training_run, base_data" in caplog.text


def test_yarns_second_factor_is_multiplied_as_in_vllm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSeek-R1-0528-Qwen3-8B's two make 1."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for more, wanted in (
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 0.5, "attention_factor": 3.0}, 1.5),
        ({"attention_factor": 3.0}, 3.0),
    ):
        scaling = load_model_config(small(tmp_path, rope_scaling={**rope, **more})).rope_scaling
        assert scaling is not None
        assert scaling.attention_factor == pytest.approx(wanted)
    assert "attn_factor 0.5 of YaRN counts, as in vLLM" in caplog.text
    with pytest.raises(ModelError, match=r"attn_factor.* got -1"):
        load_model_config(small(tmp_path, rope_scaling={**rope, "attn_factor": -1}))
    with pytest.raises(ModelError, match="extrapolation_factor"):
        load_model_config(small(tmp_path, rope_scaling={**rope, "extrapolation_factor": 2.0}))


def test_end_tokens_are_part_of_the_models_identity(published: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(published("Qwen2.5-ChatML-finetune"), tmp_path / "model"))
    before = model_identity(path, load_model_config(path))
    said = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**said, "eos_token": "<|endoftext|>"}))
    assert model_identity(path, load_model_config(path)) != before


def test_weights_of_several_dtypes_need_a_dtype(tmp_path: Path) -> None:
    path = small(tmp_path, torch_dtype=None)
    save_file({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json: field 'dtype' is missing, and .* of bfloat16, float32"):
        load_model_config(path)
    save_file({"b": torch.zeros(2, dtype=torch.bfloat16)}, path / "model.safetensors")
    assert load_model_config(path).dtype == "bfloat16"
