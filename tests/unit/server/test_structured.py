"""Grammars from clients: read, limited, compiled, and kept to by whoever only picks allowed tokens."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fledge.engine.constraint import ConstraintFactory, TokenConstraint
from fledge.server.errors import RequestError
from fledge.server.grammar_sandbox import GrammarSandbox
from fledge.server.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, HarmonyParser, HarmonyTools
from fledge.server.parsers import ReasoningParser
from fledge.server.reasoning_parsers import GraniteReasoning, MistralReasoning
from fledge.server.structured import (
    MAX_CHOICES,
    PARSER_LIMITS,
    ConstraintError,
    Grammar,
    GrammarCompiler,
    call_grammar,
    read_format,
    read_tools,
)
from fledge.server.tool_parsers import TOOL_PARSERS
from tests.parsing import parse_whole

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_calls_section_begin|>")
KIMI = ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
PADDED = 64  # ids of the model that no token has

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "</think>", "é"]}, "maxItems": 2},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
}


def make_tokenizer(markers: tuple[str, ...], end: str = "<|end|>") -> Any:
    """A byte-level BPE with merges across the punctuation of JSON, and `end` as its end of text."""
    text = [json.dumps({"name": "ab", "arguments": {"age": i, "tags": ["x"]}}, indent=i % 3 or None) for i in range(30)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(text, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens([end])
    bpe.add_tokens([AddedToken(marker, special=marker.startswith(("<|", "["))) for marker in markers])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end)


def make_compiler(tokenizer: Any, *, max_cached: int = 64, **limits: int) -> GrammarCompiler:
    eos = tokenizer.eos_token_id
    options: dict[str, Any] = {"vocab_size": len(tokenizer) + PADDED, "eos_ids": [eos], "max_cached": max_cached}
    return GrammarCompiler(tokenizer, **options, limits=PARSER_LIMITS | limits)


TOKENIZERS = {"plain": make_tokenizer(()), "special": make_tokenizer((*MARKERS, *KIMI))}
COMPILERS = {name: make_compiler(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def taken_by(constraint: TokenConstraint, tokens: Sequence[int]) -> int:
    """How many of the tokens the grammar takes in a row."""
    return len(constraint.masks(tokens)) - 1


def walk(kind: str, factory: ConstraintFactory, seed: int) -> str:
    """Pick allowed tokens at random until the answer ends; return its text."""
    tokenizer, pick = TOKENIZERS[kind], random.Random(seed)
    constraint, tokens = factory(), []
    while not constraint.is_complete:
        mask = constraint.allowed()
        assert mask is not None
        assert not mask[len(tokenizer) :].any(), "an id that no token has"
        allowed = mask.nonzero().flatten().tolist()
        tokens.append(pick.choice(allowed))
        assert len(tokens) < 3000, tokenizer.decode(tokens)
        constraint.accept(tokens[-1:])
    assert constraint.is_complete
    return str(tokenizer.decode([token for token in tokens if token != tokenizer.eos_token_id]))


def compiled(kind: str, **fields: Any) -> ConstraintFactory:
    grammar = read_format(**fields)
    assert grammar is not None
    return COMPILERS[kind].compile(grammar)


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) <= {"name", "age", "tags", "more"}
        and len(found["name"]) <= 4
        and 0 <= found["age"] <= 120
        and all(tag in ("x", "</think>", "é") for tag in found.get("tags", []))
    )


ASKED: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}}, is_person),
    ({"guided_json": SCHEMA}, is_person),
    ({"guided_json": json.dumps(SCHEMA)}, is_person),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_person),
    ({"guided_regex": r"[a-c]{2,5}/\d{3}"}, re.compile(r"[a-c]{2,5}/\d{3}").fullmatch),
    ({"structured_outputs": {"regex": "(yes|no)!?"}}, re.compile("(yes|no)!?").fullmatch),
    ({"guided_choice": ["yes", 'a "b"\n', "日本", "<think>", "<|end|>"]},
     lambda text: text in ["yes", 'a "b"\n', "日本", "<think>", "<|end|>"]),
    ({"structured_outputs": {"choice": ["one"]}}, lambda text: text == "one"),
    ({"guided_grammar": 'start: "(" start ")" | DIGIT\nDIGIT: /[0-9]/'},
     lambda text: text.strip("()").isdigit() and text.count("(") == text.count(")")),
    ({"structured_outputs": {"grammar": 'root ::= "a" word\nword ::= [b-d] | "!"'}}, re.compile("a[b-d!]").fullmatch),
]  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("fields", "check"), ASKED)
def test_allowed_tokens_spell_valid_answers(kind: str, fields: dict[str, Any], check: Callable[[str], Any]) -> None:
    factory = compiled(kind, **fields)
    texts = [walk(kind, factory, seed) for seed in range(12)]
    assert all(check(text) for text in texts), texts


def test_json_objects_are_objects_and_their_white_space_is_bounded() -> None:
    factory = compiled("plain", response_format={"type": "json_object"})
    tokenizer = TOKENIZERS["plain"]

    def accepted(text: str) -> int:
        tokens = tokenizer.encode(text)
        count = taken_by(factory(), tokens)
        return len(tokenizer.decode(tokens[:count]))

    pretty = json.dumps({"a": [1, {"b": None}], "ü": "x\n"}, indent=4, ensure_ascii=False)
    assert accepted(pretty) == len(pretty)
    assert accepted("[]") == 0
    assert accepted("{" + " " * 200 + "}") < 80
    assert accepted('{"a":' + "\n" + " " * 17 + "1}") < 23
    assert read_format(response_format={"type": "text"}) is None
    assert read_format() is None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_masks_are_those_of_one_token_at_a_time(kind: str) -> None:
    """And looking ahead leaves no trace, at the end of the answer neither."""
    factory, tokenizer = compiled(kind, guided_json=SCHEMA), TOKENIZERS[kind]
    tokens = tokenizer.encode('{"name": "ab", "age": 7}') + [tokenizer.eos_token_id] * 2
    one_by_one, looking = factory(), factory()
    for place, token in enumerate(tokens[:-2]):
        ahead = looking.masks(tokens[place : place + 6])
        assert taken_by(looking, tokens[place : place + 6]) == len(ahead) - 1 == min(6, len(tokens) - 2 - place)
        copy = factory()
        copy.accept(tokens[:place])
        for offset, mask in enumerate(ahead):
            assert (mask == copy.allowed()).all()
            if offset < len(ahead) - 1:
                copy.accept([tokens[place + offset]])
        for constraint in (one_by_one, looking):
            constraint.accept([token])
    assert one_by_one.is_complete
    assert looking.is_complete
    assert looking.masks([tokens[-1]])[0].nonzero().flatten().tolist() == [tokenizer.eos_token_id]  # type: ignore[union-attr]
    wrong = tokenizer.encode('{"name": "ab", "old": 7}')
    fresh = factory()
    assert tokenizer.decode(wrong[: taken_by(fresh, wrong)]) == '{"name": "ab", "'
    assert taken_by(fresh, tokens[:-2]) == len(tokens) - 2


def test_a_grammar_that_may_go_on_ends_by_the_end_of_text() -> None:
    tokenizer = TOKENIZERS["plain"]
    constraint = compiled("plain", guided_regex="[0-9]+")()
    assert not constraint.allowed()[tokenizer.eos_token_id]  # type: ignore[index]
    constraint.accept(tokenizer.encode("12"))
    assert not constraint.is_complete
    ahead = constraint.masks([*tokenizer.encode("3"), tokenizer.eos_token_id, *tokenizer.encode("4")])
    assert len(ahead) == 3  # nothing comes after the end
    constraint.accept([tokenizer.eos_token_id])
    assert constraint.is_complete


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format: 'type' must be"),
    ({"response_format": {"type": "xml"}}, "response_format: 'type' must be"),
    ({"response_format": {"type": "json_schema"}}, "needs 'json_schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "must be an object, found int"),
    ({"guided_json": "{"}, "guided_json: the schema is no JSON"),
    ({"guided_json": [1]}, "must be an object, found list"),
    ({"guided_json": {"type": "frob"}}, "Invalid type: frob"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
    ({"guided_json": {"$ref": "https://example.com/schema"}}, "does not fetch"),
    ({"guided_json": {"$ref": "#"}}, "nothing satisfies it"),
    ({"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
    ({"guided_json": {"const": "x" * 70_000}}, "allowed are 65536"),
    ({"guided_json": {"const": "\ud800"}}, "no character"),
    ({"guided_regex": "["}, "guided_regex: .*unclosed character class"),
    ({"guided_regex": r"(a)\1"}, "backreferences are not supported"),
    ({"guided_regex": "x" * 70_000}, "found 70000 bytes, allowed are 65536"),
    ({"guided_regex": 3}, "expected a non-empty string"),
    ({"guided_regex": "\ud800"}, "no character"),
    ({"guided_choice": []}, "expected a list of non-empty strings"),
    ({"guided_choice": "yes"}, "expected a list of non-empty strings"),
    ({"guided_choice": ["yes", 1]}, "expected a list of non-empty strings"),
    ({"guided_choice": ["x"] * 3000}, "found 3000 choices"),
    ({"guided_grammar": "frob frob"}, "neither Lark nor GBNF"),
    ({"guided_grammar": "root ::= " + "(" * 9000}, "neither Lark nor GBNF"),
    ({"guided_grammar": "start: missing"}, "guided_grammar: .*missing"),
    ({"guided_grammar": "start: @other"}, "unknown grammar"),
    ({"guided_grammar": "start: <|nope|>"}, "unknown special token"),
    ({"structured_outputs": 3}, "structured_outputs: expected an object"),
    ({"structured_outputs": {}}, "found 0 of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "found 2 of"),
    ({"structured_outputs": {"jsn": {}}}, "Did you mean 'json'"),
    ({"structured_outputs": {"json_object": "yes"}}, "expected true"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "together, allowed is one of them"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_wrong_is_said_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        compiled("plain", **fields)
    assert raised.value.status == 400
    assert raised.value.param is not None
    assert raised.value.param.split(".")[0] in fields
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_deep_schemas_are_refused_at_any_depth() -> None:
    for depth in (200, 3000):
        with pytest.raises(RequestError, match="guided_json: "):
            compiled("plain", guided_json=nested(depth))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "enum", "const", "$ref", "anyOf", "pattern", "maxLength", "x"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None)
@given(
    field=st.sampled_from(["guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format"]),
    value=_JSON | st.text(st.sampled_from('start:"/[]()*+?{}|<>@%a\\ \n'), max_size=25),
)
def test_whatever_is_asked_for_works_or_is_refused(field: str, value: Any) -> None:
    try:
        grammar = read_format(**{field: value})
        if grammar is not None:
            constraint = COMPILERS["plain"].compile(grammar)()
            assert constraint.allowed().any()  # type: ignore[union-attr]
    except RequestError as error:
        assert (error.status, "\n" in str(error)) == (400, False)  # noqa: PT017 - either outcome is fine


def test_expensive_grammars_meet_the_limits() -> None:
    costly = "start: " + " ".join(["part"] * 40) + "\npart: " + " | ".join(f'"w{i}"' for i in range(2000))
    compiler = make_compiler(TOKENIZERS["plain"], max_grammar_size=1000)
    with pytest.raises(RequestError, match="guided_grammar"):
        compiler.compile(Grammar(source={"lark_grammar": costly}, param="guided_grammar"))
    # One step of this automaton may need thousands of states: it is stopped, and its request alone ends.
    grammar = read_format(guided_regex="(.*a.{40}){3}")
    assert grammar is not None
    limited = make_compiler(TOKENIZERS["plain"], max_lexer_states=300)
    constraint = limited.compile(grammar)()
    token = TOKENIZERS["plain"].encode("a")

    def spell() -> None:
        for _ in range(500):
            constraint.masks(token)
            constraint.accept(token)

    with pytest.raises(ConstraintError, match=r"(?i)state|complex|limit"):
        spell()


def test_compiled_grammars_are_kept_and_constraints_are_independent() -> None:
    compiler = make_compiler(TOKENIZERS["plain"], max_cached=2)

    def constraint(regex: str) -> TokenConstraint:
        grammar = read_format(guided_regex=regex)
        assert grammar is not None
        return compiler.compile(grammar)()

    first, again = constraint("a+b"), constraint("a+b")
    assert compiler._compiled.cache_info().misses == 1
    first.accept(TOKENIZERS["plain"].encode("ab"))
    assert first.is_complete
    assert not again.is_complete
    assert taken_by(again, TOKENIZERS["plain"].encode("aab")) > 0
    constraint("c")
    constraint("a+b")  # used: the other one is the oldest now
    constraint("d")
    constraint("a+b")
    assert compiler._compiled.cache_info().misses == 3
    constraint("c")
    assert compiler._compiled.cache_info().misses == 4


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "kimi_k2"])
@pytest.mark.parametrize("choice", ["required", "named", "single"])
def test_calls_that_must_come_do_in_the_models_own_syntax(kind: str, name: str, choice: str) -> None:
    asked = {"type": "function", "function": {"name": "ping"}} if choice == "named" else "required"
    request = read_tools(TOOLS, asked, choice != "single")
    assert request is not None
    parser, compiler = TOOL_PARSERS[name], COMPILERS[kind]
    grammar = call_grammar(parser, request)
    assert grammar is not None
    factory = compiler.compile(grammar)
    seen: set[str] = set()
    for seed in range(10):
        content, calls = parse_whole(parser(), walk(kind, factory, seed))
        assert content is None
        assert calls
        assert choice == "required" or len(calls) == 1
        seen |= {called for called, _ in calls}
        for called, arguments in calls:
            assert is_person(arguments) if called == "weather" else json.loads(arguments) == {}
    assert seen == ({"ping"} if choice == "named" else {"weather", "ping"})


def test_nothing_is_enforced_where_the_model_may_choose_and_bad_schemas_are_refused() -> None:
    auto = read_tools(TOOLS)
    assert auto is not None
    assert call_grammar(TOOL_PARSERS["hermes"], auto) is None
    for parameters in ({"type": "frob"}, nested(3000)):
        bad = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
        assert bad is not None
        with pytest.raises(RequestError, match="tools: ") as raised:
            COMPILERS["plain"].compile(call_grammar(TOOL_PARSERS["hermes"], bad))  # type: ignore[arg-type]
        assert raised.value.status == 400


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("opened", [True, False])
def test_the_grammar_begins_after_the_reasoning(kind: str, opened: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    for fields, answer in (
        ({"guided_json": SCHEMA}, '{"name": "", "age": 1}'),
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_regex": "[0-9]{2}"}, "12"),
    ):
        grammar = read_format(**fields)
        assert grammar is not None
        factory = COMPILERS[kind].compile(replace(grammar, reasoning=ReasoningParser, reasoning_opened=opened))
        begin = "" if opened else "<think>\n"

        def taken(text: str, factory: ConstraintFactory = factory) -> bool:
            constraint, tokens = factory(), tokenizer.encode(text)
            if taken_by(constraint, tokens) < len(tokens):
                return False
            constraint.accept(tokens)
            return constraint.is_complete

        assert taken(begin + 'Well {"a": [ </thin, so\n</think>\n\n' + answer)
        assert taken(begin + "</think>" + answer)
        assert not taken(begin + "hm</think>\n\nmaybe")
        assert taken(answer) == (not opened)


def test_the_grammar_begins_after_reasoning_of_other_kinds() -> None:
    harmony = (START, CHANNEL, CONSTRAIN, MESSAGE, END)
    tokenizer = make_tokenizer((*harmony, *MistralReasoning.START_MARKERS, *MistralReasoning.END_MARKERS), RETURN)
    compiler = make_compiler(tokenizer)
    choice, tools = read_format(guided_choice=["yes"]), [{"type": "function", "function": {"name": "f"}}]
    call = call_grammar(HarmonyTools, read_tools(tools, "required", None))  # type: ignore[arg-type]
    analysis = f"{CHANNEL}analysis{MESSAGE}Well{END}{START}assistant"
    to_f = f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}"
    for grammar, kind, right, wrong in (
        (choice, HarmonyParser, f"{analysis}{CHANNEL}final{MESSAGE}yes", f"{analysis}yes"),
        (choice, HarmonyParser, f"{CHANNEL}final{MESSAGE}yes", f"{CHANNEL}final{MESSAGE}no"),
        (call, HarmonyParser, analysis + to_f + "{}", f"{analysis}{CHANNEL}final{MESSAGE}"),
        (choice, MistralReasoning, "[THINK]Well[/THINK]yes", "[THINK]Well[/THINK]no"),
        (choice, GraniteReasoning, "Here's my thought process: Well. Here is my response: yes", "Here's no"),
    ):
        assert grammar is not None
        factory = compiler.compile(replace(grammar, reasoning=kind))
        assert taken_by(factory(), tokenizer.encode(right)) == len(tokenizer.encode(right)), right
        assert taken_by(factory(), tokenizer.encode(wrong)) < len(tokenizer.encode(wrong)), wrong


def test_vllms_styles_of_json() -> None:
    for style, spaced, bare in (
        ({}, True, True),
        ({"disable_any_whitespace": False, "structural_tag": None}, True, True),
        ({"disable_any_whitespace": True}, False, True),
        ({"whitespace_pattern": "-"}, False, True),
    ):
        factory = compiled("plain", structured_outputs={"json": SCHEMA, **style})
        for text, is_taken in (('{"name": "a", "age":\n1}', spaced), ('{"name":"a","age":1}', bare)):
            tokens = TOKENIZERS["plain"].encode(text)
            assert (taken_by(factory(), tokens) == len(tokens)) == is_taken, (style, text)
    for wrong in ({"structural_tag": "{}"}, {"disable_additional_properties": True}, {"whitespace_pattern": 1}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            read_format(structured_outputs={"json": SCHEMA, **wrong})


def test_as_many_choices_as_are_allowed() -> None:
    choices = [f"c{number}" for number in range(MAX_CHOICES)]
    assert walk("plain", compiled("plain", guided_choice=choices), seed=1) in choices


def test_a_sandbox_ends_what_takes_too_long_or_too_much_and_goes_on() -> None:
    tokenizer = {"tokenizer": TOKENIZERS["plain"].backend_tokenizer.to_str()}
    bomb = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "0123456789abcdefghij"]}
    text = json.dumps({"grammars": [{"json_schema": bomb}]})
    harmless = json.dumps({"grammars": [{"lark_grammar": "start: /a+/"}]})
    options: dict[str, Any] = {"processes": 1, "tokenizer": tokenizer, "limits": PARSER_LIMITS}
    late = GrammarSandbox(**options, seconds=0.25, mib=2**14)  # more than it asks for in that time, however fast
    assert late.check(text) == "the grammar takes longer than 0.25 s to compile"
    assert late.check(harmless) is None
    small = GrammarSandbox(**options, seconds=20, mib=4)
    assert small.check(text) == "the grammar needs more than 4 MiB to compile"
    assert small.check(harmless) is None
    assert "unclosed" in str(small.check(json.dumps({"grammars": [{"lark_grammar": "start: /[/"}]})))
