"""Requests that are wrong, each in one way: both servers must refuse the same ones, with the same status and field."""

from collections.abc import Iterator
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields that both endpoints have, with values that are not allowed.
VALUES: dict[str, dict[str, Any]] = {
    "temperature-negative": {"temperature": -1},
    "temperature-text": {"temperature": "warm"},
    "top-p-zero": {"top_p": 0},
    "top-p-above-1": {"top_p": 1.5},
    "top-k-negative": {"top_k": -5},
    "min-p-above-1": {"min_p": 1.5},
    "presence-too-high": {"presence_penalty": 3},
    "frequency-too-low": {"frequency_penalty": -3},
    "repetition-zero": {"repetition_penalty": 0},
    "max-tokens-negative": {"max_tokens": -1},
    "max-tokens-too-many": {"max_tokens": 100_000},
    "max-tokens-text": {"max_tokens": "many"},
    "max-tokens-fraction": {"max_tokens": 1.5},
    "min-above-max": {"min_tokens": 9, "max_tokens": 3},
    "min-tokens-negative": {"min_tokens": -1},
    "n-zero": {"n": 0},
    "n-greedy": {"n": "two"},
    "stop-number": {"stop": 5},
    "stop-empty-string": {"stop": ""},
    "stop-ids-text": {"stop_token_ids": ["a"]},
    "bias-unknown-token": {"logit_bias": {"999999": 1}},
    "bias-no-token": {"logit_bias": {"word": 1}},
    "allowed-ids-empty": {"allowed_token_ids": []},
    "allowed-ids-unknown": {"allowed_token_ids": [999999]},
    "bad-words-number": {"bad_words": [5]},
    "seed-text": {"seed": "lucky"},
    "stream-text": {"stream": "perhaps"},
    "stream-options-alone": {"stream_options": {"include_usage": True}},
    "prompt-logprobs-too-many": {"prompt_logprobs": 1000},
    "prompt-logprobs-negative": {"prompt_logprobs": -3},
    "truncate-negative": {"truncate_prompt_tokens": -5},
    "truncate-too-long": {"truncate_prompt_tokens": 100_000},
    "model-unknown": {"model": "no-such-model"},
    "format-unknown": {"response_format": {"type": "poem"}},
    "format-without-schema": {"response_format": {"type": "json_schema"}},
    "two-constraints": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "constraint-empty": {"structured_outputs": {}},
    "regex-broken": {"structured_outputs": {"regex": "(("}},
    "choice-empty": {"structured_outputs": {"choice": []}},
    "grammar-broken": {"structured_outputs": {"grammar": "root ::= ("}},
    "schema-broken": {"structured_outputs": {"json": {"type": "nonsense"}}},
    "salt-empty": {"cache_salt": ""},
}


def wrong_requests(model: str) -> Iterator[tuple[str, str, Any]]:
    """Yield a name, the path and the body of each."""
    question = [{"role": "user", "content": "Hi."}]
    chat: dict[str, Any] = {"model": model, "messages": question, "temperature": 0, "max_tokens": 3}
    completion: dict[str, Any] = {"model": model, "prompt": "Hi.", "temperature": 0, "max_tokens": 3}
    for name, fields in VALUES.items():
        yield f"chat-{name}", CHAT, {**chat, **fields}
        yield f"completion-{name}", COMPLETIONS, {**completion, **fields}

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    messages: dict[str, Any] = {
        "none": [],
        "text": "Hi.",
        "role-unknown": [{"role": "poet", "content": "Hi."}],
        "role-missing": [{"content": "Hi."}],
        "content-number": [{"role": "user", "content": 5}],
        "content-missing": [{"role": "user"}],
        "part-unknown": [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}],
        "image": [{"role": "user", "content": [image]}],
        "too-long": [{"role": "user", "content": "word " * 2000}],
    }
    for name, value in messages.items():
        yield f"messages-{name}", CHAT, {**chat, "messages": value}
    yield "messages-missing", CHAT, {"model": model}
    yield "continue-and-generate", CHAT, {**chat, "continue_final_message": True, "add_generation_prompt": True}
    yield "top-logprobs-alone", CHAT, {**chat, "top_logprobs": 3}
    yield "top-logprobs-too-many", CHAT, {**chat, "logprobs": True, "top_logprobs": 1000}
    yield "top-logprobs-negative", CHAT, {**chat, "logprobs": True, "top_logprobs": -5}
    yield "chat-logprobs-number", CHAT, {**chat, "logprobs": 5}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    absent = {"type": "function", "function": {"name": "g"}}
    yield "choice-without-tools", CHAT, {**chat, "tool_choice": "required"}
    yield "choice-unknown-tool", CHAT, {**chat, "tools": [tool], "tool_choice": absent}
    yield "choice-unknown-word", CHAT, {**chat, "tools": [tool], "tool_choice": "perhaps"}
    yield "tool-without-function", CHAT, {**chat, "tools": [{"type": "function"}]}
    yield "tool-without-name", CHAT, {**chat, "tools": [{"type": "function", "function": {}}]}
    yield "tools-object", CHAT, {**chat, "tools": {"f": tool}}
    yield "template-of-a-client", CHAT, {**chat, "chat_template": "{{ messages }}"}

    prompts: dict[str, Any] = {
        "empty": "",
        "empty-list": [],
        "empty-ids": [[]],
        "number": 5,
        "mixed": ["a", 5],
        "unknown-id": [999999],
        "negative-id": [-1],
        "too-long": "word " * 2000,
    }
    for name, value in prompts.items():
        yield f"prompt-{name}", COMPLETIONS, {**completion, "prompt": value}
    yield "prompt-missing", COMPLETIONS, {"model": model}
    yield "logprobs-too-many", COMPLETIONS, {**completion, "logprobs": 1000}
    yield "logprobs-negative", COMPLETIONS, {**completion, "logprobs": -3}
    yield "logprobs-true", COMPLETIONS, {**completion, "logprobs": True}
    yield "suffix", COMPLETIONS, {**completion, "suffix": "the end"}
    yield "max-tokens-zero", COMPLETIONS, {**completion, "max_tokens": 0}
    yield "chat-max-tokens-zero", CHAT, {**chat, "max_tokens": 0}

    yield "not-json", CHAT, b"{"
    yield "not-an-object", CHAT, b"[]"
    yield "no-body", CHAT, b""
    yield "tokenize-both", "/tokenize", {"model": model, "prompt": "Hi.", "messages": question}
    yield "tokenize-number", "/tokenize", {"model": model, "prompt": 5}
    yield "tokenize-model-unknown", "/tokenize", {"model": "no-such-model", "prompt": "Hi."}
    yield "detokenize-text", "/detokenize", {"model": model, "tokens": "Hi."}
    yield "detokenize-missing", "/detokenize", {"model": model}
