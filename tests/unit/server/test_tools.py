"""Tool calls: what each model family writes becomes OpenAI's calls, however the text is cut into pieces."""

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.errors import ConfigError
from fledge.server.errors import RequestError
from fledge.server.harmony import HarmonyParser, HarmonyTools
from fledge.server.parsers import AnswerParser, merge_deltas
from fledge.server.structured import read_tools
from fledge.server.tool_parsers import TOOL_PARSERS, tool_parser
from tests.parsing import Calls, assembled, parse_whole

KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
WEATHER = '{"city": "Paris, \\"FR\\" {x}", "days": [1, 2]}'


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"  # noqa: RUF001
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
DEEPSEEK_31_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
TOOLS = {"f": {"properties": {"n": {"type": "integer"}, "text": {"type": "string"}, "b": {"type": "boolean"}}}}


def parse(name: str, text: str) -> tuple[str | None, Calls]:
    return parse_whole(TOOL_PARSERS[name](tools=TOOLS), text)


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    # Hermes
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", " padded text \n", " padded text \n", []),
    (
        "hermes",
        f"<tool_call>\n{call('weather', WEATHER)}\n</tool_call>",
        None,
        [("weather", WEATHER)],
    ),
    (
        "hermes",
        f"So.\n\n<tool_call>{call('a', '{}')}</tool_call>\n<tool_call>\n{call('b', '{}')}\n</tool_call>\n Done.\n",
        "So.\nDone.\n",
        [("a", "{}"), ("b", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call>', None, [("late", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "none"}</tool_call>', None, [("none", "{}")]),
    ("hermes", '<tool_call>{"name": "n", "arguments": null}</tool_call>', None, [("n", "{}")]),
    ("hermes", '<tool_call>{"name": "s", "arguments": "{\\"x\\": 1}"}</tool_call>', None, [("s", '{"x": 1}')]),
    ("hermes", f"<tool_call>{call('cut', '{}')}", None, [("cut", "{}")]),
    ("hermes", '<tool_call>{"name": "cut", "arguments": {"x": "unfin', None, [("cut", '{"x": "unfin')]),
    (
        "hermes",  # an end marker inside a string is text
        f"<tool_call>{call('echo', json.dumps({'text': '</tool_call>'}))}</tool_call>",
        None,
        [("echo", '{"text": "</tool_call>"}')],
    ),
    ("hermes", "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    ("hermes", '<tool_call>{"nome": "x"}</tool_call>!', '<tool_call>{"nome": "x"}</tool_call>!', []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", 'x <tool_call>{"na', 'x <tool_call>{"na', []),
    ("hermes", "a < b <tool_ca", "a < b <tool_ca", []),
    (
        "hermes",  # announced, then no JSON: passed on as it is, and the next call is found
        f'<tool_call>{{"name": "bad", "arguments": {{"x": o!!}}}}</tool_call><tool_call>{call("ok", "{}")}</tool_call>',
        None,
        [("bad", '{"x": o!!}}'), ("ok", "{}")],
    ),
    (
        "hermes",  # words that are none in JSON are no JSON either
        '<tool_call>{"name": "bad", "arguments": {"x": nope}}</tool_call> Hm.',
        "Hm.",
        [("bad", '{"x": nope}}')],
    ),
    (
        "hermes",  # an end marker in a string before what is no JSON is text
        '<tool_call>{"name": "bad", "arguments": {"x": "</tool_call>", y}}</tool_call>',
        None,
        [("bad", '{"x": "</tool_call>", y}}')],
    ),
    # Llama 3
    ("llama3_json", "Just text; {not a call}", "Just text; {not a call}", []),
    ("llama3_json", f"  {call('weather', WEATHER, 'parameters')}\n", None, [("weather", WEATHER)]),
    ("llama3_json", f"<|python_tag|>{call('f', '{}', 'parameters')}", None, [("f", "{}")]),
    (
        "llama3_json",
        f"{call('f', '{}', 'parameters')}; {call('g', '{}', 'parameters')};",
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "llama3_json",
        f"Looking it up. <|python_tag|>{call('f', '{}', 'parameters')} there",
        "Looking it up.\nthere",
        [("f", "{}")],
    ),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    ("llama3_json", '\n{"answer": {"name": "x"}} ', '\n{"answer": {"name": "x"}} ', []),
    ("llama3_json", "{", "{", []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", f"See {call('f', '{}', 'parameters')}", "See", [("f", "{}")]),
    ("llama3_json", f"Use {{ to open. {call('f', '{}', 'parameters')}", "Use { to open.", [("f", "{}")]),
    ("llama3_json", '{"name": "Alice"}', '{"name": "Alice"}', []),
    (
        "llama3_json",  # a call inside of another object is quoted
        '{"name": "A", "x": {"name": "f", "parameters": {}}, "y": "}"} ' + call("g", "{}", "parameters"),
        '{"name": "A", "x": {"name": "f", "parameters": {}}, "y": "}"}',
        [("g", "{}")],
    ),
    # An answer that is cut off within the end marker
    *[("hermes", f"<tool_call>{call('f', '{}')}\n" + "</tool_call>"[:cut], None, [("f", "{}")]) for cut in (1, 6, 11)],
    # Kimi K2
    ("kimi_k2", "Just text.", "Just text.", []),
    (
        "kimi_k2",
        "Sure. " + KIMI.format(KIMI_CALL.format("functions.weather:0", WEATHER)) + "\nDone",
        "Sure.\nDone",
        [("weather", WEATHER)],
    ),
    (
        "kimi_k2",
        KIMI.format(KIMI_CALL.format("functions.a:0", " {} ") + "\n" + KIMI_CALL.format("b.c:1", '{"x":1}\n')),
        None,
        [("a", "{}"), ("b.c", '{"x":1}')],
    ),
    ("kimi_k2", KIMI.format(KIMI_CALL.format("functions.a:0", "")), None, [("a", "{}")]),
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>a:0<|tool_call_argument_begin|>{"x": "unf',
        None,
        [("a", '{"x": "unf')],
    ),
    ("kimi_k2", KIMI.format(""), None, []),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>what<|tool_calls_section_end|>",
        "what",
        [],
    ),
    (
        "kimi_k2",  # text before a call, and an id that is none, cost no other call, and no marker is content
        KIMI.format("Now: " + KIMI_CALL.format("functions.a:0", "{}") + KIMI_CALL.format("no id", "{}"))
        + KIMI.format(KIMI_CALL.format("functions.b:1", "{}")),
        "Now:\nno id{}",
        [("a", "{}"), ("b", "{}")],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>no id<|tool_call_argument_begin|>{}",
        "no id{}",
        [],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>" + "a" * 300 + ":0<|tool_call_argument_begin|>{}",
        "a" * 300 + ":0{}",
        [],
    ),
    # DeepSeek: V3 and R1 with a fence, V3.1 without
    ("deepseek_v3", "Just text.", "Just text.", []),
    (
        "deepseek_v3",
        "Sure." + DEEPSEEK.format("".join(DEEPSEEK_CALL.format(name, WEATHER) for name in "fg")) + " Done",
        "Sure.\nDone",
        [("f", WEATHER), ("g", WEATHER)],
    ),
    ("deepseek_v31", DEEPSEEK.format(DEEPSEEK_31_CALL.format("f", '{"x": "```"}')), None, [("f", '{"x": "```"}')]),
    (
        "deepseek_v3",
        DEEPSEEK.format(DEEPSEEK_31_CALL.format("no name", "{}") + DEEPSEEK_31_CALL.format("f", "")),
        "no name{}",
        [("f", "{}")],
    ),
    # Qwen3-Coder
    ("qwen3_coder", "a < b <tool_ca", "a < b <tool_ca", []),
    (
        "qwen3_coder",
        "So.\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=text>\n3\n\n</parameter>\n"
        "<parameter=new>\n[1]\n</parameter>\n</function>\n</tool_call> Ok.",
        "So.\nOk.",
        [("f", '{"n": 3, "text": "3\\n", "new": "[1]"}')],
    ),
    ("qwen3_coder", "<function=g></function>", None, [("g", "{}")]),
    (
        "qwen3_coder",  # nothing closes but the next one
        "<tool_call><function=f><parameter=b>True<parameter=n>x y</function></tool_call><tool_call>no</tool_call>",
        "<tool_call>no</tool_call>",
        [("f", '{"b": true, "n": "x y"}')],
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>3</parameter><parameter=text>unf", None, [("f", '{"n": 3')]),
    # GLM
    (
        "glm45",
        "Ok<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>text</arg_key>\n<arg_value>3</arg_value>"
        "\n</tool_call>\n<tool_call>g</tool_call>",
        "Ok",
        [("f", '{"n": 3, "text": "3"}'), ("g", "{}")],
    ),
    ("glm45", "<tool_call>no name here</tool_call>", "<tool_call>no name here</tool_call>", []),
    # Mistral
    (
        "mistral",
        f"Hm. [TOOL_CALLS] [{call('f', WEATHER)}, {call('g', '{}')}]",
        "Hm.",
        [("f", WEATHER), ("g", "{}")],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]f{WEATHER}[TOOL_CALLS]g[ARGS]{{}}[TOOL_CALLS]h[CALL_ID]abc123def[ARGS]{{}}",
        None,
        [("f", WEATHER), ("g", "{}"), ("h", "{}")],
    ),
    ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    # Python's calls
    (
        "pythonic",
        "[weather(city='Paris', days=[1, 2], deep={'a': None}), a.b(x=true, y=-1.5)]",
        None,
        [("weather", '{"city": "Paris", "days": [1, 2], "deep": {"a": null}}'), ("a.b", '{"x": true, "y": -1.5}')],
    ),
    *[
        ("pythonic", text, text, [])
        for text in ("Text.", "[1, 2]", "[f(1)]", "[f(x=g())]", "[f(x=1)] and more", "[", "[f(**a)]")
    ],
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_whole_answers(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert parse(name, text) == (content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_character_by_character(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    parser = TOOL_PARSERS[name](tools=TOOLS)
    deltas = [delta for character in text for delta in parser.feed(character)] + parser.feed("", final=True)
    assert assembled(deltas) == (content, calls)
    announced = set()
    for delta in deltas:
        if "tool_calls" in delta:  # the name comes first, once, and alone
            (part,) = delta["tool_calls"]
            assert (part["index"] in announced) == ("name" not in part["function"]) == ("id" not in part)
            assert bool(part["function"]["arguments"]) == (part["index"] in announced)
            announced.add(part["index"])
        else:
            assert delta["content"]
    assert parser.feed("") == parser.feed("", final=True) == []


_FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "b"}}', '{"name":"g"}'],
    "llama3_json": ["<|python_tag|>", ";", '{"name": "f", "parameters": {"a": [1, {}]}}', '{"type":'],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        '{"a": "b"}',
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>f:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ],
    "deepseek_v3": [
        *re.split("(?<=>)", DEEPSEEK_CALL.format("f", "{}")),
        DEEPSEEK_CALL.format("f", "{}"),
        DEEPSEEK_31_CALL.format("f", "{}"),
        "function",
        "```",
    ],
    "qwen3_coder": [
        *(
            "<tool_call>",
            "<function=",
            "f",
            ">",
            "<parameter=",
            "n",
            "3",
            "</parameter>",
            "</function>",
            "</tool_call>",
        ),
        "<tool_call><function=f><parameter=n>3</parameter>",
    ],
    "glm45": ["<tool_call>", "f", "<arg_key>", "n", "</arg_key>", "<arg_value>", "3", "</arg_value>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]", "f", "[ARGS]", "[CALL_ID]", "[", "]", '{"name": "f", "arguments": {}}', "{}"],
    "pythonic": ["[", "]", "f(", "x=1", ")", "f(x='a')", "[f(x=1)]"],
}
_NOISE = [
    "\n",
    " ",
    "{",
    "}",
    '"',
    "\\",
    ":",
    ",",
    "<",
    "<|tool_call",
    "</tool",
    "name",
    '"name"',
    "null",
    "1",
    "é",
    "x",
]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(_FRAGMENTS)))
def test_any_split_gives_what_the_whole_gives(data: st.DataObject, name: str) -> None:
    pieces = st.sampled_from(_FRAGMENTS[name] + _NOISE + _FRAGMENTS[name])
    text = "".join(data.draw(st.lists(pieces, max_size=10)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parser = TOOL_PARSERS[name](tools=TOOLS)
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)] + parser.feed("", final=True)
    assert assembled(deltas) == parse(name, text)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["hermes", "llama3_json", "kimi_k2"]),
    calls=st.lists(
        st.tuples(
            st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,8}", fullmatch=True),
            st.dictionaries(
                st.text(max_size=4),
                st.recursive(
                    st.none()
                    | st.booleans()
                    | st.integers()
                    | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                    max_leaves=5,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_well_formed_calls_come_back_whatever_their_arguments(
    name: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    spelled = [(function, json.dumps(arguments)) for function, arguments in calls]
    if name == "hermes":
        text = "\n".join(f"<tool_call>\n{call(f, a)}\n</tool_call>" for f, a in spelled)
    elif name == "llama3_json":
        text = "; ".join(call(f, a, "parameters") for f, a in spelled)
    else:
        text = KIMI.format("".join(KIMI_CALL.format(f"functions.{f}:{i}", a) for i, (f, a) in enumerate(spelled)))
    assert parse(name, text) == (None, spelled)


def test_without_parallel_calls_the_first_counts() -> None:
    both = f"Hm. <tool_call>{call('a', '{}')}</tool_call> <tool_call>{call('b', '{}')}</tool_call> End"
    assert parse_whole(AnswerParser(TOOL_PARSERS["hermes"](), parallel=False), both) == ("Hm.\nEnd", [("a", "{}")])
    to, then = "<|channel|>commentary to=functions.{0}<|message|>{{}}<|call|>", "<|channel|>final<|message|>End"
    harmony = AnswerParser(HarmonyParser(), HarmonyTools(), parallel=False)
    assert parse_whole(harmony, to.format("a") + to.format("b") + then) == ("End", [("a", "{}")])


def test_ids_are_openais_or_the_models_own() -> None:
    message = merge_deltas(TOOL_PARSERS["hermes"]().feed(2 * f"<tool_call>{call('a', '{}')}</tool_call>"))
    first, second = (made["id"] for made in message["tool_calls"])
    assert re.fullmatch(r"call_[a-zA-Z0-9]{24}", first)
    assert first != second
    text = KIMI.format(KIMI_CALL.format("functions.get_x:3", "{}"))
    message = merge_deltas(TOOL_PARSERS["kimi_k2"]().feed(text))
    function = {"name": "get_x", "arguments": "{}"}
    assert message["tool_calls"] == [{"id": "functions.get_x:3", "type": "function", "function": function}]


def test_parsers_are_found_by_name_and_by_template() -> None:
    assert {tool_parser(name) for name in TOOL_PARSERS} == set(TOOL_PARSERS.values())
    assert tool_parser("none", "<tool_call>") is None
    with pytest.raises(ConfigError, match=r"unknown tool parser 'hermès'\. Did you mean 'hermes'"):
        tool_parser("hermès")
    templates = {
        "{{ '<tool_call>' }}": "hermes",
        '<|start_header_id|> {"name": function name, "parameters": dictionary}': "llama3_json",
        "<|python_tag|>": "llama3_json",
        "<|tool_calls_section_begin|>": "kimi_k2",
        "<tool_call>\n<function=name>": "qwen3_coder",
        "<tool_call>{{ name }}<arg_key>": "glm45",
        DEEPSEEK: "deepseek_v3",
        "[TOOL_CALLS]": "mistral",
        "{{ messages }}": None,
    }
    for template, name in templates.items():
        assert tool_parser(None, template) is (None if name is None else TOOL_PARSERS[name])
    assert tool_parser(None) is None


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_requests_for_tools_are_read() -> None:
    tools = [tool("a", parameters={"type": "object"}), tool("b-2")]
    assert read_tools(None) is None
    assert read_tools([], "none") is None
    auto = read_tools(tools)
    assert auto is not None
    assert (auto.required_tools, auto.parallel) == ({}, True)
    required = read_tools(tools, "required", False)
    assert required is not None
    assert (list(required.required_tools), required.parallel) == (["a", "b-2"], False)
    named = read_tools(tools, {"type": "function", "function": {"name": "b-2"}})
    assert named is not None
    assert (list(named.required_tools), named.parallel) == (["b-2"], False)
    assert read_tools(tools, "none") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1],), r"tools\[0\]: expected"),
        (([{"type": "function"}],), r"tools\[0\]: expected"),
        (([tool("")],), r"tools\[0\].function.name: expected"),
        (([tool("a b")],), "function.name"),
        (([tool("a", parameters=[])],), "function.parameters: expected a JSON schema"),
        (([tool("a"), tool("a")],), "two tools have the same name"),
        (([tool("a")] * 200,), "found 200, allowed are 128"),
        (([tool("a")], "always"), "tool_choice: expected"),
        (([tool("a")], {"type": "function", "function": {}}), "tool_choice: expected"),
        (([tool("alpha")], {"type": "function", "function": {"name": "alpa"}}), "Did you mean 'alpha'"),
        ((None, "required"), "there are no 'tools'"),
    ],
)
def test_bad_requests_for_tools_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        read_tools(*arguments)
    assert raised.value.status == 400
    assert raised.value.param
    assert "\n" not in str(raised.value)
