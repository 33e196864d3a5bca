"""The engine behind a suite: loads a target with one drafter after another and probes them."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import tokenizer_digests, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.drift.perturb_messages import NotApplicableError, PerturbationContext
from fledge.drift.probe import ProbeNames, ProbeSettings, open_llm, probe, trained_depth
from fledge.drift.result import DriftResult
from fledge.drift.segments import Conversation, Message
from fledge.drift.suite import ProbeProgress
from fledge.engine.llm import LLM


@dataclass(frozen=True, kw_only=True)
class EngineLaboratory:
    """A target and how it is probed. `options` are those of `LLM`."""

    target: str
    workload: str
    settings: ProbeSettings
    engine_depth: int | None = None  # to which the engine drafts; None: as deep as the probe
    options: Mapping[str, Any] = field(default_factory=dict)

    def identity(self, drafter: str) -> Any:
        target = resolve(self.target)
        return {
            "target": [self.target, weights_digest(target), tokenizer_digests(target)],
            "drafter": weights_digest(resolve(drafter)),
            "settings": asdict(self.settings),
            "engine_depth": self.engine_depth,
            "options": {name: str(value) for name, value in sorted(self.options.items())},
        }

    @contextmanager
    def open(self, drafter: str) -> Iterator["EngineProbe"]:
        llm = open_llm(self.target, drafter, depth=self.engine_depth or self.settings.depth, **self.options)
        names = ProbeNames(
            drafter=drafter, target=self.target, workload=self.workload, trained_depth=trained_depth(drafter)
        )
        opened = EngineProbe(llm, self.settings, names)
        try:
            yield opened
        finally:
            opened.close()
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


class EngineProbe:
    """One loaded drafter."""

    def __init__(self, llm: LLM, settings: ProbeSettings, names: ProbeNames) -> None:
        self._llm: LLM | None = llm
        self._settings = settings
        self._names = names

    @property
    def context(self) -> PerturbationContext:
        llm = self._loaded
        drafter = llm.drafter
        positions = llm.max_model_len if drafter is None else min(llm.max_model_len, drafter.config.max_positions)
        return PerturbationContext(
            tokenizer=llm.tokenizer,
            max_model_len=positions,
            answer_tokens=self._settings.max_tokens,
            seed=self._settings.seed,
            vocab_size=llm.target.config.vocab_size,
        )

    def probe(
        self,
        conversations: Sequence[Conversation],
        *,
        perturbation: str,
        temperature: float | None,
        progress: ProbeProgress,
    ) -> DriftResult:
        settings = self._settings if temperature is None else replace(self._settings, temperature=temperature)
        try:
            return probe(
                self._loaded,
                conversations,
                settings,
                names=replace(self._names, perturbation=perturbation),
                progress=progress,
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise NotApplicableError("the device's memory does not suffice for prompts of this length") from None

    def answer(self, conversations: list[tuple[Message, ...]]) -> list[str]:
        """The target's answers, without randomness. What leaves no room for an answer gets none."""
        llm, room = self._loaded, self._settings.max_tokens
        prompts = [llm.encode_chat(messages) for messages in conversations]
        fitting = [i for i, ids in enumerate(prompts) if len(ids) + room <= llm.max_model_len]
        outputs = llm.generate(
            [prompts[i] for i in fitting], SamplingParams(temperature=0.0, max_tokens=self._settings.max_tokens)
        )
        texts = {i: output.outputs[0].text or "" for i, output in zip(fitting, outputs, strict=True)}
        return [texts.get(i, "") for i in range(len(prompts))]

    def close(self) -> None:
        """Let go of the models."""
        self._llm = None

    @property
    def _loaded(self) -> LLM:
        assert self._llm is not None, "this probe is closed"
        return self._llm
