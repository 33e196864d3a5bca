"""What an engine does before the first request: capture graphs, and time the rounds that the controller chooses by."""

import functools
import statistics
import time
from collections.abc import Callable, Collection, Sequence

from fledge.engine.admission import AdmissionPolicy
from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.config import EngineConfig
from fledge.engine.cost_cache import CostCache
from fledge.engine.costs import MIN_SAMPLES, RoundCosts
from fledge.engine.graphs import Program
from fledge.engine.mixing import FEW, MixedProgram
from fledge.engine.runner import Runner
from fledge.engine.sampler import SamplingMode

MEASURING_SECONDS = {"cpu": 3.0, "cuda": 10.0}  # that warming up takes at most to learn what rounds cost
MEASURED_ROUNDS = 4  # of each kind, size and arm; the first is left out
MEASURED_TOGETHER = 3  # of each with prompts
ENOUGH_SECONDS = 0.05  # for these, if they take longer: one is left then

Progress = Callable[[int, int], None]  # how much is done, and of how much


def warm_up(
    runner: Runner,
    config: EngineConfig,
    arms: Collection[Arm],
    costs: RoundCosts,
    admission: AdmissionPolicy | None,
    cache: CostCache | None,
    progress: Progress,
) -> None:
    """Capture the rounds of these arms and the prompts, as far as they are not yet; time rounds that `cache` lacks."""
    graphs, largest = runner.graphs, config.max_num_seqs
    programs = []
    if graphs is not None:
        programs = graphs.missing(arms, max_batch=largest, max_tokens=config.max_num_batched_tokens)
    sizes = [2**n for n in range(largest.bit_length()) if 2**n < largest] + [largest]
    rounds = [(batch, arm) for batch in sizes for arm in sorted(arms)] if len(arms) > 1 else []
    if rounds and cache is not None:
        cache.recall(costs)
    rounds = [one for one in rounds if costs.latest.age(*one) is None]
    mixed = runner.mixing.candidates(config.max_num_batched_tokens) if runner.mixing is not None and programs else []
    total = len(programs) + len(mixed) + len(rounds)
    for done, program in enumerate(programs):
        progress(done, total)
        assert graphs is not None
        graphs.capture(program)
    if graphs is not None and programs:
        graphs.compile_long_prompts(max_batch=largest, max_tokens=config.max_num_batched_tokens)
    measure_mixed(runner, mixed, lambda done: progress(len(programs) + done, total))
    measure(
        runner,
        costs,
        rounds,
        lambda done: progress(len(programs) + len(mixed) + done, total),
        admission if graphs is not None else None,
    )
    if rounds and cache is not None:
        cache.keep(costs)


def measure_mixed(runner: Runner, programs: Sequence[MixedProgram], progress: Callable[[int], None]) -> None:
    """Capture and time rounds with prompts and both apart: one pass is taken where it takes less time."""
    graphs, mixing = runner.graphs, runner.mixing

    @functools.cache
    def seconds(program: Program) -> float:
        assert graphs is not None
        graphs.capture(program)
        # Behind one another, so that laying out the next overlaps with the device's work, as it does while serving.
        return runner.time(lambda: [graphs.play(program, ()) for _ in range(MEASURED_TOGETHER)]) / MEASURED_TOGETHER

    for done, program in enumerate(programs):
        progress(done)
        assert graphs is not None
        assert mixing is not None
        arm = graphs.prompt_arm(program.prompts.draft)
        one = graphs.padded_round(program.round._replace(sampling=SamplingMode.GREEDY))
        prompts = program.prompts._replace(draft=arm, sample_drafts=graphs.samples(arm))
        times = {"round_seconds": seconds(one), "prompt_seconds": seconds(prompts)}
        if not mixing.learn(program, seconds=seconds(program), **times):
            graphs.captured.pop(program, None)
        elif program.round.batch <= FEW and graphs.samples(program.round.draft):
            graphs.capture(program.with_both(sample_drafts=True))


def measure(
    runner: Runner,
    costs: RoundCosts,
    rounds: Sequence[tuple[int, Arm]],
    progress: Callable[[int], None],
    admission: AdmissionPolicy | None = None,
) -> None:
    """Time rounds of these sizes and arms, small ones first, for as long as `MEASURING_SECONDS`.

    With `admission`, those that verify fewer drafts too.
    """
    started = time.perf_counter()

    @functools.cache
    def median(batch: int, arm: Arm, kind: RequestKind, admit: int | None = None) -> float:
        took = [runner.time_round(batch, arm, kind, admit)]
        while len(took) < MEASURED_ROUNDS and sum(took) < ENOUGH_SECONDS:
            took.append(runner.time_round(batch, arm, kind, admit))
        return statistics.median(took[1:] or took)

    for done, (batch, arm) in enumerate(rounds):
        progress(done)
        if arm == PLAIN and time.perf_counter() - started > MEASURING_SECONDS[runner.state.device.type]:
            break
        for kind, table in costs.tables.items():
            if kind is RequestKind.SAMPLED_DRAFTS and not runner.state.can_sample_drafts:
                continue
            if kind is RequestKind.SAMPLED and runner.graphs is not None and runner.state.can_sample_drafts:
                kind = RequestKind.SAMPLED_DRAFTS  # noqa: PLW2901 - the graphs are the same
            table.expect(batch=batch, arm=arm, seconds=median(batch, arm, kind))
            if admission is None or arm.is_tree:
                continue
            for admit in admission.budgets.sizes(batch, arm.depth):
                seconds = median(batch, arm, kind, admit)
                for _ in range(MIN_SAMPLES):
                    admission.observe_cost(batch, arm.depth, admit, seconds, table)
    progress(len(rounds))
