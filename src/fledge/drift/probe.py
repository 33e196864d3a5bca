"""The probe: a workload decoded with real speculation, then every round of it drafted again under observation.

decode    the engine, as it serves                   tokens, and where each round began
replay    the same drafter, recording storages       what each round drafted, and where it looked
judge     drafts against the text                    figures by draft depth
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import tokenizer_digests, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.drift.metrics import DriftSums
from fledge.drift.perturb import Perturbation, PerturbationContext
from fledge.drift.prompts import ProbePrompt, Segment, segmented, with_earlier_answers
from fledge.drift.replay import MAX_SCORES, fusion_parts, replay
from fledge.drift.result import AnswerExample, DriftResult, ExampleToken, PromptRow
from fledge.engine.config import MAX_DEPTH
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.llm import LLM
from fledge.engine.outputs import CompletionOutput
from fledge.files import read_json
from fledge.models.drafter.variants import name_of
from fledge.progress import Advance


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
    drafter: str = field(default="", init=False)  # that is loaded
    llm: LLM = field(init=False)

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
        depth = min(self.settings.depth, MAX_DEPTH)
        speculation = {"model": drafter, "num_speculative_tokens": depth, "adaptive": False}
        if not self.drafter:
            # The replay needs memory of its own, beside the engine's cache.
            options = {"gpu_memory_utilization": 0.6, **self.options}
            self.llm = LLM(self.target, speculative_config=speculation, **options)
        elif drafter != self.drafter:
            self.llm.set_speculation(speculation)
        self.drafter = drafter

    @property
    def context(self) -> PerturbationContext:
        assert self.llm.drafter is not None
        return PerturbationContext(
            tokenizer=self.llm.tokenizer,
            max_model_len=min(self.llm.max_model_len, self.llm.drafter.config.max_positions),
            answer_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            vocab_size=self.llm.target.config.vocab_size,
        )

    def probe(self, prompts: Sequence[ProbePrompt], perturbation: Perturbation, advance: Advance) -> DriftResult:
        """Observe how the drafter drafts chains of its best tokens. The tokens produced are those without a probe."""
        llm, settings, limit = self.llm, self.settings, self.context.max_model_len
        temperature = settings.temperature if perturbation.temperature is None else perturbation.temperature
        drafter, config = llm.drafter, llm.config
        assert drafter is not None
        assert not config.drafts_trees
        assert not config.sample_drafts
        encoded = [segmented(prompt, llm.tokenizer) for prompt in prompts]
        sampling = SamplingParams(temperature=temperature, max_tokens=settings.max_tokens)
        outputs = llm.generate(
            [{"prompt_token_ids": list(read.token_ids)} for read in encoded],
            [replace(sampling, seed=settings.seed + i) for i in range(len(encoded))],
            progress=lambda done, total: advance(0, note=f"{perturbation.name}: decode {done}/{total}"),
        )
        answers = [output.outputs[0] for output in outputs]
        in_draft = None if drafter.vocabulary is None else drafter.vocabulary.in_draft.cpu()
        sums = DriftSums(settings.depth, fusion_parts(drafter), in_draft)
        rows, examples = [], []
        for read, answer in zip(encoded, answers, strict=True):
            drafts, measured = list[list[int]](), sums.unmeasured
            if answer.rounds:
                tokens = (*read.token_ids, *answer.token_ids)
                segments = [*read.segments, *[Segment.OUTPUT] * len(answer.token_ids)]
                segments[: settings.sink_tokens] = [Segment.SINK] * len(segments[: settings.sink_tokens])
                starts = [record.start for record in answer.rounds]
                sizes = {"depth": settings.depth, "max_scores": settings.max_scores}
                replayed = replay(llm.target, drafter, tokens, segments, starts, **sizes)
                drafts, measured = replayed.drafts.tolist(), sums.add(replayed, tokens, answer.rounds, limit)
            of_prompt: dict[str, Any] = {"id": read.id, "category": read.category}
            lengths: dict[str, Any] = {"prompt_tokens": len(read.token_ids), "output_tokens": len(answer.token_ids)}
            row = PromptRow(**of_prompt, **lengths, **measured)
            rows.append(row)
            if (length := row.acceptance.acceptance_length) is not None:
                said = _example_tokens(llm, read, answer, drafts, in_draft)
                text = _text(read.token_ids, llm.tokenizer)
                examples.append(AnswerExample(**of_prompt, acceptance_length=length, prompt=text, tokens=said))
            advance(0, note=f"{perturbation.name}: replay {len(rows)}/{len(prompts)}")
        return DriftResult(
            drafter=self.drafter,
            variant=name_of(drafter.config),
            target=self.target,
            workload=self.workload,
            perturbation=perturbation.name,
            temperature=temperature,
            trained_depth=trained_depth(self.drafter),
            depth=settings.depth,
            engine_depth=config.max_depth,
            prompts=len(prompts),
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            output_tokens=sum(row.output_tokens for row in rows),
            prompt_rows=tuple(rows),
            examples=tuple(sorted(examples, key=lambda one: one.acceptance_length)[: settings.keep_examples]),
            **sums.figures(),
        )

    def answer_earlier_turns(self, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
        return with_earlier_answers(prompts, self.llm, self.settings.max_tokens)


def trained_depth(drafter: str | Path) -> int | None:
    """Return the draft steps a drafter was trained on, if a file beside its weights says so."""
    match read_json(resolve(drafter) / PROVENANCE_FILE):
        case {"recipe": {"fit": {"depth": int(depth)}}}:
            return depth
    return None


def _example_tokens(
    llm: LLM, read: ProbePrompt, answer: CompletionOutput, drafts: list[list[int]], in_draft: Tensor | None
) -> tuple[ExampleToken, ...]:
    """An answer token by token: which were drafted, and what had been drafted in the place of the others."""
    texts = [_text([token], None) for token in answer.token_ids]
    if llm.tokenizer is not None:  # a character of several tokens is the last one's; the others are empty
        detokenizer = Detokenizer(llm.tokenizer, SamplingParams(skip_special_tokens=False))
        for token in answer.token_ids:
            detokenizer.push(token)
        texts = detokenizer.token_texts()
    found = [ExampleToken(text=text, status="own") for text in texts]
    for record, several in zip(answer.rounds, drafts, strict=True):
        begin = record.start - len(read.token_ids)
        wrong = begin + record.accepted
        found[begin:wrong] = [replace(one, status="accepted") for one in found[begin:wrong]]
        if record.accepted < min(record.drafted, len(several)) and wrong < len(found):
            could = in_draft is None or bool(in_draft[answer.token_ids[wrong]])
            draft = _text([several[record.accepted]], llm.tokenizer)
            found[wrong] = replace(found[wrong], status="rejected" if could else "outside", draft=draft)
    return tuple(found)


def _text(tokens: Sequence[int], tokenizer: Any | None) -> str:
    return " ".join(f"[{token}]" for token in tokens) if tokenizer is None else str(tokenizer.decode(list(tokens)))
