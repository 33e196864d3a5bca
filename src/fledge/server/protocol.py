"""The fields of a request: OpenAI's, vLLM's extra ones, and ours (`speculation`).

A field that is here is honoured, one in `_REFUSED` gets a 400 that says why, and any other is ignored and named in the
request's log line: clients send fields that are younger than any server.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fledge.decoding.params import MAX_LOGPROBS, SamplingParams
from fledge.engine.config import MAX_DEPTH
from fledge.server.errors import RequestError
from fledge.server.options import RequestLimits

_M = TypeVar("_M", bound="ApiModel")

MAX_IGNORED = 16  # names of unknown fields that are noted

# What these servers are asked for elsewhere and cannot do; harmless values (null, false, zero) pass.
_REFUSED = {
    "audio": "this server answers in text only",
    "modalities": "this server answers in text only",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "web_search_options": "there is no web search here",
    "best_of": "ask for 'n' answers and choose among them",
    "suffix": "text cannot be inserted; give a prompt that the answer continues",
    "prompt_logprobs": "log-probabilities are given for answers only",
    "use_beam_search": "beam search is not available",
    "length_penalty": "beam search is not available",
    "allowed_token_ids": "use a grammar or a regular expression ('structured_outputs')",
    "bad_words": "use 'logit_bias'",
    "logits_processors": "code from clients is not run here",
    "kv_transfer_params": "run a disaggregated service with vLLM, which loads the same checkpoints",
    "prompt_embeds": "prompts are text or token ids",
    "cache_salt": "the prefix cache is shared by all clients of this server; turn it off when starting the server",
    "guided_decoding_backend": "there is one backend, llguidance",
    "guided_whitespace_pattern": "use a grammar or a regular expression ('structured_outputs')",
    "mm_processor_kwargs": "this server reads text only",
}
_HARMLESS: dict[str, Any] = {
    "modalities": ["text"],
    "best_of": 1,
    "length_penalty": 1.0,
    "guided_decoding_backend": "llguidance",
}
# Known, and of no consequence for what is answered.
_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "prediction",
        "priority",
        "request_id",
        "spaces_between_special_tokens",
        "early_stopping",
    }
)

# Lists from clients may be long: the first wrong entry is enough.
_Strings = Annotated[list[str], Field(fail_fast=True)]
_Integers = Annotated[list[int], Field(fail_fast=True)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


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
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None  # no deeper than the server drafts in any case
    report: bool = False  # rounds and acceptance in the usage, and which text had been drafted


class SamplingRequest(ApiModel):
    """What chat and completions have in common. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int | None = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | _Strings | None = None
    stop_token_ids: _Integers | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
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
        asked = self.speculation
        if asked is None:
            return None
        return asked.depth if asked.enabled else 0

    @property
    def wants_report(self) -> bool:
        return self.speculation is not None and self.speculation.report

    @property
    def wants_stream_usage(self) -> bool:
        asked = self.stream_options is not None and self.stream_options.include_usage
        return asked or self.wants_report or self.wants_continuous_usage

    @property
    def wants_continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def structured_fields(self) -> dict[str, Any]:
        """For `structured.read_format`."""
        names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
        return {name: getattr(self, name) for name in (*names, "guided_grammar")}

    def ignored_fields(self) -> list[str]:
        extra = [name for name in self.model_extra or {} if name not in _WITHOUT_EFFECT and name not in _REFUSED]
        return [name[:64] for name in sorted(extra)[:MAX_IGNORED]]

    def sampling_params(
        self, defaults: Mapping[str, float | int], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the parameters of one answer. `defaults` stand in for what the request leaves out.

        Raises ConfigError, which names the field.
        """
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if getattr(self, name) is not None
        }
        others = {
            name: getattr(self, name)
            for name in (
                "presence_penalty",
                "frequency_penalty",
                "logit_bias",
                "seed",
                "min_tokens",
                "stop",
                "stop_token_ids",
                "ignore_eos",
                "include_stop_str_in_output",
                "skip_special_tokens",
            )
            if getattr(self, name) is not None
        }
        return SamplingParams(**{**defaults, **given}, **others, max_tokens=max_tokens, logprobs=logprobs)

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    def check_sizes(self, limits: RequestLimits) -> None:
        """Raise RequestError if something is more than this server takes."""
        if not 1 <= self.answers <= limits.max_n:
            _out_of_bounds("n", self.answers, f"1 to {limits.max_n}")
        stops = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > limits.max_stop_strings:
            _out_of_bounds("stop", f"{len(stops)} strings", f"at most {limits.max_stop_strings}")
        if any(len(stop) > limits.max_stop_length for stop in stops):
            _out_of_bounds("stop", "a longer string", f"at most {limits.max_stop_length} characters")
        if len(self.stop_token_ids or ()) > limits.max_stop_token_ids:
            _out_of_bounds("stop_token_ids", len(self.stop_token_ids or ()), f"at most {limits.max_stop_token_ids}")
        if len(self.logit_bias or ()) > limits.max_logit_bias:
            _out_of_bounds("logit_bias", f"{len(self.logit_bias or ())} tokens", f"at most {limits.max_logit_bias}")
        for bias in (self.logit_bias or {}).values():
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                _out_of_bounds("logit_bias", "another value", "a number from -100 to 100")


class ChatRequest(SamplingRequest):
    """`/v1/chat/completions`."""

    messages: _Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
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
    def logprobs_wanted(self) -> int | None:
        """Likeliest tokens to give with each token; None: no log-probabilities."""
        top = self.top_logprobs
        if top is not None and not self.logprobs and top != 0:
            raise RequestError("top_logprobs: needs 'logprobs' to be true", param="top_logprobs")
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            _out_of_bounds("top_logprobs", top, f"0 to {MAX_LOGPROBS}")
        return (top or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    """`/v1/completions`."""

    prompt: str | _Strings | _Integers | Annotated[list[_Integers], Field(fail_fast=True)]
    logprobs: int | None = None
    echo: bool | None = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which there may be several: text or token ids."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise RequestError("prompt: expected text or token ids, or a list of such", param="prompt")
        return list(given)


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
    for name, reason in _REFUSED.items():
        value = body.get(name)
        if name not in kind.model_fields and value and value != _HARMLESS.get(name):
            raise RequestError(f"{name}: not available here; {reason}", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)
        field = str(found[0]["loc"][0]) if found[0]["loc"] else None
        same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
        if len({one["loc"] for one in same}) > 1 and len(same) > 1:  # the members of a union, each with its complaint
            said = " or ".join(dict.fromkeys(_lower(one["msg"]) for one in same[:4]))
            message = f"{field}: {said}"
        else:
            message = f"{'.'.join(str(part) for part in found[0]['loc'])}: {_lower(found[0]['msg'])}"
        raise RequestError(message, param=field) from None


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _out_of_bounds(param: str, found: object, allowed: str) -> None:
    raise RequestError(f"{param}: found {found}, allowed is {allowed}", param=param)
