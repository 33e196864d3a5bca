"""Requests that a user of vLLM sends, some four hundred, the same each time: what `test_requests.py` compares.

A name says what a request is about. Answers are greedy, or drawn from a single token (`top_k` 1), so that both servers
give the same; where the tokens are a server's own, `is_drawn` says that only shapes can be compared.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.vllm_parity.wrong_requests import wrong_requests

MODEL = "fledgling"
CLIENTS_ID = "mine"  # ids that clients give begin so
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = (
    "The lighthouse keeper climbed the stairs and",
    "def add(a, b):\n    return",
    "Paris is the capital of France. Berlin is the capital of",
    "1, 2, 3, 4,",
    "Grüße aus Köln: 😀 é 你好",
)
QUESTIONS = ("Tell me about birds.", "Count from one to five.", "What is the sum of 2 and 3?", "Schreibe über Köln 😀.")
WORD = {"type": "object", "properties": {"word": {"enum": ["sun"]}}, "required": ["word"]}
WORD |= {"additionalProperties": False}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOTHING = {"type": "object", "properties": {}}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": NOTHING}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


@dataclass(frozen=True, kw_only=True)
class RequestCase:
    name: str
    path: str
    body: Any = None  # sent as JSON; bytes as they are
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    is_drawn: bool = False  # the tokens are random, or how a grammar's text is cut into tokens

    @property
    def is_stream(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def all_requests() -> list[RequestCase]:
    """Return every request; names are unique."""
    made = [*completions(), *chats(), *conversations(), *tools(), *structured(), *drawn(), *other_endpoints()]
    made += [RequestCase(name=f"wrong/{name}", path=path, body=body) for name, path, body in wrong_requests(MODEL)]
    made += [RequestCase(name="wrong/method", path=CHAT, method="GET")]
    made += [RequestCase(name="wrong/path", path="/v1/nothing", body={})]
    return made


def _completion(name: str, prompt: Any = PROMPTS[0], **fields: Any) -> RequestCase:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}
    return RequestCase(name=f"completion/{name}", path=COMPLETIONS, body=body)


def _chat(name: str, messages: Any = QUESTIONS[0], **fields: Any) -> RequestCase:
    messages = [user(messages)] if isinstance(messages, str) else messages
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 6, **fields}
    return RequestCase(name=f"chat/{name}", path=CHAT, body=body)


def _drawn(case: RequestCase) -> RequestCase:
    return replace(case, is_drawn=True)


USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

# What both endpoints take, each alone. The words and ids are those that the greedy answers run into.
SAMPLING: dict[str, dict[str, Any]] = {
    "max-tokens-1": {"max_tokens": 1},
    "max-tokens-24": {"max_tokens": 24},
    "stop-string": {"stop": " the", "max_tokens": 16},
    "stop-strings": {"stop": ["zebra", "s"], "max_tokens": 16},
    "stop-list-of-one": {"stop": [" a"], "max_tokens": 16},
    "stop-part-of-a-token": {"stop": ["e"], "max_tokens": 16},
    "stop-included": {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 16},
    "stop-never": {"stop": ["zebra"]},
    "stop-empty-list": {"stop": []},
    "stop-null": {"stop": None},
    "stop-ids": {"stop_token_ids": list(range(260, 330)), "max_tokens": 24},
    "stop-ids-included": {"stop_token_ids": list(range(260, 330)), "include_stop_str_in_output": True},
    "min-tokens": {"min_tokens": 5, "stop": ["e"], "max_tokens": 10},
    "min-tokens-eos": {"min_tokens": 6},
    "ignore-eos": {"ignore_eos": True, "max_tokens": 12},
    "seed": {"seed": 7},
    "user": {"user": "somebody"},
    "top-k-1": {"temperature": 1.0, "top_k": 1},
    "top-p-tiny": {"temperature": 0.8, "top_p": 1e-6},
    "min-p-1": {"temperature": 1.5, "min_p": 1.0},
    "top-k-off": {"top_k": -1},
    "top-k-zero": {"top_k": 0},
    "presence": {"presence_penalty": 1.5, "max_tokens": 16},
    "frequency": {"frequency_penalty": -1.0, "max_tokens": 16},
    "repetition": {"repetition_penalty": 1.3, "max_tokens": 16},
    "all-penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias-towards": {"logit_bias": {"300": 100}},
    "bias-away": {"logit_bias": {"290": -100, "291": -50.5, "300": -100}},
    "allowed-ids": {"allowed_token_ids": list(range(300, 340))},
    "bad-words": {"bad_words": ["the", "and", "a"], "max_tokens": 12},
    "bad-phrase": {"bad_words": ["a species"], "max_tokens": 12},
    "token-ids": {"return_token_ids": True},
    "token-ids-and-stop": {"return_token_ids": True, "stop": ["e"], "max_tokens": 16},
    "special-shown": {"skip_special_tokens": False, "max_tokens": 24},
    "spaces-between": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "truncated": {"truncate_prompt_tokens": 4},
    "truncated-right": {"truncate_prompt_tokens": 4, "truncation_side": "right"},
    "truncated-to-fit": {"truncate_prompt_tokens": -1},
    "n": {"n": 2, "temperature": 1.0, "top_k": 1},
    "n-greedy": {"n": 2},
    "prompt-logprobs": {"prompt_logprobs": 2, "max_tokens": 2},
    "prompt-logprobs-0": {"prompt_logprobs": 0, "max_tokens": 2},
    "integers-as-floats": {"max_tokens": 3.0},
    "nulls": {"top_p": None, "seed": None, "frequency_penalty": None, "logit_bias": None, "n": 1},
    "unknown-field": {"younger_than_any_server": 1},
    "salted": {"cache_salt": "salt"},
    "request-id": {"request_id": f"{CLIENTS_ID}-17"},
    "priority-0": {"priority": 0},
    "priority-unscheduled": {"priority": 1},
}
STREAMED = ("max-tokens-24", "stop-string", "stop-included", "stop-ids", "token-ids", "token-ids-and-stop", "n")
STREAMED += ("special-shown", "min-tokens", "repetition", "bad-words", "max-tokens-1")


def completions() -> Iterator[RequestCase]:
    """`/v1/completions`."""
    for name, fields in SAMPLING.items():
        yield _completion(name, **fields)
    for name in STREAMED:
        yield _completion(f"stream-{name}", stream=True, **SAMPLING[name])
    for i, prompt in enumerate(PROMPTS):
        yield _completion(f"prompt-{i}", prompt, max_tokens=12)
        yield _completion(f"logprobs-{i}", prompt, logprobs=2)
        yield _completion(f"echo-{i}", prompt, echo=True, logprobs=1)
        yield _completion(f"stream-{i}", prompt, stream=True, max_tokens=12, **(USAGE if i % 2 else CONTINUOUS))
    for wanted in (0, 1, 5, 20):
        yield _completion(f"logprobs-top-{wanted}", logprobs=wanted)
        yield _completion(f"stream-logprobs-top-{wanted}", logprobs=wanted, stream=True)
    yield _completion("logprobs-as-ids", logprobs=2, return_tokens_as_token_ids=True)
    yield _completion("logprobs-of-specials", logprobs=2, skip_special_tokens=False, max_tokens=24)
    yield _completion("logprobs-penalised", logprobs=2, repetition_penalty=1.3)
    yield _completion("logprobs-biased", logprobs=2, logit_bias={"300": 100}, max_tokens=2)
    yield _completion("logprobs-warm", logprobs=2, temperature=0.5, top_k=1)
    yield _completion("logprobs-stopped", logprobs=1, stop=["e"], max_tokens=16)
    yield _completion("logprobs-allowed", logprobs=2, allowed_token_ids=[300, 301, 302])
    yield _completion("ids", [300, 301, 302, 303])
    yield _completion("ids-echoed", [300, 301, 302, 303], echo=True)
    yield _completion("ids-with-specials-echoed", [0, 300, 301], echo=True, logprobs=0)
    yield _completion("batch", list(PROMPTS[:3]))
    yield _completion("batch-of-one", [PROMPTS[1]])
    yield _completion("batch-of-ids", [[300, 301], [302, 303, 304]])
    yield _completion("batch-with-n", list(PROMPTS[:2]), max_tokens=3, **SAMPLING["n"])
    yield _completion("batch-echoed", list(PROMPTS[:2]), echo=True, max_tokens=3)
    yield _completion("batch-logprobs", list(PROMPTS[:2]), logprobs=1, max_tokens=3)
    yield _completion("stream-batch", list(PROMPTS[:2]), stream=True, **USAGE)
    yield _completion("stream-echo", echo=True, stream=True)
    yield _completion("stream-echo-logprobs", echo=True, logprobs=1, stream=True)
    yield _completion("echo-nothing-else", echo=True, max_tokens=0)
    yield _completion("echo-nothing-else-logprobs", echo=True, max_tokens=0, logprobs=1)
    yield _completion("no-specials", add_special_tokens=False)
    yield _completion("prompt-with-specials", "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    yield _completion("no-model-named", model=None)
    yield _completion("default-max-tokens", max_tokens=None)
    yield _completion("prompt-logprobs-and-logprobs", prompt_logprobs=1, logprobs=1, max_tokens=2)
    yield _completion("suffix-empty", suffix="")
    yield _completion("stream-prompt-logprobs", stream=True, prompt_logprobs=1, max_tokens=2)


def chats() -> Iterator[RequestCase]:
    """`/v1/chat/completions` with one question."""
    for name, fields in SAMPLING.items():
        yield _chat(name, **fields)
    for name in STREAMED:
        yield _chat(f"stream-{name}", stream=True, **SAMPLING[name])
    for i, question in enumerate(QUESTIONS):
        yield _chat(f"question-{i}", question, max_tokens=12)
        yield _chat(f"stream-{i}", question, stream=True, max_tokens=12, **(USAGE if i % 2 else CONTINUOUS))
    for wanted in (0, 1, 5, 20):
        yield _chat(f"logprobs-top-{wanted}", logprobs=True, top_logprobs=wanted)
        yield _chat(f"stream-logprobs-top-{wanted}", logprobs=True, top_logprobs=wanted, stream=True)
    yield _chat("logprobs-alone", logprobs=True)
    begun = [user("Say it."), {"role": "assistant", "content": PROMPTS[4]}]
    continued: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    yield _chat("logprobs-characters", begun, logprobs=True, top_logprobs=2, max_tokens=12, **continued)
    yield _chat("logprobs-as-ids", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    yield _chat("logprobs-n", logprobs=True, max_tokens=3, **SAMPLING["n"])
    yield _chat("max-completion-tokens", max_completion_tokens=3)
    yield _chat("max-completion-tokens-wins", max_tokens=8, max_completion_tokens=3)
    yield _chat("to-the-end", "Say hi.", max_tokens=None, stop=["."])
    yield _chat("include-reasoning-off", include_reasoning=False)
    yield _chat("text-format", response_format={"type": "text"})
    yield _chat("more-special-tokens", add_special_tokens=True, return_token_ids=True)


def conversations() -> Iterator[RequestCase]:
    """Messages of every kind. The prompt's tokens are returned: they show how the template was used."""
    ids: dict[str, Any] = {"return_token_ids": True, "max_tokens": 3}
    system = {"role": "system", "content": "Be brief."}
    answered = [user("Hi."), {"role": "assistant", "content": "Hello. The"}]
    called = [user("Weather?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    yield _chat("system", [system, user("Hi.")], **ids)
    yield _chat("developer", [{**system, "role": "developer"}, user("Hi.")], **ids)
    yield _chat("turns", [*answered, user("Again.")], **ids)
    yield _chat("named-user", [{**user("Hi."), "name": "ann"}], **ids)
    yield _chat("empty-content", [user("")], **ids)
    yield _chat("part", [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}], **ids)
    parts = [{"type": "text", "text": text} for text in ("One.", "Two.")]
    yield _chat("parts", [{"role": "user", "content": parts}], **ids)
    yield _chat("parts-as-strings", [{"role": "user", "content": ["One.", "Two."]}], **ids)
    yield _chat("system-parts", [{"role": "system", "content": parts}, user("Hi.")], **ids)
    yield _chat("assistant-parts", [answered[0], {"role": "assistant", "content": parts}, user("On.")], **ids)
    yield _chat("assistant-last", answered, **ids)
    yield _chat("continued", answered, add_generation_prompt=False, continue_final_message=True, **ids)
    yield _chat("continued-stream", answered, add_generation_prompt=False, continue_final_message=True, stream=True)
    yield _chat("continued-and-generated", answered, add_generation_prompt=True, continue_final_message=True, **ids)
    yield _chat("no-generation-prompt", [user("Hi.")], add_generation_prompt=False, **ids)
    yield _chat("template-kwargs", [user("Hi.")], chat_template_kwargs={"enable_thinking": False}, **ids)
    yield _chat("documents", [user("Hi.")], documents=[{"title": "a", "text": "b"}], **ids)
    yield _chat("reasoning-effort", [user("Hi.")], reasoning_effort="low", **ids)
    yield _chat("reasoning-given", [answered[0], {**answered[1], "reasoning": "so"}, user("On.")], **ids)
    yield _chat("tool-result", [*called, result], **ids)
    yield _chat("tool-result-parts", [*called, {**result, "content": parts}], **ids)
    yield _chat("tool-result-and-tools", [*called, result], tools=[WEATHER], **ids)
    twice = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, {**CALL, "id": "call_2"}]}
    yield _chat("two-calls", [user("Weather?"), twice, result, {**result, "tool_call_id": "call_2"}], **ids)
    no_arguments = {**CALL, "function": {"name": "get_time", "arguments": ""}}
    yield _chat("call-without-arguments", [user("?"), {"role": "assistant", "tool_calls": [no_arguments]}], **ids)
    yield _chat("no-calls", [user("?"), {"role": "assistant", "content": "x", "tool_calls": []}, user("On.")], **ids)


def tools() -> Iterator[RequestCase]:
    """Tools and what to do with them."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    choices: dict[str, Any] = {"none": "none", "auto": "auto", "required": "required", "named": named}
    for (name, choice), stream in itertools.product(choices.items(), (False, True)):
        fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 48}
        fields |= {"stream": stream}
        yield _chat(f"tools-{name}{'-stream' * stream}", "Weather in Paris?", **fields)
    yield _chat("tools-unsaid", "Weather in Paris?", tools=[WEATHER, TIME], return_token_ids=True)
    undescribed = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}
    yield _chat("tools-undescribed", "What time is it?", tools=[undescribed], return_token_ids=True, max_tokens=1)
    required = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    yield _chat("tools-two-required", "Weather in Paris?", tools=[WEATHER, TIME], **required)
    yield _drawn(_chat("tools-cut-short", tools=[WEATHER], tool_choice=named, max_tokens=4))
    yield _chat("tools-empty", tools=[])
    yield _chat("tools-logprobs", tools=[WEATHER], tool_choice="auto", logprobs=True, max_tokens=4)


def structured() -> Iterator[RequestCase]:
    """Structured outputs, in formats that leave little room, so that both grammars' choices are the same."""
    strict = {"type": "json_schema", "json_schema": {"name": "word", "schema": WORD, "strict": True}}
    formats: dict[str, dict[str, Any]] = {
        "json": {"structured_outputs": {"json": WORD}},
        "regex": {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2}"}},
        "choice": {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
        "grammar": {"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "d"'}},
        "json-object": {"response_format": {"type": "json_object"}, "stop": [",", "}"]},
        "json-schema": {"response_format": strict},
    }
    for name, fields in formats.items():
        yield _chat(f"structured-{name}", "Choose.", **{"max_tokens": 24, **fields})
        yield _chat(f"structured-{name}-stream", "Choose.", stream=True, **{"max_tokens": 24, **fields})
        yield _completion(f"structured-{name}", "Answer:", **{"max_tokens": 24, **fields})
    yield _drawn(_chat("structured-cut-short", "Choose.", **formats["json"], **{"max_tokens": 3}))
    yield _chat("structured-n", "Choose.", **formats["choice"], **SAMPLING["n"])
    yield _chat("structured-logprobs", "Choose.", **formats["choice"], logprobs=True, top_logprobs=1)


def drawn() -> Iterator[RequestCase]:
    """Real draws: shapes, and what does not depend on the tokens."""
    settings: dict[str, dict[str, Any]] = {
        "hot": {"temperature": 1.0},
        "seeded": {"temperature": 0.8, "seed": 3},
        "nucleus": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        "n": {"temperature": 1.0, "n": 3},
        "logprobs": {"temperature": 1.0},
        "stream": {"temperature": 1.0, "stream": True, **USAGE},
    }
    for name, fields in settings.items():
        chat_only: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if name == "logprobs" else {}
        chat = _chat(f"drawn-{name}", ignore_eos=True, **fields, **chat_only)
        for made in (chat, _completion(f"drawn-{name}", ignore_eos=True, **fields)):
            yield _drawn(made)


def other_endpoints() -> Iterator[RequestCase]:
    """What clients ask beside generation."""
    bodies: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": PROMPTS[4]},
        "bare": {"prompt": PROMPTS[0], "add_special_tokens": False},
        "strings": {"prompt": PROMPTS[4], "return_token_strs": True},
        "specials": {"prompt": "<|im_start|>user"},
        "empty": {"prompt": ""},
        "chat": {"messages": [user("Hi.")]},
        "chat-strings": {"messages": [user("Hi.")], "return_token_strs": True},
        "chat-bare": {"messages": [user("Hi.")], "add_generation_prompt": False},
        "chat-more-specials": {"messages": [user("Hi.")], "add_special_tokens": True},
        "chat-tools": {"messages": [user("Hi.")], "tools": [WEATHER]},
        "neither": {},
    }
    for name, body in bodies.items():
        yield RequestCase(name=f"tokenize/{name}", path="/tokenize", body={"model": MODEL, **body})
    for name, ids in {"ids": [300, 301, 302], "specials": [0, 2, 300], "none": [], "unknown": [999999]}.items():
        yield RequestCase(name=f"detokenize/{name}", path="/detokenize", body={"model": MODEL, "tokens": ids})
    for name, path in {"models": "/v1/models", "health": "/health", "version": "/version", "load": "/load"}.items():
        yield RequestCase(name=f"get/{name}", path=path, method="GET", is_drawn=name == "load")
    yield RequestCase(name="post/ping", path="/ping", method="POST")
    given = _chat("header")
    named = {"X-Request-Id": f"{CLIENTS_ID}-18"}
    yield RequestCase(name="header/request-id", path=CHAT, body=given.body, headers=named)
