"""Fledge's own engine: requests in, tokens out, step by step. It knows token ids only; text is `llm.py`'s business.

    step  =  schedule  ->  launch  ->  read what the launch before it produced

On a GPU the host reads one launch behind: while the device runs a round, the host digests the previous one and
schedules the next. On a CPU there is nothing to overlap and every launch is read at once.

A step that fails is taken back: every request returns to the queue with the tokens that are known of it, and is read
again. What it would have got it still gets, as its random numbers depend on its seed and positions alone. A drafter
that fails is given up. Otherwise a request is at fault: the only one in the step, or the only suspect. If several come
into question all of them become suspects, and are admitted one by one until each has been through a round.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.block_manager import BlockManager
from fledge.engine.config import EngineConfig
from fledge.engine.constraint import TokenConstraint
from fledge.engine.controller import DepthPolicy, make_policy
from fledge.engine.costs import MIN_SAMPLES, CostTable
from fledge.engine.device_state import DeviceState
from fledge.engine.graphs import GraphRunner, batch_sizes
from fledge.engine.outputs import RequestUpdate, RoundRecord, TokenLogprobs
from fledge.engine.passes import DrafterError
from fledge.engine.protocol import DeadEngineError, EngineInfo, EngineStats
from fledge.engine.request import UNLIMITED, Phase, Request
from fledge.engine.runner import Launch, RequestResult, Runner
from fledge.engine.sampler import SamplingMode
from fledge.engine.scheduler import MustSettle, ScheduledBatch, Scheduler
from fledge.errors import ConfigError, describe
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.native import accelerate

RECENT_ROUNDS = 16
MAX_FAILURES = 3  # of steps that a request took part in, before it is held to be at fault
MEASURING_SECONDS = 3.0  # that warming up takes to learn what rounds cost
NOT_FINITE = "the target computed values that are not finite"

_log = logging.getLogger("fledge.engine")


class LLMEngine:
    """The engine of this package: one target and, if given, its drafter, on one device. See `protocol.Engine`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        config: EngineConfig,
        depth_policy: DepthPolicy | None = None,
        *,
        model: str = "",
        eos_ids: Sequence[int] = (),
    ) -> None:
        """`depth_policy`: what the config says, if not given. `model` and `eos_ids` are what `info` says of them."""
        assert (drafter is None) == (config.speculative_config is None), "a drafter comes with a speculative config"
        self.target, self.drafter = target, drafter  # as loaded: the device's state may give the drafter up
        if config.pack_weights:
            target, drafter = accelerate(target, drafter)
        self.config = config = replace(config, max_model_len=config.max_model_len or target.config.max_positions)
        self.requests: dict[str, Request] = {}  # those that have not ended
        self._depth_policy = depth_policy or make_policy(config.speculative_config, config.max_num_seqs)
        self._in_flight: Launch | None = None
        self._device_seconds = 0.0  # of the present step, that the host waited for the device or was itself the device
        self._updates: list[RequestUpdate] = []
        self._involved: Sequence[Request] = ()  # in what is being done: a failure is one of theirs
        self._death: DeadEngineError | None = None
        self._seed = 0

        state = DeviceState(config, target, drafter)
        self.device = state.device
        on_gpu = self.device.type == "cuda"
        self._reads_late = on_gpu if config.read_late is None else config.read_late
        self._stats = EngineStats(costs=CostTable(host_overlaps=self._reads_late))
        self._sampled_costs = self._stats.costs.copy()  # of rounds with sampled requests; the others' are in the stats
        self._latest_costs = self._stats.costs  # of the kind of round that ran last: what `stats` hands out
        self.block_manager = BlockManager(
            state.num_blocks, state.block_size, prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_requests=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            max_depth=config.max_depth,
            lookahead=state.lookahead,
            trees=state.tree is not None,
        )
        graphs = None
        if on_gpu and not config.enforce_eager:
            sizes = config.cudagraph_capture_sizes or batch_sizes(config.max_num_seqs)
            graphs = GraphRunner(state, sorted({*sizes, config.max_num_seqs}))
        self.runner = Runner(state, graphs)
        self.info = EngineInfo(
            model=model,
            drafter=None if config.speculative_config is None else config.speculative_config.model,
            device=str(self.device),
            dtype=str(next(self.target.parameters()).dtype).removeprefix("torch."),
            vocab_size=state.vocab_size,
            eos_ids=tuple(eos_ids),
            max_model_len=state.max_length - state.lookahead,
            max_num_seqs=config.max_num_seqs,
            scheduling_policy=config.scheduling_policy,
            max_depth=config.max_depth,
            kv_capacity=self.block_manager.capacity * state.block_size - state.lookahead,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None] = lambda _done, _all: None, *, plain: bool = False) -> None:
        graphs, largest = self.runner.graphs, self.config.max_num_seqs
        depths = set(self._depth_policy.depths) if self.runner.state.drafter is not None else {0}
        depths |= {0} if plain else set()
        programs = []
        if graphs is not None:
            programs = graphs.missing(depths, max_batch=largest, max_tokens=self.config.max_num_batched_tokens)
        sizes = [2**n for n in range(largest.bit_length()) if 2**n < largest] + [largest]
        rounds = [(batch, depth) for batch in sizes for depth in sorted(depths)] if len(depths) > 1 else []
        rounds = [one for one in rounds if self._sampled_costs.age(*one) is None]
        for done, program in enumerate(programs):
            progress(done, len(programs) + len(rounds))
            assert graphs is not None
            graphs.capture(program)
        if graphs is not None and programs:
            graphs.compile_long_prompts(max_batch=largest, max_tokens=self.config.max_num_batched_tokens)
        self._measure_rounds(rounds, lambda done: progress(len(programs) + done, len(programs) + len(rounds)))

    def _measure_rounds(self, rounds: Sequence[tuple[int, int]], progress: Callable[[int], None]) -> None:
        """Time rounds of these sizes and depths, small ones first, as far as `MEASURING_SECONDS` go."""
        started = time.perf_counter()
        kinds = ((SamplingMode.GREEDY, self._stats.costs), (SamplingMode.SAMPLED, self._sampled_costs))
        for done, (batch, depth) in enumerate(rounds):
            progress(done)
            if depth == 0 and time.perf_counter() - started > MEASURING_SECONDS:
                break
            for mode, costs in kinds:
                seconds = min(self.runner.time_round(batch, depth, mode) for _ in range(MIN_SAMPLES + 1))
                for _ in range(MIN_SAMPLES):
                    costs.add(batch=batch, depth=depth, seconds=seconds)
        progress(len(rounds))

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        eos_ids: Sequence[int] = (),
        draft_limit: int | None = None,
        cache_salt: bytes = b"",
        constraint: TokenConstraint | None = None,
        parent: str = "",
        priority: int = 0,
    ) -> None:
        if request_id in self.requests:
            raise ConfigError(f"request id '{request_id}' is in use")
        self.info.check_request(prompt, params)
        drafter = self.runner.state.drafter
        limit = min(self.info.max_model_len, self.info.kv_capacity)
        self._seed += 1
        request = Request(
            id=request_id,
            parent=parent,
            prompt=list(prompt),
            params=params,
            seed=next(value for value in (params.seed, seed, self._seed) if value is not None),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids),
            max_length=limit,
            draft_until=min(limit, drafter.config.max_positions) if drafter is not None and draft_limit != 0 else 0,
            draft_limit=UNLIMITED if draft_limit is None else draft_limit,
            cache_salt=cache_salt,
            constraint=constraint,
            priority=priority if self.config.scheduling_policy == "priority" else 0,
        )
        self.requests[request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> RequestUpdate | None:
        request = self.requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            preemptions=self.scheduler.preemptions,
            prefix_queries=self.block_manager.asked_tokens,
            prefix_hits=self.block_manager.hit_tokens,
            acceptance=AcceptanceStatistics.merge([self._stats.acceptance]),
            costs=self._latest_costs.copy(),
            choice=self._depth_policy.choice,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=self.block_manager.used,
            kv_capacity=self.block_manager.capacity,
        )

    def step(self) -> list[RequestUpdate]:
        try:
            self._step()
        except Exception as error:
            self._recover(error)
        updates, self._updates = self._updates, []
        if self._death is not None and not updates:
            raise self._death
        return updates

    def _step(self) -> None:
        started = time.perf_counter()
        self._device_seconds = 0.0
        batch = self._schedule()
        scheduled = time.perf_counter()
        previous, self._in_flight = self._in_flight, None if batch.is_empty else self._launch(batch)
        launched = time.perf_counter()
        self._postprocess(previous)
        if not self._reads_late or batch.is_empty:
            self._settle()
        ended = time.perf_counter()
        self._stats.schedule_seconds += scheduled - started
        self._stats.launch_seconds += launched - scheduled
        self._stats.read_seconds += ended - launched
        if previous is not None and batch.decoding and not (batch.chunks or previous.batch.chunks):
            seconds = max(ended - started - self._device_seconds, 0.0)
            self._costs_of(batch.decoding).add_host(batch=len(batch.decoding), seconds=seconds)

    def check_integrity(self) -> None:
        """Assert what must hold between steps: every block, row and request accounted for."""
        self.scheduler.check_integrity()
        scheduled = {id(request) for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert scheduled == {id(request) for request in self.requests.values()}
        if not self.requests:
            assert self.block_manager.used == 0, "an idle engine holds blocks"

    def _schedule(self) -> ScheduledBatch:
        self._involved = tuple(self.scheduler.running)
        if any(request.needs_host for request in self.scheduler.running):
            self._settle()
        while True:
            depth = 0
            if self.runner.state.drafter is not None:
                depth = self._depth_policy.depth(self.requests.values(), self._costs_of(self.requests.values()))
                assert 0 <= depth <= self.config.max_depth, f"depth {depth} is beyond what the engine was set up for"
            try:
                return self.scheduler.schedule(depth)
            except MustSettle:
                self._settle()

    def _costs_of(self, requests: Iterable[Request]) -> CostTable:
        """What rounds of these cost: sampling takes time too, and more of it the more drafts there are."""
        is_greedy = all(request.params.is_greedy for request in requests)
        return self._stats.costs if is_greedy else self._sampled_costs

    def _launch(self, batch: ScheduledBatch) -> Launch:
        self._involved = batch.requests
        launch = self.runner.launch(batch)
        self._stats.steps += 1
        self._stats.prompt_tokens += sum(chunk.end - chunk.start for chunk in batch.chunks)
        return launch

    def _settle(self) -> None:
        """Read what is in flight, so that the host knows all there is to know."""
        launch, self._in_flight = self._in_flight, None
        self._postprocess(launch)

    def _postprocess(self, launch: Launch | None) -> None:
        """Read a launch, if there is one, and take over what it did: tokens, cached blocks, figures."""
        if launch is None:
            return
        self._involved = launch.batch.requests
        results = self.runner.read(launch)
        now = time.perf_counter()
        self._device_seconds += results.waited
        for result in results.requests:
            if result.request.phase is not Phase.FINISHED:  # it may have ended while this was in flight
                self._updates.append(self._take(result, now, drafted=launch.batch.draft > 0))
        for chunk in launch.batch.chunks:
            request = chunk.request
            if request.phase is not Phase.FINISHED:
                self.block_manager.commit(request.table, request.tokens, min(chunk.end, request.settled))
        if results.prefill_seconds is not None:
            read = sum(chunk.end - chunk.start for chunk in launch.batch.chunks)
            self.scheduler.observe_prefill(read, results.prefill_seconds)
        stats, report = self._stats, results.report
        if report is not None:
            stats.rounds = (*stats.rounds, report)[-RECENT_ROUNDS:]
            stats.num_rounds += 1
            seconds = sum(report.seconds)
            self._device_seconds += 0.0 if self._reads_late else seconds
            if report.verify == report.draft:  # others change the depth: no one's cost
                self._latest_costs = self._costs_of(launch.batch.decoding)
                self._latest_costs.add(batch=report.batch, depth=report.verify, seconds=seconds)
            self._depth_policy.observe_round(depth=report.draft, seconds=seconds)
        if not results.drafts_finite:
            self._give_up_drafter("it computed values that are not finite")

    def _take(self, result: RequestResult, now: float, *, drafted: bool) -> RequestUpdate:
        request = result.request
        request.in_flight -= result.in_flight
        if not result.is_finite:
            self.runner.state.clear_blocks(self.block_manager.forget(request.table))
            return self._finish(request, "error", failure=NOT_FINITE)
        known = len(request.tokens)
        told = request.wants_prompt_logprobs
        tokens = request.accept(result.tokens)
        request.first_token_at = request.first_token_at or now
        for tally in (request.acceptance, self._stats.acceptance):
            tally.add(drafted=result.drafted, accepted=result.accepted)
        in_step = request.settled >= known - 1  # the drafter has read all that it drafted from
        self._depth_policy.observe(request, drafted=result.drafted * in_step, accepted=result.accepted)
        if result.drafted > 0:
            request.rounds.append(RoundRecord(start=known, drafted=result.drafted, accepted=result.accepted))
        self._stats.output_tokens += len(tokens)
        # A gap stays where the drafter missed rounds and nobody sent the request back to read them: nothing after it
        # is settled, or others would find drafter rows there that were never written.
        if (drafted or self.runner.state.drafter is None) and in_step:
            request.settled = max(request.settled, len(request.tokens) - 1)
            self.block_manager.commit(request.table, request.tokens, request.settled)
        if known > len(request.prompt):  # not its first token: a round has gone well
            request.is_suspect = False
        update = RequestUpdate(
            request.id,
            tokens,
            drafted=result.drafted,
            accepted=result.accepted,
            logprobs=None if result.logprobs is None else result.logprobs[: len(tokens)],
            prompt_logprobs=[TokenLogprobs(request.prompt[0], None), *request.prompt_logprobs] if told else None,
        )
        ended = request.finish_reason
        return update if ended is None else self._finish(request, ended, update, failure=request.failure)

    def _finish(
        self, request: Request, reason: str, update: RequestUpdate | None = None, *, failure: str | None = None
    ) -> RequestUpdate:
        """Take a request out; return its last update, which is `update` if it has tokens still to be told."""
        request.finish_reason, request.failure, request.finished_at = reason, failure, time.perf_counter()
        self._stats.aborted += reason == "abort"
        self._stats.failed += reason == "error"
        self._stats.finished += reason not in ("abort", "error")
        if reason == "error":
            _log.warning("request %s failed after %d tokens: %s", request.id, request.num_output, failure)
        self.scheduler.finish(request)
        del self.requests[request.id]
        update = update or RequestUpdate(request.id, [])
        stopped = reason == "stop" and update.token_ids and update.token_ids[-1] in request.stop_ids
        return update._replace(
            finish_reason=reason,
            stop_token_id=update.token_ids[-1] if stopped else None,
            error=failure,
            metrics=request.metrics(),
        )

    def _recover(self, error: Exception) -> None:
        """Take a failed step back, and end the request at fault if that is known."""
        self._stats.failed_steps += 1
        self._in_flight = None
        _log.warning("a step failed, and is taken back: %s", describe(error), exc_info=error)
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises if the device is beyond help
            self.scheduler.restart(self.requests.values())
            if isinstance(error, DrafterError):
                self._give_up_drafter(str(error))
            else:
                for request in self._at_fault():
                    failure = f"computing it failed: {describe(error)}"
                    self._updates.append(self._finish(request, "error", failure=failure))
        except Exception as second:
            self._death = DeadEngineError(f"the engine cannot go on after {describe(error)}: {describe(second)}")
            self._death.__cause__ = second

    def _at_fault(self) -> list[Request]:
        """Return the requests that a failed step is blamed on; if that is not clear, all in it become suspects."""
        involved = [request for request in self._involved if request.phase is not Phase.FINISHED]
        suspects = [request for request in involved if request.is_suspect]
        for clear in (involved, suspects):
            if len(clear) == 1:
                return clear
        for request in involved:
            request.is_suspect = True
            request.failures += 1
        return [request for request in involved if request.failures >= MAX_FAILURES]

    def _give_up_drafter(self, reason: str) -> None:
        """Decode without drafts from the next batch on, for good."""
        if self.runner.state.drafter is not None:
            self.runner.state.drafter = self.runner.state.drafter_cache = None  # drafts there are, are still verified
            self._stats.drafter_failure = reason
            _log.error("the drafter failed (%s); decoding goes on without speculation until the next start", reason)
