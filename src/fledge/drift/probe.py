"""The probe: a workload decoded with real speculation, then every round of it drafted again under observation.

decode    the engine, as it serves                   tokens, and where each round began
replay    the same drafter, recording storages       what each round drafted, and where it looked
judge     drafts against the text                    figures by draft depth
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.decoding.params import SamplingParams
from fledge.drift.examples import Answered, worst_examples
from fledge.drift.metrics import DriftSums, prompt_row
from fledge.drift.recording import MAX_SCORES
from fledge.drift.replay import ReplaySettings, fusion_parts, replay
from fledge.drift.result import DriftResult, tally_of
from fledge.drift.segments import Conversation, Segment, SegmentedPrompt, segmented
from fledge.engine.config import MAX_DEPTH
from fledge.engine.llm import LLM
from fledge.engine.outputs import CompletionOutput
from fledge.errors import ConfigError, PromptError
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import name_of

Progress = Callable[[str, int, int], None]  # phase ("decode", "replay"), done, all


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What is drafted and observed."""

    depth: int = 12  # to which drafting is observed; beyond the engine's depth the probe drafts on
    max_tokens: int = 128  # of each answer
    temperature: float = 0.0  # of the target; drafts are the drafter's best tokens, as the engine drafts by default
    seed: int = 0  # for temperatures above 0: prompt i is sampled with seed + i
    sink_tokens: int = 1  # how many first tokens of a sequence count as sink
    chunk_rounds: int = 256  # rounds that draft together
    max_scores: int = MAX_SCORES  # attention weights that exist at a time
    keep_examples: int = 5  # answers of lowest acceptance to keep in full

    def __post_init__(self) -> None:
        for name, low in (
            ("depth", 1),
            ("max_tokens", 1),
            ("sink_tokens", 0),
            ("chunk_rounds", 1),
            ("max_scores", 1),
            ("keep_examples", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ConfigError(f"{name}: found {value!r}, allowed is an integer of at least {low}")

    @property
    def replay(self) -> ReplaySettings:
        return ReplaySettings(depth=self.depth, chunk_rounds=self.chunk_rounds, max_scores=self.max_scores)


@dataclass(frozen=True, kw_only=True)
class ProbeNames:
    """What the result calls things."""

    drafter: str = ""
    target: str = ""
    workload: str = ""
    perturbation: str | None = None
    trained_depth: int | None = None


def open_llm(target: str | Path, drafter: str | Path, *, depth: int, **options: Any) -> LLM:
    """Load a pair as it is served, drafting `depth` tokens (at most 16). `options` are those of `LLM`."""
    speculation = {"model": str(drafter), "num_speculative_tokens": min(depth, MAX_DEPTH)}
    # The replay needs memory of its own, beside the engine's cache.
    return LLM(target, speculative_config=speculation, **{"gpu_memory_utilization": 0.6, **options})


def trained_depth(drafter: str | Path) -> int | None:
    """Return the draft steps a drafter was trained on, if a file beside its weights says so."""
    try:
        provenance = json.loads((resolve(drafter) / PROVENANCE_FILE).read_text())
        depth = provenance["recipe"]["fit"]["depth"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return depth if type(depth) is int else None


def probe(
    llm: LLM,
    conversations: Sequence[Conversation],
    settings: ProbeSettings | None = None,
    *,
    names: ProbeNames | None = None,
    progress: Progress = lambda _phase, _done, _all: None,
) -> DriftResult:
    """Observe how `llm`'s drafter drafts on a workload. The tokens produced are those without a probe."""
    settings, names = settings or ProbeSettings(), names or ProbeNames()
    drafter = _require_chains(llm)
    prompts = [segmented(conversation, llm.tokenizer) for conversation in conversations]
    answers = _decode(llm, conversations, prompts, settings, progress)
    in_draft = None if drafter.vocabulary is None else drafter.vocabulary.in_draft.cpu()
    sums = DriftSums(settings.depth, fusion_parts(drafter), in_draft)
    answered: list[Answered] = []
    for conversation, prompt, answer in zip(conversations, prompts, answers, strict=True):
        answered.append(_observe(llm, drafter, conversation, prompt, answer, settings, sums))
        progress("replay", len(answered), len(prompts))
    return DriftResult(
        drafter=names.drafter,
        variant=name_of(drafter.config),
        target=names.target,
        workload=names.workload,
        perturbation=names.perturbation,
        temperature=settings.temperature,
        trained_depth=names.trained_depth,
        depth=settings.depth,
        engine_depth=llm.config.max_depth,
        prompts=len(prompts),
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
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
    drafter, config = llm.drafter, llm.config
    if drafter is None:
        raise ConfigError("the probe observes a drafter, and this LLM has none; give speculative_config")
    if config.drafts_trees or config.sample_drafts:
        raise ConfigError(
            "the probe follows chains of a drafter's best tokens; load it without tree_width and without "
            "draft_sample_method 'probabilistic'"
        )
    return drafter


def _decode(
    llm: LLM,
    conversations: Sequence[Conversation],
    prompts: Sequence[SegmentedPrompt],
    settings: ProbeSettings,
    progress: Progress,
) -> list[CompletionOutput]:
    for conversation, prompt in zip(conversations, prompts, strict=True):
        if not 0 < len(prompt.token_ids) < llm.max_model_len:
            raise PromptError(
                f"conversation '{conversation.id}' has {len(prompt.token_ids)} tokens, allowed are 1 to "
                f"{llm.max_model_len - 1} with this target"
            )
    sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts],
        [replace(sampling, seed=settings.seed + i) for i in range(len(prompts))],
        progress=lambda done, total: progress("decode", done, total),
    )
    return [output.outputs[0] for output in outputs]


def _observe(
    llm: LLM,
    drafter: Drafter,
    conversation: Conversation,
    prompt: SegmentedPrompt,
    answer: CompletionOutput,
    settings: ProbeSettings,
    sums: DriftSums,
) -> Answered:
    """Replay one answer and add it to the sums."""
    tokens = (*prompt.token_ids, *answer.token_ids)
    found, drafts = None, []
    if answer.rounds:
        segments = [*prompt.segments, *[Segment.OUTPUT] * len(answer.token_ids)]
        segments[: settings.sink_tokens] = [Segment.SINK] * len(segments[: settings.sink_tokens])
        starts = [record.start for record in answer.rounds]
        replayed = replay(llm.target, drafter, tokens, segments, starts, settings.replay)
        limit = min(llm.max_model_len, drafter.config.max_positions)
        judged, acceptance = sums.add(replayed, tokens, answer.rounds, limit)
        found, drafts = (replayed, judged, acceptance), replayed.drafts.tolist()
    row = prompt_row(
        conversation.id,
        conversation.category,
        prompt_tokens=len(prompt.token_ids),
        output_tokens=len(answer.token_ids),
        depth=settings.depth,
        found=found,
    )
    return Answered(row=row, prompt=prompt.token_ids, output=answer.token_ids, records=answer.rounds, drafts=drafts)
