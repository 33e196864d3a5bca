"""Runs what the scheduler has put together, and reads the results when asked.

The runner owns the device: caches, row state, graphs. It knows requests only as sources of tokens and settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fledge.decoding.tree import DraftTree
from fledge.engine.graphs import GraphRunner
from fledge.engine.outputs import TokenLogprobs
from fledge.engine.prefill import PrefillInputs, lay_out, run_prefill
from fledge.engine.protocol import RoundReport
from fledge.engine.request import Request
from fledge.engine.round import phase_seconds, run_round
from fledge.engine.round_models import PassOutcome, RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.sampler import HostSampler, LogprobsTensors, Sampler, SamplingMode
from fledge.engine.scheduler import Chunk, ScheduledBatch

TIMED_ROUND = 16  # of rounds that are replayed from graphs, every so many are timed


@dataclass(kw_only=True)
class RequestResult:
    """What a launch did for one request."""

    request: Request
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    in_flight: int  # what the scheduler had reserved for it
    is_finite: bool  # the target's hidden states were
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Readback:
    """An outcome on its way to the host. `ready` waits for it; until then nobody waits for anything."""

    def __init__(self, outcome: PassOutcome, logprobs: LogprobsTensors | None = None) -> None:
        self.logprobs = logprobs
        self._host = outcome
        self._event: torch.cuda.Event | None = None
        if outcome.tokens.is_cuda:
            self._host = PassOutcome(**{name: _to_host(one) for name, one in vars(outcome).items() if one is not None})
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> PassOutcome:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(kw_only=True)
class Launch:
    """One step on the device: what was scheduled, and where its results arrive."""

    batch: ScheduledBatch
    round: Readback | None = None
    prefill: Readback | None = None


@dataclass(kw_only=True)
class StepResults:
    """What a launch did: one result for each request that got tokens."""

    requests: list[RequestResult] = field(default_factory=list)
    report: RoundReport | None = None  # of its round
    drafts_finite: bool = True  # what the drafter computed was, where the target's states were


class Runner:
    """Executes scheduled batches. Everything it does is queued on the device's stream, in order."""

    def __init__(self, models: RoundModels, state: RowState, graphs: GraphRunner | None = None) -> None:
        self.models = models
        self.state = state
        self.graphs = graphs
        self.vocab_size = models.target.config.vocab_size
        self._rounds = 0

    def drop_drafter(self) -> None:
        """Draft no more. Drafts that are there are still verified."""
        self.models = replace(self.models, drafter=None, drafter_cache=None)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Let nobody multiply with what is in these blocks of both caches."""
        for cache in (self.models.target_cache, self.models.drafter_cache):
            if cache is not None:
                cache.clear(blocks)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Launch:
        admitted = [chunk.request for chunk in batch.chunks if chunk.request.placed_blocks == 0]
        if admitted:
            self.state.begin([request.running_row for request in admitted], admitted, self.vocab_size)
        self._place_blocks(batch.requests)
        launch = Launch(batch=batch)
        if batch.decoding:
            launch.round = self._launch_round(batch)
        if batch.chunks:
            launch.prefill = self._launch_prefill(batch)
        return launch

    def read(self, launch: Launch) -> StepResults:
        """Wait for a launch and return its results."""
        batch, results = launch.batch, StepResults()
        if launch.round is not None:
            outcome = self._read(launch.round, [(request, True, True) for request in batch.decoding], results)
            assert outcome.accepted is not None
            size = len(batch.decoding)
            chosen = size + sum(outcome.accepted[:size].tolist())
            seconds = None if outcome.stamps is None else phase_seconds(outcome.stamps)
            results.report = RoundReport(size, batch.verify, batch.draft, chosen, seconds)
        if launch.prefill is not None:
            chunks = [(chunk.request, chunk.chooses, chunk.completes) for chunk in batch.chunks]
            self._read(launch.prefill, chunks, results)
        return results

    def _read(self, readback: Readback, entries: list[tuple[Request, bool, bool]], results: StepResults) -> PassOutcome:
        """Add what a pass did for each request: (request, whether it chose tokens, whether it drafted if any did)."""
        outcome = readback.ready()
        width, nothing = outcome.tokens.shape[1], [0] * len(entries)
        tokens, health = outcome.tokens.tolist(), outcome.health.tolist()
        accepted = nothing if outcome.accepted is None else outcome.accepted.tolist()
        drafted = nothing if outcome.drafted is None else outcome.drafted.tolist()
        for i, (request, chose, drafts) in enumerate(entries):
            kept = tokens[i][: accepted[i] + 1]
            is_finite = all(map(math.isfinite, health[i][: len(kept)]))
            if chose:
                result = RequestResult(
                    request=request,
                    tokens=kept,
                    drafted=drafted[i],
                    accepted=accepted[i],
                    in_flight=width,
                    is_finite=is_finite,
                    logprobs=[] if readback.logprobs is None else readback.logprobs.of(request, i * width, kept),
                )
                results.requests.append(result)
            # Behind a target that has gone wrong, a drafter cannot be right.
            if drafts and request.draft_until and is_finite and not all(map(math.isfinite, health[i][width:])):
                results.drafts_finite = False
        return outcome

    def _launch_round(self, batch: ScheduledBatch) -> Readback:
        requests, verify, draft = batch.decoding, batch.verify, batch.draft
        rows = [request.running_row for request in requests]
        mode, needs_host = SamplingMode.needed_by(requests), any(request.needs_host for request in requests)
        if self.graphs is not None and not needs_host:
            self._rounds += 1
            timed = self._rounds % TIMED_ROUND == 0  # stamps cost a few microseconds in a round of perhaps a thousand
            return Readback(
                self.graphs.round(self.models, rows, verify=verify, draft=draft, sampling=mode, timed=timed)
            )
        index = self.state.tensor(rows)
        if needs_host:
            sampler: Sampler = HostSampler(requests, self.state, self.vocab_size, self._drafts(index, verify))
        else:
            sampler = Sampler(self.state, index, mode)
        outcome = run_round(self.models, self.state, index, sampler, verify=verify, draft=draft, timed=True)
        return Readback(outcome, sampler.logprobs)

    def _launch_prefill(self, batch: ScheduledBatch) -> Readback:
        chunks, requests = batch.chunks, [chunk.request for chunk in batch.chunks]
        depth = batch.draft if any(chunk.completes for chunk in chunks) else 0
        mode = SamplingMode.needed_by(requests)
        needs_host = any(chunk.chooses and chunk.request.needs_host for chunk in chunks)
        if self.graphs is not None and not needs_host:
            outcome = self.graphs.prefill(self.models, chunks, depth=depth, sampling=mode)
            if outcome is not None:
                return Readback(outcome)
        inputs = self._prefill_inputs(chunks)
        if needs_host:
            sampler: Sampler = HostSampler(requests, self.state, self.vocab_size)
        else:
            sampler = Sampler(self.state, inputs.rows, mode)
        outcome = run_prefill(self.models, self.state, inputs, sampler, depth=depth)
        return Readback(outcome, sampler.logprobs)

    def _prefill_inputs(self, chunks: Sequence[Chunk]) -> PrefillInputs:
        lengths = [chunk.end - chunk.start for chunk in chunks]
        packed = lay_out(chunks, block_size=self.models.block_size, padding_row=self.state.padding_row)
        return PrefillInputs.of(
            self.state.tensor(packed), tokens=sum(lengths), chunks=len(chunks), max_chunk=max(lengths)
        )

    def _place_blocks(self, requests: list[Request]) -> None:
        placements: list[tuple[int, int, int]] = []
        for request in requests:
            blocks = request.table.blocks
            placements += [(request.running_row, i, blocks[i]) for i in range(request.placed_blocks, len(blocks))]
            request.placed_blocks = len(blocks)
        self.state.place_blocks(placements)

    def _drafts(self, rows: Tensor, verify: int) -> Tensor | DraftTree | None:
        """What the next round of `rows` verifies."""
        if verify == 0:
            return None
        if self.models.tree is None:
            return self.state.drafts[rows, :verify]
        return self.models.drafted_trees(self.state, rows, verify)
