"""What `test_requests.py` compares with, without servers: it sees what it should see."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_parity.comparison import Difference, Meant, compare, differences, folded, read_meant
from tests.vllm_parity.request_cases import RequestCase

pytestmark = pytest.mark.vllm  # beside what it serves

CASE = RequestCase(name="chat/one", path="/v1/chat/completions")
ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
ANSWER: dict[str, Any] = {
    "status": 200,
    "headers": {"content-type": "application/json"},
    "body": {
        "id": "chatcmpl-1",
        "created": 1,
        "choices": [{"message": {"content": "a"}, "logprobs": {"content": [ENTRY]}, "finish_reason": "stop"}],
    },
}


def changed(change: Callable[[dict[str, Any]], Any]) -> list[tuple[str, str]]:
    """Return what is found when our answer is changed so."""
    ours = copy.deepcopy(ANSWER)
    change(ours)
    return [(found.field, found.here) for found in compare(CASE, ours, ANSWER)]


@pytest.mark.parametrize(
    ("change", "field", "here"),
    [
        (lambda answer: answer.update(status=400), "status", "other"),
        (lambda answer: answer["headers"].clear(), "headers.content-type", "absent"),
        (lambda answer: answer["body"].update(id="cmpl-1"), "id", "other"),
        (lambda answer: answer["body"].update(created=1.5), "created", "other"),
        (lambda answer: answer["body"].update(extra=None), "extra", "added"),
        (lambda answer: answer["body"].update(choices=[]), "choices", "other"),
        (lambda answer: answer["body"]["choices"][0].pop("logprobs"), "choices[].logprobs", "absent"),
        (lambda answer: answer["body"]["choices"][0].update(finish_reason=None), "choices[].finish_reason", "absent"),
        (
            lambda answer: answer["body"]["choices"][0]["message"].update(content="b"),
            "choices[].message.content",
            "other",
        ),
        (
            lambda answer: answer["body"]["choices"][0]["logprobs"]["content"][0].update(logprob=-0.51),
            "choices[].logprobs.content[].logprob",
            "other",
        ),
    ],
)
def test_a_change_is_found_where_it_is(change: Callable[[dict[str, Any]], Any], field: str, here: str) -> None:
    assert changed(change) == [(field, here)]


def test_identities_times_and_rounding_are_no_difference() -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["body"] |= {"id": "chatcmpl-other", "created": 7}
        answer["body"]["choices"][0]["logprobs"]["content"][0]["logprob"] = -0.5001

    assert changed(change) == []


@pytest.mark.parametrize("token", ["id", "created", "arguments"])
def test_a_token_that_reads_as_a_field_has_a_logprob(token: str) -> None:
    ours, near, theirs = ({"top_logprobs": [{token: logprob}]} for logprob in (-1.5, -1.4999, -1.4))
    found = [list(differences(CASE, {"logprobs": ours}, {"logprobs": other})) for other in (near, theirs)]
    assert [len(one) for one in found] == [0, 1]


def stream(*parts: dict[str, Any], ending: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + ending


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def test_streams_are_alike_however_they_are_divided() -> None:
    whole = folded(stream(chunk("one two", "stop")))
    assert folded(stream(chunk("one"), chunk(" two", "stop"))) == whole
    assert whole["choices"][0]["text"] == "one two"
    assert folded(stream(chunk("one two", "stop"), ending="")) != whole
    assert folded(stream(chunk("one two", "stop"), chunk(""))) != whole
    assert folded(stream(chunk("one two"))) != whole


def test_a_meant_difference_explains_itself_only() -> None:
    meant, also = read_meant("[{field: 'choices[].a usage.*', here: absent, why: so, requests: 'chat/o* get/x'}]")
    assert (meant.field, also.field, also.requests) == ("choices[].a", "usage.*", "chat/o* get/x")
    assert meant.explains(CASE, Difference("choices[].a", "absent", None, 1))
    assert also.explains(CASE, Difference("usage.b.c", "absent", None, 1))
    assert not meant.explains(CASE, Difference("choices[].a", "added", 1, None))
    assert not meant.explains(CASE, Difference("choices[].ab", "absent", None, 1))
    assert not Meant(field="*", here="absent", why="", requests="get/*").explains(
        CASE, Difference("choices[].a", "absent", None, 1)
    )
