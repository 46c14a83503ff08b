"""Loading a tokenizer from a model directory, and the same ids and text as transformers."""

import json
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers

from pdkv.errors import InvalidRequest, ModelError
from pdkv.parsers.registry import TOOL_PARSERS, find_tool_parser
from pdkv.text import ChatTemplate, Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m['role'] == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}\n"
    "<|user|>{{ m['content'] }}{{ m | tojson }}\n"
    "{% endfor %}\n"
    "{% generation %}{% if add_generation_prompt %}<|assistant|>{% endif %}{% endgeneration %}"
)


@pytest.fixture
def model_dir(backend: tokenizers.Tokenizer, tmp_path: Path) -> Path:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(tmp_path)
    return tmp_path


def test_ids_and_text_are_those_of_transformers(model_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, theirs = Tokenizer.from_dir(model_dir), PreTrainedTokenizerFast.from_pretrained(model_dir)
    for text in ("Hello, world! one two", "the cats 你好 é", "<s>one", ""):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_text_that_the_library_panics_of_is_its_senders(byte_level: tokenizers.Tokenizer) -> None:
    """Its regular expressions give up after ten million steps back."""
    backend = tokenizers.Tokenizer.from_str(byte_level.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(q+)+!"), "isolated")
    with pytest.raises(InvalidRequest, match="the tokenizer gave up on the text: Onig"):
        Tokenizer(backend).encode("q" * 60)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(way: str, byte_level: tokenizers.Tokenizer) -> None:
    """The event loop's is one of them. A call that kept the interpreter would let none run before its end."""
    tokenizer = Tokenizer(byte_level)
    text = "the cats one two " * 20_000
    ids = tokenizer.encode(text)
    begun, stop, ran = threading.Event(), threading.Event(), []

    def run() -> None:
        begun.set()
        while not stop.wait(0.001):
            ran.append(time.perf_counter())

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(10)
    deadline = time.monotonic() + 30
    try:
        inside = 0
        while inside < 3 and time.monotonic() < deadline:
            began = time.perf_counter()
            result = tokenizer.encode(text) if way == "encode" else tokenizer.decode(ids)
            ended = time.perf_counter()
            margin = 0.2 * (ended - began)
            inside = sum(began + margin < at < ended - margin for at in ran)
    finally:
        stop.set()
        thread.join(10)
    assert inside >= 3
    assert result == (ids if way == "encode" else text)


def test_a_conversation_is_rendered_as_by_transformers(model_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, theirs = Tokenizer.from_dir(model_dir), PreTrainedTokenizerFast.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "<one> & 'two'"}, {"role": "assistant", "content": "ünï"}]
    for prompt in (True, False):
        assert ours.render_chat(messages, add_generation_prompt=prompt) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )


def test_a_template_inside_tokenizer_config_is_found(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").unlink(missing_ok=True)
    file = model_dir / "tokenizer_config.json"
    config = json.loads(file.read_text())
    text = "T{{ bos_token }}{{ messages[0].content }}"
    for template in (text, [{"name": "rag", "template": "X"}, {"name": "default", "template": text}]):
        file.write_text(json.dumps(config | {"chat_template": template}))
        assert Tokenizer.from_dir(model_dir).render_chat([{"role": "user", "content": "x"}]) == "T<s>x"


TOOLS = [{"type": "function", "function": {"name": "rain", "description": "d", "parameters": {"type": "object"}}}]
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL_USE = "{{ tools | tojson }}" + SAID


def write_templates(path: Path, files: dict[str, str], listed: object) -> None:
    """In files of their own, and in tokenizer_config.json."""
    (path / "chat_template.jinja").unlink(missing_ok=True)
    (path / "additional_chat_templates").mkdir()
    for name, template in files.items():
        (path / name).write_text(template)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": listed}))


MORE = "additional_chat_templates"
NAMED = [{"name": "default", "template": SAID}, {"name": "tool_use", "template": TOOL_USE}]


@pytest.mark.parametrize(
    ("files", "listed"),
    [
        ({}, NAMED),
        ({"chat_template.jinja": SAID, f"{MORE}/tool_use.jinja": TOOL_USE}, None),
        ({"chat_template.jinja": SAID, f"{MORE}/tool_use.jinja": TOOL_USE}, "{{ messages }}older"),
        ({"chat_template.jinja": "newer" + SAID}, NAMED),
        ({f"{MORE}/default.jinja": "newer" + SAID, "chat_template.jinja": SAID}, None),
        ({f"{MORE}/rag.jinja": "{{ documents }}"}, SAID),
        ({}, [{"name": "tool_use", "template": TOOL_USE}, {"name": "rag", "template": "{{ documents }}"}]),
    ],
)
def test_which_template_is_taken_with_and_without_tools_is_as_in_transformers(
    model_dir: Path, files: dict[str, str], listed: object
) -> None:
    """F51: the model is told of its tools, or the request is refused."""
    from transformers import PreTrainedTokenizerFast

    write_templates(model_dir, files, listed)
    ours, theirs = Tokenizer.from_dir(model_dir), PreTrainedTokenizerFast.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "Does it rain?"}]
    for tools in (None, TOOLS):
        try:
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(InvalidRequest, match="the model has no chat template"):
                ours.render_chat(messages, tools=tools)
        else:
            assert ours.render_chat(messages, tools=tools, add_generation_prompt=False) == expected


def test_the_tool_parser_is_found_by_the_template_for_tools(model_dir: Path) -> None:
    hermes = SAID + "{# <tool_call> with name and arguments #}"
    write_templates(model_dir, {}, [NAMED[0], {"name": "tool_use", "template": hermes}])
    found = find_tool_parser("auto", Tokenizer.from_dir(model_dir).chat_template_source)
    assert found is TOOL_PARSERS.load("hermes")


def test_a_special_token_of_the_configuration_is_left_out_of_text(
    byte_level: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    ids = [byte_level.token_to_id("<plain added>"), *byte_level.encode("x").ids]
    assert Tokenizer.from_dir(tmp_path).decode(ids) == "<plain added>x"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<plain added>"}}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(ids) == "x"
    assert tokenizer.special_tokens == {"eos_token": "<plain added>"}


def test_messages_that_the_template_refuses_are_the_clients_mistake(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="no wizards") as error:
        Tokenizer.from_dir(model_dir).render_chat([{"role": "wizard", "content": ""}])
    assert error.value.param == "messages"


def test_a_text_that_is_no_unicode_is_the_clients_mistake(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        Tokenizer.from_dir(model_dir).encode("a\ud800b")


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([])


def test_strftime_now_reads_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m') }}{{ messages }}", {}, now=lambda: datetime(2024, 7, 1))
    assert template.render([]) == "2024-07[]"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "tokenizer.json: broken"),
        ("tokenizer_config.json", "[", "tokenizer_config.json: cannot be read"),
        ("tokenizer_config.json", "[]", "object was expected"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3"),
        ("special_tokens_map.json", '{"additional_special_tokens": "x"}', "no list"),
        ("chat_template.jinja", "{% if %}", "chat template is broken"),
        ("chat_template.jinja", "{{ bos_token }}", "omits the user's message"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "neither a text nor a list of named texts"),
        ("tokenizer_config.json", '{"chat_template": 5}', "neither a text nor a list of named texts"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja"),
    ],
)
def test_a_missing_or_broken_file_is_named(
    byte_level: tokenizers.Tokenizer, tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_a_model_without_a_template_has_no_chat(byte_level: tokenizers.Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(byte_level).render_chat([{"role": "user", "content": "x"}])
