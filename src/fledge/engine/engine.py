"""The engine: requests in, tokens out, step by step. It knows token ids only; text is `llm.py`'s business.

    step  =  plan what runs  ->  launch it  ->  read what the launch before it produced

On a GPU the host reads one launch behind: while the device runs a round, the host digests the previous one and plans
the next. On a CPU there is nothing to overlap and every launch is read at once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.decoding.tree import tree_size
from fledge.engine.graphs import RoundGraphs
from fledge.engine.kv_pool import KVPool
from fledge.engine.paged_cache import PagedCache
from fledge.engine.request import Phase, Request, RoundRecord, TokenLogprobs
from fledge.engine.round_clock import PhaseTimes
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.runner import Launch, RequestResult, Runner
from fledge.engine.scheduler import MustSettle, Plan, Scheduler
from fledge.errors import ConfigError, PromptError
from fledge.layers.linear import pack_linears
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

# How deep to draft, given the number of running requests; 0 is plain decoding. The seam for adaptive control.
DepthPolicy = Callable[[int], int]


DEFAULT_CPU_CACHE_BYTES = 2 * 2**30
MAX_TREE_ROWS = 64  # what tree attention takes in one pass


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes. `None` is worked out from the device's memory."""

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192  # of prompts, in one step
    block_size: int | None = None  # 64 on a GPU, where attention reads whole pages; 16 on a CPU
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None  # instead of num_blocks
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    pack_weights: bool = True  # CPU, float32: a second copy of the weights in a faster layout
    max_depth: int = 0  # the deepest drafting the policy may ask for
    tree: TreeShape | None = None
    sample_drafts: bool = False
    read_late: bool | None = None  # read a launch after the next one is under way; None: on a GPU only


@dataclass(frozen=True, kw_only=True)
class Update:
    """Tokens that have become known for a request; the first `accepted` of them had been drafted."""

    request: Request
    tokens: list[int]
    accepted: int
    logprobs: list[TokenLogprobs]


@dataclass(kw_only=True)
class EngineStatistics:
    """Totals over the engine's life. Reading them asks the device nothing."""

    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
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
            pack_linears(*(model for model in (target, drafter) if model is not None))
        self._requests: dict[str, Request] = {}
        self._in_flight: Launch | None = None
        self._reads_late = on_gpu if config.read_late is None else config.read_late
        self._seed = 0

        self.config = config
        block_size = config.block_size or (64 if on_gpu else 16)
        nodes = _tree_nodes(config, target.config.vocab_size)
        num_blocks = _num_blocks(config, block_size, target, drafter)
        self.pool = KVPool(num_blocks, block_size, prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_requests=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            max_depth=config.max_depth,
            scratch_slots=_scratch_slots(config, nodes),
        )
        max_length = config.max_model_len + self.scheduler.lookahead
        models = RoundModels(
            target=target,
            target_cache=_cache(target, num_blocks, block_size),
            drafter=drafter,
            drafter_cache=None if drafter is None else _cache(drafter, num_blocks, block_size),
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
        self.graphs = RoundGraphs(models, state, config.max_num_seqs) if use_graphs else None
        self.runner = Runner(models, state, self.graphs)
        self.statistics.phases = self.runner.phase_times

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def warm_up(self, progress: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        """Capture the graphs of all batch sizes now rather than when they are first needed. Nothing on a CPU."""
        if self.graphs is not None:
            depths = {self._depth_policy(size) for size in range(1, self.config.max_num_seqs + 1)}
            has_drafter = self.runner.models.drafter is not None
            self.graphs.warm_up(sorted(depths) if has_drafter else [0], self.config.max_num_seqs, progress)

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        eos_ids: Sequence[int] = (),
        speculate: bool = True,
    ) -> Request:
        """Queue a request. Raises PromptError if it could never run, whatever else does."""
        if request_id in self._requests:
            raise ConfigError(f"request id '{request_id}' is in use")
        self.check_request(prompt, params)
        capacity = self.pool.capacity * self.pool.block_size - self.scheduler.lookahead
        wanted = len(prompt) + (params.max_tokens or 1)
        if min(wanted, self.config.max_model_len) > capacity:
            raise PromptError(
                f"the request may need {min(wanted, self.config.max_model_len)} tokens of KV cache, which has room for "
                f"{capacity}; ask for fewer tokens or give the engine more memory"
            )
        drafter = self.runner.models.drafter
        limit = min(self.config.max_model_len, capacity)
        request = Request(
            id=request_id,
            prompt=list(prompt),
            params=params,
            seed=_first_given(params.seed, seed, self._next_seed()),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids),
            max_length=limit,
            draft_until=0 if drafter is None or not speculate else min(limit, drafter.config.max_positions),
        )
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what would otherwise fail in the middle of a step, and take the other requests with it."""
        vocab_size, longest = self.runner.vocab_size, self.config.max_model_len
        if not prompt:
            raise PromptError("the prompt is empty")
        if len(prompt) >= longest:
            raise PromptError(f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {longest}")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise PromptError(f"prompt: token id {outside} is outside the vocabulary (0 to {vocab_size - 1})")
        for token in params.logit_bias or ():
            if token >= vocab_size:
                raise ConfigError(f"logit_bias token id: found {token}, allowed is 0 to {vocab_size - 1}")

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now, in whatever phase it is. What is computed for it already is discarded."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = reason
            self.statistics.aborted += reason == "abort"
            self.statistics.finished += reason != "abort"
            self._finish(request)

    def step(self) -> list[Update]:
        """Run one step and return what has become known since the last one."""
        clock = time.perf_counter
        started = clock()
        updates: list[Update] = []
        plan = self._plan(updates)
        planned = clock()
        previous, self._in_flight = self._in_flight, None
        if not plan.is_empty:
            self._in_flight = self.runner.launch(plan)
            self.statistics.steps += 1
            self.statistics.prompt_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        launched = clock()
        if previous is not None:
            updates += self._digest(previous)
        if not self._reads_late or plan.is_empty:
            updates += self._settle()
        self.statistics.schedule_seconds += planned - started
        self.statistics.launch_seconds += launched - planned
        self.statistics.read_seconds += clock() - launched
        return updates

    def check_integrity(self) -> None:
        """Assert what must hold between steps: every block, row and request accounted for."""
        self.scheduler.check_integrity()
        alive = {id(request) for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert alive == {id(request) for request in self._requests.values()}
        if not self._requests:
            assert self.pool.used == 0, "an idle engine holds blocks"

    def _plan(self, updates: list[Update]) -> Plan:
        if any(request.is_watched for request in self.scheduler.running):
            updates += self._settle()
        while True:
            depth = self._depth() if self.runner.models.drafter is not None else 0
            try:
                return self.scheduler.plan(depth)
            except MustSettle:
                updates += self._settle()

    def _depth(self) -> int:
        running = len(self.scheduler.running) + len(self.scheduler.waiting)
        depth = self._depth_policy(min(running, self.config.max_num_seqs))
        assert 0 <= depth <= self.config.max_depth, f"depth {depth} is beyond what the engine was set up for"
        return depth

    def _settle(self) -> list[Update]:
        """Read what is in flight, so that the host knows all there is to know."""
        launch, self._in_flight = self._in_flight, None
        return [] if launch is None else self._digest(launch)

    def _digest(self, launch: Launch) -> list[Update]:
        now: float | None = None
        updates: list[Update] = []
        for result in self.runner.read(launch):
            now = now or time.perf_counter()
            if result.request.phase is not Phase.FINISHED:  # it may have ended while this was in flight
                updates.append(self._take(result, now, drafted=launch.plan.draft > 0))
        for chunk in launch.plan.chunks:
            if chunk.request.phase is not Phase.FINISHED:
                self.pool.commit(chunk.request.table, chunk.request.tokens, min(chunk.end, chunk.request.settled))
        return updates

    def _take(self, result: RequestResult, now: float, *, drafted: bool) -> Update:
        request = result.request
        request.in_flight -= result.in_flight
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
        if request.finish_reason is not None:
            self.statistics.finished += 1
            self._finish(request)
        return Update(request=request, tokens=tokens, accepted=result.accepted, logprobs=result.logprobs[: len(tokens)])

    def _finish(self, request: Request) -> None:
        request.finished_at = time.perf_counter()
        self.scheduler.finish(request)
        del self._requests[request.id]

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _weight(model: TargetModel | Drafter) -> Tensor:
    """Any weight of the model's own: its embedding may be another model's."""
    return next(parameter for name, parameter in model.named_parameters() if name.startswith("layers."))


def _cache(model: TargetModel | Drafter, num_blocks: int, block_size: int) -> PagedCache:
    weight = _weight(model)
    return PagedCache(
        model.config.layer,
        num_layers=model.config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=weight.dtype,
        device=weight.device,
    )


def _num_blocks(config: EngineConfig, block_size: int, target: TargetModel, drafter: Drafter | None) -> int:
    """As many blocks as memory allows, and no more than all requests at full length could use."""
    if config.num_blocks is not None:
        return config.num_blocks
    models: list[TargetModel | Drafter] = [target] if drafter is None else [target, drafter]
    per_block: int = sum(
        PagedCache.bytes_per_block(
            model.config.layer,
            num_layers=model.config.num_layers,
            block_size=block_size,
            dtype=_weight(model).dtype,
        )
        for model in models
    )
    slack = 3 * (config.max_depth + 1) + _scratch_slots(config, _tree_nodes(config, target.config.vocab_size))
    useful = config.max_num_seqs * -(-(config.max_model_len + slack) // block_size) + 1
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    elif (device := _weight(target).device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - config.gpu_memory_utilization))
    else:
        budget = DEFAULT_CPU_CACHE_BYTES
    blocks = min(budget // per_block, useful)
    if blocks < 2:
        raise ConfigError(f"the KV cache has {budget} bytes, but a single block takes {per_block}")
    return blocks


def _tree_nodes(config: EngineConfig, vocab_size: int) -> int:
    if config.tree is None:
        return 0
    width, budget = config.tree.width, config.tree.budget
    nodes = tree_size(depth=config.max_depth, width=width, budget=budget, vocab_size=vocab_size)
    if nodes + 1 > MAX_TREE_ROWS or width * (config.max_depth - 1) > MAX_TREE_ROWS:
        raise ConfigError(
            f"a tree of width {width}, depth {config.max_depth} and {nodes} nodes is too large: at most "
            f"{MAX_TREE_ROWS - 1} nodes, and width times (depth - 1) at most {MAX_TREE_ROWS}"
        )
    return nodes


def _scratch_slots(config: EngineConfig, nodes: int) -> int:
    """Slots beyond a sequence's end that trees are laid out in."""
    return 0 if config.tree is None else max(nodes + 1, config.tree.width * config.max_depth)
