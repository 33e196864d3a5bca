"""The probe: a workload decoded with real speculation, then every round of it drafted again under observation.

decode    the engine, as it serves, or vLLM          tokens, and where each round began
replay    the same drafter, recording storages       what each round drafted, and where it looked
judge     drafts against the text                    figures by draft depth
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import tokenizer_digests, weights_digest
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import repeated_tokens
from fledge.drift.metrics import DriftSums, accepted_in, judge
from fledge.drift.perturb import Perturbation, PerturbationContext
from fledge.drift.prompts import ProbePrompt, Segment, segmented, with_earlier_answers
from fledge.drift.replay import (
    AS_IT_IS,
    MAX_SCORES,
    RECENT_TOKENS,
    Feeding,
    Replayed,
    fusion_parts,
    replay,
    rounds_taken,
)
from fledge.drift.result import AnswerExample, DriftResult, ExampleToken, PromptRow
from fledge.drift.sources import CapturedSource, OwnSource, Source, VllmServers
from fledge.engine.detokenizer import Detokenizer
from fledge.engine.outputs import CompletionOutput, RoundRecord
from fledge.evaluation.results import tally_triples
from fledge.files import read_json
from fledge.models.drafter.variants import name_of
from fledge.models.target.decoder import TargetStates
from fledge.progress import Advance

# Options of `LLM` that say how it is done and not what comes out.
_FREE = ("enforce_eager", "gpu_memory_utilization", "kv_cache_bytes", "max_num_seqs")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What is drafted and observed."""

    depth: int = 12  # to which drafting is observed; beyond the engine's depth the probe drafts on
    max_tokens: int = 128  # of each answer
    temperature: float = 0.0  # of the target; drafts are the drafter's best tokens, as the engine drafts by default
    seed: int = 0  # for temperatures above 0: prompt i is sampled with seed + i
    sink_tokens: int = 1  # how many first tokens of a sequence count as sink
    recent_tokens: int = RECENT_TOKENS  # how many last rows that a query sees are its recent window
    max_scores: int = MAX_SCORES  # attention weights that exist at a time
    keep_examples: int = 5  # answers of lowest acceptance to keep in full


@dataclass
class Prober:
    """A target whose drafters are probed, one after another. Nothing is loaded before `load`."""

    target: str
    workload: str  # what results call the prompts
    settings: ProbeSettings
    options: dict[str, Any]  # of `LLM`; with `vllm`, what of them is not the server's
    vllm: VllmServers | None = None  # that runs the target; None: it is loaded here
    say: Callable[[str], None] = lambda _line: None  # about a vLLM that starts
    drafter: str = field(default="", init=False)  # that is loaded
    source: Source = field(init=False)

    def identity(self, drafter: str) -> Any:
        """JSON values: whatever a result depends on besides prompts."""
        target = resolve(self.target)
        return {
            "target": [self.target, weights_digest(target), tokenizer_digests(target)],
            "drafter": weights_digest(resolve(drafter)),
            "settings": asdict(self.settings),
            "options": {name: str(value) for name, value in sorted(self.options.items()) if name not in _FREE},
            **({} if self.vllm is None else {"engine": "vllm"}),
        }

    def load(self, drafter: str) -> None:
        """Load a drafter in place of the one before it; the target stays loaded."""
        if not hasattr(self, "source"):
            self.source = self._open(drafter)
        elif drafter != self.drafter:
            self.source.exchange(drafter)
        self.drafter = drafter

    def _open(self, drafter: str) -> Source:
        depth = self.settings.depth
        if self.vllm is None:
            return OwnSource(self.target, drafter, depth, self.options)
        return CapturedSource(self.target, drafter, depth, self.vllm, str(self.options.get("device", "auto")), self.say)

    def close(self) -> None:
        """End what runs in a process of its own."""
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

    def probe(self, prompts: Sequence[ProbePrompt], perturbation: Perturbation, advance: Advance) -> DriftResult:
        """Observe how the drafter drafts chains of its best tokens. The tokens produced are those without a probe."""
        source, settings, tokenizer = self.source, self.settings, self.source.tokenizer
        temperature = settings.temperature if perturbation.temperature is None else perturbation.temperature
        drafter = source.drafter
        # A drafter that is fed otherwise than the engine feeds it takes other rounds: the text decides which.
        feeding = Feeding(noise=perturbation.noise, pin=perturbation.pins, seed=settings.seed)
        tells_rounds = source.tells_rounds and not perturbation.acts_on_drafting
        encoded = [segmented(prompt, tokenizer) for prompt in prompts]
        sampling = SamplingParams(temperature=temperature, max_tokens=settings.max_tokens)
        outputs = source.generate(
            [list(read.token_ids) for read in encoded],
            [replace(sampling, seed=settings.seed + i) for i in range(len(encoded))],
            progress=lambda done, total: advance(0, note=f"{perturbation.name}: decode {done}/{total}"),
        )
        answers = [output.outputs[0] for output in outputs]
        in_draft = None if drafter.vocabulary is None else drafter.vocabulary.in_draft.cpu()
        sums = DriftSums(settings.depth, fusion_parts(drafter), in_draft)
        texts = [(*read.token_ids, *answer.token_ids) for read, answer in zip(encoded, answers, strict=True)]
        has_rounds = [
            bool(answer.rounds) if tells_rounds else len(answer.token_ids) > 1 and self._has_room(read)
            for read, answer in zip(encoded, answers, strict=True)
        ]
        states = source.states([text for text, has in zip(texts, has_rounds, strict=True) if has])
        rows, examples = [], []
        for read, answer, text, has in zip(encoded, answers, texts, has_rounds, strict=True):
            drafts, records, measured = list[list[int]](), list[RoundRecord](), sums.unmeasured
            repeated = repeated_tokens(answer.token_ids)
            if has:
                state, given = next(states), answer.rounds if tells_rounds else None
                replayed, records = self._replay(state, read, text, given, feeding)
                of_text = [*[False] * len(read.token_ids), *repeated]
                drafts, measured = replayed.drafts.tolist(), sums.add(replayed, text, records, self._limit, of_text)
                if perturbation.acts_on_drafting:
                    untouched, taken = self._replay(state, read, text, None, AS_IT_IS)
                    alone = accepted_in(judge(untouched, text, taken, self._limit), taken, of_text)
                    measured["untouched_tally"] = tally_triples(alone)
            of_prompt: dict[str, Any] = {"id": read.id, "category": read.category}
            lengths: dict[str, Any] = {"prompt_tokens": len(read.token_ids), "output_tokens": len(answer.token_ids)}
            row = PromptRow(**of_prompt, **lengths, repeated_tokens=sum(repeated), **measured)
            rows.append(row)
            if (length := row.acceptance.acceptance_length) is not None:
                said = _example_tokens(tokenizer, read, answer, records, drafts, in_draft)
                shown = _text(read.token_ids, tokenizer)
                examples.append(AnswerExample(**of_prompt, acceptance_length=length, prompt=shown, tokens=said))
            advance(0, note=f"{perturbation.name}: replay {len(rows)}/{len(prompts)}")
        figures = sums.figures()
        if not tells_rounds:
            figures["replay_agreement"] = None  # the rounds are the replay's own
        return DriftResult(
            drafter=self.drafter,
            variant=name_of(drafter.config),
            norm_output=drafter.config.norm_output,
            target=self.target,
            workload=self.workload,
            perturbation=perturbation.name,
            temperature=temperature,
            trained_depth=trained_depth(self.drafter),
            depth=settings.depth,
            engine_depth=source.drafting_depth,
            prompts=len(prompts),
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            output_tokens=sum(row.output_tokens for row in rows),
            recent_tokens=settings.recent_tokens,
            prompt_rows=tuple(rows),
            examples=tuple(sorted(examples, key=lambda one: one.acceptance_length)[: settings.keep_examples]),
            **figures,
        )

    @property
    def _limit(self) -> int:
        """Nothing is drafted for places from this - 1 on."""
        return self.context.max_model_len

    def _has_room(self, read: ProbePrompt) -> bool:
        """Whether the first round after a prompt can draft anything."""
        return len(read.token_ids) + 2 < self._limit

    def _replay(
        self,
        states: TargetStates,
        read: ProbePrompt,
        text: Sequence[int],
        records: Sequence[RoundRecord] | None,
        feeding: Feeding,
    ) -> tuple[Replayed, list[RoundRecord]]:
        """The rounds of one answer, drafted again; `records` None: those that follow from the text."""
        settings = self.settings
        segments = [*read.segments, *[Segment.OUTPUT] * (len(text) - len(read.token_ids))]
        segments[: settings.sink_tokens] = [Segment.SINK] * len(segments[: settings.sink_tokens])
        places = range(len(read.token_ids) + 1, len(text)) if records is None else (one.start for one in records)
        replayed = replay(
            states,
            self.source.drafter,
            text,
            segments,
            list(places),
            depth=settings.depth,
            recent_tokens=settings.recent_tokens,
            feeding=feeding,
            max_scores=settings.max_scores,
        )
        if records is not None:
            return replayed, list(records)
        taken = rounds_taken(replayed, text, self._limit)
        return replayed.only([i for i, _ in taken]), [record for _, record in taken]

    def answer_earlier_turns(self, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
        return with_earlier_answers(prompts, self.source, self.settings.max_tokens)


def trained_depth(drafter: str | Path) -> int | None:
    """Return the draft steps a drafter was trained on, if a file beside its weights says so."""
    match read_json(resolve(drafter) / PROVENANCE_FILE):
        case {"recipe": {"fit": {"depth": int(depth)}}}:
            return depth
    return None


def _example_tokens(
    tokenizer: Any | None,
    read: ProbePrompt,
    answer: CompletionOutput,
    records: Sequence[RoundRecord],
    drafts: list[list[int]],
    in_draft: Tensor | None,
) -> tuple[ExampleToken, ...]:
    """An answer token by token: which were drafted, and what had been drafted in the place of the others."""
    texts = [_text([token], None) for token in answer.token_ids]
    if tokenizer is not None:  # a character of several tokens is the last one's; the others are empty
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
