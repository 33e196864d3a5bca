"""The `openai` Python client's main features against a running server. Every response is parsed into its types."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from fledge import SamplingParams
from tests.serving import MODEL, Serving, make_llm, make_service

KEY = "sk-of-the-tests"
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving(make_service(api_keys=("another", KEY))) as serving:
        yield serving
        serving.until_idle()


@pytest.fixture(name="client", scope="module")
def _client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def expected_text() -> str:
    llm = make_llm(speculative=False)
    return llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text


def chat(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    values: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 20, **fields}
    answer: ChatCompletion = client.chat.completions.create(**values)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    return answer


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert (choice.message.role, choice.message.content) == ("assistant", expected_text())
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 20 + answer.usage.prompt_tokens)
    assert answer._request_id == answer.id


def test_streaming_gives_the_same_text_and_a_usage_at_the_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="alias",
        messages=HELLO,
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert all(chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected_text()
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_options_has_no_usage_and_with_continuous_usage_always(client: openai.OpenAI) -> None:
    plain = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, stream=True))
    assert all(chunk.usage is None for chunk in plain)
    assert all(chunk.choices for chunk in plain)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counted = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=5,
            stream=True,
            stream_options=options,
            extra_body={"ignore_eos": True},
        )
    )
    assert [chunk.usage is not None for chunk in counted] == [True] * len(counted)
    assert counted[-1].usage is not None
    assert counted[-1].usage.completion_tokens == 5


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=6)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0  # greedy: the likeliest
        assert entry.bytes is not None
    spelled = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert spelled.decode(errors="replace").startswith(answer.choices[0].message.content or "-")
    none = chat(client, logprobs=True, max_tokens=2).choices[0].logprobs
    assert none is not None
    assert none.content is not None
    assert none.content[0].top_logprobs == []


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    fields: Any = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12, "temperature": 0}
    whole = chat(client, **fields).choices[0].logprobs
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **fields)
    told = [c.choices[0].logprobs for c in stream if c.choices and c.choices[0].logprobs]
    assert whole is not None
    streamed = [entry for one in told for entry in one.content or []]
    for found, expected in zip(streamed, whole.content or [], strict=True):
        assert found.token == expected.token
        # The two runs have other batches before them, which may round the last bit in another way.
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_several_answers_differ_and_follow_from_the_seed(client: openai.OpenAI) -> None:
    hot: Any = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 12}
    texts = [choice.message.content for choice in chat(client, **hot).choices]
    assert len(set(texts)) == 3
    again = chat(client, **hot)
    assert [choice.message.content for choice in again.choices] == texts
    assert [choice.index for choice in again.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **hot):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_and_penalties_and_biases(client: openai.OpenAI) -> None:
    text = expected_text()
    stop = text[4:6]
    answer = chat(client, stop=[stop, "never"])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["stop_reason"] == stop
    kept = chat(client, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(stop) + 2]
    only = chat(client, logit_bias={"65": 100.0}, max_tokens=5)
    assert only.choices[0].message.content == make_llm().tokenizer.decode([65]) * 5
    assert chat(client, frequency_penalty=1.5, presence_penalty=0.5).choices[0].message.content is not None


def test_completions_of_text_token_ids_and_lists_of_them(client: openai.OpenAI) -> None:
    llm = make_llm(speculative=False)
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = [output.outputs[0].text for output in llm.generate(["Hello", "abc"], params)]
    ids = [llm.tokenizer.encode(text) for text in ("Hello", "abc")]
    for prompt, expected in (("Hello", texts[:1]), (ids[0], texts[:1]), (["Hello", "abc"], texts), (ids, texts)):
        answer: Completion = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        Completion.model_validate(answer.model_dump(), strict=True)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16 * len(expected)
    streamed = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=["Hello", "abc"], temperature=0, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    echoed = client.completions.create(model=MODEL, prompt=["Hello"], temperature=0, echo=True)
    assert echoed.choices[0].text == "Hello" + texts[0]
    token_ids = client.completions.create(
        model=MODEL, prompt=ids[0], temperature=0, extra_body={"return_token_ids": True}
    )
    assert (token_ids.choices[0].model_extra or {})["token_ids"] == list(
        llm.generate([ids[0]], params)[0].outputs[0].token_ids
    )


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", temperature=0, logprobs=2, max_tokens=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 5
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs or [])


def test_speculation_can_be_controlled_and_is_reported(client: openai.OpenAI) -> None:
    contents = set()
    for speculation, depth in (({"enabled": False}, 0), ({"depth": 1}, 1), ({"depth": 16}, 3), ({}, 3)):
        answer = chat(client, extra_body={"speculation": {**speculation, "report": True}})
        contents.add(answer.choices[0].message.content)
        assert answer.usage is not None
        told = (answer.usage.model_extra or {})["speculation"]
        assert told["enabled"] == (depth > 0)
        assert len(told["accepted_by_depth"]) == depth
        assert (told["rounds"] > 0) == (depth > 0)
        assert (told["acceptance_length"] is None) == (depth == 0)
        assert (told["outside_repetition"] or {"rounds": 0})["rounds"] <= told["rounds"]
        assert (told["novel"] or {"rounds": 0})["rounds"] <= (told["outside_repetition"] or {"rounds": 0})["rounds"]
        assert 0 <= told["repeated_tokens"] <= answer.usage.completion_tokens
        assert 0 <= told["copied_tokens"] <= answer.usage.completion_tokens
        pieces = (answer.choices[0].model_extra or {})["fledge"]["pieces"]
        assert "".join(piece["text"] for piece in pieces) == answer.choices[0].message.content
        if depth == 0:
            assert not any(piece["drafted"] for piece in pieces)
    assert contents == {expected_text()}
    assert "speculation" not in (chat(client).usage.model_extra or {})  # type: ignore[union-attr]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_tokens=20,
        stream=True,
        extra_body={"speculation": {"report": True}},
    )
    chunks = list(stream)
    pieces = [
        piece
        for chunk in chunks
        for choice in chunk.choices
        for piece in (choice.model_extra or {}).get("fledge", {}).get("pieces", [])
    ]
    assert "".join(piece["text"] for piece in pieces) == expected_text()
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.model_extra or {})["speculation"]["rounds"] > 0


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve("alias").owned_by == "fledge"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_have_the_clients_own_types(client: openai.OpenAI, serving: Serving) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="gpt-4")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    for fields in ({"temperature": -1}, {"n": 0}, {"n": 99}, {"top_p": 2.0}, {"max_tokens": 0}, {"top_logprobs": 3}):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, **fields)
        assert wrong.value.param == next(iter(fields))
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "x" * 300}])
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        chat(stranger)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_structured_output_is_parsed_into_the_callers_model(client: openai.OpenAI) -> None:
    class Point(BaseModel):
        x: int = Field(ge=0, le=9)
        ok: bool

    parsed = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Point, max_tokens=120, temperature=1.0, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)
    assert parsed.choices[0].finish_reason == "stop"
    choice = chat(client, extra_body={"guided_choice": ["yes", "no"]}, temperature=1.0)
    assert choice.choices[0].message.content in ("yes", "no")
    regex = chat(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, temperature=1.0)
    assert len(regex.choices[0].message.content or "") == 6
    with pytest.raises(openai.BadRequestError):
        chat(client, extra_body={"guided_regex": "("})


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {"hot": {"type": "boolean"}},
                "required": ["hot"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_demanded_tool_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for tool_choice in ("required", named):
        fields: Any = {"tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 150, "temperature": 0.7, "seed": 3}
        answer = chat(client, parallel_tool_calls=False, **fields)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments)["hot"], bool)
        ended = "tool_calls" if tool_choice == "required" else "stop"  # as at OpenAI
        assert answer.choices[0].finish_reason == ended
        assert answer.choices[0].message.content is None
        name, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, parallel_tool_calls=False, **fields
        ):
            for delta in chunk.choices[0].delta.tool_calls or []:
                assert delta.index == 0
                assert delta.function is not None
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
        assert (name, json.loads(arguments), reason) == ("weather", json.loads(call.function.arguments), ended)
    # The conversation goes on with the call and its result in it.
    follow_up: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "[1, 2]"},
    ]
    assert chat(client, messages=follow_up).choices[0].message.content is not None


def test_tools_that_nobody_knows_how_to_read_are_refused_and_unused_tools_are_not(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        chat(client, tools=TOOLS)
    assert chat(client, tools=TOOLS, tool_choice="none").choices[0].message.content == expected_text()


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]])
def test_content_may_come_in_parts(client: openai.OpenAI, content: Any) -> None:
    if content is None:
        with pytest.raises(openai.BadRequestError):
            chat(client, messages=[{"role": "user", "content": None}])
    else:
        assert chat(client, messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": content}])
