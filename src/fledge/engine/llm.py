"""The offline API, with vLLM's names: `LLM(...).generate(prompts, SamplingParams(...))`.

Loads models and converts between text and tokens; everything else is done by the engine.
"""

import gc
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch

from fledge.checkpoints.source import resolve
from fledge.decoding.params import SamplingParams
from fledge.engine.choosing import own_config
from fledge.engine.config import EngineConfig, SpeculativeConfig, sampling_defaults
from fledge.engine.constraint import ConstraintFactory, with_token_rules
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.engine import LLMEngine
from fledge.engine.loading import begin_device, build_engine, load_own_target
from fledge.engine.outputs import RequestMetrics, RequestOutput, StreamEvent
from fledge.engine.protocol import Engine
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.engine.vllm_engine import VllmEngine, open_vllm
from fledge.errors import ConfigError, FledgeError, NeedsVllmError, PromptError
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.progress import Progress

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A target, with or without a drafter, for offline inference. Its engine is ours or another (`from_engine`)."""

    def __init__(
        self, model: str | Path, *, engine: str = "fledge", vllm_python: str | None = None, **options: Any
    ) -> None:
        try:
            config = own_config(model, engine, options)
        except NeedsVllmError as error:
            raise ConfigError(f"{error}: LLM(..., engine='vllm')") from None
        if config is None:
            directory = resolve(model, weights=False)
            tokenizer = load_tokenizer(directory)
            vllm = open_vllm(model, vllm_python, tokenizer, options)
            self._set_up(vllm, tokenizer, options.get("seed") or 0, directory)
            return
        directory = resolve(model)
        begin_device(config.device)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:  # in parallel to reading the weights
            pending = pool.submit(load_tokenizer, directory)
            target = load_own_target(directory, config)
            tokenizer = pending.result()
        built = build_engine(target, tokenizer, config, model=str(model), directory=directory)
        self._set_up(built, tokenizer, config.seed, directory)

    def close(self) -> None:
        """End the engine's process, if it has one. It also ends with this process."""
        if isinstance(self.engine, VllmEngine):
            self.engine.close()

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Any | None = None, *, seed: int = 0) -> "LLM":
        """Use an existing engine."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer, seed)
        return llm

    def _set_up(self, engine: Engine, tokenizer: Any | None, seed: int, directory: Path | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._directory = directory  # of the target
        self.max_model_len = engine.info.max_model_len
        self.eos_ids = engine.info.eos_ids
        self._seeds = random.Random(seed)  # for requests without a seed
        self._requests = 0
        self._answers: dict[str, Detokenizer] = {}  # by id of the engine's request
        self._grammars: Any = None  # compiler of structured outputs, created when needed

    @property
    def target(self) -> TargetModel:
        return self._own_engine.target

    @property
    def drafter(self) -> Drafter | None:
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
        """Change drafter and depth, or disable speculation (None); the target stays loaded. No request may be running.

        The engine is rebuilt: caches, graphs and statistics are reset. If the drafter is refused, the error is raised
        and the target continues without speculation.
        """
        assert not self._answers, "drafters are exchanged between requests"
        speculation = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        if isinstance(self.engine, VllmEngine):  # starts vLLM again
            self.engine = self.engine.with_speculation(None if speculation is None else speculation.to_dict())
            return
        target, config, model = self.target, self.config, self.engine.info.model
        del self.engine  # first: it holds most of a GPU's memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        alone = replace(config, speculative_config=None)
        try:
            wanted = replace(alone, speculative_config=speculation)
            self.engine = build_engine(target, self.tokenizer, wanted, model=model, directory=self._directory)
        except FledgeError:
            self.engine = build_engine(target, self.tokenizer, alone, model=model)
            raise

    def swap_drafter(self, model: str | Path) -> None:
        """Exchange the drafter; the depth stays. Requests may be running: their answers do not change.

        Raises FledgeError if it does not fit the target or the memory; the old drafter is kept then.
        """
        self.engine.exchange_drafter(self.engine.prepare_drafter(str(model)))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        constraint: ConstraintFactory | Sequence[ConstraintFactory | None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several prompts with continuous batching.

        prompts: each a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`
        sampling_params: for all prompts, or a list; default: the model's (`get_default_sampling_params`)
        use_tqdm: show a progress bar on standard error
        constraint: called once for each answer, instead of `structured_outputs`; for all prompts, or a list
        progress: called with the number of finished and of all prompts
        priority: lower is earlier, with the scheduling policy "priority"; for all prompts, or a list
        """
        single = isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int))
        several: list[Any] = [prompts] if single else list(prompts)
        params = _for_each(several, sampling_params or self.get_default_sampling_params(), "sampling parameters")
        constraints = _for_each(several, constraint, "constraints")
        priorities = _for_each(several, priority or 0, "priorities")
        # All prompts are encoded and submitted, so checked, before the first one runs.
        encoded = [self.encode(prompt) for prompt in several]
        outputs: dict[int, RequestOutput] = {}
        waiting: dict[int, Job] = {}
        with Progress(quiet=not use_tqdm).task("prompts", len(several)) as advance_bar:
            try:
                for (text, ids), one, factory, rank in zip(encoded, params, constraints, priorities, strict=True):
                    waiting[len(waiting)] = self.submit(text, ids, one, factory, priority=rank)
                while waiting:
                    self.advance()
                    for number in [number for number, job in waiting.items() if job.is_finished]:
                        job = waiting.pop(number)
                        outputs[number] = job.output()
                        self.forget([job])
                        advance_bar()
                        if progress is not None:
                            progress(len(several) - len(waiting), len(several))
            finally:
                self.forget(waiting.values())
        return [outputs[number] for number in range(len(several))]

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        stream: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> Iterator[StreamEvent]: ...

    def chat(
        self, messages: Any, sampling_params: Any = None, *, use_tqdm: bool = False, stream: bool = False
    ) -> list[RequestOutput] | Iterator[StreamEvent]:
        """Answer one or several conversations, with the tokenizer's chat template.

        `stream`: for one conversation, return the events of `LLM.stream`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        if stream and not single:
            raise ConfigError("stream: only one conversation can be streamed at a time, as a list of messages")
        encoded = [self.encode_chat(conversation) for conversation in ([messages] if single else messages)]
        if stream:
            return self.stream(encoded[0], sampling_params)
        return self.generate(encoded, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Answer one prompt, with an event for each round. The prompt is checked now, not at the first event."""
        params = sampling_params or self.get_default_sampling_params()
        if params.n != 1:
            raise ConfigError(f"n: found {params.n}, but only one answer can be streamed at a time")
        text, ids = self.encode(prompt)
        self.engine.info.check_request(ids, params)
        return self._stream(text, ids, params)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests without any: those of the target's generation_config.json."""
        return SamplingParams.from_dict({} if self._directory is None else sampling_defaults(self._directory))

    def get_tokenizer(self) -> Any:
        """Return the target's tokenizer (transformers); None if its directory has none."""
        return self.tokenizer

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation."""
        return encode_chat(self._require_tokenizer("chat messages"), messages)

    def _stream(self, text: str | None, prompt_ids: list[int], params: SamplingParams) -> Iterator[StreamEvent]:
        job = self.submit(text, prompt_ids, params)
        (answer,) = job.answers.values()
        sent, output = 0, None
        try:
            while output is None:
                if not job.is_finished and len(answer.token_ids) == sent:  # another stream may have stepped for us
                    self.advance()
                fresh = tuple(answer.token_ids[sent:])
                sent += len(fresh)
                output = job.output() if job.is_finished else None
                if fresh or output is not None:
                    yield StreamEvent(pieces=answer.release(), token_ids=fresh, output=output)
        finally:
            self.forget([job])

    def submit(
        self,
        text: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        constraint: ConstraintFactory | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> "Job":
        """Queue a prompt. The caller calls `advance` until the job is finished, and then `forget`."""
        self.engine.info.check_request(prompt_ids, params)
        if constraint is None and params.structured_outputs is not None:
            constraint = self._compile(params.structured_outputs)
        job = Job(request_id or str(self._requests), text, prompt_ids, {})
        self._requests += 1
        default_seed, vocab_size = self._seeds.getrandbits(63), self.engine.info.vocab_size
        for index in range(params.n):
            engine_id = f"{job.request_id}-{index}"
            self.engine.add_request(
                engine_id,
                prompt_ids,
                replace(params, n=1),
                # Answers to one prompt must differ, and be determined by the seed.
                seed=next_int64(default_seed if params.seed is None else params.seed, index),
                eos_ids=self.eos_ids,
                constraint=with_token_rules(constraint and constraint(), params, self.tokenizer, vocab_size),
                parent=job.request_id,
                priority=priority,
            )
            answer = Detokenizer(self.tokenizer, params, self.eos_ids, prompt_ids)
            job.answers[engine_id] = self._answers[engine_id] = answer
        return job

    def advance(self) -> None:
        """Run one step of the engine, for all unfinished answers."""
        for update in self.engine.step():
            answer = self._answers[update.request_id]
            if answer.add(update):
                last = self.engine.abort(update.request_id, reason="stop")
                assert last is not None
                answer.add(last)

    def forget(self, jobs: Iterable["Job"]) -> None:
        """Remove jobs; unfinished ones are aborted."""
        for job in jobs:
            for request_id in job.answers:
                self.engine.abort(request_id)
                self._answers.pop(request_id, None)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return a prompt's text (None if it was given as token ids) and its token ids."""
        if isinstance(prompt, Mapping):
            if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
                keys = sorted(map(str, prompt))
                raise PromptError(f"prompt: found keys {keys}, expected 'prompt' or 'prompt_token_ids'")
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            return prompt, [int(token) for token in self._require_tokenizer("a text prompt").encode(prompt)]
        if (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, bytes)
            and all(type(token) is int for token in prompt)
        ):
            return None, [int(token) for token in prompt]
        raise PromptError(f"prompt: found {type(prompt).__name__}, expected text or a list of token ids")

    def _compile(self, structured_outputs: Any) -> ConstraintFactory:
        tokenizer = self._require_tokenizer("structured output")
        try:
            from fledge.server.structured import GrammarCompiler, read_format  # noqa: PLC0415 - needs llguidance
        except ImportError as error:
            raise ConfigError(f"structured_outputs: needs {error.name}; pip install 'fledge[server]'") from None
        try:
            info = self.engine.info
            compiler = self._grammars or GrammarCompiler(tokenizer, vocab_size=info.vocab_size, eos_ids=info.eos_ids)
            self._grammars = compiler
            grammar = read_format(structured_outputs=structured_outputs)
            assert grammar is not None
            return compiler.compile(grammar)
        except FledgeError as error:
            raise ConfigError(str(error), param="structured_outputs") from None

    def _require_tokenizer(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise PromptError(
                f"{purpose} needs a tokenizer, which the target's directory lacks; give token ids instead"
            )
        return self.tokenizer


class Job(NamedTuple):
    """A prompt and its answers, while they are generated."""

    request_id: str
    text: str | None
    prompt_ids: list[int]
    answers: dict[str, Detokenizer]  # by the engine's requests

    @property
    def is_finished(self) -> bool:
        return all(answer.is_finished for answer in self.answers.values())

    def output(self) -> RequestOutput:
        answers = list(self.answers.values())
        prompt_logprobs = answers[0].prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=tuple(self.prompt_ids),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            outputs=tuple(answer.completion(i) for i, answer in enumerate(answers)),
            metrics=RequestMetrics.pooled([answer.metrics for answer in answers if answer.metrics is not None]),
            finished=self.is_finished,
        )


def next_int64(seed: int, index: int) -> int:
    """Return seed + index, wrapped to int64."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _for_each(prompts: Sequence[Any], given: Any, what: str) -> Sequence[Any]:
    """Return one value for each prompt; `given` is a list of them, or one for all."""
    each: Sequence[Any] = given if isinstance(given, Sequence) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts but {len(each)} {what}")
    return each


def _describe_options() -> None:
    """Set signature and docstring of `LLM(model, **options)` from the fields of `EngineConfig`."""
    own = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields(EngineConfig)
    ]
    parameters = list(inspect.signature(LLM.__init__).parameters.values())[:-1]
    setattr(LLM.__init__, "__signature__", inspect.Signature([*parameters, *own]))  # noqa: B010 - mypy knows no such name
    helps = {
        "model": "A directory or a hub name.",
        "engine": "fledge, vllm (in a process of its own, with all its options) or auto (ours where it can).",
        "vllm_python": "Python that has vLLM; or FLEDGE_VLLM_PYTHON. This one if left out.",
        **{one.name: one.metadata["help"] for one in fields(EngineConfig)},
    }
    helps["speculative_config"] += f" Its keys: {', '.join(one.name for one in fields(SpeculativeConfig))}."
    listed = "\n".join(f"    {name}: {text}" for name, text in helps.items())
    LLM.__init__.__doc__ = f"Load a target. Parameters, by vLLM's names:\n\n{listed}\n"


_describe_options()
