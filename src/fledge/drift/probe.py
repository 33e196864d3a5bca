"""The probe: the target answers a workload, then every round of speculation is drafted again and recorded.

answer    our engine, or vLLM; once for all drafters        tokens
replay    the drafter that serves, with recording storages  where rounds begin, their drafts, their attention
judge     drafts against the text                           figures by draft depth
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import tokenizer_digests, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import Overlap
from fledge.drift.answers import Answer, AnswerCache, AnsweredPrompts
from fledge.drift.metrics import DriftSums
from fledge.drift.perturb import Perturbation, PerturbationContext, perturb
from fledge.drift.prompts import ProbePrompt, Segment, segmented, with_earlier_answers
from fledge.drift.replay import MAX_SCORES, FinishedText, Intervention, Replay, Replayed, fusion_parts, rounds_taken
from fledge.drift.result import AnswerExample, DriftResult, ExampleToken, PromptRow
from fledge.drift.sources import EngineSource, Source, VllmServers, VllmSource, in_batches
from fledge.drift.storages import RECENT_TOKENS
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.outputs import RoundRecord
from fledge.files import read_json
from fledge.models.drafter.variants import name_of
from fledge.models.target.decoder import TargetStates
from fledge.progress import Advance

VERSION = 3  # of saved cells and answers: raise it when figures change their meaning
# Options of `LLM` that do not change the result.
_FREE = ("enforce_eager", "gpu_memory_utilization", "kv_cache_bytes", "max_num_seqs")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What is drafted and recorded."""

    depth: int = 12  # of the probe's drafts, which may be deeper than the engine's
    max_tokens: int = 128  # of each answer
    temperature: float = 0.0  # of the target; drafts are always greedy, as by default in the engine
    seed: int = 0  # for temperatures above 0: prompt i is sampled with seed + i
    sink_tokens: int = 1  # first tokens of a sequence that count as attention sink
    recent_tokens: int = RECENT_TOKENS  # last visible rows that are the recent window of a query
    max_scores: int = MAX_SCORES  # attention weights that exist at a time
    keep_examples: int = 5  # answers of lowest acceptance that are kept in full


@dataclass
class Prober:
    """Probes drafters of a target, one after another. Nothing is loaded before `load`."""

    target: str
    workload: str  # name of the prompts in results
    settings: ProbeSettings
    options: dict[str, Any]  # of `LLM`; with `vllm`, those that are not options of the server
    vllm: VllmServers | None = None  # servers that run the target; None: it is loaded here
    answers: AnswerCache = field(default_factory=AnswerCache)
    say: Callable[[str], None] = lambda _line: None  # reports the start of a vLLM
    drafter: str = field(default="", init=False)  # the loaded one
    source: Source = field(init=False)

    def identity(self, drafter: str) -> Any:
        """Everything that a result depends on besides the prompts, as JSON values."""
        return {**self.target_identity, "drafter": weights_digest(resolve(drafter)), "settings": asdict(self.settings)}

    @property
    def target_identity(self) -> dict[str, Any]:
        """Everything about the target that its answers depend on."""
        target = resolve(self.target)
        return {
            "target": [self.target, weights_digest(target), tokenizer_digests(target)],
            "options": {name: str(value) for name, value in sorted(self.options.items()) if name not in _FREE},
            **({} if self.vllm is None else {"engine": "vllm"}),
        }

    def load(self, drafter: str) -> None:
        """Load a drafter in place of the one before it; the target stays loaded."""
        if not hasattr(self, "source"):
            self.source = self._open(drafter)
        elif drafter != self.drafter:
            self.source.set_drafter(drafter)
        self.drafter = drafter

    def _open(self, drafter: str) -> Source:
        depth = self.settings.depth
        if self.vllm is None:
            return EngineSource(self.target, drafter, depth, self.options)
        return VllmSource(self.target, drafter, depth, self.vllm, str(self.options.get("device", "auto")), self.say)

    def close(self) -> None:
        """End the processes that were started."""
        if hasattr(self, "source"):
            self.source.close()

    @property
    def context(self) -> PerturbationContext:
        return PerturbationContext(
            tokenizer=self.source.tokenizer,
            max_model_len=min(self.source.max_model_len, self.source.drafter.config.max_positions),
            answer_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            vocab_size=self.source.vocab_size,
        )

    def answered(
        self, prompts: Sequence[ProbePrompt], perturbation: Perturbation, advance: Advance = lambda *_, **__: None
    ) -> AnsweredPrompts:
        """Perturb the prompts and have the target answer them, unless the answers are cached."""
        perturbation, context, settings = perturbation.answered_as, self.context, self.settings
        sampling = SamplingParams(temperature=self._temperature(perturbation), max_tokens=settings.max_tokens)

        def make() -> AnsweredPrompts:
            changed = perturb(perturbation, prompts, context)
            if changed.skip is not None:
                return AnsweredPrompts(prompts=(), answers=(), left_out=changed.left_out, skip=changed.skip)
            encoded = tuple(segmented(prompt, context.tokenizer) for prompt in changed.prompts)
            answers = self.source.answers(
                [list(read.token_ids) for read in encoded],
                [replace(sampling, seed=settings.seed + i) for i in range(len(encoded))],
                lambda done, total: advance(0, note=f"{perturbation.name}: answer {done}/{total}"),
            )
            return AnsweredPrompts(prompts=encoded, answers=tuple(answers), left_out=changed.left_out)

        depends_on = [
            [VERSION, self.target_identity, perturbation.name, [asdict(prompt) for prompt in prompts]],
            [asdict(sampling), settings.seed, context.max_model_len, self.source.drafting_depth],
        ]
        return self.answers.get(perturbation.name, depends_on, make)

    def _temperature(self, perturbation: Perturbation) -> float:
        return self.settings.temperature if perturbation.temperature is None else perturbation.temperature

    def probe(self, answered: AnsweredPrompts, perturbation: Perturbation, advance: Advance) -> DriftResult:
        """Record how the drafter drafts greedy chains."""
        source, settings, tokenizer = self.source, self.settings, self.source.tokenizer
        prompts, drafter = answered.prompts, source.drafter
        in_draft = None if drafter.vocabulary is None else drafter.vocabulary.in_draft.cpu()
        sums = DriftSums(settings.depth, fusion_parts(drafter), in_draft)
        asked = zip(prompts, answered.answers, strict=True)
        overlaps = [Overlap.of(read.token_ids, answer.token_ids) for read, answer in asked]
        measured = [sums.unmeasured for _ in prompts]
        rounds = dict[int, tuple[list[RoundRecord], list[list[int]]]]()  # by prompt: records and drafts
        for i, taken, replayed in self._replayed(answered, perturbation):
            text = (*prompts[i].token_ids, *answered.answers[i].token_ids)
            measured[i] = sums.add(replayed, text, taken, self._limit, overlaps[i])
            rounds[i] = taken, replayed.drafts.tolist()
            advance(0, note=f"{perturbation.name}: replay {len(rounds)}/{len(prompts)}")
        rows = [
            PromptRow(
                id=read.id,
                category=read.category,
                prompt_tokens=len(read.token_ids),
                output_tokens=len(answer.token_ids),
                repeated_tokens=sum(overlaps[i].repeated),
                copied_tokens=sum(overlaps[i].copied),
                **measured[i],
            )
            for i, (read, answer) in enumerate(zip(prompts, answered.answers, strict=True))
        ]
        lengths = {i: length for i, row in enumerate(rows) if (length := row.acceptance.acceptance_length) is not None}
        examples = [
            AnswerExample(
                id=rows[i].id,
                category=rows[i].category,
                acceptance_length=lengths[i],
                prompt=_text(prompts[i].token_ids, tokenizer),
                tokens=_example_tokens(tokenizer, prompts[i], answered.answers[i], *rounds[i], in_draft),
            )
            for i in sorted(lengths, key=lambda i: lengths[i])[: settings.keep_examples]
        ]
        return DriftResult(
            drafter=self.drafter,
            variant=name_of(drafter.config),
            norm_output=drafter.config.norm_output,
            target=self.target,
            workload=self.workload,
            perturbation=perturbation.name,
            temperature=self._temperature(perturbation),
            trained_depth=trained_depth(self.drafter),
            depth=settings.depth,
            engine_depth=source.drafting_depth,
            prompts=len(prompts),
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            output_tokens=sum(row.output_tokens for row in rows),
            recent_tokens=settings.recent_tokens,
            prompt_rows=tuple(rows),
            examples=tuple(examples),
            **sums.figures(),
        )

    @property
    def _limit(self) -> int:
        """Nothing is drafted for positions from `_limit` - 1 on."""
        return self.context.max_model_len

    def _replayed(
        self, answered: AnsweredPrompts, perturbation: Perturbation
    ) -> Iterator[tuple[int, list[RoundRecord], Replayed]]:
        """Yield for each prompt that has rounds its index, the rounds, and what the replay recorded."""
        settings, depth, device = self.settings, self.source.drafting_depth, self.source.drafter.fc.weight.device
        intervention = Intervention(noise=perturbation.noise, pin=perturbation.pins, seed=settings.seed)
        pairs = zip(answered.prompts, answered.answers, strict=True)
        texts = [(*read.token_ids, *answer.token_ids) for read, answer in pairs]
        starts = [len(read.token_ids) + 1 for read in answered.prompts]  # of each prompt's first round
        chosen = [i for i, text in enumerate(texts) if starts[i] < min(len(text), self._limit - 1)]
        chosen.sort(key=lambda i: len(texts[i]))  # texts of about the same length share a pass
        numbered = zip(chosen, self.source.states([texts[i] for i in chosen]), strict=True)
        observed = {"recent_tokens": settings.recent_tokens, "max_scores": settings.max_scores}
        for several in in_batches(numbered, lambda pair: len(texts[pair[0]]), device):
            finished = [self._finished_text(answered, i, texts[i], states) for i, states in several]
            replay = Replay(self.source.drafter, finished, **observed)
            taken = [
                rounds_taken(
                    one.starts, leading, depth=depth, known=len(one.tokens) + len(one.beyond), limit=self._limit
                )
                for one, leading in zip(finished, replay.matching_drafts(depth, intervention), strict=True)
            ]
            begun = [[record.start for record in records] for records in taken]
            drafted = replay.draft(begun, settings.depth, intervention)
            yield from zip([i for i, _ in several], taken, drafted, strict=True)

    def _finished_text(
        self, answered: AnsweredPrompts, i: int, text: Sequence[int], states: TargetStates
    ) -> FinishedText:
        read, sinks = answered.prompts[i], self.settings.sink_tokens
        segments = [*read.segments, *[Segment.OUTPUT] * (len(text) - len(read.token_ids))]
        segments[:sinks] = [Segment.SINK] * len(segments[:sinks])
        places, beyond = range(len(read.token_ids) + 1, len(text)), answered.answers[i].beyond
        return FinishedText(states=states, tokens=text, segments=segments, starts=places, beyond=beyond)

    def answer_earlier_turns(self, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
        return with_earlier_answers(prompts, self.source, self.settings.max_tokens)


def trained_depth(drafter: str | Path) -> int | None:
    """Return the number of draft steps that a drafter was trained on, if its provenance file has it."""
    match read_json(resolve(drafter) / PROVENANCE_FILE):
        case {"recipe": {"fit": {"depth": int(depth)}}}:
            return depth
    return None


def _example_tokens(
    tokenizer: Any | None,
    read: ProbePrompt,
    answer: Answer,
    records: Sequence[RoundRecord],
    drafts: list[list[int]],
    in_draft: Tensor | None,
) -> tuple[ExampleToken, ...]:
    """Return an answer token by token: which were drafted, and the wrong drafts in place of the others."""
    texts = [_text([token], None) for token in answer.token_ids]
    if tokenizer is not None:  # a character of several tokens is the text of the last one
        detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
        for token in answer.token_ids:
            detokenizer.push(token)
        texts = detokenizer.token_texts()
    found = [ExampleToken(text=text, status="own") for text in texts]
    for record, several in zip(records, drafts, strict=True):
        begin = record.start - len(read.token_ids)
        wrong = begin + record.accepted
        found[begin:wrong] = [replace(one, status="accepted") for one in found[begin:wrong]]
        if record.accepted < min(record.drafted, len(several)) and wrong < len(found):
            could = in_draft is None or bool(in_draft[answer.token_ids[wrong]])
            draft = _text([several[record.accepted]], tokenizer)
            found[wrong] = replace(found[wrong], status="rejected" if could else "outside", draft=draft)
    return tuple(found)


def _text(tokens: Sequence[int], tokenizer: Any | None) -> str:
    return " ".join(f"[{token}]" for token in tokens) if tokenizer is None else str(tokenizer.decode(list(tokens)))
