"""The offline API: `LLM(...).generate(prompts, SamplingParams(...))`, under vLLM's names.

It turns text into requests and tokens into text; the engine does the rest.
"""

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.devices import choose_device, choose_dtype
from fledge.engine.answer import Answer
from fledge.engine.constraint import ConstraintFactory
from fledge.engine.engine import Engine
from fledge.engine.outputs import RequestMetrics, RequestOutput, StreamEvent
from fledge.engine.sizing import EngineConfig
from fledge.engine.speculative_config import SpeculativeConfig
from fledge.engine.text_stream import TextStream
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.errors import ConfigError, FledgeError, PromptError, refuses_unknown_names
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The part of `EngineConfig` that users set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    enforce_eager: bool
    gpu_memory_utilization: float
    kv_cache_bytes: int | None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}: found {value!r}, allowed is an integer of at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization: found {self.gpu_memory_utilization!r}, allowed is above 0, up to 1"
            )


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
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        gpu_memory_utilization: float = 0.9,
        kv_cache_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        """Load the models. `dtype` "auto" is the dtype the target is stored in, on a CPU float32: CPUs compute
        16-bit numbers more slowly. The drafter follows the target.

        The other names are vLLM's; `kv_cache_bytes` sizes the KV cache directly, on a GPU or a CPU.
        """
        config = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        directory = resolve(model)
        place = choose_device(device)
        precision = choose_dtype(dtype) or (torch.float32 if place.type == "cpu" else None)
        self.target = load_target(directory, dtype=precision, device=place)
        self.tokenizer = load_tokenizer(directory)
        self.max_model_len = self._check_length(max_model_len)
        self.eos_ids = self._find_eos_ids()
        self._options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_bytes=kv_cache_bytes,
        )
        self.engine = self._build_engine(config, None if config is None else self._load_drafter(config))
        _warm_up(self.engine)
        self._seeds = random.Random(seed)  # for requests that bring none
        self._requests = 0
        self._answers: dict[str, Answer] = {}

    def set_speculation(self, speculative_config: Mapping[str, Any] | SpeculativeConfig | None) -> None:
        """Exchange drafter and depth, or do without (None); the target stays loaded. No request may be running.

        The engine is built anew, so caches, graphs and statistics begin afresh. Where a drafter is refused, the target
        goes on alone.
        """
        assert not self._answers, "drafters are exchanged between requests"
        config = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        vars(self).pop("engine", None)  # first: it holds most of a GPU's memory. There is none if a build failed before
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            drafter = None if config is None else self._load_drafter(config)
        except FledgeError:
            self.engine = self._build_engine(None, None)
            _warm_up(self.engine)
            raise
        self.engine = self._build_engine(config, drafter)
        _warm_up(self.engine)

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
                    outputs[number] = job.output(self.eos_ids)
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
        self.engine.check_request(ids, params)
        return self._stream(_text_of(prompt), ids, params)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids a conversation becomes."""
        return encode_chat(self._require_tokenizer("chat messages"), messages)

    def _stream(self, text: str | None, prompt_ids: list[int], params: SamplingParams) -> Iterator[StreamEvent]:
        job = self._submit(text, prompt_ids, params)
        (answer,) = job.answers
        sent, output = 0, None
        try:
            while output is None:
                if not job.is_finished and len(answer.token_ids) == sent:  # another stream may have stepped for us
                    self._advance()
                fresh = tuple(answer.token_ids[sent:])
                sent += len(fresh)
                output = job.output(self.eos_ids) if job.is_finished else None
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
        answers = []
        for index in range(params.n):
            # Answers to one prompt must differ, and still follow from the seed.
            seed = next_int64(drawn if params.seed is None else params.seed, index)
            request = self.engine.add_request(
                f"{number}-{index}",
                prompt_ids,
                replace(params, seed=None, n=1),
                seed=seed,
                eos_ids=self.eos_ids,
                constraint=None if constraint is None else constraint(),
            )
            stream = None if self.tokenizer is None else TextStream(self.tokenizer, params)
            answers.append(Answer(request, stream, index))
            self._answers[request.id] = answers[-1]
        return _Job(str(number), text, tuple(prompt_ids), answers)

    def _advance(self) -> None:
        """One step of the engine, for all answers in the making."""
        for update in self.engine.step():
            answer = self._answers[update.request.id]
            answer.take(update)
            if answer.stopped_by_string and answer.request.finish_reason is None:
                self.engine.abort(answer.request.id, reason="stop")

    def _forget(self, jobs: Iterable["_Job"]) -> None:
        """Drop jobs, finished or not (an exception, or a stream that nobody reads to its end)."""
        for job in jobs:
            for answer in job.answers:
                self.engine.abort(answer.request.id)
                self._answers.pop(answer.request.id, None)

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

    def _load_drafter(self, config: SpeculativeConfig) -> Drafter:
        drafter = load_drafter(resolve(config.model), self.target)
        found = "eagle" if drafter.config.architecture is Architecture.EAGLE1 else "eagle3"
        if config.method not in (None, found):
            raise ConfigError(
                f"speculative_config: 'method' is '{config.method}', but {config.model} is a drafter "
                f"for method '{found}'"
            )
        if config.max_model_len is not None:
            limit = min(config.max_model_len, drafter.config.max_positions)
            drafter.config = replace(drafter.config, max_positions=limit)
        return drafter

    def _build_engine(self, config: SpeculativeConfig | None, drafter: Drafter | None) -> Engine:
        options = asdict(self._options)
        if config is None:
            return Engine(self.target, None, EngineConfig(max_model_len=self.max_model_len, **options))
        engine_config = EngineConfig(
            max_model_len=self.max_model_len,
            **options,
            max_depth=config.max_depth,
            tree=None if config.tree_width is None else TreeShape(width=config.tree_width, budget=config.tree_budget),
            sample_drafts=config.draft_sample_method == "probabilistic",
        )
        return Engine(self.target, drafter, engine_config, config.depth_at)


class _Job:
    """A prompt and the answers to it that are in the making."""

    def __init__(self, number: str, text: str | None, prompt_ids: tuple[int, ...], answers: list[Answer]) -> None:
        self.number = number
        self.text = text
        self.prompt_ids = prompt_ids
        self.answers = answers

    @property
    def is_finished(self) -> bool:
        return all(answer.is_finished for answer in self.answers)

    def output(self, eos_ids: tuple[int, ...]) -> RequestOutput:
        return RequestOutput(
            request_id=self.number,
            prompt=self.text,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(answer.completion(eos_ids) for answer in self.answers),
            metrics=RequestMetrics.pooled([answer.metrics() for answer in self.answers]),
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


def _warm_up(engine: Engine) -> None:
    """Capture the engine's graphs, with a progress bar on standard error."""
    if engine.runner.graphs is None:
        return
    from rich.console import Console  # noqa: PLC0415 - only GPU machines have graphs to capture
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("capturing CUDA graphs", total=None)
        engine.warm_up(lambda done, total: bar.update(task, completed=done, total=total))
