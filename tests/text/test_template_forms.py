"""What templates get of messages, against what transformers renders of the same."""

import copy
from typing import Any

import pytest

from pdkv.errors import InvalidRequest, ModelError
from pdkv.text import ChatTemplate

FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
LOOP = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BY_ROLE = (  # a system message's text, parts of all others, as some vision models' templates have it
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
WITH_TOOLS = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + FIRST_PART
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + FIRST_PART
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def transformers_prompt(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [[prompt], _] = render_jinja_template([messages], chat_template=template, **options)
    return str(prompt)


@pytest.mark.parametrize("template", [FIRST_PART, LOOP, BOTH, TEXT, BY_ROLE, WITH_TOOLS, SYSTEM_FIRST])
def test_a_template_that_wants_parts_or_text_gets_what_it_wants(template: str) -> None:
    """F52: the prompt is that of transformers for messages in the template's own form."""
    texts = {"system": "Be brief.", "user": "What is a fox?", "assistant": "A fox", "tool": "red"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    wants_text = {FIRST_PART: (), BY_ROLE: ("system",), BOTH: tuple(texts), TEXT: tuple(texts)}.get(template, ())
    own = [{**m, "content": m["content"] if m["role"] in wants_text else [part(m["content"])]} for m in messages]
    wanted = transformers_prompt(template, own, tools=TOOLS)
    parted = [{"role": role, "content": [part(text)]} for role, text in texts.items()]
    for given in (messages, parted):
        assert ChatTemplate(template, {}).render(given, tools=TOOLS) == wanted
    continued = ChatTemplate(template, {}).render(messages, tools=TOOLS, continue_final_message=True)
    assert continued == wanted


@pytest.mark.parametrize(
    ("template", "prompt"), [(BOTH, "<user>ab"), (LOOP, "<user>ab"), (TEXT, "<user>a\nb"), (FIRST_PART, "<user>a\nb")]
)
def test_several_parts_stay_apart_where_the_template_reads_them_all(template: str, prompt: str) -> None:
    """Else they are joined by newlines, as in vLLM: none is lost, and no repr of a list is a prompt."""
    assert ChatTemplate(template, {}).render([{"role": "user", "content": [part("a"), part("b")]}]) == prompt


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}Answer:",
        "{% for m in messages %}{{ m.content.parts }}{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %}",
    ],
)
def test_a_template_that_leaves_the_users_words_out_is_refused_when_it_is_loaded(template: str) -> None:
    with pytest.raises(ModelError, match="omits the user's message"):
        ChatTemplate(template, {})


def test_a_template_for_tools_may_say_nothing_without_them() -> None:
    template = "{% if tools %}" + WITH_TOOLS + "{% endif %}"
    messages = [{"role": "user", "content": "x"}]
    assert ChatTemplate(template, {}, for_tools=True).render(messages, tools=TOOLS) == "f<user>x"


def test_messages_are_made_turns_and_stay_as_they_are() -> None:
    call = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [part("a"), part("b")], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "so"},
    ]
    before = copy.deepcopy(messages)
    text = ChatTemplate("{% for m in messages %}{{ m | tojson }}\n{% endfor %}", {}).render(
        messages, continue_final_message=True
    )
    assert messages == before
    assert text.splitlines() == [
        '{"role": "user", "content": "a\\nb"}',
        '{"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"type": "function", '
        '"id": "c", "function": {"name": "f", "arguments": {"x": "é"}}}], "reasoning": "hm"}',
        '{"role": "tool", "content": "1", "tool_call_id": "c"}',
        '{"role": "assistant", "content": "so',
    ]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "user"},
            r"messages\[0\].content must be a text .*required and not null except in an assistant's turn, got None",
        ),
        ({"role": "user", "content": 5}, r"messages\[0\].content must be a text or a list of text parts, .* got 5"),
        ({"role": "user", "content": ["a"]}, r"content\[0\] must be a text part .* got 'a'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] must be a text part .*image_url"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls must be a list of calls, got 'f'"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, r"tool_calls\[0\] must be a call .* got {'name': 'f'}"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]},
            r"tool_calls\[0\].function.arguments must be a JSON text or an object, got 7",
        ),
    ],
)
def test_a_message_that_is_none_is_named(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        ChatTemplate(TEXT, {}).render([message])


def test_a_final_message_that_is_continued_is_a_text() -> None:
    with pytest.raises(InvalidRequest, match="requires the content of the final message to be a string"):
        ChatTemplate(TEXT, {}).render([{"role": "assistant", "content": [part("a")]}], continue_final_message=True)


def test_variables_may_have_any_name_but_the_templates_own() -> None:
    names = {"self": 1, "turns": 2, "variables": 3}
    assert (
        ChatTemplate(TEXT + "{{ turns }}", {}).render([{"role": "user", "content": "x"}], variables=names) == "<user>x2"
    )


ASKED: dict[str, Any] = {"role": "user", "content": "run ls"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "a.txt"}
EACH = "{% for m in messages %}<{{ m.role }}>"
CALLS = EACH + "{{ m.content }}{% for c in m.tool_calls or [] %}"


def called(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "exec", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT]


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (CALLS + "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}", '{"path": "é"}'),
        (CALLS + "{{ c.function.arguments }}{% endfor %}{% endfor %}", '{"path": "é"}'),  # an object's repr is no JSON
        (CALLS + "{{ c.function.arguments | trim }}{% endfor %}{% endfor %}", '{"path": "é"}'),
        (CALLS + "{% if c.function.arguments is not string %}{{ raise_exception('text') }}{% endif %}"
         "{{ c.function.arguments }}{% endfor %}{% endfor %}", '{"path": "é"}'),
        (CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}", {"path": "é"}),
        (CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}",
         {"path": "é"}),
        (CALLS + "{{ c.function | tojson }}{% endfor %}{% endfor %}", {"path": "é"}),
    ],
)  # fmt: skip
def test_arguments_of_calls_have_the_form_that_the_template_wants(template: str, arguments: Any) -> None:
    """Either form of a client's becomes it; the prompt is that of transformers for arguments in it."""
    wanted = transformers_prompt(template, called(arguments, ""))
    for given in ('{"path": "é"}', {"path": "é"}):
        assert ChatTemplate(template, {}).render(called(given)) == wanted


NOT_NONE = (
    "{% for m in messages %}{% if m.content is not none %}<{{ m.role }}>{{ m.content }}</>{% endif %}"
    "{% for c in m.tool_calls or [] %}<CALL>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
IS_NONE = (  # DeepSeek-R1's: calls beside a content are left out
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}<CALL>"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content", "form"),
    [
        (NOT_NONE, None, {}),
        (IS_NONE, None, "{}"),
        (CALLS + "{{ c.function | tojson }}{% endfor %}{% endfor %}", "", {}),
    ],
)
def test_beside_calls_stands_null_where_the_template_looks_for_it(template: str, content: Any, form: Any) -> None:
    """Else an empty text, where null would be the word None."""
    wanted = transformers_prompt(template, called(form, content))
    for given in (None, ""):
        assert ChatTemplate(template, {}).render(called("{}", given)) == wanted
    assert "Hm" in ChatTemplate(NOT_NONE, {}).render(called("{}", "Hm"))


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (TEXT, "developer"),
        ("{% for m in messages if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
         "system"),
        ("{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('role') }}{% endif %}"
         "<{{ m.role }}>{{ m.content }}{% endfor %}", "system"),
    ],
)  # fmt: skip
def test_a_developer_speaks_as_system_where_the_template_does_not_know_it(template: str, role: str) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]
    wanted = transformers_prompt(template, [{**messages[0], "role": role}, messages[1]])
    assert ChatTemplate(template, {}).render(messages) == wanted


def test_a_content_format_that_is_given_is_not_looked_for() -> None:
    message = [{"role": "user", "content": "a"}]
    assert ChatTemplate(BOTH, {}, content_format="openai").render(message) == "<user>a"
    shows = EACH + "{{ m.content | tojson }}{% endfor %}"
    for content_format, prompt in (("string", '<user>"a"'), ("openai", '<user>[{"type": "text", "text": "a"}]')):
        assert ChatTemplate(shows, {}, content_format=content_format).render(message) == prompt
    for content_format, template in (
        ("string", LOOP),
        ("openai", "{% for m in messages %}{{ m.content.x }}{% endfor %}"),
    ):
        with pytest.raises(ModelError, match="omits the user's message, as text"):
            ChatTemplate(template, {}, content_format=content_format)


def test_what_was_found_can_be_read() -> None:
    assert str(ChatTemplate(IS_NONE, {}).forms) == (
        "user text, system text, assistant text, tool text; arguments as text, beside null; developer has its role"
    )
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content[0].text }}{% endfor %}"
    assert str(ChatTemplate(only_users, {}).forms).endswith(
        "developer speaks as system; it leaves out: system, assistant, calls"
    )
