"""Training and probing the drafters of an experiment, several side by side; what is done is not done again."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fledge.devices import choose_device
from fledge.drift.answers import AnswerCache
from fledge.drift.perturb import Perturbation, parse_perturbation
from fledge.drift.probe import Prober, ProbeSettings
from fledge.drift.prompts import load_probe_workload
from fledge.drift.suite import NO_MEMORY, cell_path, probe_cell, probe_prompts
from fledge.errors import ConfigError, FledgeError
from fledge.evaluation.workloads import Workload
from fledge.files import json_line, read_json, write_text
from fledge.progress import Advance, Progress
from fledge.training.pipeline import Pipeline
from fledge.training.stages.evaluate import read_held_out
from fledge.training.stages.prepare import HELD_OUT
from recipes.drift.experiment import Experiment, Fit

SHARED = ("prepare", "regenerate", "vocab", "capture")  # stages whose output is the same for all drafters
_GPU_MEMORY = 0.3  # of the device, for the keys and values of all processes that probe; states and replay need the rest
_LOOK_SECONDS = 2.0  # between looks at what has been done
_QUIET = Progress(quiet=True)
_Share = TypeVar("_Share")


def train(experiment: Experiment, out: Path, processes: int, progress: Progress) -> None:
    """Have the target answer, once, then train what is not there yet."""
    answers = experiment.recipe(experiment.fits[0], out / "answers")
    if answers.regenerate.engine == "fledge" and answers.regenerate.processes == 1:
        answers = replace(answers, regenerate=replace(answers.regenerate, processes=processes))
    Pipeline(answers, progress=progress).run(until=SHARED[-1])
    for fit in experiment.fits:
        output = out / "drafters" / fit.name
        output.mkdir(parents=True, exist_ok=True)
        for stage in SHARED:
            if not (output / stage).exists():
                (output / stage).symlink_to(Path("..", "..", "answers", stage))
    # The longest first: the last ones to end should be short.
    several = sorted(experiment.fits, key=lambda fit: -fit.arm.depth)
    missing = [[fit] for fit in several if not _is_trained(experiment, out, fit)]

    def done() -> int:
        return sum(drafter_directory(out, fit).is_dir() for fit in several)

    work = partial(_train_share, experiment, out)
    _side_by_side(work, missing, processes, progress.task("fit", len(several), done()), done)


def _is_trained(experiment: Experiment, out: Path, fit: Fit) -> bool:
    recipe = experiment.recipe(fit, out / "drafters" / fit.name)
    return Pipeline(recipe).states()["eval"].manifest is not None and drafter_directory(out, fit).is_dir()


def drafter_directory(out: Path, fit: Fit) -> Path:
    return out / "drafters" / fit.name / "drafter"


def _train_share(experiment: Experiment, out: Path, fits: Sequence[Fit], _processes: int) -> Iterator[None]:
    for fit in fits:
        Pipeline(experiment.recipe(fit, out / "drafters" / fit.name), progress=_QUIET).run()
        yield


def probe(experiment: Experiment, out: Path, processes: int, progress: Progress) -> None:
    """Probe all drafters. A process keeps its target, and of a condition its answers and states."""
    for fit in experiment.fits:
        if not drafter_directory(out, fit).is_dir():
            raise ConfigError(f"{drafter_directory(out, fit)}: is not there; run --stage train first")
    conditions = [Perturbation(), *map(parse_perturbation, experiment.probe.conditions)]

    def done() -> int:
        return sum(_cell(out, fit, condition).is_file() for fit in experiment.fits for condition in conditions)

    total = len(experiment.fits) * len(conditions)
    work = partial(_probe_share, experiment, out, _workload(experiment, out))
    shares = probe_shares(conditions, experiment.fits, processes)
    _side_by_side(work, shares, processes, progress.task("probe", total, done()), done)
    for fit in experiment.fits:
        cells = {condition.name: read_json(_cell(out, fit, condition)) for condition in conditions}
        skips = {name: NO_MEMORY if cell is None else cell["skip"] for name, cell in cells.items()}
        found = {name: cell["result"] for name, cell in cells.items() if cell is not None and not cell["skip"]}
        for depth in (depth for result in found.values() for depth in result["by_depth"]):
            depth["heads"] = []  # most of the bytes, and the report is about the mean of all
        skipped = {name: skip for name, skip in skips.items() if skip is not None}
        write_text(out / "probes" / f"{fit.name}.json", json_line({"results": found, "skipped": skipped}))


class ProbeShare(NamedTuple):
    """Drafters that are probed one after another under one condition."""

    condition: Perturbation
    fits: Sequence[Fit]


def probe_shares(conditions: Sequence[Perturbation], fits: Sequence[Fit], processes: int) -> list[ProbeShare]:
    """All cells, by condition: what drafters share there is made once for each share. For several processes half of
    the drafters, then half of what is left, ...: the shares that end last are of one drafter.
    """
    shares, left = list[ProbeShare](), list(fits)
    while left:
        size = len(left) if processes == 1 else -(-len(left) // 2)
        shares += [ProbeShare(condition, left[:size]) for condition in conditions]
        left = left[size:]
    return shares


def _probe_share(
    experiment: Experiment, out: Path, workload: Workload, share: ProbeShare, processes: int
) -> Iterator[None]:
    section, recipe = experiment.probe, experiment.recipe(share.fits[0], out / "answers")
    options: dict[str, Any] = {"dtype": section.dtype, "device": recipe.device}
    # Nothing is decoded for long enough to be worth capturing.
    options |= {"enforce_eager": True, "max_num_seqs": section.prompts}
    if processes > 1 and choose_device(recipe.device).type == "cuda":
        # Free memory tells none what the others will take.
        options["kv_cache_bytes"] = int(_GPU_MEMORY * torch.cuda.mem_get_info()[1]) // processes
    settings = ProbeSettings(depth=section.depth, max_tokens=section.max_tokens, keep_examples=0)
    prober = _prober(recipe.target.path, workload.name, settings, tuple(options.items()), out / "probes" / "answers")
    prompts = probe_prompts(workload, str(drafter_directory(out, share.fits[0])), prober, out / "probes")
    for fit in share.fits:
        drafter = str(drafter_directory(out, fit))
        probe_cell(drafter, share.condition, prompts, prober, out / "probes" / fit.name)
        yield


@lru_cache(maxsize=1)
def _prober(
    target: str, workload: str, settings: ProbeSettings, options: tuple[tuple[str, Any], ...], answers: Path
) -> Prober:
    """The one of this process: loading the target takes longer than most shares do."""
    return Prober(target, workload, settings, dict(options), answers=AnswerCache(answers))


def _cell(out: Path, fit: Fit, condition: Perturbation) -> Path:
    return cell_path(out / "probes" / fit.name, str(drafter_directory(out, fit)), condition)


def _workload(experiment: Experiment, out: Path) -> Workload:
    section = experiment.probe
    if section.workload is not None:
        return load_probe_workload(section.workload, sample=section.prompts)
    states = Pipeline(experiment.recipe(experiment.fits[0], out / "answers")).states()
    path = states["prepare"].directory / HELD_OUT
    if not path.is_file():
        raise ConfigError(f"{path}: is not there; run --stage train first, or name probe.workload")
    prompts = tuple(read_held_out(path))
    held_out = Workload(name="held out of training", prompts=prompts, source="the training prompts", licence="theirs")
    return held_out.sampled(section.prompts, seed=0)


def _side_by_side(
    work: Callable[[_Share, int], Iterator[None]],
    shares: Sequence[_Share],
    processes: int,
    task: AbstractContextManager[Advance],
    done: Callable[[], int],
) -> None:
    """Do all shares, so many at a time, in processes that take one after another; with one process in this one.

    `done` counts what `task` shows.
    """
    shown = done()
    with task as advance, ExitStack() as stack:
        steps: Iterator[None] = (step for share in shares for step in work(share, 1))
        if processes > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
            pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
            stack.callback(pool.shutdown)  # waits: those at work end theirs, or at Ctrl-C save what they have
            steps = _in_turn(lambda share: pool.submit(_do_all, work, share, processes), shares, processes)
        try:
            for _ in steps:
                advance((now := done()) - shown)
                shown = now
        except (BrokenProcessPool, torch.OutOfMemoryError):
            advice = "fewer --processes if memory was short; the same command goes on from here"
            raise FledgeError(f"a process ended before its work did: {advice}") from None
        except FledgeError:
            raise
        except Exception as error:
            if processes == 1:
                raise
            said = " ".join(str(error).split())
            advice = "the same command goes on from here, with --processes 1 it shows where"
            raise FledgeError(f"a process failed: {type(error).__name__}: {said}; {advice}") from None


def _do_all(work: Callable[[_Share, int], Iterator[None]], share: _Share, processes: int) -> None:
    for _ in work(share, processes):
        pass


def _in_turn(submit: Callable[[_Share], Future[None]], shares: Iterable[_Share], processes: int) -> Iterator[None]:
    """Do all shares and yield now and then; raise what one raised. No more than can begin are submitted: a pool that
    is shut down does what it was given.
    """
    waiting, running = deque(shares), set[Future[None]]()
    while waiting or running:
        running |= {submit(waiting.popleft()) for _ in range(min(len(waiting), processes - len(running)))}
        finished, running = wait(running, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
        yield
