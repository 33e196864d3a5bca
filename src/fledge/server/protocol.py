"""The fields of a request: OpenAI's, vLLM's extra ones, and ours (`speculation`).

A field that is here is honoured, one that fields.yaml refuses gets a 400 that says why, and any other is ignored and
named in the request's log line: clients send fields that are younger than any server.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fledge.decoding.params import INT64_MAX, INT64_MIN, MAX_LOGPROBS, SamplingParams
from fledge.engine.config import MAX_DEPTH
from fledge.server.errors import RequestError, refuse

_M = TypeVar("_M", bound="ApiModel")

# Bounds on requests. What they protect is other people's rounds, memory and the log.
MAX_ANSWERS = 128  # prompts times n
MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 64
MAX_REQUEST_ID = 128
MAX_IGNORED = 16  # names of unknown fields that are noted
MAX_FIELDS = 1024  # of a body itself
MAX_CONTAINERS = 20_000  # arrays and objects in a body; reading many small ones holds up everybody
COMPLETION_MAX_TOKENS = 16  # OpenAI's default

_FIELDS = yaml.safe_load((resources.files(__package__) / "fields.yaml").read_text(encoding="utf-8"))

_HARMLESS: dict[str, list[Any]] = _FIELDS["harmless"]
NOT_SERVED: dict[str, str] = _FIELDS["not_served"]  # OpenAI's paths, and why they are not here


def _whole(value: Any) -> Any:
    """1.0 is an integer, by JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_whole)]
# Lists from clients may be long: the first wrong entry is enough.
_Strings = Annotated[list[str], Field(fail_fast=True)]
_Integers = Annotated[list[int], Field(fail_fast=True)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)  # whatever comes after a quote, once
_Bias = Annotated[float, Field(ge=-100, le=100)]


def has_too_many_containers(text: bytes) -> bool:
    """Whether JSON, which need not be valid, has more than `MAX_CONTAINERS` arrays and objects. Parses nothing."""
    if text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS:
        return False
    bare = _STRING.sub(b"", text)  # a text may have as many brackets as it likes
    return bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS


def request_name(given: Any) -> str | None:
    """Return a client's own name for a request, if it can be told back in a header and in the log."""
    is_plain = isinstance(given, str) and given.isascii() and given.isprintable()
    return given if is_plain and 0 < len(given) <= MAX_REQUEST_ID else None


class ApiModel(BaseModel):
    """A JSON object from a client. Types are exact: "5" is not a number, and true is not 1."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(ApiModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(ApiModel):
    """How to speculate for this request. The tokens are the same whatever it says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = True
    depth: Annotated[_Int, Field(ge=0, le=MAX_DEPTH)] | None = None  # no deeper than the server drafts in any case
    report: bool = False  # rounds and acceptance in the usage, and which text had been drafted


class SamplingRequest(ApiModel):
    """What chat and completions have in common. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[_Int, Field(ge=1, le=MAX_N)] | None = 1
    max_tokens: _Int | None = None
    min_tokens: _Int | None = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: _Int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[_Int, Field(ge=-1)] | None = None  # -1: to what leaves room for an answer
    truncation_side: Literal["left", "right"] | None = None  # which end goes; left if not given
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    request_id: str | None = None  # the end of the answer's id; the header X-Request-Id comes first
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # prefixes are shared within one
    priority: Annotated[_Int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = 0  # lower is earlier
    prompt_logprobs: _Int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: _Strings | None = None
    guided_grammar: str | None = None
    speculation: SpeculationOptions | None = None

    @property
    def speculation_depth(self) -> int | None:
        """0: none; None: as the server drafts."""
        asked = self.speculation or SpeculationOptions()
        return asked.depth if asked.enabled else 0

    @property
    def salt(self) -> bytes:
        """`cache_salt` in a fixed length: none can be chosen that, with tokens after it, looks like another."""
        return hashlib.blake2b(self.cache_salt.encode(), digest_size=16).digest() if self.cache_salt else b""

    @property
    def wants_report(self) -> bool:
        return self.speculation is not None and self.speculation.report

    @property
    def wants_stream_usage(self) -> bool:
        return self.wants_report or (self.stream_options is not None and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_stream_usage and (self.stream_options or StreamOptions()).continuous_usage_stats

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def asked_length(self) -> tuple[str, int | None]:
        """The field that bounds an answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def most_tokens(self) -> int | None:
        """Of one answer; None: as many as there is room for."""
        return self.asked_length[1]

    @property
    def logprobs_wanted(self) -> int | None:
        """Likeliest tokens to give with each token; None: no log-probabilities."""
        return None

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The same of the prompt's tokens."""
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "cannot be streamed")
        return self.prompt_logprobs

    def structured_fields(self) -> dict[str, Any]:
        """For `structured.read_format`."""
        guided = {f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")}
        return self.model_dump(include={"response_format", "structured_outputs", *guided})

    def ignored_fields(self) -> list[str]:
        known = {*_FIELDS["without_effect"], *_FIELDS["refused"]}
        return [name[:64] for name in sorted(set(self.model_extra or {}) - known)[:MAX_IGNORED]]

    def sampling_params(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Return the parameters of one answer. `defaults` stand in for what the request leaves out.

        Raises ConfigError, which names the field.
        """
        ours: dict[str, Any] = {"n": 1, "max_tokens": self.most_tokens, "logprobs": self.logprobs_wanted}
        ours["structured_outputs"] = None  # read by `structured.read_format`
        ours["prompt_logprobs"] = self.prompt_logprobs_wanted
        names = [field.name for field in fields(SamplingParams) if field.name not in ours]
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(**{**defaults, **given, **ours})


class ChatRequest(SamplingRequest):
    """`/v1/chat/completions`."""

    messages: _Objects
    max_completion_tokens: _Int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[_Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: _Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: _Objects | None = None

    @property
    def asked_length(self) -> tuple[str, int | None]:
        given = self.max_completion_tokens
        return super().asked_length if given is None else ("max_completion_tokens", given)

    @property
    def logprobs_wanted(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "needs 'logprobs' to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    """`/v1/completions`."""

    prompt: str | _Strings | _Integers | Annotated[list[_Integers], Field(fail_fast=True)]
    logprobs: _Int | None = None
    echo: bool | None = False

    @property
    def most_tokens(self) -> int:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        echoed = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        wanted = [self.logprobs or 0] if echoed else []
        asked = super().prompt_logprobs_wanted
        return max(wanted if asked is None else [asked, *wanted], default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which there may be several: text or token ids."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            refuse("prompt", "expected text or token ids, or a list of such")
        return list(given)


class ResponsesRequest(ApiModel):
    """`/v1/responses`; what else a chat takes passes."""

    model: str | None = None
    input: str | _Objects
    instructions: str | None = None
    stream: bool | None = False
    max_output_tokens: _Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: _Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None


class DrafterRequest(ApiModel):
    """`/admin/drafter`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # A directory on the server, a bundled model or a hub name.
    model: Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]


class TokenizeRequest(ApiModel):
    """`/tokenize`: of a prompt, or of a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: _Objects | None = None
    tools: _Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ApiModel):
    """`/detokenize`."""

    model: str | None = None
    tokens: _Integers


def parse(kind: type[_M], body: Mapping[str, Any]) -> _M:
    """Check a body's fields. Raises RequestError, which names the first field that is wrong and quotes no value."""
    for name, reason in _FIELDS["refused"].items():
        value = body.get(name)
        is_harmless = value is None or value is False or value in ("", [], {}) or value in _HARMLESS.get(name, ())
        is_harmless = is_harmless or (name == "best_of" and value == body.get("n"))  # all of them are the best
        if name not in kind.model_fields and not is_harmless:
            refuse(name, f"not available here; {reason}", code="unsupported_parameter")
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)
        field = str(found[0]["loc"][0]) if found[0]["loc"] else None
        same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
        is_union = len({one["loc"] for one in same}) > 1  # each of its members with its complaint
        where = field if is_union else ".".join(map(str, found[0]["loc"]))[:100]
        said = dict.fromkeys(one["msg"][:1].lower() + one["msg"][1:] for one in same[: 4 if is_union else 1])
        raise RequestError(f"{where}: {' or '.join(said)}", param=field) from None
