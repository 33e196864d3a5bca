"""The offline API: `LLM(...).generate(prompts, SamplingParams(...))`, under vLLM's names.

It turns text into requests and tokens into text; the engine does the rest.
"""

import gc
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.constraint import ConstraintFactory
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.engine import LLMEngine
from fledge.engine.loader import build_engine, load_engine
from fledge.engine.outputs import RequestMetrics, RequestOutput, StreamEvent
from fledge.engine.protocol import Engine
from fledge.engine.tokenizer import encode_chat
from fledge.errors import ConfigError, FledgeError, PromptError
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A target, with or without a drafter, ready to answer. Its engine is ours, or any other: see `from_engine`."""

    engine: Engine
    tokenizer: Any | None

    def __init__(self, model: str | Path, **options: Any) -> None:
        config = EngineConfig(**options)
        engine, tokenizer = load_engine(model, config)
        self._set_up(engine, tokenizer, config.seed)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Any | None = None, *, seed: int = 0) -> "LLM":
        """Answer with an engine that is there already."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer, seed)
        return llm

    def _set_up(self, engine: Engine, tokenizer: Any | None, seed: int) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_model_len = engine.info.max_model_len
        self.eos_ids = engine.info.eos_ids
        self._seeds = random.Random(seed)  # for requests that bring none
        self._requests = 0
        self._answers: dict[str, Detokenizer] = {}  # by request

    @property
    def target(self) -> TargetModel:
        """The loaded target, for those who look inside."""
        return self._own_engine.target

    @property
    def drafter(self) -> Drafter | None:
        """The loaded drafter, if there is one."""
        return self._own_engine.drafter

    @property
    def config(self) -> EngineConfig:
        return self._own_engine.config

    @property
    def _own_engine(self) -> LLMEngine:
        if not isinstance(self.engine, LLMEngine):
            raise ConfigError("this looks at the models themselves, which only Fledge's own engine has")
        return self.engine

    def set_speculation(self, speculative_config: Mapping[str, Any] | SpeculativeConfig | None) -> None:
        """Exchange drafter and depth, or do without (None); the target stays loaded. No request may be running.

        The engine is built anew, so caches, graphs and statistics begin afresh. Where a drafter is refused, the target
        goes on alone.
        """
        assert not self._answers, "drafters are exchanged between requests"
        speculation = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        target, config, model = self.target, self.config, self.engine.info.model
        del self.engine  # first: it holds most of a GPU's memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        alone = replace(config, speculative_config=None)
        try:
            wanted = replace(alone, speculative_config=speculation)
            self.engine = build_engine(target, self.tokenizer, wanted, model=model)
        except FledgeError:
            self.engine = build_engine(target, self.tokenizer, alone, model=model)
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        constraint: ConstraintFactory | Sequence[ConstraintFactory | None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several prompts together, in continuous batches.

        A prompt is a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`. `constraint`, one
        for all prompts or one for each, is called once for each answer (`fledge.server.structured` makes such from
        schemas and grammars). `progress` is called with the number of finished and of all prompts.
        """
        several = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(several)
        if len(sampling_params) != len(several):
            raise ConfigError(f"{len(several)} prompts but {len(sampling_params)} sampling parameters")
        if constraint is None or not isinstance(constraint, Sequence):
            constraint = [constraint] * len(several)
        if len(constraint) != len(several):
            raise ConfigError(f"{len(several)} prompts but {len(constraint)} constraints")
        # All prompts are encoded and submitted, and so checked, before the first one runs.
        encoded = [self._encode(prompt) for prompt in several]
        outputs: list[RequestOutput | None] = [None] * len(several)
        waiting: dict[int, _Job] = {}
        try:
            for prompt, ids, params, made in zip(several, encoded, sampling_params, constraint, strict=True):
                waiting[len(waiting)] = self._submit(_text_of(prompt), ids, params, made)
            while waiting:
                self._advance()
                for number in [number for number, job in waiting.items() if job.is_finished]:
                    job = waiting.pop(number)
                    outputs[number] = job.output()
                    self._forget([job])
                    if progress is not None:
                        progress(len(several) - len(waiting), len(several))
        finally:
            self._forget(waiting.values())
        return [output for output in outputs if output is not None]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one or several conversations, through the tokenizer's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        several: Sequence[Any] = [messages] if single else messages
        return self.generate([self.encode_chat(conversation) for conversation in several], sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Answer one prompt, one event a round. The prompt is checked now, not at the first event."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"n: found {params.n}, but only one answer can be streamed at a time")
        ids = self._encode(prompt)
        self.engine.info.check_request(ids, params)
        return self._stream(_text_of(prompt), ids, params)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids a conversation becomes."""
        return encode_chat(self._require_tokenizer("chat messages"), messages)

    def _stream(self, text: str | None, prompt_ids: list[int], params: SamplingParams) -> Iterator[StreamEvent]:
        job = self._submit(text, prompt_ids, params)
        (answer,) = job.answers.values()
        sent, output = 0, None
        try:
            while output is None:
                if not job.is_finished and len(answer.token_ids) == sent:  # another stream may have stepped for us
                    self._advance()
                fresh = tuple(answer.token_ids[sent:])
                sent += len(fresh)
                output = job.output() if job.is_finished else None
                if fresh or output is not None:
                    yield StreamEvent(pieces=answer.release(), token_ids=fresh, output=output)
        finally:
            self._forget([job])

    def _submit(
        self,
        text: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        constraint: ConstraintFactory | None = None,
    ) -> "_Job":
        number = self._requests
        self._requests += 1
        drawn = self._seeds.getrandbits(63)
        answers = {}
        for index in range(params.n):
            # Answers to one prompt must differ, and still follow from the seed.
            seed = next_int64(drawn if params.seed is None else params.seed, index)
            request_id = f"{number}-{index}"
            self.engine.add_request(
                request_id,
                prompt_ids,
                replace(params, seed=None, n=1),
                seed=seed,
                eos_ids=self.eos_ids,
                constraint=None if constraint is None else constraint(),
            )
            answers[request_id] = self._answers[request_id] = Detokenizer(self.tokenizer, params, self.eos_ids)
        return _Job(str(number), text, tuple(prompt_ids), answers)

    def _advance(self) -> None:
        """One step of the engine, for all answers in the making."""
        for update in self.engine.step():
            answer = self._answers[update.request_id]
            if answer.add(update):
                last = self.engine.abort(update.request_id, reason="stop")
                assert last is not None
                answer.add(last)

    def _forget(self, jobs: Iterable["_Job"]) -> None:
        """Drop jobs, finished or not (an exception, or a stream that nobody reads to its end)."""
        for job in jobs:
            for request_id in job.answers:
                self.engine.abort(request_id)
                self._answers.pop(request_id, None)

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
        return ids

    def _require_tokenizer(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise PromptError(
                f"{purpose} needs a tokenizer, and the target's directory has none; give token ids instead"
            )
        return self.tokenizer


class _Job:
    """A prompt and the answers to it that are in the making."""

    def __init__(
        self, number: str, text: str | None, prompt_ids: tuple[int, ...], answers: dict[str, Detokenizer]
    ) -> None:
        self.number = number
        self.text = text
        self.prompt_ids = prompt_ids
        self.answers = answers

    @property
    def is_finished(self) -> bool:
        return all(answer.is_finished for answer in self.answers.values())

    def output(self) -> RequestOutput:
        metrics = [answer.metrics for answer in self.answers.values() if answer.metrics is not None]
        return RequestOutput(
            request_id=self.number,
            prompt=self.text,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(answer.completion(i) for i, answer in enumerate(self.answers.values())),
            metrics=RequestMetrics.pooled(metrics),
        )


def next_int64(seed: int, index: int) -> int:
    """Return seed + index, from the largest int64 on to the smallest."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _describe_options() -> None:
    """Give `LLM(model, **options)` the signature and the docstring that its options have in `EngineConfig`."""
    own = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields(EngineConfig)
    ]
    parameters = list(inspect.signature(LLM.__init__).parameters.values())[:-1]
    setattr(LLM.__init__, "__signature__", inspect.Signature([*parameters, *own]))  # noqa: B010 - mypy knows no such name
    told = "\n".join(f"    {one.name}: {one.metadata['help']}" for one in fields(EngineConfig))
    LLM.__init__.__doc__ = f"Load `model`, a directory or a hub name. Options, by vLLM's names:\n\n{told}\n"


_describe_options()
