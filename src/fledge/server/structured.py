"""Structured output: what a request says its answer must look like, read from OpenAI's and vLLM's fields.

    read_format(response_format=..., guided_regex=..., ...)  ->  Grammar  ->  GrammarCompiler.compile  ->  factory

A grammar is data from a client. Its size is limited here, the work it may cause by llguidance's own limits.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from fledge.errors import nearest_name_hint
from fledge.server.grammar import Grammar, GrammarLimits, lark_string, one_line, refuse_grammar

# Between JSON tokens: a space, or a new line and its indentation. Left free, a small model may put in white space for
# ever, which is valid and useless.
WHITESPACE = r"\x20|\x0D?\x0A(\x20{0,32}|\x09{0,8})"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def read_format(
    *,
    response_format: Any = None,
    structured_outputs: Any = None,
    guided_json: Any = None,
    guided_regex: Any = None,
    guided_choice: Any = None,
    guided_grammar: Any = None,
    limits: GrammarLimits | None = None,
) -> Grammar | None:
    """Return the grammar that a request's fields (OpenAI's and vLLM's, as parsed from JSON) ask for, if any."""
    limits = limits or GrammarLimits()
    asked: list[tuple[str, str, Any]] = []  # field, kind, value
    guided = {"json": guided_json, "regex": guided_regex, "choice": guided_choice, "grammar": guided_grammar}
    asked += [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
    if structured_outputs is not None:
        asked.append(_read_structured_outputs(structured_outputs))
    if response_format is not None:
        asked += _read_response_format(response_format)
    if not asked:
        return None
    if len(asked) > 1:
        names = ", ".join(field for field, _, _ in asked)
        refuse_grammar(asked[-1][0], f"found {names} together, allowed is one of them")
    param, kind, value = asked[0]
    return Grammar(source=_source(param, kind, value, limits), param=param)


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with our way of writing JSON, which the schema's own `x-guidance` may overrule."""
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, Mapping) else {})}
    return {**schema, "x-guidance": options}


def check_size(param: str, text: str, limits: GrammarLimits) -> None:
    """Refuse text that is too long, or that is no text: JSON can spell halves of characters."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        refuse_grammar(param, "found half of a UTF-16 surrogate pair, which is no character")
    if size > limits.max_bytes:
        refuse_grammar(param, f"found {size} bytes, allowed are {limits.max_bytes}")


def check_json_size(param: str, value: Any, limits: GrammarLimits) -> None:
    """`check_size` of a value's JSON text."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        refuse_grammar(param, "nested too deeply")
    check_size(param, text, limits)


def _read_response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json_object", True)]
    if kind != "json_schema":
        refuse_grammar("response_format", "'type' must be 'text', 'json_object' or 'json_schema'")
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        refuse_grammar("response_format", "type 'json_schema' needs 'json_schema': {'name': ..., 'schema': {...}}")
    return [("response_format", "json", inner["schema"])]


def _read_structured_outputs(value: Any) -> tuple[str, str, Any]:
    if not isinstance(value, Mapping):
        refuse_grammar("structured_outputs", f"expected an object with one of {', '.join(_KINDS)}")
    given = {name: inner for name, inner in value.items() if inner is not None}
    for name in given:
        if name not in _KINDS:
            refuse_grammar("structured_outputs", f"unknown name '{name}'.{nearest_name_hint(str(name), _KINDS)}")
    if len(given) != 1:
        refuse_grammar("structured_outputs", f"found {len(given)} of {', '.join(_KINDS)}, allowed is one")
    ((kind, inner),) = given.items()
    return f"structured_outputs.{kind}", kind, inner


def _source(param: str, kind: str, value: Any, limits: GrammarLimits) -> dict[str, Any]:
    if kind == "json_object":
        if value is not True:
            refuse_grammar(param, "expected true")
        return {"json_schema": json_schema({"type": "object"})}
    if kind == "json":
        return {"json_schema": json_schema(_read_schema(param, value, limits))}
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or not all(isinstance(choice, str) and choice for choice in value):
            refuse_grammar(param, "expected a list of non-empty strings")
        if len(value) > limits.max_choices:
            refuse_grammar(param, f"found {len(value)} choices, allowed are {limits.max_choices}")
        lark = "start: " + " | ".join(lark_string(choice) for choice in value)
        check_size(param, lark, limits)
        return {"lark_grammar": lark}
    if not isinstance(value, str) or not value.strip():
        refuse_grammar(param, "expected a non-empty string")
    check_size(param, value, limits)
    if kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}  # \d is 0 to 9, not every script's digits
    try:
        return {"lark_grammar": any_to_lark(value)}  # Lark as it is; GBNF, which vLLM also takes, translated
    except Exception as error:  # it raises whatever it stumbled over
        refuse_grammar(param, f"neither Lark nor GBNF: {one_line(error)}")


def _read_schema(param: str, value: Any, limits: GrammarLimits) -> Mapping[str, Any]:
    if isinstance(value, str):
        check_size(param, value, limits)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            refuse_grammar(param, f"the schema is no JSON: {one_line(error)}")
    check_json_size(param, value, limits)
    if not isinstance(value, Mapping):
        refuse_grammar(param, f"the schema must be an object, found {type(value).__name__}")
    return value
