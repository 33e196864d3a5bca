"""Runs what the scheduler planned, and reads the results when asked.

The runner owns the device: caches, row state, graphs. It knows requests only as sources of tokens and settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.decoding.tree import DraftTree
from fledge.engine.choosing import Chooser, Choosing, DeviceChooser, Logprobs, Watcher
from fledge.engine.outputs import TokenLogprobs
from fledge.engine.prefill import PrefillInputs, PrefillOutcome, lay_out, run_prefill
from fledge.engine.prefill_graphs import PrefillGraphs
from fledge.engine.protocol import RoundReport
from fledge.engine.request import Request
from fledge.engine.round import run_round
from fledge.engine.round_clock import phase_seconds
from fledge.engine.round_graphs import RoundGraphs
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.scheduler import Chunk, Plan

TIMED_ROUND = 16  # of rounds that are replayed from graphs, every so many are timed


@dataclass(kw_only=True)
class RequestResult:
    """What a launch did for one request."""

    request: Request
    tokens: list[int]
    drafted: int
    accepted: int
    in_flight: int  # what the scheduler had reserved for it
    is_finite: bool = True  # the target's hidden states were
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Readback:
    """Tensors on their way to the host. `ready` waits for them; until then nobody waits for anything."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
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
    """One step on the device: what was asked, and where its results arrive."""

    plan: Plan
    first: (
        Readback | None
    )  # of the chunks: tokens, the target's health and, if it drafted, the drafter's, [chunks] each
    first_logprobs: Logprobs | None
    rounds: Readback | None  # tokens [batch, verify + 1], accepted [batch], drafted [batch], health [batch, ...]
    round_logprobs: Logprobs | None
    drafter_failed: bool = False  # known once it was read
    report: RoundReport | None = None  # of the round, once it was read


class Runner:
    """Executes plans. Everything it does is queued on the device's stream, in order."""

    def __init__(
        self,
        models: RoundModels,
        state: RowState,
        graphs: RoundGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
    ) -> None:
        self.models = models
        self.state = state
        self.graphs = graphs
        self.prefill_graphs = prefill_graphs
        self.device = state.device
        self._rounds = 0
        self.vocab_size = models.target.config.vocab_size

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launch:
        admitted = [chunk.request for chunk in plan.chunks if chunk.request.placed_blocks == 0]
        if admitted:
            self.state.begin([_row(request) for request in admitted], admitted, self.vocab_size)
        self._place_blocks([*(chunk.request for chunk in plan.chunks), *plan.decoding])
        rounds, round_logprobs = self._round(plan) if plan.decoding else (None, None)
        first, first_logprobs = self._prefill(plan.chunks, plan.draft) if plan.chunks else (None, None)
        return Launch(
            plan=plan, first=first, first_logprobs=first_logprobs, rounds=rounds, round_logprobs=round_logprobs
        )

    def read(self, launch: Launch) -> list[RequestResult]:
        """Wait for a launch and return its results, one for each request that got tokens."""
        results: list[RequestResult] = []
        if launch.rounds is not None:
            tensors = launch.rounds.ready()
            tokens, accepted, drafted, health = (tensor.tolist() for tensor in tensors[:4])
            seconds = phase_seconds(tensors[4]) if len(tensors) > 4 else None
            batch, verify, draft = len(launch.plan.decoding), launch.plan.verify, launch.plan.draft
            launch.report = RoundReport(batch, verify, draft, batch + sum(accepted[:batch]), seconds)
            per_row = launch.plan.verify + 1
            for i, request in enumerate(launch.plan.decoding):
                kept = accepted[i] + 1
                logprobs = []
                if launch.round_logprobs is not None:
                    logprobs = launch.round_logprobs.of(request, i * per_row, tokens[i][:kept])
                results.append(
                    RequestResult(
                        request=request,
                        tokens=tokens[i][:kept],
                        drafted=drafted[i],
                        accepted=accepted[i],
                        in_flight=per_row,
                        is_finite=all(map(math.isfinite, health[i][:kept])),
                        logprobs=logprobs,
                    )
                )
                # Behind a target that has gone wrong, a drafter cannot be right.
                if draft and request.draft_until and results[-1].is_finite and not math.isfinite(health[i][per_row]):
                    launch.drafter_failed = True
        if launch.first is not None:
            results += self._read_first(launch, launch.first.ready())
        return results

    def _read_first(self, launch: Launch, tensors: list[Tensor]) -> list[RequestResult]:
        """Return the first tokens of what was read. Entries of chunks that chose none mean nothing."""
        results = []
        first, is_finite = tensors[0].tolist(), tensors[1].isfinite().tolist()
        drafts_finite = tensors[2].isfinite().tolist() if len(tensors) > 2 else [True] * len(first)
        for i, chunk in enumerate(launch.plan.chunks):
            request = chunk.request
            if chunk.chooses:
                logprobs = [] if launch.first_logprobs is None else launch.first_logprobs.of(request, i, [first[i]])
                results.append(
                    RequestResult(
                        request=request,
                        tokens=[first[i]],
                        drafted=0,
                        accepted=0,
                        in_flight=1,
                        is_finite=is_finite[i],
                        logprobs=logprobs,
                    )
                )
            if chunk.completes and request.draft_until and is_finite[i] and not drafts_finite[i]:
                launch.drafter_failed = True
        return results

    def _prefill(self, chunks: list[Chunk], draft: int) -> tuple[Readback, Logprobs | None]:
        depth = draft if any(chunk.completes for chunk in chunks) else 0
        requests = [chunk.request for chunk in chunks]
        choosing = Choosing.needed_by(requests)
        watched = any(chunk.chooses and chunk.request.is_watched for chunk in chunks)
        logprobs = None
        outcome: PrefillOutcome | None = None
        if self.prefill_graphs is not None and not watched:
            outcome = self.prefill_graphs.replay(self.models, chunks, depth=depth, choosing=choosing)
        if outcome is None:
            lengths = [chunk.end - chunk.start for chunk in chunks]
            packed = lay_out(chunks, block_size=self.models.block_size, padding_row=self.state.padding_row)
            inputs = PrefillInputs.of(
                self.state.tensor(packed), tokens=sum(lengths), chunks=len(chunks), max_chunk=max(lengths)
            )
            chooser: Chooser = DeviceChooser(self.state, inputs.rows, choosing)
            if watched:
                chooser = Watcher(requests, self.state, self.vocab_size)
            outcome = run_prefill(self.models, self.state, inputs, chooser, depth=depth)
            logprobs = chooser.logprobs if isinstance(chooser, Watcher) else None
        results = [outcome.first_tokens, outcome.health]
        return Readback(results if outcome.drafts_health is None else [*results, outcome.drafts_health]), logprobs

    def _place_blocks(self, requests: list[Request]) -> None:
        placements: list[tuple[int, int, int]] = []
        for request in requests:
            blocks = request.table.blocks
            assert request.row is not None
            placements += [(request.row, i, blocks[i]) for i in range(request.placed_blocks, len(blocks))]
            request.placed_blocks = len(blocks)
        self.state.place_blocks(placements)

    def _round(self, plan: Plan) -> tuple[Readback, Logprobs | None]:
        requests, verify, draft = plan.decoding, plan.verify, plan.draft
        rows = [_row(request) for request in requests]
        watched = any(request.is_watched for request in requests)
        logprobs = None
        if self.graphs is not None and not watched:
            self._rounds += 1
            # Stamps cost a few microseconds in a round of perhaps a thousand.
            timed = self._rounds % TIMED_ROUND == 0
            choosing = Choosing.needed_by(requests)
            outcome = self.graphs.replay(rows, verify=verify, draft=draft, choosing=choosing, timed=timed)
        else:
            index = self.state.tensor(rows)
            chooser: Chooser = DeviceChooser(self.state, index, Choosing.needed_by(requests))
            if watched:
                chooser = Watcher(requests, self.state, self.vocab_size, self._drafts(index, verify))
            outcome = run_round(self.models, self.state, index, chooser, verify=verify, draft=draft, timed=True)
            logprobs = chooser.logprobs if isinstance(chooser, Watcher) else None
        results = [outcome.tokens, outcome.accepted, outcome.drafted, outcome.health]
        return Readback(results if outcome.stamps is None else [*results, outcome.stamps]), logprobs

    def _drafts(self, rows: Tensor, verify: int) -> Tensor | DraftTree | None:
        """What the next round of `rows` verifies."""
        if verify == 0:
            return None
        if self.models.tree is None:
            return self.state.drafts[rows, :verify]
        return self.models.drafted_trees(self.state, rows, verify)


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
