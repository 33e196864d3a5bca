"""The offline API: `LLM(...).generate(prompts, SamplingParams(...))`, under vLLM's names.

Requests are run one after another by the reference loop.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Round, Speculation, generate
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent, TextPiece
from fledge.engine.speculative_config import SpeculativeConfig
from fledge.engine.text_stream import TextStream
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, PromptError, refuses_unknown_names
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@refuses_unknown_names("LLM argument")
class LLM:
    """A target, with or without a drafter, ready to answer."""

    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
    ) -> None:
        """Load the models. `dtype` "auto" is the dtype the target is stored in; the drafter follows the target."""
        config = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        directory = resolve(model)
        self.target = load_target(directory, dtype=_dtype(dtype), device=_device(device))
        self.tokenizer = load_tokenizer(directory)
        self.max_model_len = self._check_length(max_model_len)
        self.eos_ids = self._find_eos_ids()
        self.speculation = None if config is None else self._load_speculation(config)
        self._seeds = random.Random(seed)  # for requests that bring none
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several prompts: strings, token id lists, `{"prompt": ...}` or `{"prompt_token_ids": ...}`."""
        several = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(several)
        if len(sampling_params) != len(several):
            raise ConfigError(f"{len(several)} prompts but {len(sampling_params)} sampling parameters")
        checked = [
            (prompt, self._encode(prompt), params) for prompt, params in zip(several, sampling_params, strict=True)
        ]
        return [_last(self._run(_text_of(prompt), ids, params)) for prompt, ids, params in checked]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one or several conversations, through the tokenizer's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        several: Sequence[Any] = [messages] if single else messages
        return self.generate([self.encode_chat(conversation) for conversation in several], sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Answer one prompt, one event a round. The prompt is checked now, not at the first event."""
        return self._run(_text_of(prompt), self._encode(prompt), sampling_params or SamplingParams())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids a conversation becomes."""
        return encode_chat(self._require_tokenizer("chat messages"), messages)

    def _run(self, text: str | None, prompt_ids: list[int], params: SamplingParams) -> Iterator[StreamEvent]:
        started = time.perf_counter()
        first_token_at: float | None = None
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, params)
        acceptance = AcceptanceStatistics()
        token_ids: list[int] = []
        drafted: list[bool] = []  # for each token
        request_id = str(self._requests)
        self._requests += 1
        rounds = generate(
            self.target,
            prompt_ids,
            params,
            seed=self._seeds.getrandbits(63),
            speculation=self.speculation,
            max_length=self.max_model_len,
            eos_ids=self.eos_ids,
        )
        for done in rounds:
            first_token_at = first_token_at or time.perf_counter()
            acceptance.add(drafted=done.drafted, accepted=done.accepted)
            fresh, stopped = _take(done, stream)
            token_ids += fresh
            drafted += [index < done.accepted for index in range(len(fresh))]
            finished = stopped or done.finish_reason is not None
            pieces = stream.release(finished=finished) if stream is not None else []
            output = None
            if finished:
                rounds.close()
                stop_string = stream.stop_string if stream is not None else None
                reason = "stop" if stopped else done.finish_reason
                completion = CompletionOutput(
                    index=0,
                    text=stream.text if stream is not None else "",
                    token_ids=tuple(token_ids),
                    finish_reason=reason,
                    stop_reason=stop_string or self._stop_id(reason, token_ids),
                )
                output = RequestOutput(
                    request_id=request_id,
                    prompt=text,
                    prompt_token_ids=tuple(prompt_ids),
                    outputs=(completion,),
                    metrics=RequestMetrics(
                        acceptance=acceptance,
                        time_to_first_token=first_token_at - started,
                        seconds=time.perf_counter() - started,
                    ),
                )
            yield StreamEvent(
                pieces=tuple(TextPiece(text=piece, drafted=drafted[index]) for index, piece in pieces),
                token_ids=tuple(fresh),
                output=output,
            )
            if finished:
                return

    def _stop_id(self, reason: str | None, token_ids: list[int]) -> int | None:
        """The stop id that ended the answer; None for the target's own end-of-text, as in vLLM."""
        if reason != "stop" or token_ids[-1] in self.eos_ids:
            return None
        return token_ids[-1]

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt_token_ids"}:
                prompt = prompt["prompt_token_ids"]
            elif keys == {"prompt"}:
                prompt = prompt["prompt"]
            else:
                raise PromptError(
                    f"prompt: found keys {sorted(map(str, keys))}, expected 'prompt' or 'prompt_token_ids'"
                )
        if isinstance(prompt, str):
            ids = [int(token) for token in self._require_tokenizer("a text prompt").encode(prompt)]
        elif isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
            ids = [int(token) for token in prompt]
        else:
            raise PromptError(f"prompt: found {type(prompt).__name__}, expected text or a list of token ids")
        vocab_size = self.target.config.vocab_size
        if not ids:
            raise PromptError("the prompt is empty")
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise PromptError(f"prompt: token id {outside[0]} is outside the vocabulary (0 to {vocab_size - 1})")
        if len(ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but prompt and answer together may have {self.max_model_len}"
            )
        return ids

    def _require_tokenizer(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise PromptError(
                f"{purpose} needs a tokenizer, and the target's directory has none; give token ids instead"
            )
        return self.tokenizer

    def _check_length(self, max_model_len: int | None) -> int:
        limit = self.target.config.max_positions
        if max_model_len is None:
            return limit
        if type(max_model_len) is not int or not 1 < max_model_len <= limit:
            raise ConfigError(
                f"max_model_len: found {max_model_len!r}, allowed is 2 to {limit} (the target's positions)"
            )
        return max_model_len

    def _find_eos_ids(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return tuple(sorted({*self.target.config.eos_ids, *(() if own is None else (own,))}))

    def _load_speculation(self, config: SpeculativeConfig) -> Speculation | None:
        depth = config.depth_at(batch_size=1)
        if depth == 0:
            return None
        drafter = load_drafter(resolve(config.model), self.target)
        _check_method(config, drafter)
        if config.max_model_len is not None:
            limit = min(config.max_model_len, drafter.config.max_positions)
            drafter.config = replace(drafter.config, max_positions=limit)
        tree = None
        if config.tree_width is not None:
            tree = TreeShape(width=config.tree_width, budget=config.tree_budget)
        return Speculation(
            drafter=drafter, depth=depth, tree=tree, sample_drafts=config.draft_sample_method == "probabilistic"
        )


def _take(done: Round, stream: TextStream | None) -> tuple[list[int], bool]:
    """Return the round's tokens up to the one that completes a stop string, and whether one did."""
    if stream is None:
        return list(done.tokens), False
    for count, token in enumerate(done.tokens, start=1):
        if stream.push(token):
            return list(done.tokens[:count]), True
    return list(done.tokens), False


def _last(events: Iterator[StreamEvent]) -> RequestOutput:
    output = None
    for event in events:
        output = event.output
    assert output is not None
    return output


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _check_method(config: SpeculativeConfig, drafter: Drafter) -> None:
    found = "eagle" if drafter.config.architecture is Architecture.EAGLE1 else "eagle3"
    if config.method not in (None, found):
        raise ConfigError(
            f"speculative_config: 'method' is '{config.method}', but {config.model} is a drafter for method '{found}'"
        )


def _dtype(name: str) -> torch.dtype | None:
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise ConfigError(f"dtype: found {name!r}, allowed is auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: found {name!r}, allowed is auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no GPU here")
    return device
