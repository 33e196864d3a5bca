"""langchain-openai: messages, streams, batches, an agent's turn with tools, structured output."""

import asyncio
import json
from typing import Literal

import pytest

from tests.clients.cases import UNITS, City
from tests.clients.conftest import Server

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
QUESTION = "What is the capital of France?"


@pytest.fixture(name="chat")
def _chat(server: Server):
    return langchain_openai.ChatOpenAI(
        base_url=server.v1, api_key=server.key, model=server.model, temperature=0, max_tokens=64, max_retries=0
    )


def get_weather(city: Literal["Paris", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Current weather in a city."""
    return f"18 degrees {unit} in {city}"


def test_answers_streams_and_batches(chat) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    streamed = list(chat.stream(QUESTION))
    assert len(streamed) > 1
    assert "".join(chunk.content for chunk in streamed) == answer.content
    assert [one.content for one in chat.batch([QUESTION] * 3)] == [answer.content] * 3
    assert asyncio.run(chat.ainvoke(QUESTION)).content == answer.content


def test_a_turn_of_an_agent(chat) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    asked = bound.invoke(QUESTION)
    (call,) = asked.tool_calls
    assert call["args"]["unit"] in UNITS
    (piece, *rest) = bound.stream(QUESTION)
    for chunk in rest:
        piece = piece + chunk
    assert [one["args"] for one in piece.tool_calls] == [call["args"]]
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert chat.invoke([HumanMessage(QUESTION), asked, result]).content


def test_tools_are_the_models_choice_unless_told(chat) -> None:
    bound = chat.bind_tools([get_weather])
    answer = bound.invoke(QUESTION)
    assert answer.content or answer.tool_calls
    assert "".join(chunk.content for chunk in bound.stream(QUESTION)) == answer.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method: str) -> None:
    assert isinstance(chat.with_structured_output(City, method=method).invoke(QUESTION), City)
    schema = {"title": "city", "description": "A city.", **json.loads(json.dumps(City.model_json_schema()))}
    schema["additionalProperties"] = False  # or the model may add some
    assert set(chat.with_structured_output(schema, method=method).invoke(QUESTION)) == set(City.model_fields)
