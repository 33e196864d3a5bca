"""Fledge's own engine: requests in, tokens out, step by step. It works with token ids only; text is in `llm.py`.

    step  =  schedule  ->  launch  ->  read the results of the previous launch

On a GPU the host reads one launch behind: while the device runs a round, the host processes the results of the previous
one and schedules the next. On a CPU nothing can overlap, and every launch is read at once.

After a failed step all requests are preempted with their known tokens and recomputed. Their tokens do not change, as
random numbers depend on seed and position only. If the drafter failed, it is switched off. Otherwise a request is at
fault: the only one in the step, or the only suspect. If there are several, all become suspects, and are admitted one by
one until each has completed a round.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.admission import AdmissionPolicy, budgets_for
from fledge.engine.arms import PLAIN, Acceptance, RequestKind
from fledge.engine.block_manager import BlockManager
from fledge.engine.config import EngineConfig
from fledge.engine.constraint import TokenConstraint
from fledge.engine.controller import DepthPolicy, make_policy
from fledge.engine.cost_cache import CostCache
from fledge.engine.costs import RoundCosts
from fledge.engine.device_state import DeviceState
from fledge.engine.estimator import Turns
from fledge.engine.graphs import make_graphs
from fledge.engine.outputs import RequestUpdate, RoundRecord, TokenLogprobs
from fledge.engine.passes import DrafterError
from fledge.engine.protocol import DeadEngineError, EngineInfo, EngineStats
from fledge.engine.request import UNLIMITED, Phase, Request, kind_of_round, requests_at_fault
from fledge.engine.runner import Launch, RequestResult, Runner
from fledge.engine.scheduler import MustSettle, ScheduledBatch, Scheduler
from fledge.engine.swap import PreparedDrafter, exchange, fitting_cache, prepare
from fledge.engine.warm_up import warm_up
from fledge.engine.work_ahead import WorkAhead
from fledge.errors import ConfigError, describe
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.native import accelerate, is_in_library
from fledge.native.team import torch_alone

RECENT_ROUNDS = 16
NOT_FINITE = "the target computed values that are not finite"

_log = logging.getLogger("fledge.engine")


class LLMEngine:
    """The engine of this package: one target, with or without a drafter, on one device. See `protocol.Engine`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        config: EngineConfig,
        depth_policy: DepthPolicy | None = None,
        *,
        model: str = "",
        eos_ids: Sequence[int] = (),
        cost_cache: CostCache | None = None,
    ) -> None:
        """`depth_policy`: by default from the config. `model`, `eos_ids`: for `info`. `cost_cache`: for `warm_up`."""
        assert (drafter is None) == (config.speculative_config is None), "a drafter comes with a speculative config"
        self.target, self.drafter = target, drafter  # as loaded; `DeviceState.drafter` is None after a failure
        if config.pack_weights:
            target, drafter = accelerate(target, drafter)
        self.config = config = replace(config, max_model_len=config.max_model_len or target.config.max_positions)
        self.requests: dict[str, Request] = {}  # unfinished ones
        self._depth_policy = depth_policy or make_policy(config.speculative_config, config.max_num_seqs)
        self._in_flight: Launch | None = None
        self._device_seconds = 0.0  # of this step: waiting for the device, or on a CPU computing
        self._turns = Turns()
        self._updates: list[RequestUpdate] = []
        self._involved: Sequence[Request] = ()  # requests that may be at fault if the present operation fails
        self._death: DeadEngineError | None = None
        self._seed = 0
        state = DeviceState(config, target, drafter)
        self.device = state.device
        on_gpu = self.device.type == "cuda"
        self._reads_late = on_gpu if config.read_late is None else config.read_late
        self._stats, self._cost_cache = EngineStats(), cost_cache
        self._costs = RoundCosts(host_overlaps=self._reads_late)
        budgets = budgets_for(config.speculative_config, on_gpu)
        has_chains = any(arm.depth and not arm.is_tree for arm in self._depth_policy.arms)
        self.admission = AdmissionPolicy(config.max_depth, budgets) if has_chains else None
        self.block_manager = BlockManager(
            state.num_blocks, state.block_size, prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_requests=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            max_depth=config.max_depth,
            lookahead=state.lookahead,
        )
        self.runner = Runner(state, make_graphs(state, config, budgets) if on_gpu else None)
        self._ahead = WorkAhead(self.runner, self.config)
        self.info = EngineInfo(
            model=model,
            drafter=config.drafter,
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
        return bool(self.requests or self._updates)

    def warm_up(
        self,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
        *,
        plain: bool = False,
        acceptance: Acceptance | None = None,
    ) -> None:
        self._depth_policy.expect(acceptance or {})
        arms = {*self._depth_policy.arms, *([PLAIN] if plain else ())}
        with self._threads():
            left = warm_up(self.runner, self.scheduler, self.config, arms, self._costs, self._cost_cache, progress)
        self._ahead = WorkAhead(self.runner, self.config, left)

    def work_ahead(self) -> bool:
        self._come_to_rest()
        return self._ahead.advance()

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
            seed=next(value for value in (seed, params.seed, self._seed) if value is not None),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids),
            max_length=limit,
            draft_until=min(limit, drafter.config.max_positions) if drafter is not None and draft_limit != 0 else 0,
            draft_limit=UNLIMITED if draft_limit is None else draft_limit,
            cache_salt=cache_salt,
            constraint=constraint,
            priority=priority if self.config.scheduling_policy == "priority" else 0,
        )
        if request.draft_until and not params.is_greedy and self.runner.state.can_sample_drafts:
            # With a seed of its own a request keeps argmax drafts: its text must not depend on speculation.
            choice = request.may_sample_drafts = self.config.sample_drafts is None and params.seed is None
            choice = choice and self._depth_policy.samples_drafts(request, self.requests.values(), self._costs)
            if self.config.sample_drafts or choice:
                request.kind = RequestKind.SAMPLED_DRAFTS
        self.requests[request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> RequestUpdate | None:
        request = self.requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    def prepare_drafter(self, model: str) -> PreparedDrafter:
        return prepare(model, self.target, self.config, target_model=self.info.model)

    def exchange_drafter(self, new: PreparedDrafter, acceptance: Acceptance | None = None) -> None:
        cache = fitting_cache(new, self.runner.state, self.config)  # or raises, and nothing has changed
        self._come_to_rest()
        self.drafter = exchange(new, cache, self.runner, self.scheduler, self.requests.values())
        self.config = self.config.with_drafter(new.name)
        self.info = replace(self.info, drafter=new.name)
        self._stats.begin_drafter()
        self._depth_policy.expect(acceptance or {})
        if self.admission is not None:
            self.admission.forget()

    def stats(self) -> EngineStats:
        if self.admission is not None and not self.requests:
            self.admission.model.digest()  # while busy only now and then, as it takes time
        return replace(
            self._stats,
            preemptions=self.scheduler.preemptions,
            prefix_queries=self.block_manager.asked_tokens,
            prefix_hits=self.block_manager.hit_tokens,
            acceptance=AcceptanceStatistics.merge([self._stats.acceptance]),
            calibration=None if self.admission is None else self.admission.model.calibration,
            costs=self._costs.latest.copy(),
            choice=self._depth_policy.choice,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=self.block_manager.used,
            kv_capacity=self.block_manager.capacity,
        )

    def step(self) -> list[RequestUpdate]:
        try:
            with self._threads():
                self._step()
        except Exception as error:
            self._recover(error)
        updates, self._updates = self._updates, []
        if self._death is not None and not updates:
            raise self._death
        return updates

    def _threads(self) -> AbstractContextManager[None]:
        """Context for computations: if the C layers run both models, torch's own operators use one thread."""
        state = self.runner.state
        return torch_alone() if is_in_library(state.target, state.drafter) else nullcontext()

    def _step(self) -> None:
        if self._ahead.is_due:
            self._settle()  # capturing and timing graphs overwrites the results of others
            self._ahead.advance()
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
        if previous is not None and batch.is_alike(previous.batch):
            seconds = max(ended - started - self._device_seconds, 0.0)
            self._costs.tables[batch.kind].add_host(batch=len(batch.decoding), arm=batch.draft, seconds=seconds)

    def check_integrity(self) -> None:
        """Assert the invariants between steps: every block, row and request is accounted for."""
        self.scheduler.check_integrity()
        scheduled = {id(request) for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert scheduled == {id(request) for request in self.requests.values()}
        if not self.requests:
            assert self.block_manager.used == 0, "an idle engine holds blocks"

    def _schedule(self) -> ScheduledBatch:
        running = self._involved = tuple(self.scheduler.running)
        if any(one.needs_host for one in running) or 2 * sum(one.drafts is None for one in running) > len(running):
            self._settle()
        while True:
            arm, requests = PLAIN, self.requests.values()
            if self.runner.state.drafter is not None:
                arm = self._depth_policy.choose(requests, self._costs.tables[kind_of_round(requests)])
                assert 0 <= arm.depth <= self.config.max_depth, f"{arm} is beyond what the engine was set up for"
            try:
                return self._arranged(self.scheduler.schedule(arm, self.runner.prompts_along))
            except MustSettle:
                self._settle()

    def _arranged(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return the batch as a mixed pass, or with the number of drafts to verify (all, if there are prompts)."""
        requests, arm, costs = batch.decoding, batch.verify, self._costs.tables[batch.kind]
        if self.runner.mixes(batch, than=1 - costs.discount_of(len(requests), arm)):
            return replace(batch, is_mixed=True)
        if self.admission is None or not requests or not arm.depth or arm.is_tree or arm != batch.draft:
            return batch
        if batch.needs_host:  # `HostSampler` takes all drafts
            return batch
        return self.runner.admitting(batch, self.admission.admit(requests, arm.depth, costs, self.runner.confidence))

    def _launch(self, batch: ScheduledBatch) -> Launch:
        self._involved = batch.requests
        launch = self.runner.launch(batch)
        self._stats.steps += 1
        self._stats.prompt_tokens += batch.num_prompt_tokens
        return launch

    def _settle(self) -> None:
        """Read the launch in flight, if there is one."""
        launch, self._in_flight = self._in_flight, None
        self._postprocess(launch)

    def _come_to_rest(self) -> None:
        """Settle between two steps; recover if that fails."""
        try:
            self._settle()
        except Exception as error:
            self._recover(error)

    def _postprocess(self, launch: Launch | None) -> None:
        """Read a launch, if there is one, and process its results: tokens, cached blocks, statistics."""
        if launch is None:
            return
        self._involved = launch.batch.requests
        results = self.runner.read(launch)
        now = time.perf_counter()
        self._device_seconds += results.waited
        told, turns, is_full = len(self._updates), range(0), launch.batch.admit is None
        if launch.batch.verify.depth:  # learn from full rounds: admitted drafts are accepted more often
            turns = self._turns.next(len(results.requests), is_full=is_full)
        for i, result in enumerate(results.requests):
            if result.request.phase is not Phase.FINISHED:  # it may have finished while this was in flight
                self._updates.append(self._take(result, now, launch.batch, i in turns))
        if launch.batch.verify.depth:
            self._stats.acceptance.count((one.drafted, one.accepted) for one in self._updates[told:])
        for chunk in launch.batch.chunks:
            request = chunk.request
            if request.phase is not Phase.FINISHED:
                self.block_manager.commit(request.table, request.tokens, min(chunk.end, request.settled))
        if results.prefill_seconds is not None:
            self.scheduler.observe_prefill(launch.batch.num_prompt_tokens, results.prefill_seconds)
        stats, report, admission = self._stats, results.report, self.admission
        if admission is not None and results.outcomes is not None and admission.observe(results.outcomes):
            self.runner.state.set_acceptance(admission.model.coefficients)
        if report is not None:
            stats.rounds = (*stats.rounds, report)[-RECENT_ROUNDS:]
            stats.num_rounds += 1
            seconds = sum(report.seconds)
            self._device_seconds += 0.0 if self._reads_late else seconds
            kind, depth = launch.batch.kind, report.verify.depth
            if report.admit is not None and admission is not None:
                admission.observe_cost(report.batch, depth, report.admit, seconds, self._costs.tables[kind])
            elif report.verify == report.draft and not report.prompt_tokens:  # other rounds are not the cost of an arm
                self._costs.add(kind, batch=report.batch, arm=report.verify, seconds=seconds)
            self._depth_policy.observe_round(arm=report.draft, seconds=seconds)
        if not results.drafts_finite:
            self._give_up_drafter("it computed values that are not finite")

    def _take(self, result: RequestResult, now: float, batch: ScheduledBatch, is_observed: bool) -> RequestUpdate:
        request, drafted, accepted = result.request, result.drafted, result.accepted
        request.in_flight -= result.in_flight
        if not result.is_finite:
            self.runner.state.clear_blocks(self.block_manager.forget(request.table))
            return self._finish(request, "error", failure=NOT_FINITE)
        known = len(request.tokens)
        is_first = known == len(request.prompt)
        told = is_first and request.wants_prompt_logprobs
        tokens = request.accept(result.tokens)
        request.first_token_at = request.first_token_at or now
        in_step = request.settled >= known - 1  # the drafter has not missed tokens
        if drafted:
            request.rounds.append(RoundRecord(known, drafted, accepted))
        observed = drafted if in_step and is_observed else 0
        if observed or request.finish_reason is not None:
            is_tree = batch.verify.is_tree
            self._depth_policy.observe(request, is_tree=is_tree, drafted=observed, accepted=accepted)
        if in_step and result.state_norms:
            self._stats.state_growth = self._stats.state_growth.plus(result.state_norms)
        self._stats.output_tokens += len(tokens)
        # If the drafter missed rounds there is a gap in its cache until the request goes back to prefill. Nothing after
        # the gap is settled, or other requests would find drafter rows in the prefix cache that were never written.
        if (batch.draft.depth or self.runner.state.drafter is None) and in_step:
            request.settled = max(request.settled, len(request.tokens) - 1)
            self.block_manager.commit(request.table, request.tokens, request.settled)
        if not is_first:  # it has completed a round
            request.is_suspect = False
        logprobs = None if result.logprobs is None else result.logprobs[: len(tokens)]
        of_prompt = [TokenLogprobs(request.prompt[0], None), *request.prompt_logprobs] if told else None
        update = RequestUpdate(request.id, tokens, drafted, accepted, logprobs, of_prompt)
        ended = request.finish_reason
        return update if ended is None else self._finish(request, ended, update, failure=request.failure)

    def _finish(
        self, request: Request, reason: str, update: RequestUpdate | None = None, *, failure: str | None = None
    ) -> RequestUpdate:
        """Remove a request; return its last update. `update`: its last tokens, if any."""
        request.finish_reason, request.failure, request.finished_at = reason, failure, time.perf_counter()
        self._stats.count_end(reason)
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
        """Preempt all requests after a failed step, and end the request at fault if it is known."""
        self._stats.failed_steps += 1
        self._in_flight = None
        _log.warning("a step failed, and is taken back: %s", describe(error), exc_info=error)
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises if the device cannot be used any more
            self.scheduler.restart(self.requests.values())
            if isinstance(error, DrafterError):
                self._give_up_drafter(str(error))
            else:
                for request in requests_at_fault(self._involved):
                    failure = f"computing it failed: {describe(error)}"
                    self._updates.append(self._finish(request, "error", failure=failure))
        except Exception as second:
            self._death = DeadEngineError(f"the engine cannot go on after {describe(error)}: {describe(second)}")
            self._death.__cause__ = second

    def _give_up_drafter(self, reason: str) -> None:
        """Switch speculation off, from the next batch on."""
        if self.runner.state.drafter is not None:
            self.runner.state.drafter = self.runner.state.drafter_cache = None  # existing drafts are still verified
            self._stats.drafter_failure = reason
            _log.error("the drafter failed (%s); decoding goes on without speculation until there is another", reason)
