"""Runs what the scheduler planned, and reads the results when asked.

The runner owns the device: caches, row state, graphs. It knows requests only as sources of tokens and settings.
"""

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
from fledge.engine.round_clock import PhaseTimes
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.scheduler import Plan

TIMED_ROUND = 16  # of rounds that are replayed from graphs, every so many are timed


@dataclass(kw_only=True)
class RequestResult:
    """What a launch did for one request."""

    request: Request
    tokens: list[int]
    drafted: int
    accepted: int
    in_flight: int  # what the scheduler had reserved for it
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
    first_tokens: Readback | None  # [chunks that chose a token]
    first_logprobs: Logprobs | None
    rounds: Readback | None  # tokens [batch, verify + 1], accepted [batch], drafted [batch]
    round_logprobs: Logprobs | None


class Runner:
    """Executes plans. Everything it does is queued on the device's stream, in order."""

    def __init__(self, models: RoundModels, state: RowState, graphs: RoundGraphs | None) -> None:
        self.models = models
        self.state = state
        self.graphs = graphs
        self.device = state.device
        self.phase_times = PhaseTimes()
        self._rounds = 0
        self.vocab_size = models.target.config.vocab_size

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launch:
        admitted = [chunk.request for chunk in plan.chunks if chunk.request.placed_blocks == 0]
        if admitted:
            self.state.begin([_row(request) for request in admitted], admitted, self.vocab_size)
        self._place_blocks([*(chunk.request for chunk in plan.chunks), *plan.decoding])
        rounds, round_logprobs = self._round(plan) if plan.decoding else (None, None)
        read = None
        if plan.chunks:
            read = run_prefill(self.models, self.state, plan.chunks, depth=plan.draft, vocab_size=self.vocab_size)
        return Launch(
            plan=plan,
            first_tokens=None if read is None else Readback([read.first_tokens]),
            first_logprobs=None if read is None else read.logprobs,
            rounds=rounds,
            round_logprobs=round_logprobs,
        )

    def read(self, launch: Launch) -> list[RequestResult]:
        """Wait for a launch and return its results, one for each request that got tokens."""
        results: list[RequestResult] = []
        if launch.rounds is not None:
            tensors = launch.rounds.ready()
            tokens, accepted, drafted = (tensor.tolist() for tensor in tensors[:3])
            for stamps in tensors[3:]:
                self.phase_times.add(stamps)
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
                        logprobs=logprobs,
                    )
                )
        if launch.first_tokens is not None:
            (first,) = launch.first_tokens.ready()
            choosing = [chunk.request for chunk in launch.plan.chunks if chunk.chooses]
            for i, (request, token) in enumerate(zip(choosing, first.tolist(), strict=True)):
                logprobs = [] if launch.first_logprobs is None else launch.first_logprobs.of(request, i, [token])
                results.append(
                    RequestResult(
                        request=request, tokens=[token], drafted=0, accepted=0, in_flight=1, logprobs=logprobs
                    )
                )
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
        results = [outcome.tokens, outcome.accepted, outcome.drafted]
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
