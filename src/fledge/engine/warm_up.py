"""What an engine does before the first request: capture graphs, and time the rounds that the controller chooses by.

It is ready with a few graphs of each kind. Sizes between them, which leave less padding, and rounds with prompts in one
pass are left to `work_ahead.py`.
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable, Collection, Sequence

import torch

from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.config import EngineConfig
from fledge.engine.cost_cache import CostCache
from fledge.engine.costs import RoundCosts
from fledge.engine.programs import Program
from fledge.engine.request import Request
from fledge.engine.runner import Runner
from fledge.engine.scheduler import Scheduler
from fledge.progress import timed

_log = logging.getLogger("fledge.engine")

TIMED_LENGTH = 128  # tokens of those whose rounds are timed
MEASURING_SECONDS = 3.0  # that warming up takes at most to learn what rounds cost
MEASURED_ROUNDS = 6  # of each kind, size and arm; the first is left out
ENOUGH_SECONDS = 0.05  # for these, but for the first: if one takes longer, there is no other

Progress = Callable[[int, int], None]  # how much is done, and of how much


@torch.inference_mode()
def warm_up(
    runner: Runner,
    scheduler: Scheduler,
    config: EngineConfig,
    arms: Collection[Arm],
    costs: RoundCosts,
    cache: CostCache | None,
    progress: Progress,
) -> Sequence[Program]:
    """Capture what requests of these arms need, as far as it is not yet; time rounds that `cache` lacks.

    Returns what can wait.
    """
    graphs, largest, programs = runner.graphs, config.max_num_seqs, []
    arms = arms if runner.state.drafter is not None else {PLAIN}
    if graphs is not None:
        programs = graphs.missing(arms, max_batch=largest, max_tokens=config.max_num_batched_tokens)
    first = [program for program in programs if graphs is not None and graphs.is_first(program)]
    sizes = [2**n for n in range(largest.bit_length()) if 2**n < largest] + [largest]
    if graphs is not None:  # the largest is no matter of seconds there, and costs between two sizes are interpolated
        sizes = [*sizes[::2], *sizes[1::2]]
    rounds = [(batch, arm) for batch in sizes for arm in sorted(arms)] if len(arms) > 1 else []
    if rounds and cache is not None:
        cache.recall(costs)
    rounds = [one for one in rounds if costs.latest.age(*one) is None]
    total = len(first) + len(rounds)
    with timed(_log, "graphs captured", len(first)):
        for done, program in enumerate(first):
            progress(done, total)
            assert graphs is not None
            graphs.capture(program)
    length = min(TIMED_LENGTH, runner.state.max_length - runner.state.lookahead)
    with timed(_log, "rounds timed") as stage, scheduler.dummy_requests(length) as dummies:
        runner.state.begin(dummies)
        runner.state.place_blocks(dummies)
        stage.count = measure(runner, costs, rounds, dummies, lambda done: progress(len(first) + done, total))
    if stage.count and cache is not None:
        cache.keep(costs)
    return programs


def measure(
    runner: Runner,
    costs: RoundCosts,
    rounds: Sequence[tuple[int, Arm]],
    dummies: Sequence[Request],
    progress: Callable[[int], None],
) -> int:
    """Time rounds of these sizes and arms, in this order, for as long as `MEASURING_SECONDS`; return how many.

    Of the `dummies` as many as the largest has. It is enough to tell the arms apart before any has run: rounds that
    run correct it. Those that would run in a graph of another size are left out, and rounds of fewer drafts, which are
    only wanted once it is known how many stand. When time is up, one round with drafts is timed beside a plain one, and
    no kind but greedy ones: beside rounds that long, choosing tokens is little.
    """
    started = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - started > MEASURING_SECONDS

    @functools.cache
    def median(batch: int, arm: Arm, kind: RequestKind) -> float:
        took = [runner.time_round(dummies[:batch], arm, kind)]
        while len(took) < MEASURED_ROUNDS and sum(took[1:]) < ENOUGH_SECONDS:
            took.append(runner.time_round(dummies[:batch], arm, kind))
        return statistics.median(took[1:])

    for done, (batch, arm) in enumerate(rounds):
        progress(done)
        if is_late() and rounds[done - 1] != (batch, PLAIN):
            break
        for kind, table in costs.tables.items():
            if kind is RequestKind.SAMPLED_DRAFTS and not runner.state.can_sample_drafts:
                continue
            if kind is RequestKind.SAMPLED and runner.graphs is not None and runner.state.can_sample_drafts:
                kind = RequestKind.SAMPLED_DRAFTS  # noqa: PLW2901 - the graphs are the same
            kind = RequestKind.GREEDY if is_late() else kind  # noqa: PLW2901
            if runner.is_ready_for(batch, arm, kind):
                table.expect(batch=batch, arm=arm, seconds=median(batch, arm, kind))
    progress(len(rounds))
    return median.cache_info().misses
