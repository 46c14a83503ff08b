"""Answers as models of each family write them, by their published formats, and what is to be read in them."""

from typing import NamedTuple

TOOLS = frozenset({"get_weather", "search", "get_time", "write_file"})


class Recorded(NamedTuple):
    """One answer."""

    name: str
    parser: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as they were written)


_PARIS = '{"city": "Paris", "unit": "celsius"}'
_NESTED = (
    '{"path": "a/b.json", "content": "{\\"k\\": [1, 2, {\\"x\\": null}]}\\n", '
    '"options": {"mode": "w", "tags": ["é", "\\u4f60", "😀"], "size": -1.5e+3, "ok": true}}'
)

HERMES = [
    Recorded("text", "hermes", "The capital of France is Paris.\n", "The capital of France is Paris.\n"),
    Recorded(
        "one call, as Qwen writes it",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": ' + _PARIS + "}\n</tool_call>",
        calls=(("get_weather", _PARIS),),
    ),
    Recorded(
        "text in front, and two calls",
        "hermes",
        "I'll look both up.\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "Bücher", "limit": 3}}\n</tool_call>',
        "I'll look both up.",
        (("get_weather", '{"city": "Paris"}'), ("search", '{"query": "Bücher", "limit": 3}')),
    ),
    Recorded(
        "arguments first, as Hermes 2 Pro writes it",
        "hermes",
        '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n</tool_call>\n',
        calls=(("get_weather", '{"city": "Rome"}'),),
    ),
    Recorded(
        "all kinds of values",
        "hermes",
        '<tool_call>\n{"name": "write_file", "arguments": ' + _NESTED + "}\n</tool_call>",
        calls=(("write_file", _NESTED),),
    ),
    Recorded(
        "text behind",
        "hermes",
        'First. <tool_call>{"name": "get_time", "arguments": {}}</tool_call>\nThen this.',
        "First.\nThen this.",
        (("get_time", "{}"),),
    ),
    Recorded("no arguments", "hermes", '<tool_call>{"name": "get_time"}</tool_call>', calls=(("get_time", "{}"),)),
    Recorded(
        "null as arguments",
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        calls=(("get_time", "{}"),),
    ),
    Recorded(
        "arguments as a text",
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": "{\\"zone\\": \\"\\u00dc\\"}"}</tool_call>',
        calls=(("get_time", '{"zone": "Ü"}'),),
    ),
    Recorded(
        "closing tags inside of a value",
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query": "</tool_call> <tool_call>{"}}</tool_call>',
        calls=(("search", '{"query": "</tool_call> <tool_call>{"}'),),
    ),
    Recorded(
        "cut in the closing tag",
        "hermes",
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_ca',
        calls=(("get_time", '{"zone": "UTC"}'),),
    ),
    Recorded(
        "the closing tag is missing",
        "hermes",
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}',
        calls=(("get_time", '{"zone": "UTC"}'),),
    ),
    Recorded(
        "the outer brace is missing",
        "hermes",
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        calls=(("get_time", '{"zone": "UTC"}'), ("get_time", "{}")),
    ),
    Recorded(
        "cut off in its arguments",
        "hermes",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "half a l',
        calls=(("write_file", '{"path": "a", "content": "half a l'),),
    ),
    Recorded("cut off in its tag", "hermes", "Well <tool_ca", "Well <tool_ca"),
    Recorded("cut off in its name", "hermes", 'Well <tool_call>\n{"name": "get_w', 'Well <tool_call>\n{"name": "get_w'),
    Recorded(
        "no JSON at all",
        "hermes",
        "Use <tool_call>get_weather(Paris)</tool_call> like that",
        "Use <tool_call>get_weather(Paris)</tool_call> like that",
    ),
    Recorded(
        "a call without a name",
        "hermes",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    ),
    Recorded(
        "a name that is none",
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ),
    Recorded(
        "a list as arguments",
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>',
    ),
    Recorded(
        "no call and then one",
        "hermes",
        '<tool_call><tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        "<tool_call>",
        (("get_time", "{}"),),
    ),
    Recorded(
        "arguments cease to be JSON",
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query": "a" "b"}}</tool_call> so',
        "so",
        (("search", '{"query": "a" "b"}}'),),
    ),
]

LLAMA = [
    Recorded("text", "llama3_json", "Paris {it is}.", "Paris {it is}."),
    Recorded(
        "one call",
        "llama3_json",
        '{"name": "get_weather", "parameters": ' + _PARIS + "}",
        calls=(("get_weather", _PARIS),),
    ),
    Recorded(
        "behind the tag",
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_time", "parameters": {}}',
        calls=(("get_time", "{}"),),
    ),
    Recorded(
        "two with a semicolon between them",
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Rom"}}; {"name": "search", "parameters": {"query": ";{"}}',
        calls=(("get_weather", '{"city": "Rom"}'), ("search", '{"query": ";{"}')),
    ),
    Recorded(
        "two lines behind a text",
        "llama3_json",
        "I'll call them:\n\n"
        '{"name": "get_time", "parameters": {"zone": "UTC"}}\n{"name": "get_time", "parameters": {}}\n',
        "I'll call them:",
        (("get_time", '{"zone": "UTC"}'), ("get_time", "{}")),
    ),
    Recorded(
        "two tags",
        "llama3_json",
        '<|python_tag|>{"name": "get_time", "parameters": {}};<|python_tag|>{"name": "search", "parameters": {}}',
        calls=(("get_time", "{}"), ("search", "{}")),
    ),
    Recorded(
        "all kinds of values",
        "llama3_json",
        '{"name": "write_file", "parameters": ' + _NESTED + "}",
        calls=(("write_file", _NESTED),),
    ),
    Recorded(
        "text behind",
        "llama3_json",
        '{"name": "get_time", "parameters": {}}; then this',
        "; then this",
        (("get_time", "{}"),),
    ),
    Recorded(
        "an object that names no tool",
        "llama3_json",
        '{"name": "Ada", "parameters": {"born": 1815}}\n{\n  "name": "x"\n}',
        '{"name": "Ada", "parameters": {"born": 1815}}\n{\n  "name": "x"\n}',
    ),
    Recorded("another object", "llama3_json", '{"answer": 42}', '{"answer": 42}'),
    Recorded(
        "an object within a line",
        "llama3_json",
        'Write {"name": "get_time", "parameters": {}}',
        'Write {"name": "get_time", "parameters": {}}',
    ),
    Recorded(
        "code behind the tag",
        "llama3_json",
        '<|python_tag|>brave_search.call(query="{}")',
        '<|python_tag|>brave_search.call(query="{}")',
    ),
    Recorded(
        "no call and then one", "llama3_json", '{\n{"name": "get_time", "parameters": {}}', "{", (("get_time", "{}"),)
    ),
    Recorded(
        "cut off",
        "llama3_json",
        '{"name": "search", "parameters": {"query": "lla',
        calls=(("search", '{"query": "lla'),),
    ),
    Recorded(
        "arguments cease to be JSON",
        "llama3_json",
        '{"name": "search", "parameters": {"query": None}} ok',
        calls=(("search", '{"query": None}} ok'),),
    ),
    Recorded("cut off in its tag", "llama3_json", "so <|python", "so <|python"),
    Recorded(
        "a semicolon at the end",
        "llama3_json",
        '{"name": "get_time", "parameters": {}} ;\n',
        calls=(("get_time", "{}"),),
    ),
]

MISTRAL = [
    Recorded("text", "mistral", "Paris [it is].", "Paris [it is]."),
    Recorded(
        "a list of one",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + _PARIS + "}]",
        calls=(("get_weather", _PARIS),),
    ),
    Recorded(
        "a list of two, with ids and in any order",
        "mistral",
        '[TOOL_CALLS][{"name": "get_time", "arguments": {}, "id": "VvvODy9mT"}, '
        '{"arguments": {"query": "],"}, "name": "search"}]',
        calls=(("get_time", "{}"), ("search", '{"query": "],"}')),
    ),
    Recorded(
        "text in front and behind",
        "mistral",
        'Let me see.[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]\n\nDone.',
        "Let me see.\n\nDone.",
        (("get_time", "{}"),),
    ),
    Recorded(
        "an object without a list",
        "mistral",
        '[TOOL_CALLS]{"name": "get_time", "arguments": {}}',
        calls=(("get_time", "{}"),),
    ),
    Recorded(
        "one call of tokenizer v11",
        "mistral",
        "[TOOL_CALLS]get_weather[ARGS]" + _PARIS,
        calls=(("get_weather", _PARIS),),
    ),
    Recorded(
        "two with ids",
        "mistral",
        "See.[TOOL_CALLS]get_time[CALL_ID]abcDEF123[ARGS]{}"
        '[TOOL_CALLS]search[CALL_ID]x1[ARGS]{"query": "[TOOL_CALLS]"}',
        "See.",
        (("get_time", "{}"), ("search", '{"query": "[TOOL_CALLS]"}')),
    ),
    Recorded(
        "without the second marker",
        "mistral",
        '[TOOL_CALLS]search{"query": "a"}[TOOL_CALLS]get_time{}',
        calls=(("search", '{"query": "a"}'), ("get_time", "{}")),
    ),
    Recorded(
        "all kinds of values",
        "mistral",
        '[TOOL_CALLS] [{"name": "write_file", "arguments": ' + _NESTED + "}]",
        calls=(("write_file", _NESTED),),
    ),
    Recorded("no list", "mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]"),
    Recorded("an empty list", "mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []"),
    Recorded("words", "mistral", "[TOOL_CALLS] is a marker {}", "[TOOL_CALLS] is a marker {}"),
    Recorded(
        "words and then a call",
        "mistral",
        "[TOOL_CALLS]hm [TOOL_CALLS]get_time[ARGS]{}",
        "[TOOL_CALLS]hm",
        (("get_time", "{}"),),
    ),
    Recorded(
        "the second of a list is none",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, {"nam": 1}]',
        ', {"nam": 1}]',
        (("get_time", "{}"),),
    ),
    Recorded(
        "cut off between two",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, ',
        calls=(("get_time", "{}"),),
    ),
    Recorded("cut off in its head", "mistral", "a [TOOL_CALLS]get_ti", "a [TOOL_CALLS]get_ti"),
    Recorded(
        "cut off in its arguments",
        "mistral",
        '[TOOL_CALLS]search[ARGS]{"query": "ab\\',
        calls=(("search", '{"query": "ab\\'),),
    ),
    Recorded(
        "arguments cease to be JSON",
        "mistral",
        "[TOOL_CALLS]search[ARGS]{query: 1}[TOOL_CALLS]get_time[ARGS]{}",
        calls=(("search", "{query: 1}"), ("get_time", "{}")),
    ),
    Recorded(
        "a head that is too long",
        "mistral",
        "[TOOL_CALLS]" + "n" * 600 + "[ARGS]{}",
        "[TOOL_CALLS]" + "n" * 600 + "[ARGS]{}",
    ),
]

QWEN3_CODER = [
    Recorded("text", "qwen3_coder", "Less is < more.\n", "Less is < more.\n"),
    Recorded(
        "one call",
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        (("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    Recorded(
        "two calls, one without arguments, and text behind",
        "qwen3_coder",
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n"
        '<parameter=query>\nB\u00fccher "a"\n\n  x\n</parameter>\n</function>\n</tool_call>\nDone.',
        "Done.",
        (("get_time", "{}"), ("search", '{"query": "B\u00fccher \\"a\\"\\n\\n  x"}')),
    ),
    Recorded(
        "without the outer tags",
        "qwen3_coder",
        "<function=get_time><parameter=zone>UTC</parameter></function>",
        calls=(("get_time", '{"zone": "UTC"}'),),
    ),
    Recorded(
        "values that look like something, and markup in one",
        "qwen3_coder",
        "<tool_call><function=write_file><parameter=content>\nif (a < b) {}\n<p>\n</parameter>"
        '<parameter=options>\n{"tags": ["a", null]}\n</parameter><parameter=ok>\nTrue\n</parameter>'
        "<parameter=size>\n-1.5e3\n</parameter></function></tool_call>",
        calls=(
            (
                "write_file",
                '{"content": "if (a < b) {}\\n<p>", "options": {"tags": ["a", null]}, "ok": true, "size": -1.5e3}',
            ),
        ),
    ),
    Recorded("no call", "qwen3_coder", "<tool_call>\nget_time</tool_call>", "<tool_call>\nget_time</tool_call>"),
    Recorded("a function of no name", "qwen3_coder", "a <function=<b> c", "a <function=<b> c"),
    Recorded(
        "what is no argument",
        "qwen3_coder",
        "<tool_call><function=get_time><parameter=a>\n1\n</parameter>oops</function></tool_call>.",
        ".",
        (("get_time", '{"a": 1, oops'),),
    ),
    Recorded(
        "cut off within a value",
        "qwen3_coder",
        "<tool_call><function=get_time><parameter=a>\n1\n</parameter><parameter=b>\nx",
        calls=(("get_time", '{"a": 1'),),
    ),
]

GLM45 = [
    Recorded("text", "glm45", "Less is < more.\n", "Less is < more.\n"),
    Recorded(
        "one call",
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "I look.",
        (("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    Recorded(
        "two calls without line ends, as GLM 4.7 writes them",
        "glm45",
        "<tool_call>get_time</tool_call><tool_call>search<arg_key>query</arg_key><arg_value> a\nb </arg_value>"
        "</tool_call>Done.",
        "Done.",
        (("get_time", "{}"), ("search", '{"query": " a\\nb "}')),
    ),
    Recorded("no call", "glm45", "<tool_call>get time</tool_call>", "<tool_call>get time</tool_call>"),
    Recorded(
        "what is no argument",
        "glm45",
        "<tool_call>get_time<arg_key>a</arg_key>1</tool_call>.",
        ".",
        (("get_time", "<arg_key>a</arg_key>1"),),
    ),
]

PYTHONIC = [
    Recorded("text", "pythonic", "A list: [1, 2]\n[3]\n", "A list: [1, 2]\n[3]\n"),
    Recorded(
        "one call",
        "pythonic",
        '[get_weather(city="Paris", days=3)]',
        calls=(("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    Recorded(
        "two calls with tags, as Llama 4 writes them",
        "pythonic",
        "<|python_start|>[get_time(), search( query='it\\'s (a) [b], c' , limit = None )]<|python_end|>",
        calls=(("get_time", "{}"), ("search", '{"query": "it\'s (a) [b], c", "limit": null}')),
    ),
    Recorded(
        "all kinds of values behind a text",
        "pythonic",
        "I write.\n"
        "[write_file(path='a\\n', options={'mode': \"w\", 'tags': ['\u00e9', (1, 2)], \"ok\": True}, size=-1.5)]",
        "I write.",
        (
            (
                "write_file",
                '{"path": "a\\n", "options": {"mode": "w", "tags": ["\u00e9", [1, 2]], "ok": true}, "size": -1.5}',
            ),
        ),
    ),
    Recorded("a function that is no tool", "pythonic", "[print(1)]", "[print(1)]"),
    Recorded("what is no argument", "pythonic", '[get_time("UTC")]', calls=(("get_time", '("UTC")]'),)),
    Recorded("what is no value", "pythonic", "[get_time(a=1, b=f(x))]", calls=(("get_time", '{"a": 1, b=f(x))]'),)),
    Recorded("cut off within a value", "pythonic", '[get_time(a=1, b="x', calls=(("get_time", '{"a": 1'),)),
    Recorded("in a line", "pythonic", 'so [get_time(a="x")] is text', 'so [get_time(a="x")] is text'),
]


ANSWERS = [*HERMES, *LLAMA, *MISTRAL, *QWEN3_CODER, *GLM45, *PYTHONIC]


class Thought(NamedTuple):
    """One answer of a model that thinks."""

    name: str
    parser: str
    prompt: str  # its end
    text: str
    reasoning: str
    content: str


THOUGHTS = [
    Thought(
        "Qwen 3",
        "qwen3",
        "",
        "<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4.\n",
        "Let me see.\n\nYes.",
        "It is 4.\n",
    ),
    Thought("Qwen 3 2507: the prompt opens", "qwen3", "<think>\n", "Let me see.\n</think>\n\n4", "Let me see.", "4"),
    Thought("Qwen 3 told not to think", "qwen3", "<think>\n\n</think>\n\n", "4 </think> 5\n", "", "4 </think> 5\n"),
    Thought("Qwen 3 does not think", "qwen3", "", " 4 <think>", "", " 4 <think>"),
    Thought("spaces alone", "qwen3", "", " \n", "", " \n"),
    Thought("cut off", "qwen3", "<think>\n", "Let me </thin", "Let me </thin", ""),
    Thought("cut off in its tag", "qwen3", "", "\n<thi", "", "\n<thi"),
    Thought("no thoughts", "qwen3", "", "<think>\n\n</think>\n\nHi", "", "Hi"),
    Thought("R1 leaves the tag out", "deepseek_r1", "", "Hm.\n</think>\n\nYes", "Hm.", "Yes"),
    Thought("R1 repeats the tag", "deepseek_r1", "<think>\n", "<think>\nHm.</think>Yes", "Hm.", "Yes"),
    Thought("R1 never ends", "deepseek_r1", "", "Hm < and <b> </think", "Hm < and <b> </think", ""),
    Thought("V3.1 told not to think", "deepseek_r1", "</think>", "Yes <think>", "", "Yes <think>"),
    Thought("Magistral", "mistral", "", "[THINK]Hé 😀[/THINK]Yes", "Hé 😀", "Yes"),
]
