"""OpenAI's own client, against the bundled pair: answers, streams, tools, forms, errors."""

import asyncio
import json

import pytest

from tests.clients.cases import GREEDY, HELLO, UNITS, WEATHER, City
from tests.clients.conftest import Server

openai = pytest.importorskip("openai")


@pytest.fixture(name="client")
def _client(server: Server):
    return openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=60)


def test_answers_and_streams(client, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    answer = client.chat.completions.create(model=server.model, messages=HELLO, **GREEDY)
    whole = answer.choices[0].message.content
    assert whole
    assert answer.usage.completion_tokens <= GREEDY["max_tokens"]
    with client.chat.completions.stream(model=server.model, messages=HELLO, **GREEDY) as events:
        assert "".join(event.delta for event in events if event.type == "content.delta") == whole
    chunks = client.completions.create(model=server.model, prompt="Once upon a time", stream=True, **GREEDY)
    text = client.completions.create(model=server.model, prompt="Once upon a time", **GREEDY).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text != ""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client, server: Server, choice) -> None:
    fields = {"model": server.model, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    fields["parallel_tool_calls"] = False  # so small a model would go on calling
    (call,) = client.chat.completions.create(**fields, max_tokens=64).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["unit"] in UNITS
    with client.chat.completions.stream(**fields, max_tokens=64) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("get_weather", call.function.arguments)
    turns = [*HELLO, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
    assert client.chat.completions.create(model=server.model, messages=turns, **GREEDY).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_tools_with_auto_are_left_to_the_model(client, server: Server, stream: bool) -> None:
    fields = {"model": server.model, "messages": HELLO, "tools": [WEATHER], "tool_choice": "auto", "temperature": 0}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**fields).choices[0].message
    assert message.content or message.tool_calls
    assert "<tool_call" not in (message.content or "")


def test_parse_fills_in_a_form(client, server: Server) -> None:
    answer = client.chat.completions.parse(
        model=server.model, messages=HELLO, response_format=City, temperature=0, max_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_many_at_once(server: Server) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as client:
            asked = (client.chat.completions.create(model=server.model, messages=HELLO, **GREEDY) for _ in range(8))
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert len(set(asyncio.run(ask_all()))) == 1


def test_errors_are_of_the_clients_own_kinds(client, server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.v1, api_key="another", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model=server.model, messages=HELLO, top_p=7)
