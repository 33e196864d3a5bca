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
from fledge.engine.prefill import PrefillInputs, PrefillOutcome, lay_out, run_prefill
from fledge.engine.protocol import RoundReport
from fledge.engine.request import Request
from fledge.engine.round import RoundOutcome, phase_seconds, run_round
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.sampler import DeviceSampler, HostSampler, LogprobsTensors, SamplingMode
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
    """Tensors on their way to the host. `ready` waits for them; until then nobody waits for anything."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = list(tensors)

    def ready(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(kw_only=True)
class Launch:
    """One step on the device: what was scheduled, and where its results arrive."""

    batch: ScheduledBatch
    round: Readback | None = None  # tokens [batch, verify + 1], accepted [batch], drafted [batch], health [batch, ...]
    round_logprobs: LogprobsTensors | None = None
    first: Readback | None = None  # [chunks] each: first tokens, the target's health and, if it drafted, the drafter's
    first_logprobs: LogprobsTensors | None = None


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
            self._launch_round(launch)
        if batch.chunks:
            self._launch_prefill(launch)
        return launch

    def read(self, launch: Launch) -> StepResults:
        """Wait for a launch and return its results."""
        results = StepResults()
        if launch.round is not None:
            self._read_round(launch, launch.round.ready(), results)
        if launch.first is not None:
            self._read_first(launch, launch.first.ready(), results)
        return results

    def _launch_round(self, launch: Launch) -> None:
        requests, verify, draft = launch.batch.decoding, launch.batch.verify, launch.batch.draft
        rows = [request.running_row for request in requests]
        mode = SamplingMode.needed_by(requests)
        outcome: RoundOutcome
        if any(request.needs_host for request in requests):
            index = self.state.tensor(rows)
            sampler = HostSampler(requests, self.state, self.vocab_size, self._drafts(index, verify))
            outcome = run_round(self.models, self.state, index, sampler, verify=verify, draft=draft, timed=True)
            launch.round_logprobs = sampler.logprobs
        elif self.graphs is not None:
            self._rounds += 1
            timed = self._rounds % TIMED_ROUND == 0  # stamps cost a few microseconds in a round of perhaps a thousand
            outcome = self.graphs.round(self.models, rows, verify=verify, draft=draft, sampling=mode, timed=timed)
        else:
            index = self.state.tensor(rows)
            on_device = DeviceSampler(self.state, index, mode)
            outcome = run_round(self.models, self.state, index, on_device, verify=verify, draft=draft, timed=True)
        read = [outcome.tokens, outcome.accepted, outcome.drafted, outcome.health]
        launch.round = Readback(read if outcome.stamps is None else [*read, outcome.stamps])

    def _launch_prefill(self, launch: Launch) -> None:
        chunks, requests = launch.batch.chunks, [chunk.request for chunk in launch.batch.chunks]
        depth = launch.batch.draft if any(chunk.completes for chunk in chunks) else 0
        mode = SamplingMode.needed_by(requests)
        outcome: PrefillOutcome | None = None
        if any(chunk.chooses and chunk.request.needs_host for chunk in chunks):
            sampler = HostSampler(requests, self.state, self.vocab_size)
            outcome = run_prefill(self.models, self.state, self._prefill_inputs(chunks), sampler, depth=depth)
            launch.first_logprobs = sampler.logprobs
        elif self.graphs is not None:
            outcome = self.graphs.prefill(self.models, chunks, depth=depth, sampling=mode)
        if outcome is None:
            inputs = self._prefill_inputs(chunks)
            on_device = DeviceSampler(self.state, inputs.rows, mode)
            outcome = run_prefill(self.models, self.state, inputs, on_device, depth=depth)
        read = [outcome.first_tokens, outcome.health]
        launch.first = Readback(read if outcome.drafts_health is None else [*read, outcome.drafts_health])

    def _prefill_inputs(self, chunks: Sequence[Chunk]) -> PrefillInputs:
        lengths = [chunk.end - chunk.start for chunk in chunks]
        packed = lay_out(chunks, block_size=self.models.block_size, padding_row=self.state.padding_row)
        return PrefillInputs.of(
            self.state.tensor(packed), tokens=sum(lengths), chunks=len(chunks), max_chunk=max(lengths)
        )

    def _read_round(self, launch: Launch, tensors: list[Tensor], results: StepResults) -> None:
        batch, width = launch.batch, launch.batch.verify + 1
        tokens, accepted, drafted, health = (tensor.tolist() for tensor in tensors[:4])
        seconds = phase_seconds(tensors[4]) if len(tensors) > 4 else None
        chosen = len(batch.decoding) + sum(accepted)
        results.report = RoundReport(len(batch.decoding), batch.verify, batch.draft, chosen, seconds)
        for i, request in enumerate(batch.decoding):
            kept = tokens[i][: accepted[i] + 1]
            logprobs = launch.round_logprobs
            result = RequestResult(
                request=request,
                tokens=kept,
                drafted=drafted[i],
                accepted=accepted[i],
                in_flight=width,
                is_finite=all(map(math.isfinite, health[i][: len(kept)])),
                logprobs=[] if logprobs is None else logprobs.of(request, i * width, kept),
            )
            results.requests.append(result)
            # Behind a target that has gone wrong, a drafter cannot be right.
            if batch.draft and request.draft_until and result.is_finite and not math.isfinite(health[i][width]):
                results.drafts_finite = False

    def _read_first(self, launch: Launch, tensors: list[Tensor], results: StepResults) -> None:
        """Add the first tokens of what was read. Entries of chunks that chose none mean nothing."""
        first, is_finite = tensors[0].tolist(), tensors[1].isfinite().tolist()
        drafts_finite = tensors[2].isfinite().tolist() if len(tensors) > 2 else [True] * len(first)
        for i, chunk in enumerate(launch.batch.chunks):
            request, logprobs = chunk.request, launch.first_logprobs
            if chunk.chooses:
                results.requests.append(
                    RequestResult(
                        request=request,
                        tokens=[first[i]],
                        in_flight=1,
                        is_finite=is_finite[i],
                        logprobs=[] if logprobs is None else logprobs.of(request, i, [first[i]]),
                    )
                )
            if chunk.completes and request.draft_until and is_finite[i] and not drafts_finite[i]:
                results.drafts_finite = False

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
