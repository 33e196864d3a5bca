"""The engine: requests in, tokens out, step by step. It knows token ids only; text is `llm.py`'s business.

    step  =  plan what runs  ->  launch it  ->  read what the launch before it produced

On a GPU the host reads one launch behind: while the device runs a round, the host digests the previous one and plans
the next. On a CPU there is nothing to overlap and every launch is read at once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.constraint import TokenConstraint
from fledge.engine.kv_pool import KVPool
from fledge.engine.prefill_graphs import PrefillGraphs
from fledge.engine.recording import CudaRecorder
from fledge.engine.recovery import DeadEngineError, DrafterFailed, Trials, describe
from fledge.engine.request import UNLIMITED, Phase, Request, RoundRecord, TokenLogprobs
from fledge.engine.round_clock import PhaseTimes
from fledge.engine.round_graphs import RoundGraphs
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.runner import Launch, RequestResult, Runner
from fledge.engine.scheduler import MustSettle, Plan, Scheduler
from fledge.engine.sizing import EngineConfig, RequestBounds, count_blocks, make_cache, scratch_slots, tree_nodes
from fledge.errors import ConfigError
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.native import accelerate

# How deep to draft, given the number of running requests; 0 is plain decoding. The seam for adaptive control.
DepthPolicy = Callable[[int], int]

NOT_FINITE = "the target computed values that are not finite"

_log = logging.getLogger("fledge.engine")


@dataclass(frozen=True, kw_only=True)
class Update:
    """Tokens that have become known for a request; the first `accepted` of them had been drafted.

    With a `finish_reason` it is the last of the request, which does not change any more.
    """

    request: Request
    tokens: list[int]
    accepted: int
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None


@dataclass(kw_only=True)
class EngineStatistics:
    """Totals over the engine's life. Reading them asks the device nothing."""

    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    failed_steps: int = 0
    drafter_failure: str | None = None  # why the engine goes on without its drafter
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # verify, accept, draft
    schedule_seconds: float = 0.0  # planning
    launch_seconds: float = 0.0  # queueing work; on a CPU also doing it
    read_seconds: float = 0.0  # waiting for the device and digesting its results


class Engine:
    """Continuous batching over one target and, if given, its drafter."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        config: EngineConfig,
        depth_policy: DepthPolicy = lambda _running: 0,
    ) -> None:
        self.device = target.embed_tokens.weight.device
        on_gpu = self.device.type == "cuda"
        self.statistics = EngineStatistics()
        self._depth_policy = depth_policy
        if config.pack_weights:
            target, drafter = accelerate(target, drafter)
        self._requests: dict[str, Request] = {}
        self._in_flight: Launch | None = None
        self._updates: list[Update] = []
        self._involved: Sequence[Request] = ()  # in what is being done: a failure is one of theirs
        self._reads_late = on_gpu if config.read_late is None else config.read_late
        self._seed = 0

        self.config = config
        block_size = config.block_size or (64 if on_gpu else 16)
        nodes = tree_nodes(config, target.config.vocab_size)
        num_blocks = count_blocks(config, block_size, target, drafter)
        self.pool = KVPool(num_blocks, block_size, prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_requests=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            max_depth=config.max_depth,
            scratch_slots=scratch_slots(config, nodes),
        )
        self._trials = Trials(self.scheduler)
        max_length = config.max_model_len + self.scheduler.lookahead
        models = RoundModels(
            target=target,
            target_cache=make_cache(target, num_blocks, block_size),
            drafter=drafter,
            drafter_cache=None if drafter is None else make_cache(drafter, num_blocks, block_size),
            max_length=max_length,
            block_size=block_size,
            tree=config.tree,
            sample_drafts=config.sample_drafts,
        )
        state = RowState(
            max_requests=config.max_num_seqs,
            max_blocks=self.pool.blocks_for(max_length),
            max_depth=max(config.max_depth, 1),
            device=self.device,
            tree_nodes=nodes,
            draft_probs_vocab=target.config.vocab_size if config.sample_drafts else 0,
        )
        use_graphs = on_gpu and not config.enforce_eager
        recorder = CudaRecorder() if use_graphs else None
        self.runner = Runner(
            models,
            state,
            None if recorder is None else RoundGraphs(models, state, config.max_num_seqs, recorder),
            None if recorder is None else PrefillGraphs(models, state, recorder),
        )
        self.statistics.phases = self.runner.phase_times
        self.bounds = RequestBounds(
            vocab_size=self.runner.vocab_size,
            max_model_len=config.max_model_len,
            capacity=self.pool.capacity * block_size - self.scheduler.lookahead,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None] = lambda _done, _all: None, *, plain: bool = False) -> None:
        """Capture the graphs of all batch sizes now rather than when they are first needed. Nothing on a CPU.

        `plain`: those without speculation too, which a request may ask for and a failed drafter leads to.
        """
        graphs, prefill_graphs, models = self.runner.graphs, self.runner.prefill_graphs, self.runner.models
        if graphs is None or prefill_graphs is None:
            return
        most = self.config.max_num_seqs
        depths = {self._depth_policy(size) for size in range(1, most + 1)} if models.drafter is not None else {0}
        depths |= {0} if plain else set()
        captures = [
            *graphs.missing(sorted(depths), most),
            *prefill_graphs.missing(
                models, sorted(depths), max_tokens=self.config.max_num_batched_tokens, max_chunks=most
            ),
        ]
        for done, capture in enumerate(captures):
            progress(done, len(captures))
            capture()
        progress(len(captures), len(captures))

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        eos_ids: Sequence[int] = (),
        speculate: bool = True,
        draft_limit: int | None = None,
        constraint: TokenConstraint | None = None,
    ) -> Request:
        """Queue a request. Raises PromptError if it could never run, whatever else does.

        No more than `draft_limit` tokens are drafted for it in a round, however many are for others; 0 is the same as
        not to speculate. A `constraint` is this request's alone. If it fails, the request ends with finish reason
        "error" and says why in `failure`.
        """
        if request_id in self._requests:
            raise ConfigError(f"request id '{request_id}' is in use")
        self.check_request(prompt, params)
        drafter = self.runner.models.drafter
        speculate = speculate and draft_limit != 0
        limit = min(self.config.max_model_len, self.bounds.capacity)
        request = Request(
            id=request_id,
            prompt=list(prompt),
            params=params,
            seed=_first_given(params.seed, seed, self._next_seed()),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids),
            max_length=limit,
            draft_until=min(limit, drafter.config.max_positions) if drafter is not None and speculate else 0,
            draft_limit=UNLIMITED if draft_limit is None else draft_limit,
            constraint=constraint,
        )
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise PromptError or ConfigError for a request that can never run."""
        self.bounds.check(prompt, params)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now, in whatever phase it is. What is computed for it already is discarded."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = reason
            self.statistics.aborted += reason == "abort"
            self.statistics.finished += reason != "abort"
            self._finish(request)

    def step(self) -> list[Update]:
        """Run one step and return what has become known since the last one.

        What fails inside ends the request at fault, with finish reason "error"; the others go on as if nothing had
        happened. Raises DeadEngineError where there is no going on.
        """
        try:
            self._step()
        except Exception as error:
            self._recover(error)
        updates, self._updates = self._updates, []
        return updates

    def _step(self) -> None:
        clock = time.perf_counter
        started = clock()
        plan = self._plan()
        planned = clock()
        previous, self._in_flight = self._in_flight, None
        if not plan.is_empty:
            self._involved = plan.requests
            self._in_flight = self.runner.launch(plan)
            self.statistics.steps += 1
            self.statistics.prompt_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        launched = clock()
        if previous is not None:
            self._digest(previous)
        if not self._reads_late or plan.is_empty:
            self._settle()
        self.statistics.schedule_seconds += planned - started
        self.statistics.launch_seconds += launched - planned
        self.statistics.read_seconds += clock() - launched

    def check_integrity(self) -> None:
        """Assert what must hold between steps: every block, row and request accounted for."""
        self.scheduler.check_integrity()
        alive = {id(request) for request in self.scheduler.alive}
        assert alive == {id(request) for request in self._requests.values()}
        if not self._requests:
            assert self.pool.used == 0, "an idle engine holds blocks"

    def _plan(self) -> Plan:
        self._involved = tuple(self.scheduler.running)
        if any(request.is_watched for request in self.scheduler.running):
            self._settle()
        while True:
            try:
                return self.scheduler.plan(self._depth())
            except MustSettle:
                self._settle()

    def _depth(self) -> int:
        """How deep to draft in this step: no deeper than some request wants."""
        if self.runner.models.drafter is None:
            return 0
        running = len(self.scheduler.running) + len(self.scheduler.waiting)
        depth = self._depth_policy(min(running, self.config.max_num_seqs))
        assert 0 <= depth <= self.config.max_depth, f"depth {depth} is beyond what the engine was set up for"
        wanted = 0
        for request in self._requests.values():
            wanted = max(wanted, request.draft_limit if request.draft_until else 0)
            if wanted >= depth:
                return depth
        return wanted

    def _settle(self) -> None:
        """Read what is in flight, so that the host knows all there is to know."""
        launch, self._in_flight = self._in_flight, None
        if launch is not None:
            self._digest(launch)

    def _digest(self, launch: Launch) -> None:
        self._involved = launch.plan.requests
        now: float | None = None
        for result in self.runner.read(launch):
            now = now or time.perf_counter()
            if result.request.phase is not Phase.FINISHED:  # it may have ended while this was in flight
                self._updates.append(self._take(result, now, drafted=launch.plan.draft > 0))
        for chunk in launch.plan.chunks:
            if chunk.request.phase is not Phase.FINISHED:
                self.pool.commit(chunk.request.table, chunk.request.tokens, min(chunk.end, chunk.request.settled))
        if launch.drafter_failed:
            self._give_up_drafter("it computed values that are not finite")

    def _take(self, result: RequestResult, now: float, *, drafted: bool) -> Update:
        request = result.request
        request.in_flight -= result.in_flight
        if not result.is_finite:
            self._wipe(request)
            return self._fail(request, NOT_FINITE)
        known = len(request.tokens)
        tokens = request.accept(result.tokens)
        request.logprobs += result.logprobs[: len(tokens)]
        request.first_token_at = request.first_token_at or now
        for tally in (request.acceptance, self.statistics.acceptance):
            tally.add(drafted=result.drafted, accepted=result.accepted)
        if result.drafted > 0:
            request.rounds.append(RoundRecord(start=known, drafted=result.drafted, accepted=result.accepted))
        self.statistics.output_tokens += len(tokens)
        # A gap stays where the drafter missed rounds and nobody sent the request back to read them: nothing after it
        # is settled, or others would find drafter rows there that were never written.
        if (drafted or self.runner.models.drafter is None) and request.settled >= known - 1:
            request.settled = max(request.settled, len(request.tokens) - 1)
            self.pool.commit(request.table, request.tokens, request.settled)
        if request.finish_reason == "error":
            self._note_failure(request)
            self._finish(request)
        elif request.finish_reason is not None:
            self.statistics.finished += 1
            self._finish(request)
        elif known > len(request.prompt):  # not its first token: a round has gone well
            self._trials.passed(request)
        return Update(
            request=request,
            tokens=tokens,
            accepted=result.accepted,
            logprobs=result.logprobs[: len(tokens)],
            finish_reason=request.finish_reason,
        )

    def _recover(self, error: Exception) -> None:
        """Take a failed step back, and end the request that is to blame for it if that is known."""
        self.statistics.failed_steps += 1
        involved, self._in_flight = self._involved, None
        _log.warning("a step failed, and is taken back: %s", describe(error), exc_info=error)
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises if the device is beyond help
            self.scheduler.restart(self._requests.values())
            if isinstance(error, DrafterFailed):
                self._give_up_drafter(str(error))
            else:
                for request in self._trials.guilty(involved):
                    self._updates.append(self._fail(request, f"computing it failed: {describe(error)}"))
            self._trials.resume()
        except Exception as second:
            raise DeadEngineError(f"the engine cannot go on after {describe(error)}: {describe(second)}") from second

    def _give_up_drafter(self, reason: str) -> None:
        """Decode without drafts from the next plan on, for good. Those that are there are still verified."""
        if self.runner.models.drafter is not None:
            self.runner.models = replace(self.runner.models, drafter=None, drafter_cache=None)
            self.statistics.drafter_failure = reason
            _log.error("the drafter failed (%s); decoding goes on without speculation until the next start", reason)

    def _wipe(self, request: Request) -> None:
        """Let nobody find, or multiply with, what was computed for a request."""
        blocks = self.pool.forget(request.table)
        for cache in (self.runner.models.target_cache, self.runner.models.drafter_cache):
            if cache is not None:
                cache.clear(blocks)

    def _fail(self, request: Request, why: str) -> Update:
        """End a request with an error of its own."""
        request.finish_reason, request.failure = "error", why
        self._note_failure(request)
        self._finish(request)
        return Update(request=request, tokens=[], accepted=0, logprobs=[], finish_reason="error")

    def _note_failure(self, request: Request) -> None:
        self.statistics.failed += 1
        _log.warning("request %s failed after %d tokens: %s", request.id, request.num_output, request.failure)

    def _finish(self, request: Request) -> None:
        request.finished_at = time.perf_counter()
        self.scheduler.finish(request)
        del self._requests[request.id]
        self._trials.passed(request)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)
