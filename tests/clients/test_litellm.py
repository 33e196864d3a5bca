"""litellm, as an OpenAI-compatible server and as what it calls hosted vLLM."""

import asyncio
import json

import pytest

from tests.clients.cases import GREEDY, HELLO, UNITS, WEATHER, City
from tests.clients.conftest import Server

litellm = pytest.importorskip("litellm", reason="litellm is not installed (make test-clients)")


@pytest.fixture(name="where", params=["openai", "hosted_vllm"])
def _where(request: pytest.FixtureRequest, server: Server) -> dict[str, object]:
    return {
        "model": f"{request.param}/{server.model}",
        "api_base": server.v1,
        "api_key": server.key,
        "timeout": 60,
        "num_retries": 0,
    }


def test_answers_and_streams(where) -> None:
    whole = litellm.completion(**where, messages=HELLO, **GREEDY).choices[0].message.content
    assert whole
    chunks = list(litellm.completion(**where, messages=HELLO, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == whole
    awaited = asyncio.run(litellm.acompletion(**where, messages=HELLO, **GREEDY))
    assert awaited.choices[0].message.content == whole


def test_tools(where) -> None:
    fields = {**where, "messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    fields["parallel_tool_calls"] = False  # so small a model would go on calling
    (call,) = litellm.completion(**fields, max_tokens=64).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["unit"] in UNITS
    chunks = list(litellm.completion(**fields, max_tokens=64, stream=True))
    (streamed,) = litellm.stream_chunk_builder(chunks, messages=HELLO).choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("get_weather", call.function.arguments)


def test_tools_with_auto_are_left_to_the_model(where) -> None:
    message = litellm.completion(**where, messages=HELLO, tools=[WEATHER], **GREEDY).choices[0].message
    assert message.content or message.tool_calls


def test_a_form(where) -> None:
    answer = litellm.completion(**where, messages=HELLO, response_format=City, temperature=0, max_tokens=64)
    City.model_validate_json(answer.choices[0].message.content)


def test_errors_are_of_the_clients_own_kinds(where) -> None:
    with pytest.raises(litellm.exceptions.AuthenticationError):
        litellm.completion(**{**where, "api_key": "another"}, messages=HELLO)
    with pytest.raises(litellm.exceptions.BadRequestError, match="top_p"):
        litellm.completion(**where, messages=HELLO, top_p=7)
