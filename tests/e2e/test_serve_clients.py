"""What clients expect beside chats and completions: responses, tools by their own choice, small endpoints."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.serving import MODEL, Serving, make_service

TOOL: Any = {"type": "function", "name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"], "additionalProperties": False}
}  # fmt: skip
ASKED: Any = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 20}


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving(make_service(tool_call_parser="hermes", disable_any_whitespace=True)) as serving:
        yield serving
        serving.until_idle()


@pytest.fixture(name="client", scope="module")
def _client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(name="http", scope="module")
def _http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=60) as http:
        yield http


def test_responses_say_what_chats_say(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    answer = client.responses.create(**ASKED, instructions="Be brief", metadata={"a": "b"}, store=False)
    Response.model_validate(answer.model_dump())
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details) == ("incomplete", answer.incomplete_details)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 20)


def test_streamed_responses_end_with_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
    assert [one.type for one in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    with client.responses.stream(**ASKED) as stream:  # the client puts it together itself, event by event
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_functions_are_called_and_their_results_read(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 100, "tools": [TOOL], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    answer = client.responses.create(**asked)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (answer.status, call.name, call.status) == ("completed", "weather", "completed")
    assert call.arguments in ('{"hot":true}', '{"hot":false}')  # no white space
    events = list(client.responses.create(**asked, stream=True))
    done = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [one.arguments for one in done] == [call.arguments]
    follow_up = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "yes"},
    ]
    named = {"type": "function", "name": "weather"}
    assert client.responses.create(**{**ASKED, "input": follow_up, "tools": [TOOL], "tool_choice": "auto"}).output_text
    assert client.responses.create(**{**asked, "tool_choice": named}).output[0].type == "function_call"


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": 1},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call", "name": 1}]},
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "file_search"}},
        {"text": {"format": {"type": "xml"}}},
        {"text": {"format": 1}},
        {"reasoning": {"effort": 1}},
        {"max_output_tokens": 0},
        {"max_output_tokens": 10**6},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_responses_that_cannot_be_had(http: httpx.Client, wrong: dict[str, Any]) -> None:
    answer = http.post("/v1/responses", json={"input": "Hello", **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_json_has_the_shape_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    written: Any = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    text = client.responses.create(**{**ASKED, "max_output_tokens": 60}, text=written).output_text
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_small_endpoints_and_what_is_not_there(http: httpx.Client, client: openai.OpenAI) -> None:
    assert http.get("/ping").json() == http.post("/ping").json() == {"status": "ok"}
    assert http.get("/load").json() == {"server_load": 0}
    page = http.get("/docs").text
    assert all(path in page for path in http.get("/openapi.json").json()["paths"])
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    missing = http.post("/v1/chat", json={})
    assert missing.status_code == 404
    assert "/v1/chat/completions, " in missing.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(input="a", model=MODEL)
