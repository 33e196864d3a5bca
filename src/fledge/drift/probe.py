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
from torch import Tensor

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import tokenizer_digests, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.drift.metrics import DriftSums
from fledge.drift.perturb import NotApplicableError, PerturbationContext
from fledge.drift.replay import MAX_SCORES, fusion_parts, replay
from fledge.drift.result import AnswerExample, DriftResult, ExampleToken, PromptRow, TokenStatus
from fledge.drift.segments import ProbePrompt, Segment, SegmentedPrompt, segmented
from fledge.drift.workloads import with_earlier_answers
from fledge.engine.config import MAX_DEPTH
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.llm import LLM
from fledge.engine.outputs import CompletionOutput
from fledge.files import read_json
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


@dataclass
class Prober:
    """A target whose drafters are probed, one after another. Nothing is loaded before `load`."""

    target: str
    workload: str  # what results call the prompts
    settings: ProbeSettings
    options: dict[str, Any]  # of `LLM`
    _drafter: str = ""
    _llm: LLM | None = None

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
            max_model_len=_limit(self.llm),
            answer_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            vocab_size=self.llm.target.config.vocab_size,
        )

    def probe(
        self, prompts: Sequence[ProbePrompt], *, perturbation: str, temperature: float | None, progress: PhaseProgress
    ) -> DriftResult:
        """`temperature` None: the run's own. Raises NotApplicableError where memory does not suffice."""
        settings = self.settings if temperature is None else replace(self.settings, temperature=temperature)
        try:
            result = probe(self.llm, prompts, settings, progress)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise NotApplicableError("the device's memory does not suffice for prompts of this length") from None
        return replace(
            result,
            drafter=self._drafter,
            target=self.target,
            workload=self.workload,
            perturbation=perturbation,
            trained_depth=trained_depth(self._drafter),
        )

    def answer_earlier_turns(self, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
        return with_earlier_answers(prompts, self.llm, self.settings.max_tokens)


def open_llm(target: str | Path, drafter: str | Path, *, depth: int, **options: Any) -> LLM:
    """Load a pair as it is served, drafting `depth` tokens (at most 16). `options` are those of `LLM`."""
    # The replay needs memory of its own, beside the engine's cache.
    options = {"gpu_memory_utilization": 0.6, **options}
    return LLM(target, speculative_config=_speculation(drafter, depth), **options)


def _speculation(drafter: str | Path, depth: int) -> dict[str, Any]:
    return {"model": str(drafter), "num_speculative_tokens": min(depth, MAX_DEPTH)}


def _limit(llm: LLM) -> int:
    """Tokens that target and drafter can hold."""
    assert llm.drafter is not None
    return min(llm.max_model_len, llm.drafter.config.max_positions)


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
    progress: PhaseProgress = lambda _phase, _done, _all: None,
) -> DriftResult:
    """Observe how `llm`'s drafter drafts chains of its best tokens. The tokens produced are those without a probe."""
    drafter, config = llm.drafter, llm.config
    assert drafter is not None
    assert not config.drafts_trees
    assert not config.sample_drafts
    encoded = [segmented(prompt, llm.tokenizer) for prompt in prompts]
    sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
    outputs = llm.generate(
        [{"prompt_token_ids": list(read.token_ids)} for read in encoded],
        [replace(sampling, seed=settings.seed + i) for i in range(len(encoded))],
        progress=lambda done, total: progress("decode", done, total),
    )
    answers = [output.outputs[0] for output in outputs]
    in_draft = None if drafter.vocabulary is None else drafter.vocabulary.in_draft.cpu()
    sums = DriftSums(settings.depth, fusion_parts(drafter), in_draft)
    rows, examples = [], []
    for prompt, read, answer in zip(prompts, encoded, answers, strict=True):
        drafts, measured = _observe(llm, read, answer, settings, sums)
        row = PromptRow(
            id=prompt.id,
            category=prompt.category,
            prompt_tokens=len(read.token_ids),
            output_tokens=len(answer.token_ids),
            **measured,
        )
        rows.append(row)
        if (length := row.acceptance.acceptance_length) is not None:
            example = AnswerExample(
                id=prompt.id,
                category=prompt.category,
                acceptance_length=length,
                prompt=_text(read.token_ids, llm.tokenizer),
                tokens=_example_tokens(llm, read, answer, drafts, in_draft),
            )
            examples.append(example)
        progress("replay", len(rows), len(prompts))
    return DriftResult(
        variant=name_of(drafter.config),
        temperature=settings.temperature,
        depth=settings.depth,
        engine_depth=config.max_depth,
        prompts=len(prompts),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        prompt_rows=tuple(rows),
        examples=tuple(sorted(examples, key=lambda one: one.acceptance_length)[: settings.keep_examples]),
        **sums.figures(),
    )


def _observe(
    llm: LLM, read: SegmentedPrompt, answer: CompletionOutput, settings: ProbeSettings, sums: DriftSums
) -> tuple[list[list[int]], dict[str, Any]]:
    """Replay one answer and add it to the sums. Returns the drafts of each round, and what its `PromptRow` holds."""
    if not answer.rounds:
        return [], sums.unmeasured
    assert llm.drafter is not None
    tokens = (*read.token_ids, *answer.token_ids)
    segments = [*read.segments, *[Segment.OUTPUT] * len(answer.token_ids)]
    segments[: settings.sink_tokens] = [Segment.SINK] * len(segments[: settings.sink_tokens])
    starts = [record.start for record in answer.rounds]
    sizes = {"depth": settings.depth, "max_scores": settings.max_scores}
    replayed = replay(llm.target, llm.drafter, tokens, segments, starts, **sizes)
    return replayed.drafts.tolist(), sums.add(replayed, tokens, answer.rounds, _limit(llm))


def _example_tokens(
    llm: LLM, read: SegmentedPrompt, answer: CompletionOutput, drafts: list[list[int]], in_draft: Tensor | None
) -> tuple[ExampleToken, ...]:
    """An answer token by token: which were drafted, and what had been drafted in the place of the others."""
    accepted: set[int] = set()  # places in the answer
    wrong: dict[int, int] = {}  # place -> what had been drafted there
    for record, several in zip(answer.rounds, drafts, strict=True):
        begin = record.start - len(read.token_ids)
        accepted.update(range(begin, begin + record.accepted))
        if record.accepted < min(record.drafted, len(several)):
            wrong[begin + record.accepted] = several[record.accepted]
    found = []
    for place, (token, text) in enumerate(zip(answer.token_ids, _pieces(answer, llm.tokenizer), strict=True)):
        status: TokenStatus = "accepted" if place in accepted else "own"
        draft = None
        if place in wrong and place not in accepted:
            status = "rejected" if in_draft is None or bool(in_draft[token]) else "outside"
            draft = _text([wrong[place]], llm.tokenizer)
        found.append(ExampleToken(text=text, status=status, draft=draft))
    return tuple(found)


def _pieces(answer: CompletionOutput, tokenizer: Any | None) -> list[str]:
    """The text of each token. A character of several tokens is the last one's; the others are empty."""
    if tokenizer is None:
        return [_text([token], None) for token in answer.token_ids]
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
    for token in answer.token_ids:
        detokenizer.push(token)
    return detokenizer.token_texts()


def _text(tokens: Sequence[int], tokenizer: Any | None) -> str:
    return " ".join(f"[{token}]" for token in tokens) if tokenizer is None else str(tokenizer.decode(list(tokens)))
