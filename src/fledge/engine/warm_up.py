"""What an engine does before the first request: capture graphs, and time the rounds that the controller chooses by.

It is ready with a few graphs of each kind. Sizes between them, which leave less padding, and rounds with prompts in one
pass are captured one at a time while it has nothing to do.
"""

import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.config import EngineConfig
from fledge.engine.cost_cache import CostCache
from fledge.engine.costs import RoundCosts
from fledge.engine.mixing import FEW, MixedProgram
from fledge.engine.programs import Program
from fledge.engine.runner import Runner
from fledge.engine.sampler import SamplingMode
from fledge.errors import describe

MEASURING_SECONDS = 3.0  # that warming up takes at most to learn what rounds cost
MEASURED_ROUNDS = 4  # of each kind, size and arm; the first is left out
MEASURED_TOGETHER = 3  # of each with prompts
ENOUGH_SECONDS = 0.05  # for these, if they take longer: one is left then

_log = logging.getLogger("fledge.engine")

Progress = Callable[[int, int], None]  # how much is done, and of how much


@torch.inference_mode()
def warm_up(
    runner: Runner,
    config: EngineConfig,
    arms: Collection[Arm],
    costs: RoundCosts,
    cache: CostCache | None,
    progress: Progress,
) -> Iterator[bool]:
    """Capture what requests of these arms need, as far as it is not yet; time rounds that `cache` lacks.

    Returns what can wait (`later`).
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
    for done, program in enumerate(first):
        progress(done, total)
        assert graphs is not None
        graphs.capture(program)
    measure(runner, costs, rounds, lambda done: progress(len(first) + done, total))
    if rounds and cache is not None:
        cache.keep(costs)
    return later(runner, config, programs)


@torch.inference_mode()
def later(runner: Runner, config: EngineConfig, programs: Sequence[Program]) -> Iterator[bool]:
    """Do what makes requests faster still, a graph at a time: yields after each. Nobody waits for it, if it fails."""
    try:
        yield from _captures(runner, config, programs)
    except Exception as error:
        _log.warning("capturing graphs ahead failed, and is given up: %s", describe(error), exc_info=error)


def _captures(runner: Runner, config: EngineConfig, programs: Sequence[Program]) -> Iterator[bool]:
    """What was wanted most comes first, then rounds with prompts, then `programs`."""
    graphs, mixing = runner.graphs, runner.mixing
    if graphs is None or not programs:
        return

    def can_run(program: Program) -> bool:  # the drafter may have been given up meanwhile
        return runner.state.drafter is not None or not program.uses_drafter

    largest, tokens = config.max_num_seqs, config.max_num_batched_tokens
    for program in filter(can_run, graphs.long_prompts(max_batch=largest, max_tokens=tokens)):
        graphs.run_once(program)
        yield True
    mixed = measure_mixed(runner, [] if mixing is None else mixing.candidates(tokens))
    for program in itertools.chain(mixed, programs):
        wanted = [one for one, _ in graphs.wanted.most_common()]
        for one in filter(can_run, [*wanted, program]):
            if one not in graphs.captured and graphs.capture(one):
                yield True


def measure_mixed(runner: Runner, programs: Sequence[MixedProgram]) -> Iterator[Program]:
    """Time rounds with prompts and both apart: one pass is taken where it takes less time.

    Yields what is to be captured before it goes on.
    """
    graphs, mixing = runner.graphs, runner.mixing

    @functools.cache
    def seconds(program: Program) -> float:
        assert graphs is not None
        # Behind one another, so that laying out the next overlaps with the device's work, as it does while serving.
        return runner.time(lambda: [graphs.play(program, ()) for _ in range(MEASURED_TOGETHER)]) / MEASURED_TOGETHER

    for program in programs:
        assert graphs is not None
        assert mixing is not None
        arm = graphs.prompt_arm(program.prompts.draft)
        one = graphs.padded_round(program.round._replace(sampling=SamplingMode.GREEDY))
        prompts = program.prompts._replace(draft=arm, sample_drafts=graphs.samples(arm))
        yield from (one, prompts, program)
        if not {one, prompts, program} <= graphs.captured.keys():
            return  # there is no room, or no drafter any more
        times = {"round_seconds": seconds(one), "prompt_seconds": seconds(prompts)}
        if not mixing.learn(program, seconds=seconds(program), **times):
            graphs.release(program)
        elif program.round.batch <= FEW and graphs.samples(program.round.draft):
            yield program.with_both(sample_drafts=True)


def measure(
    runner: Runner, costs: RoundCosts, rounds: Sequence[tuple[int, Arm]], progress: Callable[[int], None]
) -> None:
    """Time rounds of these sizes and arms, in this order, for as long as `MEASURING_SECONDS`.

    It is enough to tell the arms apart before any has run: rounds that run correct it. Those that would run in a graph
    of another size are left out, and rounds of fewer drafts, which are only wanted once it is known how many stand.
    """
    started = time.perf_counter()

    @functools.cache
    def median(batch: int, arm: Arm, kind: RequestKind) -> float:
        took = [runner.time_round(batch, arm, kind)]
        while len(took) < MEASURED_ROUNDS and sum(took) < ENOUGH_SECONDS:
            took.append(runner.time_round(batch, arm, kind))
        return statistics.median(took[1:] or took)

    for done, (batch, arm) in enumerate(rounds):
        progress(done)
        if arm == PLAIN and time.perf_counter() - started > MEASURING_SECONDS:
            break
        for kind, table in costs.tables.items():
            if kind is RequestKind.SAMPLED_DRAFTS and not runner.state.can_sample_drafts:
                continue
            if kind is RequestKind.SAMPLED and runner.graphs is not None and runner.state.can_sample_drafts:
                kind = RequestKind.SAMPLED_DRAFTS  # noqa: PLW2901 - the graphs are the same
            if runner.is_ready_for(batch, arm, kind):
                table.expect(batch=batch, arm=arm, seconds=median(batch, arm, kind))
    progress(len(rounds))
