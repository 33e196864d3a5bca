"""Log-probabilities of prompts over HTTP, in OpenAI's and vLLM's shapes, and lm-eval's way to read them."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import MODEL, Serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [7, 3, 50, 9, 100]


@pytest.fixture(name="http", scope="module")
def _http() -> Iterator[httpx.Client]:
    with Serving() as serving, httpx.Client(base_url=serving.url, timeout=60) as client:
        yield client
        serving.until_idle()


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(COMPLETIONS, json={"model": MODEL, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_lm_eval_reads_the_likelihood_of_a_continuation(http: httpx.Client) -> None:
    asked = {"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    made = complete(http, prompt=PROMPT, max_tokens=4, logprobs=1, return_token_ids=True, ignore_eos=True)["choices"][0]
    best, other = [*PROMPT, *made["token_ids"]], [*PROMPT, 12, 13, 14, 15]
    answer = complete(http, prompt=[best, other], **asked)
    sums = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(found["tokens"]) == len(found["text_offset"]) == len(best) + 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        logprobs, tops = (found[name][len(PROMPT) : -1] for name in ("token_logprobs", "top_logprobs"))
        sums.append((sum(logprobs), all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))))
    assert sums[0] == (pytest.approx(sum(made["logprobs"]["token_logprobs"]), abs=1e-4), True)
    assert sums[1][0] < sums[0][0]
    assert not sums[1][1]


def test_nothing_but_the_prompt(http: httpx.Client) -> None:
    for asked in ({"echo": True, "logprobs": 2}, {"echo": True}, {"prompt_logprobs": 1}):
        answer = complete(http, prompt="Hello", max_tokens=0, **asked)
        (choice,) = answer["choices"]
        assert choice["text"] == ("Hello" if "echo" in asked else "")
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert (choice["prompt_logprobs"] is None) == ("prompt_logprobs" not in asked)
        assert (choice["logprobs"] is None) == ("logprobs" not in asked)
        assert not choice["logprobs"] or choice["logprobs"]["tokens"] == list("Hello")
    for wrong in ({"max_tokens": 0}, {"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": -1}):
        assert http.post(COMPLETIONS, json={"prompt": "Hello", **wrong}).status_code == 400


def test_a_stream_begins_with_the_prompt(http: httpx.Client) -> None:
    asked = {"prompt": "Hello", "max_tokens": 3, "logprobs": 1, "echo": True}
    whole = complete(http, **asked)["choices"][0]
    lines = http.post(COMPLETIONS, json={**asked, "temperature": 0, "stream": True}).text.split("\n\n")
    chunks = [httpx.Response(200, content=line[6:]).json()["choices"][0] for line in lines[:-2]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]


def test_vllms_field(http: httpx.Client) -> None:
    prompt = complete(http, prompt=PROMPT, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "prompt_logprobs": 0}
    chat = http.post(CHAT, json=body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [len(one) for one in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)
    assert prompt[0] is None
    for token, found in zip(PROMPT[1:], prompt[1:], strict=True):
        own = found[str(token)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert {1, 2} <= {one["rank"] for one in found.values()}
        assert sum(one["logprob"] > own["logprob"] for one in found.values()) == min(own["rank"] - 1, 2)


def test_the_tokenizer_is_described_for_those_who_tokenize_here(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"]
    assert "message.role" in info["chat_template"]
    assert info["tokenizer_class"]
    encoded = http.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()
    assert encoded["count"] == 1
