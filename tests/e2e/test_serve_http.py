"""What comes over the wire and should not: every mistake gets a 4xx in OpenAI's format, and the server lives on."""

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fledge import LLM
from tests.serving import MAX_MODEL_LEN, MODEL, Serving, make_llm, make_service, pair_directory

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(name="serving", scope="module")
def _serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving
        serving.until_idle()


@pytest.fixture(name="http", scope="module")
def _http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        yield client


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check OpenAI's error format; return the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return dict(error)


def post(http: httpx.Client, path: str, body: bytes | str, **headers: str) -> httpx.Response:
    return http.post(path, content=body, headers={"Content-Type": "application/json", **headers})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "x": [{"y": -1e999}]}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "model": "\\udfff"}',
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "a", "x": ' + b"[" * 80 + b"]" * 80 + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_good_json(http: httpx.Client, path: str, body: bytes) -> None:
    refusal(post(http, path, body), 400)


WRONG = [
    {"temperature": -0.1},
    {"temperature": 1e999},
    {"temperature": "0.5"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -5},
    {"top_k": 1.5},
    {"min_p": 2},
    {"n": 0},
    {"n": -1},
    {"n": 1000},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 2**70},
    {"min_tokens": -1},
    {"min_tokens": 10, "max_tokens": 5},
    {"repetition_penalty": 0},
    {"presence_penalty": 5},
    {"frequency_penalty": -9},
    {"stop": ""},
    {"stop": [1]},
    {"stop": ["a"] * 17},
    {"stop": "x" * 1000},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": [1] * 1000},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": {"1" * 5000: 1}},
    {"logit_bias": {str(i): 1 for i in range(2000)}},
    {"logit_bias": [1]},
    {"seed": 2**64},
    {"seed": "x"},
    {"stream": "yes"},
    {"stream_options": {"include_usage": 1}},
    {"speculation": {"depth": -1}},
    {"speculation": {"depth": 17}},
    {"speculation": {"depht": 2}},
    {"speculation": True},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": -2},
    {"truncate_prompt_tokens": MAX_MODEL_LEN + 1},
    {"cache_salt": ""},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"guided_regex": "["},
    {"guided_grammar": "start: nothing"},
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"suffix": "x"},
    {"best_of": 4},
    {"use_beam_search": True},
    {"prompt_logprobs": 21},
    {"model": 5},
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: json.dumps(fields)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_fields_out_of_range_are_named(http: httpx.Client, fields: dict[str, Any], stream: bool) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
        values = {**body, "stream": stream, **fields}
        error = refusal(post(http, path, json.dumps(values).replace("1e+999", "1e999")), 400)
        if error["param"] is not None:
            assert error["param"].split("[")[0].split(" ")[0] in fields


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {"messages": [5]}),
        (CHAT, {"messages": [{}]}),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user"}]}),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
        (CHAT, {"messages": HELLO * 3000}),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}),
        (CHAT, {"messages": HELLO, "logprobs": 3}),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}),
        (CHAT, {"messages": HELLO, "tools": [{}] * 1000}),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}),
        (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}),
        (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}),
        (CHAT, {"messages": HELLO, "continue_final_message": True}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": [VOCAB := 257]}),
        (COMPLETIONS, {"prompt": [1.5]}),
        (COMPLETIONS, {"prompt": ["a", 1]}),
        (COMPLETIONS, {"prompt": [1] * MAX_MODEL_LEN}),
        (COMPLETIONS, {"prompt": "x" * 100_000}),
        (COMPLETIONS, {"prompt": ["a"] * 1000}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21, "echo": True}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/detokenize", {"tokens": [VOCAB]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_requests_that_make_no_sense(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refusal(http.post(path, json=body), 400)


def test_big_bodies_other_types_unknown_paths_and_methods(http: httpx.Client) -> None:
    error = refusal(post(http, CHAT, b'{"messages": "' + b"x" * 10_000_000 + b'"}'), 413)
    assert error["code"] == "request_too_large"

    def in_pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    response = http.post(CHAT, content=in_pieces(), headers={"Content-Type": "application/json"})
    refusal(response, 413)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        refusal(http.post(CHAT, content=b"{}", headers={"Content-Type": kind}), 415)
    refusal(http.get(CHAT), 405)
    refusal(http.get("/v2/nothing"), 404)
    refusal(http.post(CHAT, json={"messages": HELLO, "model": "gpt-4"}), 404)
    refusal(http.get("/v1/models/../../etc/passwd"), 404)
    refusal(http.get("/dashboard/%2e%2e/%2e%2e/etc/passwd"), 404)


def test_fields_that_are_new_to_us_are_ignored(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "user": "u", "metadata": {"a": "b"}, "store": False, "from_2031": [1]}
    assert http.post(CHAT, json=body).status_code == 200
    harmless = {"best_of": 1, "suffix": None, "modalities": ["text"], "functions": None, "logprobs": None}
    assert http.post(CHAT, json={**body, **harmless}).status_code == 200


def test_templates_from_clients_are_refused_unless_allowed_and_then_sandboxed(http: httpx.Client) -> None:
    mine = {"messages": HELLO, "max_tokens": 2, "chat_template": "{{ messages[0].content }}"}
    refusal(http.post(CHAT, json=mine), 403)
    refusal(http.post("/tokenize", json=mine), 403)
    with Serving(make_service(allow_client_templates=True)) as serving, httpx.Client(base_url=serving.url) as open_http:
        assert open_http.post(CHAT, json=mine).status_code == 200
        tokens = open_http.post("/tokenize", json=mine).json()["tokens"]
        assert tokens == make_llm().tokenizer.encode("Hello")
        for template in (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.__init__.__globals__ }}",
            "{% include '/etc/passwd' %}",
            "{% for",
            "{{ raise_exception('no\nway') }}",
            "{{ 1 / 0 }}",
        ):
            answer = open_http.post("/tokenize", json={**mine, "chat_template": template})
            if answer.status_code == 200:  # an attribute that the sandbox hides is empty
                assert answer.json()["count"] == 0
            else:
                refusal(answer, 400)
        refusal(open_http.post("/tokenize", json={**mine, "chat_template": "x" * 70_000}), 400)


def test_tokens_there_and_back(http: httpx.Client) -> None:
    text = "Grüße, 🦅!"
    found = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == len(text.encode())
    assert found["max_model_len"] == MAX_MODEL_LEN
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": chat}).json()["prompt"] == "<user>Hello\n<assistant>"


def test_health_version_metrics_page_and_schema(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    http.post(CHAT, json={"messages": HELLO, "max_tokens": 4})
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "fledge_spec_decode_num_drafts_total" in metrics.text
    assert "<html" in http.get("/").text
    schema = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert "ChatRequest" in schema["components"]["schemas"]
    assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "https://evil.example"}).headers


def test_keys_guard_everything_that_computes_and_the_numbers() -> None:
    service = make_service(api_keys=("first", "second"), cors_origins=("https://example.org",))
    with Serving(service) as serving, httpx.Client(base_url=serving.url) as http:
        body = {"messages": HELLO, "max_tokens": 2}
        guarded = [("POST", CHAT), ("POST", COMPLETIONS), ("POST", "/tokenize"), ("POST", "/detokenize")]
        guarded += [("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/dashboard/data")]
        for method, path in guarded:
            for header in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic first"},
                {"api-key": "first"},
            ):
                error = refusal(http.request(method, path, json=body, headers=header), 401)
                assert error["code"] == "invalid_api_key"
        for key in ("first", "second"):
            assert http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/version", "/metrics", "/"):
            assert http.get(path).status_code == 200
        allowed = http.get("/health", headers={"Origin": "https://example.org"})
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        other = http.get("/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_one_line_for_each_request_without_its_content(
    serving: Serving, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fledge.request")
    secret = "the launch code is 1234"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 6, "ignore_eos": True}
    body |= {"mystery": 1, "priority": 1}  # neither changes anything here
    answer = http.post(CHAT, json=body)
    http.post(CHAT, json={**body, "stream": True})
    http.post(CHAT, json={**body, "temperature": secret})
    serving.until_idle()
    deadline = time.monotonic() + 10
    lines: list[dict[str, Any]] = []
    while len(lines) < 3 and time.monotonic() < deadline:  # a stream's line comes after its last byte
        time.sleep(0.01)
        lines = [record.fields for record in caplog.records if record.name == "fledge.request"]  # type: ignore[attr-defined]
    assert len(lines) == 3
    whole, streamed, wrong = sorted(lines, key=lambda line: (line["status"], line["stream"]))
    assert whole["id"] == answer.json()["id"] == answer.headers["x-request-id"]
    assert (whole["prompt_tokens"], whole["output_tokens"], whole["finish_reason"]) == (
        answer.json()["usage"]["prompt_tokens"],
        6,
        "length",
    )
    assert whole["ttft_ms"] > 0
    assert whole["tpot_ms"] > 0
    assert whole["ignored"] == ["mystery", "priority"]
    assert (streamed["stream"], streamed["status"], streamed["output_tokens"]) == (True, 200, 6)
    assert (wrong["status"], wrong["error"]) == (400, "invalid_request")
    assert "launch code" not in json.dumps(lines)


def test_a_model_without_tokenizer_takes_token_ids() -> None:
    bare = pair_directory() / "bare"
    if not bare.exists():
        shutil.copytree(pair_directory() / "target", bare, ignore=shutil.ignore_patterns("tok*", "chat*", "special*"))
    service = make_service(LLM(bare, max_num_seqs=4))
    with Serving(service) as serving, httpx.Client(base_url=serving.url) as http:
        answer = http.post(COMPLETIONS, json={"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}).json()
        assert len(answer["choices"][0]["token_ids"]) <= 4
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            refusal(http.post(path, json=body), 400)
        refusal(http.post(COMPLETIONS, json={"prompt": [1], "guided_regex": "a"}), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": MAX_MODEL_LEN + 1}, "max_output_tokens"),
        ({"text": {"format": "json"}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"temperature": -1}, "temperature"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
    ids=str,
)
def test_the_responses_api_names_its_own_fields(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refusal(http.post(RESPONSES, json={"input": "a", "max_output_tokens": 2, **fields}), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
