"""Launches scheduled batches, as CUDA graphs if there are any, and reads their results later."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.engine.admission import DraftOutcomes, are_greedy
from fledge.engine.arms import Arm, RequestKind
from fledge.engine.device_state import DeviceState
from fledge.engine.graphs import GraphRunner
from fledge.engine.logprobs import Asked, LogprobsTensors, entries_asking
from fledge.engine.mixing import MixedProgram, Mixing
from fledge.engine.outputs import TokenLogprobs
from fledge.engine.passes import PassOutcome
from fledge.engine.programs import PromptProgram, RoundProgram
from fledge.engine.protocol import PhaseSeconds, RoundReport
from fledge.engine.request import Request, kind_of_round
from fledge.engine.sampler import SamplingMode, masks_after
from fledge.engine.scheduler import ScheduledBatch

SAMPLED_ROUNDS = 8  # state norms are read in one of so many rounds that draft
SAMPLED_REQUESTS = 16  # and of about so many requests in it: each takes time

Results = TypeVar("Results", PassOutcome, LogprobsTensors)


class PendingDrafts(NamedTuple):
    """Drafts of a launch for requests with constraints, whose next masks depend on them."""

    requests: Sequence[Request]
    counts: Tensor  # [requests, 1 + max_depth]: the number of drafts, then the drafts

    def read(self) -> None:
        """Store them in the requests. The copy to the host must be done."""
        for request, (count, *tokens) in zip(self.requests, self.counts.tolist(), strict=True):
            request.drafts = tokens[:count]


class Launch(NamedTuple):
    """One step on the device: the batch, and its results, which are on the host after `wait`."""

    batch: ScheduledBatch
    round: PassOutcome | None
    prefill: PassOutcome | None
    drafts: PendingDrafts | None  # if there are requests with constraints
    times: tuple[Any, Any]  # start of prefill, end of the launch: CUDA events, or on a CPU seconds

    def wait(self) -> float:
        """Wait for the results; return the seconds of prefill."""
        return _seconds_between(*self.times)


def _seconds_between(begun: Any, done: Any) -> float:
    """Wait for the second time; return the difference. Times are those of `Launch`."""
    if not isinstance(done, torch.cuda.Event):
        return float(done - begun)
    done.synchronize()
    return float(begun.elapsed_time(done)) * 1e-3


def _to_host(outcome: PassOutcome) -> PassOutcome:
    """Queue a copy to the host. Prompt log-probabilities stay on the device: few requests want them."""
    return _copied(outcome) if outcome.tokens.is_cuda else outcome


def _copied(results: Results) -> Results:
    """Copy a dataclass of tensors, and nested log-probabilities, to the host asynchronously."""
    copies: dict[str, Any] = {}
    for name, value in vars(results).items():
        if isinstance(value, Tensor):
            copies[name] = _on_host(value)
        elif isinstance(value, LogprobsTensors):
            copies[name] = _copied(value)
    return replace(results, **copies)


def _on_host(value: Tensor) -> Tensor:
    """Return a pinned copy, which is valid once the device has reached it."""
    if not value.is_cuda:
        return value
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def _outcomes(batch: ScheduledBatch, outcome: PassOutcome) -> DraftOutcomes | None:
    """Return the outcomes of a round's drafts, without those of requests with a constraint; None for trees."""
    if outcome.confidence is None or outcome.drafted is None or outcome.accepted is None:
        return None
    requests = batch.decoding
    confidence, drafted, accepted = (
        column[: len(requests)].numpy() for column in (outcome.confidence, outcome.drafted, outcome.accepted)
    )
    found = DraftOutcomes(confidence, drafted, accepted, are_greedy(requests))
    if not batch.constrained:
        return found
    free = np.array([request.constraint is None for request in requests])
    return DraftOutcomes(*(column[free] for column in found)) if free.any() else None


class RequestResult(NamedTuple):
    """Results of a launch for one request."""

    request: Request
    tokens: list[int]
    drafted: int
    accepted: int
    in_flight: int  # tokens that the scheduler had counted as in flight
    is_finite: bool  # whether the target's hidden states are finite
    logprobs: list[TokenLogprobs] | None
    state_norms: Sequence[float] = ()  # of the drafter, at each depth; only of some requests and rounds


@dataclass(kw_only=True)
class StepResults:
    """Results of a launch, with one entry for each request that has new tokens."""

    requests: list[RequestResult] = field(default_factory=list)
    report: RoundReport | None = None  # of its round
    outcomes: DraftOutcomes | None = None  # of its drafts; None: none were verified, or with `HostSampler`
    prefill_seconds: float | None = None  # of the pass with prefill, mixed or not; None: no prefill
    waited: float = 0.0  # seconds that the host waited for the device
    drafts_finite: bool = True  # whether the drafter's results are finite where the target's are


class Runner:
    """Executes scheduled batches. All work is queued on the device's stream, in order."""

    def __init__(self, state: DeviceState, graphs: GraphRunner | None = None) -> None:
        self.state = state
        self.graphs = graphs
        self.mixing = Mixing(state, graphs) if state.device.type == "cuda" else None
        self._rounds_drafted = 0

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Launch:
        admitted = [chunk.request for chunk in batch.chunks if chunk.request.placed_blocks == 0]
        if admitted:
            self.state.begin(admitted)
        self.state.place_blocks(batch.requests)
        if batch.is_mixed:
            assert self.mixing is not None
            begun, work = self._take_time(), (batch.decoding, batch.chunks)
            self._refuse(batch.constrained, batch.verify.depth)
            both = self.mixing.run(self._mixed_program(batch), work)
            parts, drafts = (_to_host(both.round), _to_host(both.prompts)), self._pending_drafts(batch)
            return Launch(batch, *parts, drafts, (begun, self._take_time()))
        decoded = _to_host(self._launch_round(batch)) if batch.decoding else None
        begun = self._take_time()
        prefilled = _to_host(self._launch_prefill(batch)) if batch.chunks else None
        drafts = self._pending_drafts(batch)
        return Launch(batch, decoded, prefilled, drafts, (begun, self._take_time()))

    def _refuse(self, requests: Sequence[Request], depth: int = 0) -> None:
        """Write the grammar masks of requests to the device: for the next token, and after each of `depth` drafts."""
        holders = [one for one in requests if one.constraint is not None and one.slot is not None]
        found = [(one.slot, masks_after(one, (one.drafts or ())[:depth])) for one in holders]
        masks = [(slot, of_slot) for slot, of_slot in found if slot is not None and of_slot is not None]
        if masks:
            self.state.adjustments.refuse(masks)

    def _pending_drafts(self, batch: ScheduledBatch) -> PendingDrafts | None:
        """Queue a copy of the drafts for requests with constraints, which are left out of rounds until it is read."""
        requests = [*batch.constrained, *(chunk.request for chunk in batch.chunks if chunk.completes)]
        requests = [one for one in requests if one.constraint is not None and one.slot is not None]
        if not requests:
            return None
        rows = self.state.tensor([request.running_row for request in requests])
        counts = torch.cat([self.state.draft_count[rows, None], self.state.drafts[rows]], dim=1)
        for request in requests:
            request.drafts = None
        return PendingDrafts(requests, _on_host(counts))

    def _take_time(self) -> Any:
        """Return a CUDA event after all launched work, or on a CPU the present time."""
        if self.state.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @torch.inference_mode()
    def time(self, play: Callable[[], object]) -> float:
        """Return the device time of the work that `play` launches, in seconds."""
        begun, _, done = self._take_time(), play(), self._take_time()
        return _seconds_between(begun, done)

    def is_ready_for(self, batch: int, arm: Arm, kind: RequestKind) -> bool:
        """Whether a graph of the right size is captured for such a round, or there are no graphs."""
        graphs = self.graphs
        return graphs is None or graphs.padded_round(_timed_round(batch, arm, kind)) in graphs.captured

    @torch.inference_mode()
    def time_round(self, dummies: Sequence[Request], arm: Arm, kind: RequestKind) -> float:
        """Time a round of dummy requests (`Scheduler.dummy_requests`) as of this kind; return seconds."""
        state, batch = self.state, len(dummies)
        program = _timed_round(batch, arm, kind)
        state.set_dummy_rows(batch, kind, length=dummies[0].max_length, drafts=arm.depth)
        if self.graphs is not None:
            stamps = self.graphs.round(program, dummies).stamps
        else:
            stamps = program.run(state, program.inputs(state, dummies)).stamps
        assert stamps is not None
        return float(stamps[3] - stamps[0]) * 1e-9

    def confidence(self, requests: Sequence[Request], depth: int) -> NDArray[np.float32] | None:
        """Return the drafter's confidence in the drafts of the next round, [requests, depth]; 0 where there is none.

        None on a GPU, where reading it would synchronise, and with sampled drafts: the number of drafts to verify must
        not depend on the tokens that were sampled.
        """
        state = self.state
        if state.device.type != "cpu" or any(request.sample_drafts for request in requests):
            return None
        rows = torch.tensor([request.running_row for request in requests])
        is_draft = torch.arange(depth) < state.draft_count[rows, None]
        found: NDArray[np.float32] = (state.confidence[rows, :depth] * is_draft).numpy()
        return found

    def read(self, launch: Launch) -> StepResults:
        """Wait for a launch and return its results."""
        batch, results = launch.batch, StepResults()
        asked = time.perf_counter()
        prefill_seconds = launch.wait()
        results.waited = time.perf_counter() - asked
        if launch.drafts is not None:
            launch.drafts.read()
        if launch.round is not None:
            self._rounds_drafted += batch.draft.depth > 0
            turn, rest = divmod(self._rounds_drafted, SAMPLED_ROUNDS)
            every = -(-len(batch.decoding) // SAMPLED_REQUESTS)
            is_sampled = batch.draft.depth > 0 and rest == 0
            sampled = range(turn % every, len(batch.decoding), every) if is_sampled else range(0)
            entries = [(request, True, True) for request in batch.decoding]
            self._read(launch.round, entries, results, sampled)
            stamps = launch.round.stamps
            assert stamps is not None
            seconds = PhaseSeconds(*(stamps.diff().double() * 1e-9).tolist())
            chosen = sum(len(result.tokens) for result in results.requests)
            if batch.verify.depth and not batch.needs_host:
                results.outcomes = _outcomes(batch, launch.round)
            along = batch.num_prompt_tokens if batch.is_mixed else 0
            results.report = RoundReport(
                len(batch.decoding), batch.verify, batch.draft, chosen, seconds, batch.admit, along
            )
        if launch.prefill is not None:
            chunks = [(chunk.request, chunk.chooses, chunk.completes) for chunk in batch.chunks]
            self._read(launch.prefill, chunks, results)
            results.prefill_seconds = prefill_seconds
            for chunk, part in zip(batch.chunks, launch.prefill.prompt_logprobs, strict=False):
                if part is not None:
                    tokens = chunk.request.prompt[chunk.start + 1 :][: len(part.chosen)]
                    told = part.read(0, tokens, chunk.request.params.prompt_logprobs)
                    chunk.request.prompt_logprobs[chunk.start :] = told or ()
        return results

    def _read(
        self,
        outcome: PassOutcome,
        entries: list[tuple[Request, bool, bool]],
        results: StepResults,
        sampled: range = range(0),
    ) -> None:
        """Add the results of a pass for each entry: (request, whether it chose tokens, whether it may have drafted).

        For the entries `sampled`, with state norms.
        """
        width, nothing = outcome.tokens.shape[1], [0] * len(entries)
        tokens, health = outcome.tokens.tolist(), outcome.health[: len(entries)]
        all_finite = bool(health.isfinite().all())
        of_states = health.tolist() if sampled or not all_finite else ()
        accepted = nothing if outcome.accepted is None else outcome.accepted.tolist()
        drafted = nothing if outcome.drafted is None else outcome.drafted.tolist()
        asking = {i: n for n, i in enumerate(entries_asking([request for request, *_ in entries]))}
        for i, (request, chose, drafts) in enumerate(entries):
            kept = tokens[i][: accepted[i] + 1]
            is_finite = all_finite or all(map(math.isfinite, of_states[i][: len(kept)]))
            if chose:
                logprobs = None
                if i in asking and outcome.logprobs is not None:
                    logprobs = outcome.logprobs.read(asking[i] * width, kept, request.params.logprobs)
                norms = of_states[i][width:-1] if i in sampled and request.draft_until else ()
                results.requests.append(
                    RequestResult(request, kept, drafted[i], accepted[i], width, is_finite, logprobs, norms)
                )
            # The drafter is not at fault if the target's states are not finite.
            if all_finite or not (drafts and request.draft_until and is_finite):
                continue
            if not all(map(math.isfinite, of_states[i][width:])):
                results.drafts_finite = False

    def prompts_along(self, batch: int, arm: Arm) -> tuple[Arm, int] | None:
        return None if self.mixing is None else self.mixing.along(batch, arm)

    def mixes(self, batch: ScheduledBatch, than: float = 0.0) -> bool:
        """Whether round and prefill of a batch can be a mixed pass, and that is faster: `than` as in `Mixing.takes`.

        Not with trees, with `HostSampler`, and if a new request has adjusted logits or prompt log-probabilities.
        """
        if self.mixing is None or not (batch.decoding and batch.chunks):
            return False
        if batch.verify != batch.draft or batch.draft.is_tree:
            return False
        newcomers = [chunk.request for chunk in batch.chunks]
        if batch.needs_host or any(one.adjusts or one.wants_prompt_logprobs for one in newcomers):
            return False
        return self.mixing.takes(self._mixed_program(batch), than)

    def _mixed_program(self, batch: ScheduledBatch) -> MixedProgram:
        sampling = SamplingMode.needed_by(batch.requests)
        samples = _draws(kind_of_round(batch.requests), batch.draft)
        both = MixedProgram(self._round_program(batch), self._prompt_program(batch, batch.draft))
        return both.with_both(sampling=sampling, sample_drafts=samples)

    def _round_program(self, batch: ScheduledBatch) -> RoundProgram:
        requests = batch.decoding
        sampling, asked = SamplingMode.needed_by(requests), Asked.by(requests)
        adjusting = sum(request.slot is not None for request in requests)
        sample_drafts = _draws(batch.kind, batch.verify, batch.draft)
        return RoundProgram(
            len(requests), batch.verify, batch.draft, sampling, sample_drafts, asked, adjusting, batch.admit
        )

    def admitting(self, batch: ScheduledBatch, admit: int | None) -> ScheduledBatch:
        """Return the batch with `admit` drafts to verify; unchanged (all drafts) if there is no graph for that."""
        fewer, graphs = replace(batch, admit=admit), self.graphs
        if admit is None or graphs is None:
            return fewer
        return batch if graphs.will_do(graphs.padded_round(self._round_program(fewer))) is None else fewer

    def _launch_round(self, batch: ScheduledBatch) -> PassOutcome:
        program, requests = self._round_program(batch), batch.decoding
        if not batch.needs_host:
            self._refuse(batch.constrained, batch.verify.depth)
        if self.graphs is not None and not batch.needs_host:
            return self.graphs.round(program, requests)
        return program.run(self.state, program.inputs(self.state, requests), requests if batch.needs_host else ())

    def _prompt_program(self, batch: ScheduledBatch, draft: Arm) -> PromptProgram:
        chunks, requests = batch.chunks, [chunk.request for chunk in batch.chunks]
        return PromptProgram(
            tokens=batch.num_prompt_tokens,
            chunks=len(chunks),
            max_chunk=max(chunk.end - chunk.start for chunk in chunks),
            draft=draft,
            has_drafter=self.state.drafter is not None,
            sampling=SamplingMode.needed_by(requests),
            sample_drafts=_draws(kind_of_round(requests), draft),
            asked=Asked.by(requests),
            adjusting=sum(request.slot is not None for request in requests),
        )

    def _launch_prefill(self, batch: ScheduledBatch) -> PassOutcome:
        program, chunks = self._prompt_program(batch, batch.first_draft), batch.chunks
        chosen = [chunk.request for chunk in chunks if chunk.chooses]
        needs_host = any(one.needs_host for one in chosen) or any(chunk.prompt_rows for chunk in chunks)
        self._refuse(chosen)
        if self.graphs is not None and not needs_host:
            return self.graphs.prefill(program, chunks)
        outcome = program.run(self.state, program.inputs(self.state, chunks), chunks if needs_host else ())
        self.state.reset_padding()
        return outcome


def _timed_round(batch: int, arm: Arm, kind: RequestKind) -> RoundProgram:
    sampling = SamplingMode.GREEDY if kind is RequestKind.GREEDY else SamplingMode.SAMPLED
    return RoundProgram(batch, arm, arm, sampling, _draws(kind, arm))


def _draws(kind: RequestKind, *arms: Arm) -> bool:
    """Whether a program for this kind of requests drafts or verifies sampled drafts."""
    return kind is RequestKind.SAMPLED_DRAFTS and any(arm.depth and not arm.is_tree for arm in arms)
