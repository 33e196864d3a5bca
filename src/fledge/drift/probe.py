"""The probe: a workload decoded with real speculation, then every round of it drafted again under observation.

decode    the engine, as it serves                   tokens, and where each round began
replay    the same drafter, recording storages       what each round drafted, and where it looked
judge     drafts against the text                    figures by draft depth
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import tokenizer_digests, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.drift.changes import NotApplicableError, PerturbationContext
from fledge.drift.examples import Answered, worst_examples
from fledge.drift.metrics import DriftSums, prompt_row
from fledge.drift.replay import MAX_SCORES, fusion_parts, replay
from fledge.drift.result import DriftResult, tally_of
from fledge.drift.segments import ProbePrompt, Segment, SegmentedPrompt, segmented
from fledge.drift.workloads import with_earlier_answers
from fledge.engine.llm import LLM
from fledge.engine.outputs import CompletionOutput
from fledge.engine.speculative_config import MAX_DEPTH
from fledge.errors import ConfigError, PromptError
from fledge.files import read_json
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import name_of

PhaseProgress = Callable[[str, int, int], None]  # phase ("decode", "replay"), done, all


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What is drafted and observed."""

    depth: int = 12  # to which drafting is observed; beyond the engine's depth the probe drafts on
    max_tokens: int = 128  # of each answer
    temperature: float = 0.0  # of the target; drafts are the drafter's best tokens, as the engine drafts by default
    seed: int = 0  # for temperatures above 0: prompt i is sampled with seed + i
    sink_tokens: int = 1  # how many first tokens of a sequence count as sink
    max_scores: int = MAX_SCORES  # attention weights that exist at a time
    keep_examples: int = 5  # answers of lowest acceptance to keep in full

    def __post_init__(self) -> None:
        lowest = {"depth": 1, "max_tokens": 1, "sink_tokens": 0, "max_scores": 1, "keep_examples": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ConfigError(f"{name}: found {value!r}, allowed is an integer of at least {low}")


class Prober:
    """A target whose drafters are probed, one after another. `workload` is what results call the prompts."""

    def __init__(self, target: str, *, workload: str, settings: ProbeSettings, **options: Any) -> None:
        """`options` are those of `LLM`. Nothing is loaded before `load`."""
        self.target = target
        self.workload = workload
        self.settings = settings
        self.options = options
        self._drafter = ""
        self._llm: LLM | None = None

    def identity(self, drafter: str) -> Any:
        """JSON values: whatever a result depends on besides prompts."""
        target = resolve(self.target)
        return {
            "target": [self.target, weights_digest(target), tokenizer_digests(target)],
            "drafter": weights_digest(resolve(drafter)),
            "settings": asdict(self.settings),
            "options": {name: str(value) for name, value in sorted(self.options.items())},
        }

    def load(self, drafter: str) -> None:
        """Load a drafter in place of the one before it; the target stays loaded."""
        if self._llm is None:
            self._llm = open_llm(self.target, drafter, depth=self.settings.depth, **self.options)
        elif drafter != self._drafter:
            self._llm.set_speculation(_speculation(drafter, self.settings.depth))
        self._drafter = drafter

    @property
    def llm(self) -> LLM:
        assert self._llm is not None, "no drafter is loaded"
        return self._llm

    @property
    def context(self) -> PerturbationContext:
        return PerturbationContext(
            tokenizer=self.llm.tokenizer,
            max_model_len=min(self.llm.max_model_len, _require_chains(self.llm).config.max_positions),
            answer_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            vocab_size=self.llm.target.config.vocab_size,
        )

    def probe(
        self,
        prompts: Sequence[ProbePrompt],
        *,
        perturbation: str,
        temperature: float | None,
        progress: PhaseProgress,
    ) -> DriftResult:
        """`temperature` None: the run's own. Raises NotApplicableError where memory does not suffice."""
        settings = self.settings if temperature is None else replace(self.settings, temperature=temperature)
        try:
            return probe(
                self.llm,
                prompts,
                settings,
                drafter=self._drafter,
                target=self.target,
                workload=self.workload,
                perturbation=perturbation,
                trained_depth=trained_depth(self._drafter),
                progress=progress,
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise NotApplicableError("the device's memory does not suffice for prompts of this length") from None

    def answer_earlier_turns(self, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
        return with_earlier_answers(prompts, self.llm, self.settings.max_tokens)


def open_llm(target: str | Path, drafter: str | Path, *, depth: int, **options: Any) -> LLM:
    """Load a pair as it is served, drafting `depth` tokens (at most 16). `options` are those of `LLM`."""
    # The replay needs memory of its own, beside the engine's cache.
    options = {"gpu_memory_utilization": 0.6, **options}
    return LLM(target, speculative_config=_speculation(drafter, depth), **options)


def _speculation(drafter: str | Path, depth: int) -> dict[str, Any]:
    return {"model": str(drafter), "num_speculative_tokens": min(depth, MAX_DEPTH)}


def trained_depth(drafter: str | Path) -> int | None:
    """Return the draft steps a drafter was trained on, if a file beside its weights says so."""
    try:
        depth = (read_json(resolve(drafter) / PROVENANCE_FILE) or {})["recipe"]["fit"]["depth"]
    except (KeyError, TypeError):
        return None
    return depth if type(depth) is int else None


def probe(
    llm: LLM,
    prompts: Sequence[ProbePrompt],
    settings: ProbeSettings,
    *,
    drafter: str = "",
    target: str = "",
    workload: str = "",
    perturbation: str | None = None,
    trained_depth: int | None = None,
    progress: PhaseProgress = lambda _phase, _done, _all: None,
) -> DriftResult:
    """Observe how `llm`'s drafter drafts on prompts. The tokens produced are those without a probe.

    The names and the trained depth are only put into the result.
    """
    model = _require_chains(llm)
    encoded = [segmented(prompt, llm.tokenizer) for prompt in prompts]
    answers = _decode(llm, prompts, encoded, settings, progress)
    in_draft = None if model.vocabulary is None else model.vocabulary.in_draft.cpu()
    sums = DriftSums(settings.depth, fusion_parts(model), in_draft)
    answered: list[Answered] = []
    for prompt, read, answer in zip(prompts, encoded, answers, strict=True):
        answered.append(_observe(llm, model, prompt, read, answer, settings, sums))
        progress("replay", len(answered), len(prompts))
    return DriftResult(
        drafter=drafter,
        variant=name_of(model.config),
        target=target,
        workload=workload,
        perturbation=perturbation,
        temperature=settings.temperature,
        trained_depth=trained_depth,
        depth=settings.depth,
        engine_depth=llm.engine.config.max_depth,
        prompts=len(prompts),
        prompt_tokens=sum(len(read.token_ids) for read in encoded),
        output_tokens=sum(len(answer.token_ids) for answer in answers),
        tally=tally_of(sums.acceptance),
        engine_tally=tally_of(sums.engine_acceptance),
        replay_agreement=sums.replay_agreement,
        by_depth=sums.by_depth(),
        fused_rms=sums.fused_rms(),
        fusion_shares=sums.fusion_shares(),
        calibration=sums.calibration(),
        prompt_rows=tuple(one.row for one in answered),
        examples=worst_examples(answered, settings.keep_examples, llm.tokenizer, in_draft),
    )


def _require_chains(llm: LLM) -> Drafter:
    drafter, config = llm.engine.runner.models.drafter, llm.engine.config
    if drafter is None:
        raise ConfigError("the probe observes a drafter, and this LLM has none; give speculative_config")
    if config.tree is not None or config.sample_drafts:
        raise ConfigError(
            "the probe follows chains of a drafter's best tokens; load it without tree_width and without "
            "draft_sample_method 'probabilistic'"
        )
    return drafter


def _decode(
    llm: LLM,
    prompts: Sequence[ProbePrompt],
    encoded: Sequence[SegmentedPrompt],
    settings: ProbeSettings,
    progress: PhaseProgress,
) -> list[CompletionOutput]:
    for prompt, read in zip(prompts, encoded, strict=True):
        if not 0 < len(read.token_ids) < llm.max_model_len:
            raise PromptError(
                f"conversation '{prompt.id}' has {len(read.token_ids)} tokens, allowed are 1 to "
                f"{llm.max_model_len - 1} with this target"
            )
    sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
    outputs = llm.generate(
        [{"prompt_token_ids": list(read.token_ids)} for read in encoded],
        [replace(sampling, seed=settings.seed + i) for i in range(len(encoded))],
        progress=lambda done, total: progress("decode", done, total),
    )
    return [output.outputs[0] for output in outputs]


def _observe(
    llm: LLM,
    drafter: Drafter,
    prompt: ProbePrompt,
    read: SegmentedPrompt,
    answer: CompletionOutput,
    settings: ProbeSettings,
    sums: DriftSums,
) -> Answered:
    """Replay one answer and add it to the sums."""
    tokens = (*read.token_ids, *answer.token_ids)
    found, drafts = None, []
    if answer.rounds:
        segments = [*read.segments, *[Segment.OUTPUT] * len(answer.token_ids)]
        segments[: settings.sink_tokens] = [Segment.SINK] * len(segments[: settings.sink_tokens])
        starts = [record.start for record in answer.rounds]
        sizes = {"depth": settings.depth, "max_scores": settings.max_scores}
        replayed = replay(llm.target, drafter, tokens, segments, starts, **sizes)
        limit = min(llm.max_model_len, drafter.config.max_positions)
        judged, acceptance = sums.add(replayed, tokens, answer.rounds, limit)
        found, drafts = (replayed, judged, acceptance), replayed.drafts.tolist()
    row = prompt_row(
        prompt.id,
        prompt.category,
        prompt_tokens=len(read.token_ids),
        output_tokens=len(answer.token_ids),
        depth=settings.depth,
        found=found,
    )
    return Answered(row=row, prompt=read.token_ids, output=answer.token_ids, records=answer.rounds, drafts=drafts)
