"""Plausible requests with something odd in one place, then in several: the answer may be a refusal, never a failure.

`test_serve_schema.py` makes requests up from the schema, which says nothing of what is inside messages, tools and
grammars, and nothing of sizes just below the limits. Here every place of a good request gets every odd value.
"""

import contextlib
import copy
import functools
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serving import Serving, make_service

EXAMPLES = int(os.environ.get("FLEDGE_TEST_FUZZ_EXAMPLES", "20"))
SECONDS = 60  # for one request's answer, on a busy machine

TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["b"]}}, "required": ["a"]}
SHARED: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "truncate_prompt_tokens": 4,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "structured_outputs": {"regex": "[ab]{2}"},
    "guided_json": SCHEMA,
    "guided_regex": "[ab]{2}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a"',
    "speculation": {"enabled": True, "depth": 1, "report": True},
}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "seen", "tool_call_id": "1"},
]
CHAT = {
    "messages": MESSAGES,
    "max_completion_tokens": 2,
    "top_logprobs": 1,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "reasoning_effort": "low",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "documents": [{"title": "a", "text": "b"}],
}
# For each path: what a request must have, and the fields that it can have besides.
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ({"messages": MESSAGES[:1], "max_tokens": 1}, SHARED | CHAT),
    "/v1/completions": ({"prompt": "Hi", "max_tokens": 1}, {"prompt": ["Hi", "you"], "logprobs": 1, "echo": True}),
    "/v1/responses": (
        {"input": "Hi", "max_output_tokens": 1},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "seen"},
            ],
            "instructions": "Look.",
            "stream": True,
            "temperature": 0.5,
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": {"type": "function", "name": "look"},
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "request_id": "a",
            "cache_salt": "b",
        },
    ),
    "/tokenize": ({}, {"prompt": "Hi", "messages": MESSAGES}),
    "/detokenize": ({"tokens": [1]}, {"tokens": [1, 2], "model": "tiny"}),
}

DIGITS = "9" * 5000  # more than Python makes a number of
INSIDE: list[Any] = [None, 2**63, DIGITS, {}]  # these are tried at every depth
ODD: list[Any] = [True, -1, 10**400, 1e308, math.nan, "", "\0\ud800", [], {DIGITS: 1.0}]


def odd_values(value: Any) -> Iterator[Any]:
    """Yield what may stand in a value's place: another type, a wrong size, the right thing a level deeper or often."""
    yield from INSIDE
    yield [value]
    yield [value] * 2048
    yield from ODD
    yield {"a": value}
    yield {str(i): value for i in range(1024)}
    yield [f"{i}" for i in range(2047)]
    nested = value
    for _ in range(50):
        nested = [nested]
    yield nested


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of everything inside a value."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(child, *path, key)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda holder, key: holder[key], path, value)


def put(request: dict[str, Any], fields: dict[str, Any], path: tuple[Any, ...], number: int) -> None:
    """Put the odd value of this number, made of what a good request has there, into one place of a request."""
    at(request, path[:-1])[path[-1]] = list(odd_values(at(fields, path)))[number]


NUMBERS = range(len(list(odd_values(0))))
NUMBERS_INSIDE = range(len(INSIDE) + 2)
SPOTS = {address: list(places(fields)) for address, (_, fields) in REQUESTS.items()}


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving(make_service(request_timeout=20.0, allow_client_templates=True)) as serving:
        yield serving
        serving.until_idle()
        assert serving.service.engine.is_healthy
        assert serving.in_engine(lambda engine: engine.stats().failed_steps) == 0


@pytest.fixture(name="client", scope="module")
def _client(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=SECONDS) as client:
        yield client


def check(client: httpx.Client, address: str, request: dict[str, Any]) -> str | None:
    """Return what is wrong with the answer."""
    try:
        response = client.post(address, content=json.dumps(request), headers={"content-type": "application/json"})
    except httpx.TransportError as error:
        return f"{error!r} for {json.dumps(request)[:200]}"
    if response.status_code >= 500 or '"server_error"' in response.text:  # in a stream, too
        return f"{response.status_code} for {json.dumps(request)[:200]}: {response.text[:200]}"
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.text) < 2 * len(DIGITS)
    return None


@pytest.mark.parametrize("address", REQUESTS)
def test_something_odd_in_one_place(client: httpx.Client, address: str) -> None:
    needed, fields = REQUESTS[address]
    failures = []
    for path in SPOTS[address]:
        good = needed | {path[0]: fields[path[0]]}
        for number in NUMBERS if len(path) == 1 else NUMBERS_INSIDE:
            request = copy.deepcopy(good)
            put(request, fields, path, number)
            failure = check(client, address, request)
            failures += [f"{path}: {failure}"] * (failure is not None)
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("address", REQUESTS)
def test_something_odd_in_several_places(client: httpx.Client, address: str) -> None:
    needed, fields = REQUESTS[address]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(st.lists(st.tuples(st.sampled_from(SPOTS[address]), st.sampled_from(NUMBERS)), min_size=2, max_size=4))
    def holds(changes: list[tuple[tuple[Any, ...], int]]) -> None:
        request = copy.deepcopy(needed | {path[0]: fields[path[0]] for path, _ in changes})
        for path, number in changes:
            with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier one took the place away
                put(request, fields, path, number)
        failure = check(client, address, request)
        assert failure is None, failure

    holds()
