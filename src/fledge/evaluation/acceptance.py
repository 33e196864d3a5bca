"""Measures the acceptance of drafters on workloads, and whether speculation changes the target's text.

The target first answers every turn without a drafter. Each turn is then a prompt of its own, the same for every drafter
and depth, and a drafter must not change the target's answer to it.
"""

import gc
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.drafter import read_vocabulary
from fledge.checkpoints.source import resolve
from fledge.decoding.drafter_statistics import Reliability, StateGrowth, Triples
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.llm import LLM
from fledge.engine.outputs import RequestOutput
from fledge.engine.protocol import EngineStats
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.dialogue import AnsweredTurn, Dialogue, answer_dialogues, steps
from fledge.evaluation.results import (
    DraftMode,
    RequestRecord,
    Rounds,
    Tally,
    answer_facts,
    statistics_of,
    statistics_of_requests,
    tally_triples,
)
from fledge.evaluation.workloads import Prompt, Workload, grouped
from fledge.progress import Advance
from fledge.records import Record

# In float32, two ways to compute the same logits differ by about 1e-5. Log-probabilities closer than this are a tie.
TIE = 1e-3
# Between 16 and 32, where logits often lie, bfloat16 has steps of 0.125, and two ways to compute a logit may differ by
# two steps. Of two logits, one may be too low by that much and the other too high.
SIXTEEN_BIT_TIE = 0.5
MAX_TEXT_PROMPT = 64  # tokens of a plain text that are the prompt; the target continues it
_LEAST_ROOM = 2  # tokens of an answer: for a single token there is nothing to draft


@dataclass(frozen=True, kw_only=True)
class AcceptanceSettings:
    """The target, and how it answers."""

    target: str
    max_tokens: int = 128
    max_num_seqs: int = 32
    max_model_len: int | None = None
    seed: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
    device: str = "auto"
    engine: str = "fledge"  # or vllm, auto
    vllm_python: str | None = None
    vllm_options: tuple[str, ...] = ()  # arguments of its command line


@dataclass(frozen=True, kw_only=True)
class TargetTurn(AnsweredTurn):
    """One turn of a workload, and the target's answer without a drafter."""

    workload: str
    category: str
    prompt: str  # its id; turns of one conversation have the same


@dataclass(frozen=True, kw_only=True)
class TargetAnswers(Record):
    """The target's answers without a drafter, and the prompts (workload, id) that did not fit."""

    turns: tuple[TargetTurn, ...]
    too_long: tuple[tuple[str, str], ...] = ()  # the first turn does not fit
    cut_short: tuple[tuple[str, str], ...] = ()  # a later turn does not fit


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """One drafter at one depth on some turns."""

    requests: tuple[RequestRecord, ...]  # one for each turn
    different: tuple[tuple[int, int], ...]  # turns whose answers differ from the target's, and the first such token
    seconds: float
    failure: str | None = None  # why the drafter was switched off during the measurement
    state_growth: Triples = ()
    reliability: Triples = ()
    counted: Tally = ()  # the engine's count for all turns together, if there is none for each request

    @property
    def total(self) -> AcceptanceStatistics:
        told = self.statistics("all")
        return told if told.rounds else statistics_of(self.counted)

    def statistics(self, rounds: Rounds) -> AcceptanceStatistics:
        """Acceptance in such rounds, of the requests for which it is known."""
        return statistics_of_requests(self.requests, rounds)

    @property
    def tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    def grouped(self, names: Iterable[str]) -> dict[str, AcceptanceStatistics]:
        """Acceptance pooled by group; `names` has the group of each turn."""
        groups = grouped(zip(names, self.requests, strict=True), lambda pair: pair[0])
        return {name: statistics_of(t for _, r in group for t in r.acceptance) for name, group in groups.items()}


class AcceptanceMeter:
    """A target, loaded when it is first needed, with changing drafters and depths."""

    def __init__(self, settings: AcceptanceSettings) -> None:
        self.settings = settings
        self._speculation: dict[str, object] | None = None

    @cached_property
    def llm(self) -> LLM:
        names = ("dtype", "kv_cache_dtype", "device", "max_model_len", "max_num_seqs", "seed", "engine", "vllm_python")
        options: dict[str, Any] = {name: getattr(self.settings, name) for name in names}
        options |= {"vllm_options": self.settings.vllm_options} if self.settings.vllm_options else {}
        options |= {"batch_invariant": True} if self.settings.batch_invariant else {}
        return LLM(self.settings.target, enable_prefix_caching=False, **options)

    @property
    def dtype(self) -> str:
        return self.llm.engine.info.dtype

    @property
    def device(self) -> str:
        device = self.llm.engine.info.device
        return torch.cuda.get_device_name(device) if device.startswith("cuda") else device

    @property
    def tie(self) -> float:
        """The largest difference of two log-probabilities that may be due to rounding."""
        # In an 8-bit cache, keys or values that differ by 1e-7 may be rounded to values that differ by 1/16.
        is_precise = self.dtype == "float32" and self.settings.kv_cache_dtype in ("auto", "float32")
        return TIE if is_precise or self.settings.batch_invariant else SIXTEEN_BIT_TIE

    def set_drafter(self, drafter: str | Path | None, depth: int = 0, more: DraftMode | None = None) -> None:
        """Draft with this drafter and depth from now on; None: without a drafter. Raises what `LLM` raises.

        `more` has further keys of a speculative config, such as those of a tree.
        """
        fixed = {"num_speculative_tokens": depth, "adaptive": False, **(more or {})}
        speculation = None if drafter is None else {"model": str(drafter), **fixed}
        if speculation != self._speculation:
            self._speculation = {}  # if the next line fails, it is not known what is in use
            self.llm.set_speculation(speculation)
            self._speculation = speculation

    def answer(
        self, workloads: Sequence[Workload], temperature: float, advance: Advance = lambda *_: None
    ) -> TargetAnswers:
        """Let the target answer every turn without a drafter; its answers are the history of later turns.

        Raises PromptError if the chat template refuses a first turn. Turns that do not fit are listed in the result.
        """
        self.set_drafter(None)
        asked = [(workload.name, prompt) for workload in workloads for prompt in workload.prompts]
        dialogues = [
            Dialogue(
                number=zlib.crc32(prompt.id.encode()),  # not its index, which depends on the other prompts
                turns=split_turns(prompt.messages) if prompt.messages else [()],
                first_ids=self._first_ids(prompt),
            )
            for _, prompt in asked
        ]
        params = SamplingParams(temperature=temperature, max_tokens=self.settings.max_tokens, seed=self.settings.seed)
        answer_dialogues(self.llm, dialogues, params, least_room=_LEAST_ROOM, advance=advance)
        turns, too_long, cut_short = list[TargetTurn](), list[tuple[str, str]](), list[tuple[str, str]]()
        for (name, prompt), one in zip(asked, dialogues, strict=True):
            about: Any = {"workload": name, "category": prompt.category, "prompt": prompt.id}
            turns += [TargetTurn(**about, **vars(turn)) for turn in one.answers]
            if one.dropped is not None:
                (cut_short if one.answers else too_long).append((name, prompt.id))
        return TargetAnswers(turns=tuple(turns), too_long=tuple(too_long), cut_short=tuple(cut_short))

    def _first_ids(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of the first prompt; of a plain text, its beginning."""
        if prompt.token_ids or not prompt.num_turns:
            return prompt.token_ids
        if prompt.messages:
            return self.llm.encode_chat(split_turns(prompt.messages)[0])
        assert self.llm.tokenizer is not None
        ids: list[int] = self.llm.tokenizer.encode(prompt.text)
        return ids[: max(1, min(MAX_TEXT_PROMPT, len(ids) // 2))]

    def measure(
        self, turns: Sequence[TargetTurn], temperature: float, advance: Advance = lambda *_: None
    ) -> Measurement:
        """Answer every turn with the drafter in use, and measure acceptance."""
        started, before = time.perf_counter(), self.llm.engine.stats()
        most = self.settings.max_tokens
        outputs = self.llm.generate(
            [list(turn.prompt_token_ids) for turn in turns],
            [SamplingParams(temperature=temperature, max_tokens=most, seed=turn.seed) for turn in turns],
            progress=steps(advance),
        )
        seconds, after = time.perf_counter() - started, self.llm.engine.stats()
        drafter = self.llm.engine.info.drafter
        vocabulary = None if drafter is None else read_vocabulary(resolve(drafter))
        in_draft = None if vocabulary is None else vocabulary.in_draft
        pairs = list(zip(turns, outputs, strict=True))
        parted = [first_difference(output.outputs[0].token_ids, turn.answer_token_ids) for turn, output in pairs]
        requests = tuple(request_record(turn.prompt, output, in_draft) for turn, output in pairs)
        fresh = after.acceptance.since(before.acceptance)
        counted = () if any(one.acceptance for one in requests) else tally_triples(fresh)
        return Measurement(
            requests=requests,
            counted=counted,
            different=tuple((i, place) for i, place in enumerate(parted) if place is not None),
            seconds=seconds,
            failure=after.drafter_failure,
            state_growth=StateGrowth(sums=after.state_growth.sums - before.state_growth.sums).triples,
            reliability=Reliability(sums=_reliability(after).sums - _reliability(before).sums).triples,
        )

    def clear_differences(
        self, turns: Sequence[TargetTurn], different: Iterable[tuple[int, int]], temperature: float
    ) -> set[int]:
        """Return the turns of `different` at whose first differing token the target's choice was no tie.

        If the two best tokens tie (log-probabilities within `tie`), rounding decides, and neither answer is wrong.
        """
        self.set_drafter(None)
        places = dict(different)
        outputs = self.llm.generate(
            [[*turns[i].prompt_token_ids, *turns[i].answer_token_ids[:place]] for i, place in places.items()],
            [SamplingParams(temperature=temperature, logprobs=2, max_tokens=1, seed=turns[i].seed) for i in places],
        )
        best_two = [[score for _, score in (output.outputs[0].logprobs or ())[0].top[:2]] for output in outputs]
        return {i for i, (best, second) in zip(places, best_two, strict=True) if best - second > self.tie}

    def close(self) -> None:
        """Free the memory."""
        if (llm := vars(self).pop("llm", None)) is not None:
            llm.close()
        self._speculation = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _reliability(stats: EngineStats) -> Reliability:
    """The calibration of all drafts, of greedy and of sampled requests."""
    calibration = stats.calibration
    return Reliability() if calibration is None else Reliability.of(calibration.by_confidence.sum(0).tolist())


def request_record(prompt: str, output: RequestOutput, in_draft: torch.Tensor | None) -> RequestRecord:
    """Return the record of an answer for results. `in_draft`: mask of the draft vocabulary; None: it has all tokens."""
    (completion,) = output.outputs
    tokens = completion.token_ids
    # A round's first rejected draft was for the position after the accepted ones, which trimming may have removed.
    places = [r.start + r.accepted - len(output.prompt_token_ids) for r in completion.rounds if r.accepted < r.drafted]
    right = [tokens[place] for place in places if place < len(tokens)]
    return RequestRecord(
        prompt=prompt,
        sent=0.0,  # all are submitted before the first one runs
        first_token=output.metrics.time_to_first_token,
        done=output.metrics.seconds,
        **answer_facts(
            tokens,
            prompt=output.prompt_token_ids,
            acceptance=output.metrics.acceptance,
            rounds=completion.rounds,
        ),
        missed=len(right),
        missed_outside=0 if in_draft is None else sum(not in_draft[token] for token in right),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, which may be the end of the shorter one."""
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
