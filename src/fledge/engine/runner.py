"""Runs what the scheduler planned, and reads the results when asked.

The runner owns the device: caches, row state, graphs. It knows requests only as sources of tokens and settings.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.decoding.tree import DraftTree
from fledge.engine.choosing import Chooser, Choosing, DeviceChooser, Logprobs, Watcher
from fledge.engine.graphs import RoundGraphs
from fledge.engine.prefill import run_prefill
from fledge.engine.request import Request, TokenLogprobs
from fledge.engine.round import run_round
from fledge.engine.round_clock import PhaseTimes, RoundReport
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.scheduler import Plan

RECENT_ROUNDS = 16
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
    first_tokens: Readback | None  # of the chunks that chose a token: tokens and health, [chunks] each
    first_logprobs: Logprobs | None
    first_drafts: Readback | None  # health, [chunks that completed]
    rounds: Readback | None  # tokens [batch, verify + 1], accepted [batch], drafted [batch], health [batch, ...]
    round_logprobs: Logprobs | None
    drafter_failed: bool = False  # known once it was read


class Runner:
    """Executes plans. Everything it does is queued on the device's stream, in order."""

    def __init__(self, models: RoundModels, state: RowState, graphs: RoundGraphs | None) -> None:
        self.models = models
        self.state = state
        self.graphs = graphs
        self.device = state.device
        self.phase_times = PhaseTimes()
        self.recent_rounds: deque[RoundReport] = deque(maxlen=RECENT_ROUNDS)  # whoever watches empties it
        self._rounds = 0
        self.vocab_size = models.target.config.vocab_size

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launch:
        admitted = [chunk.request for chunk in plan.chunks if chunk.request.placed_blocks == 0]
        if admitted:
            self.state.begin([_row(request) for request in admitted], admitted, self.vocab_size)
        self._place_blocks([*(chunk.request for chunk in plan.chunks), *plan.decoding])
        rounds, round_logprobs = self._round(plan) if plan.decoding else (None, None)
        chosen = drafts_health = None
        if plan.chunks:
            read = run_prefill(self.models, self.state, plan.chunks, depth=plan.draft, vocab_size=self.vocab_size)
            chosen, drafts_health = read.chosen, read.drafts_health
        return Launch(
            plan=plan,
            first_tokens=None if chosen is None else Readback([chosen.first_tokens, chosen.health]),
            first_logprobs=None if chosen is None else chosen.logprobs,
            first_drafts=None if drafts_health is None else Readback([drafts_health]),
            rounds=rounds,
            round_logprobs=round_logprobs,
        )

    def read(self, launch: Launch) -> list[RequestResult]:
        """Wait for a launch and return its results, one for each request that got tokens."""
        results: list[RequestResult] = []
        if launch.rounds is not None:
            tensors = launch.rounds.ready()
            tokens, accepted, drafted, health = (tensor.tolist() for tensor in tensors[:4])
            seconds = self.phase_times.add(tensors[4]) if len(tensors) > 4 else None
            batch, verify, draft = len(launch.plan.decoding), launch.plan.verify, launch.plan.draft
            self.recent_rounds.append(RoundReport(batch, verify, draft, batch + sum(accepted[:batch]), seconds))
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
        if launch.first_tokens is not None:
            first, first_health = launch.first_tokens.ready()
            is_finite = first_health.isfinite().tolist()
            choosing = [chunk.request for chunk in launch.plan.chunks if chunk.chooses]
            for i, (request, token) in enumerate(zip(choosing, first.tolist(), strict=True)):
                logprobs = [] if launch.first_logprobs is None else launch.first_logprobs.of(request, i, [token])
                results.append(
                    RequestResult(
                        request=request,
                        tokens=[token],
                        drafted=0,
                        accepted=0,
                        in_flight=1,
                        is_finite=is_finite[i],
                        logprobs=logprobs,
                    )
                )
        if launch.first_drafts is not None:
            completed = [chunk.request for chunk in launch.plan.chunks if chunk.completes]
            wrong = [result.request for result in results if not result.is_finite]
            drafts_finite = launch.first_drafts.ready()[0].isfinite().tolist()
            for request, finite in zip(completed, drafts_finite, strict=True):
                launch.drafter_failed |= not finite and request.draft_until > 0 and request not in wrong
        return results

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
