"""Sampling parameters of a request, with vLLM's names and defaults.

Only values and their ranges are checked here: no tensors, no tokenizer, no vocabulary size. Ids outside the vocabulary
are refused where it is known (`sampling.SamplingRows.from_params`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, NoReturn

from fledge.errors import ConfigError, refuses_unknown_names

# Lower temperatures mean greedy (vLLM's threshold): dividing logits by them would overflow.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1e30  # higher ones are clamped: the distribution is uniform long before, and float32 is finite

MAX_ANSWERS = 128
MAX_LOGPROBS = 20  # OpenAI's and vLLM's limit

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@refuses_unknown_names("structured output")
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on the format of an answer: exactly one of these. vLLM's name (before: GuidedDecodingParams)."""

    json: Mapping[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None  # True: any JSON object


@refuses_unknown_names("sampling parameter")
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings and stop conditions of a request. Checked and normalised at construction.

    Normalised means: numbers have their declared type, `stop` and `stop_token_ids` are tuples, `logit_bias` has
    integer keys (in JSON they are strings) and is None when empty, `top_k` is 0 when off, `seed` is None if the engine
    chooses one (for vLLM also -1). Values out of range raise ConfigError.

        temperature: randomness; 0: greedy, always the most likely token
        top_p: keep the smallest set of most likely tokens with at least this total probability
        top_k: keep this many of the most likely tokens; 0 or -1: all
        min_p: keep tokens with at least this fraction of the most likely token's probability
        repetition_penalty: divides the logits of tokens in prompt and answer; 1: none
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once or per occurrence
        logit_bias: token id -> value added to its logit
        seed: makes a sampled answer reproducible, in any batch
        max_tokens, min_tokens: length of the answer; max_tokens None: up to the context length
        stop: strings that end the answer; one string, or a list
        stop_token_ids: token ids that end the answer
        allowed_token_ids: the only token ids that may be generated, end-of-text ids included; None: all
        bad_words: strings that are never generated, as their tokens at the start of a text or after a space
        n: number of answers
        logprobs: number of most likely tokens to return with each token's log-probability; None: no log-probabilities
        prompt_logprobs: the same for the prompt's tokens; the prefix cache is not used then
        ignore_eos: continue after the model's end-of-text token
        include_stop_str_in_output: keep the stop string in the text
        skip_special_tokens: leave special tokens out of the text
        structured_outputs: `StructuredOutputsParams`, or its fields as a mapping: {"json": schema}, {"regex": ...}, ...
        guided_decoding: vLLM's older name of structured_outputs
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | StructuredOutputsParams | None = field(default=None, hash=False)
    guided_decoding: InitVar[Mapping[str, Any] | StructuredOutputsParams | None] = None

    def __post_init__(self, guided_decoding: Mapping[str, Any] | StructuredOutputsParams | None) -> None:
        if guided_decoding is not None and self.structured_outputs is not None:
            _refuse("guided_decoding", guided_decoding, "one of guided_decoding and structured_outputs")
        min_of_max_tokens = 1 if self.prompt_logprobs is None else 0  # 0: only the prompt's log-probabilities
        checked: dict[str, object] = {
            "temperature": min(_number("temperature", self.temperature, low=0.0), MAX_TEMPERATURE),
            "top_p": _number("top_p", self.top_p, low=0.0, high=1.0, low_excluded=True),
            "top_k": max(0, _integer("top_k", self.top_k, low=-1)),
            "min_p": _number("min_p", self.min_p, low=0.0, high=1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, low=0.0, low_excluded=True),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0),
            "logit_bias": _logit_bias(self.logit_bias),
            "seed": _seed(self.seed),
            "n": _integer("n", self.n, low=1, high=MAX_ANSWERS),
            **{
                name: _integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
                for name in ("logprobs", "prompt_logprobs")
                if getattr(self, name) is not None
            },
            "max_tokens": None
            if self.max_tokens is None
            else _integer("max_tokens", self.max_tokens, low=min_of_max_tokens),
            "min_tokens": _integer("min_tokens", self.min_tokens, low=0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "bad_words": _strings("bad_words", self.bad_words),
            "structured_outputs": _structured_outputs(guided_decoding or self.structured_outputs),
        }
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not checked["allowed_token_ids"]:
                _refuse("allowed_token_ids", self.allowed_token_ids, "at least one token id")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"an integer of at most max_tokens, {self.max_tokens}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from JSON-like values. Unknown names raise ConfigError."""
        if not isinstance(values, Mapping):
            _refuse("sampling parameters", values, "an object with one value for each name")
        return cls(**{str(name): value for name, value in values.items()})

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen; top_k, top_p, min_p and seed have no effect then."""
        return self.temperature < GREEDY_TEMPERATURE


def _refuse(name: str, found: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{name}: found {found!r:.100}, allowed is {allowed}", param=name.partition(" ")[0])


def _number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_excluded: bool = False,
) -> float:
    allowed = f"a finite number{_interval(low, high, low_excluded)}"
    # bool is an int in Python, but a mistake here.
    if isinstance(value, bool) or not isinstance(value, Real):
        _refuse(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        _refuse(name, value, allowed)
    if not math.isfinite(number) or not low <= number <= high or (low_excluded and number == low):
        _refuse(name, value, allowed)
    return number


def _integer(name: str, value: object, *, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    span = f" of at least {low}" if high == INT64_MAX and low != INT64_MIN else f" from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        _refuse(name, value, f"an integer{span}")
    number = int(value)
    if not low <= number <= high:
        _refuse(name, value, f"an integer{span}")
    return number


def _interval(low: float, high: float, low_excluded: bool) -> str:
    if math.isinf(low):
        return ""
    lower = f" above {low:g}" if low_excluded else f" of at least {low:g}"
    return lower if math.isinf(high) else f"{lower} and at most {high:g}"


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = _integer("seed", value)
    return None if seed == -1 else seed


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        _refuse("logit_bias", value, "a mapping from token id to number")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        is_number = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        spelled = int(key) if is_number else key
        token = _integer("logit_bias token id", spelled, low=0)
        if token in bias:
            _refuse("logit_bias token id", key, "each token once")
        bias[token] = _number(f"logit_bias[{token}]", amount)
    return bias or None


def _strings(name: str, value: object) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        _refuse(name, value, "a non-empty string or a list of non-empty strings")
    return tuple(texts)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        _refuse(name, value, "a list of token ids")
    return tuple(_integer(name, token, low=0) for token in value)


def _structured_outputs(value: object) -> dict[str, Any] | None:
    """Return {name: value} of the one constraint given. The value is checked where it is compiled."""
    if value is None:
        return None
    kinds = [one.name for one in fields(StructuredOutputsParams)]
    given = value if isinstance(value, Mapping) else {kind: getattr(value, kind, None) for kind in kinds}
    asked = {kind: inner for kind, inner in given.items() if inner is not None}
    if len(asked) != 1 or not asked.keys() <= set(kinds):
        _refuse("structured_outputs", value, f"one of {', '.join(kinds)}")
    return asked
