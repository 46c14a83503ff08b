"""Templates in the place of the model's: of a caller, and of a stranger, within bounds."""

from pathlib import Path

import pytest
import small_tokenizers
import tokenizers

from pdkv.config import EngineConfig
from pdkv.errors import InvalidRequest, ModelError
from pdkv.text import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "Hé"}]
SAID = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = "{{ bos_token }}{% for m in messages %}{{ m.content[0].text }}{% endfor %}{{ tools | tojson if tools }}"
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(32) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(
        small_tokenizers.byte_level_backend(), special_tokens={"bos_token": "<s>"}, chat_template="model's" + SAID
    )


@pytest.mark.processes
@pytest.mark.parametrize("bounded", [False, True])
def test_a_template_that_is_given_is_asked_what_it_takes_too(tokenizer: Tokenizer, bounded: bool) -> None:
    tool = {"type": "function", "function": {"strict": False, "name": "f"}}  # a model is not told of `strict`
    given = {"chat_template": PARTS, "bounded": bounded}
    assert tokenizer.render_chat(MESSAGES, **given) == "<s>Hé"
    assert tokenizer.render_chat(MESSAGES, tools=[tool], **given).endswith('"name": "f"}}]')
    assert tokenizer.render_chat(MESSAGES, **given, variables={"bos_token": "é"}) == "éHé"
    shown = tokenizer.render_chat(MESSAGES, chat_template="{{ messages | tojson }}", content_format="openai")
    assert '"text": "Hé"' in shown
    assert tokenizer.render_chat(MESSAGES) == "model's[user]Hé"
    assert "{'type': 'text', 'text': 'Hé'}" in tokenizer.render_chat(MESSAGES, content_format="openai")


@pytest.mark.processes
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "chat_template: the chat template is broken|Expected an expression"),
        ("x", "omits the user's message"),
        ("{{ messages.__class__.__mro__ }}" + SAID, "attribute '__class__' of 'list' object is unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}" + SAID, "unsafe"),
        ("{{ self.__init__.__globals__ }}" + SAID, "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}" + SAID, "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}" + SAID, "unsafe|undefined|no attribute"),
        ("{% include '/etc/hostname' %}" + SAID, "no loader"),
        ("{{ messages.clear() }}" + SAID, "not safely callable|unsafe|clear"),
        ("{{ range(10000000) }}" + SAID, "too big"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_template_that_is_none_or_reaches_out_is_the_callers_mistake(
    tokenizer: Tokenizer, template: str, says: str, bounded: bool
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        tokenizer.render_chat(MESSAGES, chat_template=template, bounded=bounded)


@pytest.mark.processes
@pytest.mark.parametrize(
    "template",
    [ENDLESS + SAID, "{{ 'a' * 1000000000 }}" + SAID, SAID + "{{ 'é' * 20000000 }}", *(
        pytest.param(template, marks=pytest.mark.slow) for template in (
            DOUBLED + SAID, "{{ '%0900000000d' % 1 }}" + SAID, "{{ [[1]] * 100000000 }}" + SAID,
            "{{ 'a'.center(900000000) }}" + SAID,
        )
    )],
    ids=lambda template: str(template)[:30],
)  # fmt: skip
def test_a_strangers_template_may_take_little_time_and_memory(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"more than 2 s of a processor or 512 MiB|MemoryError|more than 16777216"):
        tokenizer.render_chat(MESSAGES, chat_template=template, bounded=True)
    assert tokenizer.render_chat(MESSAGES, chat_template=SAID, bounded=True) == "[user]Hé"


def test_a_template_of_a_file_stands_in_the_place_of_all_of_the_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend: tokenizers.Tokenizer = small_tokenizers.byte_level_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}" + SAID)
    (tmp_path / "own.jinja").write_text(SAID + "{{ tools | length if tools }}")
    caplog.set_level("INFO")
    config = EngineConfig(model=tmp_path, chat_template=tmp_path / "own.jinja")
    tokenizer = load_tokenizer(config)
    assert tokenizer.render_chat(MESSAGES, tools=[{"a": 1}]) == "[user]Hé1"
    assert "chat template default and of tools: user text, system text" in caplog.text
    with pytest.raises(ModelError, match=r"nowhere\.jinja"):
        load_tokenizer(EngineConfig(model=tmp_path, chat_template=tmp_path / "nowhere.jinja"))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content.lower() }}{% endfor %}")
    fixed = EngineConfig(model=tmp_path, chat_template=tmp_path / "own.jinja", chat_template_content_format="openai")
    with pytest.raises(ModelError, match="omits the user's message, as text parts"):
        load_tokenizer(fixed)
