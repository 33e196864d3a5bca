"""Keys, messages, log-probabilities, log lines and the fields of requests, each for itself."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import RequestMetrics, TokenLogprobs
from fledge.errors import ConfigError
from fledge.server.completions import MIN_LOGPROB, chat_logprobs, completion_logprobs, token_texts
from fledge.server.errors import RequestError
from fledge.server.options import ApiKeys, ServeOptions
from fledge.server.prompts import loops_over_content, normalize_messages
from fledge.server.protocol import ChatRequest, CompletionRequest, parse
from fledge.server.request_log import JsonFormatter, RequestLogEntry, TextFormatter
from tests.serving import make_llm

# Keys


def test_any_of_several_keys_opens_and_nothing_else() -> None:
    keys = ApiKeys(["one", "tw\u00f6"])
    assert keys.match("one")
    assert keys.match("tw\u00f6")
    for wrong in ("", "on", "one ", "ONE", "tw\udcf6"):
        assert not keys.match(wrong)
    with pytest.raises(ConfigError):
        ApiKeys(["good", " "])


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert ApiKeys(["a", "b", "c"]).match("a")
    assert len(compared) == 3
    assert all(len(one) == len(other) == 32 for one, other in compared)


# Messages


def test_messages_become_what_templates_know() -> None:
    made = normalize_messages(
        [
            {"role": "developer", "content": "be brief", "name": "op"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ]
    )
    assert made[0] == {"role": "system", "content": "be brief", "name": "op"}
    assert made[1]["content"] == "a\nb"
    assert made[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert made[3] == {"role": "tool", "content": "done", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("loop", "takes_parts"),
    [
        ("{% for part in message['content'] %}{{ part.text }}{% endfor %}", True),
        ("{% for part in message.content %}{{ part.text }}{% endfor %}", True),
        ("{% set content = message.content %}{% for part in content %}{{ part.text }}{% endfor %}", True),
        ("{{ message.content }}{% for call in message.tool_calls %}{% endfor %}", False),
        ("{% generation %}{% for part in message.content %}{% endfor %}{% endgeneration %}", False),
    ],
)
def test_templates_that_go_through_parts_get_them(loop: str, takes_parts: bool) -> None:
    assert loops_over_content(f"{{% for message in messages %}}{loop}{{% endfor %}}") == takes_parts


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": ["x", {"type": "image_url"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}, "arguments"),
    ],
)
def test_a_wrong_message_is_named(message: dict[str, Any], where: str) -> None:
    with pytest.raises(RequestError) as refused:
        normalize_messages([message])
    assert where in str(refused.value)
    assert refused.value.param == "messages"


# Log-probabilities


def test_tokens_that_are_parts_of_characters_have_their_bytes() -> None:
    tokenizer = make_llm().tokenizer
    texts = token_texts(tokenizer)
    ids = tokenizer.encode("é")
    assert [texts(token)[1] for token in ids] == [[0xC3], [0xA9]]
    assert all("\ufffd" in texts(token)[0] for token in ids)
    (plain,) = tokenizer.encode("A")
    assert texts(plain) == ("A", [65])
    assert token_texts(tokenizer, as_ids=True)(plain) == (f"token_id:{plain}", [65])
    assert token_texts(None)(5)[0] == "token_id:5"


def test_logprobs_in_both_shapes_are_finite() -> None:
    tokenizer = make_llm().tokenizer
    a, b = tokenizer.encode("ab")
    entries = [TokenLogprobs(token=a, logprob=-0.5, top=((b, float("-inf")), (a, -0.5)))]
    texts = token_texts(tokenizer)
    (chat,) = chat_logprobs(entries, texts)["content"]
    assert (chat["token"], chat["logprob"], chat["bytes"]) == ("a", -0.5, [97])
    assert [top["logprob"] for top in chat["top_logprobs"]] == [MIN_LOGPROB, -0.5]
    completion = completion_logprobs([*entries, *entries], texts, offsets=[7, 8])
    assert completion["tokens"] == ["a", "a"]
    assert completion["text_offset"] == [7, 8]
    assert completion["top_logprobs"][0] == {"a": -0.5, "b": MIN_LOGPROB}
    json.dumps(completion, allow_nan=False)


# Fields


def test_defaults_of_the_model_stand_in_for_what_is_left_out() -> None:
    request = parse(CompletionRequest, {"prompt": "a", "top_p": 0.5, "stop": "x", "temperature": 0, "max_tokens": 5})
    params = request.sampling_params({"temperature": 0.7, "top_p": 0.9, "top_k": 40})
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens) == (0, 0.5, 40, ("x",), 5)
    assert params.include_stop_str_in_output is False
    null = parse(CompletionRequest, {"prompt": "a", "stop": None, "n": None, "seed": None, "logit_bias": None})
    assert null.num_choices == 1
    assert null.sampling_params({}).temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "depth"),
    [({}, None), ({"speculation": {}}, None), ({"speculation": {"enabled": False, "depth": 3}}, 0),
     ({"speculation": {"depth": 2}}, 2), ({"speculation": {"depth": 0}}, 0)],
)  # fmt: skip
def test_speculation_in_the_extra_body(fields: dict[str, Any], depth: int | None) -> None:
    request = parse(ChatRequest, {"messages": [], **fields})
    assert request.speculation_depth == depth
    assert not request.wants_report


def test_the_answer_to_a_wrong_field_does_not_quote_it() -> None:
    secret = "my password"
    for fields in ({"temperature": secret}, {"stop": [secret, 5]}, {"logit_bias": {secret: 1}}):
        with pytest.raises((RequestError, ConfigError)) as refused:
            _read(fields)
        if "logit_bias" not in fields:
            assert secret not in str(refused.value)
        assert refused.value.param is not None


@pytest.mark.parametrize("fields", [{"tools": "x"}, {"tools": [1]}, {"parallel_tool_calls": "yes"}, {"tool_choice": 5}])
def test_fields_about_tools_have_their_types(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        parse(ChatRequest, {"messages": [], **fields})
    assert refused.value.param == next(iter(fields))
    assert refused.value.status == 400


def _read(fields: dict[str, Any]) -> None:
    parse(CompletionRequest, {"prompt": "a", **fields}).sampling_params({})


def test_options_are_checked() -> None:
    formats = [{"chat_template_content_format": "text"}]
    for values in (
        *formats,
        {"request_timeout": 0},
        {"drain_timeout": -1},
        {"max_queue": -1},
        {"served_model_names": ()},
    ):
        with pytest.raises(ConfigError):
            ServeOptions(**{"served_model_names": ("m",), **values})  # type: ignore[arg-type]


# The log


def test_a_record_becomes_a_line_of_json_or_of_text() -> None:
    acceptance = AcceptanceStatistics()
    acceptance.add(drafted=3, accepted=2, rounds=4)
    metrics = RequestMetrics(
        acceptance=acceptance, cached_tokens=16, preemptions=0, time_to_first_token=0.5, seconds=1.5
    )
    record = RequestLogEntry(id="chatcmpl-1", path="/v1/chat/completions", model="m", answers=1, prompt_tokens=20)
    record.add_result(SimpleNamespace(metrics=metrics, output_tokens=11, finish_reasons=["stop", "stop"]))  # type: ignore[arg-type]
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("fledge.request")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        record.write()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    values = json.loads(JsonFormatter().format(lines[0]))
    assert values["id"] == "chatcmpl-1"
    assert (values["ttft_ms"], values["tpot_ms"], values["acceptance_length"]) == (500.0, 100.0, 3.0)
    assert (values["rounds"], values["finish_reason"], values["cached_tokens"]) == (4, "stop", 16)
    assert "ignored" not in values
    assert not any(name.startswith("_") for name in values)
    text = TextFormatter().format(lines[0])
    assert "id=chatcmpl-1" in text
    assert "acceptance_length=3.0" in text
    assert "\n" not in text


def test_a_field_with_a_line_break_stays_on_its_line() -> None:
    record = logging.LogRecord("fledge.request", logging.INFO, "", 0, "request", (), None)
    record.fields = {"ignored": ["a\nb c"]}
    assert "\n" not in TextFormatter().format(record)
    assert "\n" not in JsonFormatter().format(record)
