"""What a user of vLLM changes nothing for: fields, prefixes, usage, offsets, as its own server has them."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.serving import MAX_MODEL_LEN, MODEL, Serving, make_service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ODD = "Repeat: 😀 é 你好 "


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    options: dict[str, Any] = {"root_path": "/llm", "enable_force_include_usage": True, "max_logprobs": 3}
    options |= {"tool_call_parser": "qwen3_coder", "response_role": "helper", "chat_template_content_format": "openai"}
    template = {
        "default_chat_template_kwargs": {"greeting": "Hi"},
        "chat_template": "{{ greeting }}{{ messages[0].content[0].text }}{{ tools[0].function.name if tools }}",
    }
    with Serving(make_service(**options, **template)) as serving:
        yield serving
        serving.until_idle()


@pytest.fixture(name="http", scope="module")
def _http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if path == CHAT else {"prompt": ODD}
    answer = http.post(path, json={"model": MODEL, "temperature": 0, "max_tokens": 12, **given, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chunks(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    given = {"messages": HELLO} if path == CHAT else {"prompt": ODD}
    body = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "stream": True, **given, **fields}
    lines = [line[6:] for line in http.post(path, json=body).text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_a_path_is_served_with_and_without_the_prefix(http: httpx.Client) -> None:
    for prefix in ("", "/llm"):
        assert http.get(f"{prefix}/v1/models").json()["data"][0]["id"] == MODEL
        assert http.get(f"{prefix}/").status_code == 200
        assert ask(http, f"{prefix}{COMPLETIONS}", prompt="a")["usage"]["completion_tokens"] == 12
        assert "makes no embeddings" in http.post(f"{prefix}/v1/embeddings", json={}).text
    assert http.get("/llm/llm/v1/models").status_code == 404


def test_usage_of_streams(http: httpx.Client) -> None:
    refused = http.post(CHAT, json={"messages": HELLO, "stream_options": {"include_usage": True}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")
    forced = chunks(http, CHAT)
    assert [one["usage"] is None for one in forced] == [True] * (len(forced) - 1) + [False]
    for path in (CHAT, COMPLETIONS):
        told = chunks(http, path, stream_options={"continuous_usage_stats": True, "include_usage": True})
        counts = [one["usage"]["completion_tokens"] for one in told]
        assert counts == sorted(counts)
        assert (counts[0] == 0, counts[-1]) == (path == CHAT, 6)


def test_token_ids_come_with_those_of_the_prompt(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        whole = ask(http, path, return_token_ids=True)
        holder = whole if path == CHAT else whole["choices"][0]
        text = "HiHello" if path == CHAT else ODD
        ids = http.post("/tokenize", json={"prompt": text}).json()
        assert (holder["prompt_token_ids"], ids["token_strs"]) == (ids["tokens"], None)
        first, *others = chunks(http, path, return_token_ids=True)
        assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == ids["tokens"]
        told = [one if path == CHAT else one["choices"][0] for one in others if one["choices"]]
        assert not any(one.get("prompt_token_ids") for one in told)


def test_offsets_index_the_text(http: httpx.Client) -> None:
    for echo in (False, True):
        choice = ask(http, COMPLETIONS, logprobs=1, echo=echo, max_tokens=8)["choices"][0]
        text, told = choice["text"], choice["logprobs"]
        starts, tokens = told["text_offset"], told["tokens"]
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert starts[-1] <= len(text)
        for start, end, token in zip(starts, [*starts[1:], len(text)], tokens, strict=True):
            assert start == end or text[start:end].endswith(token) or "\ufffd" in token
        streamed = [
            one["choices"][0]["logprobs"] for one in chunks(http, COMPLETIONS, logprobs=1, echo=echo) if one["choices"]
        ]
        assert [at for one in streamed if one for at in one["text_offset"]] == starts[: len(starts) - 2]


def test_integers_may_be_written_as_floats_and_prompts_cut_at_either_end(http: httpx.Client) -> None:
    assert ask(http, COMPLETIONS, max_tokens=2.0, n=1.0, seed=3.0)["usage"]["completion_tokens"] == 2
    assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2.5}).status_code == 400
    ids = list(range(30, 40))
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        made = ask(http, COMPLETIONS, prompt=ids, truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True)
        assert made["choices"][0]["prompt_token_ids"] == kept
    for prompt in (ids, [*ids, *range(MAX_MODEL_LEN)]):  # to what leaves room for one token
        made = ask(http, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1, return_token_ids=True, max_tokens=1)
        assert made["choices"][0]["prompt_token_ids"] == prompt[-MAX_MODEL_LEN + 1 :]


def test_a_clients_name_for_a_request_comes_back(http: httpx.Client) -> None:
    def told(field: str | None, header: str | None) -> tuple[str, str]:
        headers = {} if header is None else {"X-Request-Id": header}
        body = {"prompt": "a", "max_tokens": 1, "request_id": field}
        answer = http.post(COMPLETIONS, json=body, headers=headers)
        return answer.json()["id"], answer.headers["x-request-id"]

    assert told("mine", None) == ("cmpl-mine", "cmpl-mine")
    assert told("mine", "yours") == ("cmpl-yours", "yours")
    for unusable in ("", "x" * 200, "two\nlines", "ü"):
        made, header = told(unusable, None)
        assert made == header
        assert re.fullmatch("cmpl-[0-9a-f]{32}", made)
    with ThreadPoolExecutor(4) as pool:  # the same name at the same time is nobody's loss
        assert set(pool.map(lambda _: told("mine", None)[0], range(8))) == {"cmpl-mine"}


def test_prompt_logprobs_of_zero_are_given(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        answer = ask(http, path, prompt_logprobs=0, max_tokens=1)
        told = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
        assert told[0] is None
        assert all(len(one) == 1 for one in told[1:])
    refused = http.post(COMPLETIONS, json={"prompt": "ab", "logprobs": 4})
    assert "logprobs: found 4, this server gives at most 3" in refused.text


def test_bad_words_and_allowed_tokens(http: httpx.Client) -> None:
    text = ask(http, CHAT, allowed_token_ids=[40, 41, 42], bad_words=["H"])["choices"][0]["message"]["content"]
    ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert set(ids) <= {40, 41, 42} - set(http.post("/tokenize", json={"prompt": "H"}).json()["tokens"])
    for wrong in ({"allowed_token_ids": [999]}, {"bad_words": ["a"] * 100}, {"bad_words": "a"}):
        assert http.post(CHAT, json={"messages": HELLO, **wrong}).json()["error"]["param"] == next(iter(wrong))


def test_calls_that_must_come_do_so_where_the_models_own_syntax_has_no_grammar(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool = {"type": "function", "function": {"name": "light", "parameters": schema}}
    answer = ask(http, CHAT, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "light"
    assert isinstance(json.loads(call["function"]["arguments"])["on"], bool)


UNAVAILABLE: list[dict[str, Any]] = [
    {"echo": True},
    {"logprob_token_ids": [1]},
    {"thinking_token_budget": 0},
    {"regex": "a"},
    {"ebnf": 'root ::= "a"'},
    {"stop_regex": "a"},
    {"vllm_xargs": {"a": 1}},
    {"best_of": 2},
    {"logits_processors": ["a.b"]},
    {"max_tokens": MAX_MODEL_LEN + 1},
    {"max_completion_tokens": MAX_MODEL_LEN + 1, "max_tokens": 1},
]


@pytest.mark.parametrize("fields", UNAVAILABLE, ids=lambda fields: next(iter(fields)))
def test_what_would_change_an_answer_is_refused_by_name(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post(CHAT, json={"messages": HELLO, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


def test_an_answer_ends_where_the_context_does(http: httpx.Client) -> None:
    made = ask(http, COMPLETIONS, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    assert (made["usage"]["total_tokens"], made["choices"][0]["finish_reason"]) == (MAX_MODEL_LEN, "length")


def test_answers_have_the_role_that_was_set(http: httpx.Client) -> None:
    assert ask(http, CHAT, priority=0, n=2, best_of=2)["choices"][1]["message"]["role"] == "helper"
    assert chunks(http, CHAT)[0]["choices"][0]["delta"]["role"] == "helper"
    continued = [*HELLO, {"role": "assistant", "content": "Well"}]
    goes_on = {"add_generation_prompt": False, "messages": continued}
    assert ask(http, CHAT, **goes_on)["choices"][0]["message"]["role"] == "assistant"


def test_tools_that_may_not_be_called_are_in_the_prompt_unless_the_operator_says_otherwise(
    serving: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "function": {"name": "light"}}]
    plain = ask(http, CHAT)["usage"]["prompt_tokens"]
    assert ask(http, CHAT, tools=tools, tool_choice="none")["usage"]["prompt_tokens"] == plain + len("light")
    excluding = replace(serving.service.options, exclude_tools_when_tool_choice_none=True)
    monkeypatch.setattr(serving.service, "options", excluding)
    assert ask(http, CHAT, tools=tools, tool_choice="none")["usage"]["prompt_tokens"] == plain


def test_every_answer_has_an_id(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/nowhere", "/v1/chat/completions"):
        assert re.fullmatch("[0-9a-f]{32}", http.get(path).headers["x-request-id"])
        named = http.get(path, headers={"X-Request-Id": "mine"})
        assert named.headers.get_list("x-request-id") == ["mine"]


def test_the_schema_lists_every_refusal(http: httpx.Client) -> None:
    told = http.get("/openapi.json").json()["paths"][CHAT]["post"]["responses"]
    assert {"400", "401", "403", "404", "408", "413", "415", "429", "503"} <= set(told)
