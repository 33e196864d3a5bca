"""Request bodies: OpenAI's fields, vLLM's extra ones, and ours (`speculation`).

Fields of these classes are honoured. Fields that fields.yaml refuses get a 400 with the reason. All others are ignored
and named in the request log, because clients may be newer than the server.
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

# Limits on requests, which protect other requests, memory and the log.
MAX_CHOICES = 128  # prompts times n
MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 64
MAX_REQUEST_ID = 128
MAX_IGNORED = 16  # names of unknown fields in the log
MAX_FIELDS = 1024  # at the top level of a body
MAX_CONTAINERS = 20_000  # arrays and objects in a body: parsing many small ones blocks the event loop
COMPLETION_MAX_TOKENS = 16  # OpenAI's default

_FIELDS = yaml.safe_load((resources.files(__package__) / "fields.yaml").read_text(encoding="utf-8"))

_HARMLESS: dict[str, list[Any]] = _FIELDS["harmless"]
UNSUPPORTED_PATHS: dict[str, str] = _FIELDS["not_served"]  # path -> reason


def _as_int(value: Any) -> Any:
    """Convert 1.0 to 1: it is an integer by JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_as_int)]
# Lists may be long, so validation stops at the first invalid entry.
_Strings = Annotated[list[str], Field(fail_fast=True)]
_Integers = Annotated[list[int], Field(fail_fast=True)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)  # complete or not; possessive, so linear
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Salt = Annotated[str, Field(min_length=1, max_length=1024)]


def has_too_many_containers(text: bytes) -> bool:
    """Whether JSON, valid or not, has more than `MAX_CONTAINERS` arrays and objects. Does not parse it."""
    if text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS:
        return False
    structure = _JSON_STRING.sub(b"", text)  # brackets in strings do not count
    return structure.count(b"[") + structure.count(b"{") > MAX_CONTAINERS


def valid_request_id(value: Any) -> str | None:
    """Return a client's request id if it may be used in headers and in the log, else None."""
    is_printable = isinstance(value, str) and value.isascii() and value.isprintable()
    return value if is_printable and 0 < len(value) <= MAX_REQUEST_ID else None


class ApiModel(BaseModel):
    """A JSON object from a client. Types are strict: "5" is not a number, and true is not 1."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(ApiModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(ApiModel):
    """How to speculate for this request. It does not change the output."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = True
    depth: Annotated[_Int, Field(ge=0, le=MAX_DEPTH)] | None = None  # at most the depth of the server
    report: bool = False  # acceptance in the usage, and which text was drafted


class SamplingRequest(ApiModel):
    """The common fields of chat and text completions. `SamplingParams` checks the ranges."""

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
    truncate_prompt_tokens: Annotated[_Int, Field(ge=-1)] | None = None  # -1: to the context length
    truncation_side: Literal["left", "right"] | None = None  # the end that is cut off; None: left
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    request_id: str | None = None  # the last part of the response's id, unless there is a header X-Request-Id
    cache_salt: _Salt | None = None  # only requests with the same salt share prefixes
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
        """The largest draft depth. 0: no speculation; None: the server's depth."""
        options = self.speculation or SpeculationOptions()
        return options.depth if options.enabled else 0

    @property
    def cache_salt_digest(self) -> bytes:
        """A digest of `cache_salt`. Its fixed length keeps one salt plus tokens from equalling another salt."""
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
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """The field that limits the length of the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """The longest output; None: as long as the context allows."""
        return self.max_tokens_field[1]

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token; None: no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "cannot be streamed")
        return self.prompt_logprobs

    def structured_fields(self) -> dict[str, Any]:
        """The arguments of `structured.read_format`."""
        guided = {f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")}
        return self.model_dump(include={"response_format", "structured_outputs", *guided})

    def ignored_fields(self) -> list[str]:
        """Names of unknown fields, for the log."""
        known = {*_FIELDS["without_effect"], *_FIELDS["refused"]}
        return [name[:64] for name in sorted(set(self.model_extra or {}) - known)[:MAX_IGNORED]]

    def sampling_params(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Return the sampling parameters of one choice. `defaults`: for fields that the request does not have.

        Raises ConfigError, which names the field.
        """
        ours: dict[str, Any] = {"n": 1, "max_tokens": self.max_new_tokens, "logprobs": self.num_logprobs}
        ours["structured_outputs"] = None  # see `structured.read_format`
        ours["prompt_logprobs"] = self.num_prompt_logprobs
        names = [field.name for field in fields(SamplingParams) if field.name not in ours]
        own: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(**{**defaults, **own, **ours})


class ChatRequest(SamplingRequest):
    """The body of `/v1/chat/completions`."""

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
    def max_tokens_field(self) -> tuple[str, int | None]:
        number = self.max_completion_tokens
        return super().max_tokens_field if number is None else ("max_completion_tokens", number)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "needs 'logprobs' to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    """The body of `/v1/completions`."""

    prompt: str | _Strings | _Integers | Annotated[list[_Integers], Field(fail_fast=True)]
    logprobs: _Int | None = None
    echo: bool | None = False

    @property
    def max_new_tokens(self) -> int:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        is_echoed = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        numbers = [super().num_prompt_logprobs, (self.logprobs or 0) if is_echoed else None]
        return max((number for number in numbers if number is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts: text or token ids."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts:
            refuse("prompt", "expected text or token ids, or a list of such")
        return list(prompts)


class ResponsesRequest(ApiModel):
    """The body of `/v1/responses`; other fields of chat requests are allowed."""

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
    cache_salt: _Salt | None = None


class DrafterRequest(ApiModel):
    """The body of `/admin/drafter`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # A directory on the server, a bundled model or a hub name.
    model: Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]


class TokenizeRequest(ApiModel):
    """The body of `/tokenize`: a prompt, or a conversation for the chat template."""

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
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: _Integers


def parse(kind: type[_M], body: Mapping[str, Any]) -> _M:
    """Validate a body. Raises RequestError, which names the first invalid field and quotes no value."""
    for name, reason in _FIELDS["refused"].items():
        value = body.get(name)
        is_harmless = value is None or value is False or value in ("", [], {}) or value in _HARMLESS.get(name, ())
        is_harmless = is_harmless or (name == "best_of" and value == body.get("n"))  # the best n of n
        if name not in kind.model_fields and not is_harmless:
            refuse(name, f"not available here; {reason}", code="unsupported_parameter")
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)
        field = str(found[0]["loc"][0]) if found[0]["loc"] else None
        same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
        is_union = len({one["loc"] for one in same}) > 1  # one message for each type of the union
        where = field if is_union else ".".join(map(str, found[0]["loc"]))[:100]
        messages = dict.fromkeys(one["msg"][:1].lower() + one["msg"][1:] for one in same[: 4 if is_union else 1])
        raise RequestError(f"{where}: {' or '.join(messages)}", param=field) from None
