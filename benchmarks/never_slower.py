"""Is the controller ever slower than the best fixed depth, or than no drafting? One engine, all arms, one run.

    python benchmarks/never_slower.py --shape 8b --concurrency 256,64,16,4,1 --deepest 3,3,5,7,7 --changing \
        --seconds 235 --out never-slower.json

Arms: no drafting, fixed depths (`K=3`; `K=3 drawn` with sampled drafts, where something is sampled), with `--tree WxN`
a fixed tree, and the controller (`adaptive`), which goes through all cells with what it has learned, and learns nothing
from the other arms' rounds. Each cell is a closed loop: C requests in flight until all were submitted; tokens of that
time over that time. With `--shape` the bundled pair has the cost of a large one (`fledge bench inflate`) and its own
text and acceptance.

Arms take turns, `--repeats` times, all cells before the next repeat. The largest of several noisy figures is too large,
so the best fixed arm of a repeat is the one that was best in the other repeats, if there are any.

Each run of an arm is in the file as soon as it has ended. The same command again does what is missing there, and
nothing again; the controller then begins anew. `--seconds` says when to stop.
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fledge.bench.inflate import SHAPES, inflate_drafter, inflate_target
from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.params import SamplingParams
from fledge.engine.arms import Acceptance, Arm
from fledge.engine.config import EngineConfig
from fledge.engine.controller import AdaptiveDepth, DepthPolicy, wanted_depth
from fledge.engine.costs import CostTable, RoundCosts
from fledge.engine.engine import LLMEngine
from fledge.engine.request import Request
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.evaluation.workloads import load_workload
from fledge.files import read_json, write_json

Requests = Iterator[tuple[list[int], SamplingParams]]
SAMPLED_DEPTHS = 3  # fixed arms at a temperature are no deeper: deeper ones were never the best


class Phase(NamedTuple):
    """So many requests of one workload, so many of them at a time."""

    workload: str
    temperature: float
    concurrency: int
    count: int


class Cell(NamedTuple):
    """What all arms are measured with: one phase, or several that follow each other."""

    phases: tuple[Phase, ...]
    deepest: int  # fixed arm

    @property
    def label(self) -> dict[str, Any]:
        if len(self.phases) == 1:
            (phase,) = self.phases
            return {"temperature": phase.temperature, "workload": phase.workload, "concurrency": phase.concurrency}
        return {
            "temperature": ", ".join(f"{phase.temperature:g}" for phase in self.phases),
            "workload": "changing",
            "concurrency": ", ".join(str(phase.concurrency) for phase in self.phases),
        }


class OneArm:
    """Always the same."""

    choice = None

    def __init__(self, arm: Arm, *, drawn: bool = False) -> None:
        self._drawn = drawn
        self.arms = (arm,)

    def choose(self, requests: Collection[Request], costs: CostTable) -> Arm:  # noqa: ARG002 - the policy's contract
        (arm,) = self.arms
        return arm if arm.is_tree else Arm(min(arm.depth, wanted_depth(requests)))

    def samples_drafts(self, request: Request, others: Collection[Request], costs: RoundCosts) -> bool:  # noqa: ARG002
        return self._drawn

    def expect(self, acceptance: Acceptance) -> None:
        pass

    def observe(self, request: Request, *, is_tree: bool, drafted: int, accepted: int) -> None:
        pass

    def observe_round(self, *, arm: Arm, seconds: float) -> None:
        pass


class Loop:
    """A closed loop on one engine."""

    def __init__(
        self, engine: LLMEngine, prompts: dict[str, list[list[int]]], max_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._engine, self._prompts, self._max_tokens, self._clock = engine, prompts, max_tokens, clock
        self._number = 0
        self._costs, self._admission = engine._costs, engine.admission  # the controller's, not the other arms'

    def _requests(self, workload: str, temperature: float, count: int) -> Requests:
        """Of lengths from a half to one and a half: if answers ended at once, prompts would come in bursts."""
        for i, prompt in enumerate(islice(cycle(self._prompts[workload]), count)):
            longest = round(self._max_tokens * (0.5 + i * 0.618 % 1))
            yield prompt, SamplingParams(temperature=temperature, max_tokens=longest)

    def run(self, policy: DepthPolicy, phases: Sequence[Phase]) -> dict[str, float | None]:
        """Tokens per second while there were requests to submit."""
        engine = self._engine
        engine._depth_policy = policy
        adapts = isinstance(policy, AdaptiveDepth)
        engine._costs = self._costs if adapts else RoundCosts()
        engine.admission = self._admission if adapts else None
        before, started, length = engine.stats(), self._clock(), 0.0
        for phase in phases:
            requests = self._requests(phase.workload, phase.temperature, phase.count)
            for seed, (prompt, params) in enumerate(requests):
                while len(engine.requests) >= phase.concurrency:
                    engine.step()
                engine.add_request(str(self._number), prompt, params, seed=seed, eos_ids=engine.info.eos_ids)
                self._number += 1
            length = self._clock() - started
        tokens = engine.stats().output_tokens - before.output_tokens
        while engine.has_unfinished:
            engine.step()
        rounds = engine.stats().acceptance.tally - before.acceptance.tally
        accepted = sum(accepted * n for (_, accepted), n in rounds.items())
        return {
            "tokens_per_second": tokens / length,
            "acceptance_length": 1 + accepted / rounds.total() if rounds else None,
        }


class Results:
    """The file: a record for each cell, with what each arm gave in each repeat."""

    def __init__(self, path: Path | None, arguments: dict[str, Any]) -> None:
        """Go on with what is there. Exits if that was measured in another way."""
        self._path, self._arguments = path, arguments
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        found = None if path is None else read_json(path)
        if found is not None and found["arguments"] != arguments:
            sys.exit(f"{path} was measured with other arguments: {found['arguments']}; give another --out")
        self._cells: list[dict[str, Any]] = [] if found is None else found["cells"]

    def of(self, cell: Cell) -> dict[str, Any]:
        label = cell.label
        for record in self._cells:
            if label.items() <= record.items():
                return record
        self._cells.append({**label, "speeds": {}, "acceptance_length": {}})
        return self._cells[-1]

    @property
    def worst(self) -> dict[str, float | None]:
        compared = [record for record in self._cells if "to_best" in record]
        return {what: min((record[what] for record in compared), default=None) for what in ("to_best", "to_none")}

    def write(self) -> None:
        if self._path is not None:
            write_json(self._path, {"arguments": self._arguments, "cells": self._cells, "worst": self.worst})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="fledgling")
    parser.add_argument("--drafter", default="fledgling-eagle3.1")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--depths", default="1,2,3,4,5,6,7")
    parser.add_argument("--tree", help="a tree of the deepest depth too: WIDTHxNODES, as 8x32")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--deepest", help="fixed arm at each of these concurrencies; not given: all, everywhere")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--workloads", default="humaneval,mt_bench")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--generations", type=float, default=3, help="requests for each of those in flight")
    parser.add_argument("--least", type=int, default=12, help="requests in a cell at least")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="tokens per second of one busy CPU thread, not of time")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--changing", action="store_true", help="also a load that changes in size and content")
    parser.add_argument("--ahead-seconds", type=float, default=40.0, help="that graphs are captured for at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.generations <= 1:
        parser.error("--generations: more than 1, or all requests are there before any has ended")
    return args


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """By concurrency, in the order given, as time may not be enough for all; the changing load behind the first.

    Content changes once for each: workloads go back and forth.
    """
    sizes, workloads, deepest = numbers(args.concurrency), args.workloads.split(","), max(numbers(args.depths))
    most = max(sizes)
    bounds = dict(zip(sizes, numbers(args.deepest), strict=True)) if args.deepest else dict.fromkeys(sizes, deepest)
    temperatures = [float(temperature) for temperature in args.temperatures.split(",")]
    cells = []
    for number, size in enumerate(sizes):
        count = max(round(args.generations * size), args.least)
        for workload, temperature in itertools.product(workloads[:: -1 if number % 2 else 1], temperatures):
            cells.append(Cell((Phase(workload, temperature, size, count),), bounds[size]))
    if args.changing:
        phases = (
            Phase(workloads[-1], 0.0, min(4, most), 16),
            Phase(workloads[-1], 1.0, most, round(1.5 * most)),
            Phase(workloads[0], 0.0, min(16, most), 64),
        )
        cells.insert(len(temperatures) * len(workloads), Cell(phases, min(deepest, 3)))
    return cells


def fixed_arms(cell: Cell, depths: Sequence[int], tree: Arm | None) -> dict[str, DepthPolicy]:
    """With something sampled: argmax drafts of the least depth alone, as deeper ones never win, and drawn ones."""
    wanted = [depth for depth in depths if depth <= cell.deepest]
    is_sampled = all(phase.temperature > 0 for phase in cell.phases)
    arms: dict[str, DepthPolicy] = {"none": OneArm(Arm(0))}
    arms |= {f"K={depth}": OneArm(Arm(depth)) for depth in (wanted[:1] if is_sampled else wanted)}
    if is_sampled:
        arms |= {f"K={depth} drawn": OneArm(Arm(depth), drawn=True) for depth in wanted if depth <= SAMPLED_DEPTHS}
    elif tree is not None and len(cell.phases) == 1:
        arms["tree"] = OneArm(tree)
    return arms


class AllArms(OneArm):
    """For warming up: graphs are wanted of all these."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        super().__init__(arms[0])
        self.arms = tuple(arms)


def make_loop(args: argparse.Namespace, adaptive: AdaptiveDepth, depths: Sequence[int]) -> Loop:
    """Load the pair, warm an engine up."""
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    small = load_target(resolve(args.target))
    drafter = load_drafter(resolve(args.drafter), small)
    if args.shape:
        shape = SHAPES[args.shape]
        target = inflate_target(small, shape, dtype, device)
        drafter = inflate_drafter(drafter, small, target, shape=shape)
    else:
        target = small.to(device, dtype)
        drafter = drafter.to(device, dtype)
    tokenizer = load_tokenizer(resolve(args.target))
    prompts = {
        name: [encode_chat(tokenizer, prompt.first_messages) for prompt in load_workload(name, sample=96).prompts]
        for name in args.workloads.split(",")
    }
    speculation = {"model": args.drafter, "num_speculative_tokens": max(depths)}
    if args.tree:
        speculation |= dict(zip(("tree_width", "tree_budget"), map(int, args.tree.split("x")), strict=True))
    config = EngineConfig(
        speculative_config=speculation,
        max_num_seqs=max(numbers(args.concurrency)),
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    arms = sorted({*adaptive.arms, *map(Arm, depths)})
    engine = LLMEngine(target, drafter, config, AllArms(arms), eos_ids=target.config.eos_ids)
    loaded = time.perf_counter()
    engine.warm_up()
    warm = time.perf_counter()
    while (more := engine.work_ahead()) and time.perf_counter() - warm < args.ahead_seconds:
        pass
    ended = time.perf_counter()
    engine._ahead._due = float("inf")  # what is not captured by now holds up no run
    gc.collect()
    gc.freeze()  # as the server does: looking through what stays holds everybody up for 0.2 s now and then
    print(
        f"loaded in {loaded - started:.1f} s, warmed up in {warm - loaded:.1f} s, worked ahead for {ended - warm:.1f} s"
        f"{', not to the end' if more else ''}",
        flush=True,
    )
    return Loop(engine, prompts, args.max_tokens, time.process_time if args.cpu_time else time.perf_counter)


def main() -> None:
    args, began = arguments(), time.perf_counter()
    asked = {name: value for name, value in vars(args).items() if name not in ("out", "seconds", "ahead_seconds")}
    asked["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    repeats = asked.pop("repeats")
    results, depths = Results(args.out, asked), numbers(args.depths)
    adaptive = AdaptiveDepth(max(depths), max(numbers(args.concurrency)), tree=bool(args.tree))
    tree = next((arm for arm in adaptive.arms if arm.is_tree), None)
    cells = [
        (cell, {**fixed_arms(cell, depths, tree), "adaptive": adaptive}, results.of(cell)) for cell in cells_of(args)
    ]
    missing = [
        (cell, name, policy, record)
        for repeat in range(repeats)
        for cell, arms, record in cells
        for name, policy in arms.items()
        if len(record["speeds"].get(name, ())) <= repeat
    ]
    if not missing:
        print("nothing is missing")
        return
    loop, last = make_loop(args, adaptive, depths), None
    for done, (cell, name, policy, record) in enumerate(missing):
        if time.perf_counter() - began > args.seconds:
            print(f"time is up: {len(missing) - done} of {len(missing)} runs are left")
            break
        if cell is not last:  # whatever the first requests of a kind wait for
            loop.run(OneArm(Arm(0)), [phase._replace(count=min(phase.count, 8)) for phase in cell.phases])
            last = cell
        found = loop.run(policy, cell.phases)
        record["speeds"].setdefault(name, []).append(found["tokens_per_second"])
        record["acceptance_length"][name] = found["acceptance_length"]
        if policy is adaptive:
            record["choice"] = adaptive.choice and adaptive.choice._asdict()
            compare(record)
        results.write()
    print(f"worst cells: {results.worst}, after {time.perf_counter() - began:.0f} s")


def compare(record: dict[str, Any]) -> None:
    """Add how the controller compares in the repeats that all arms have been through, and say it."""
    speeds = record["speeds"]
    fixed = [name for name in speeds if name != "adaptive"]
    repeats = range(min(map(len, speeds.values())))
    to_best, best = [], []
    for this in repeats:
        others = [r for r in repeats if r != this] or [this]
        best.append(max(fixed, key=lambda name: sum(speeds[name][r] for r in others)))
        to_best.append(speeds["adaptive"][this] / speeds[best[-1]][this])
    means = {name: statistics.mean(values) for name, values in speeds.items()}
    record |= {
        "best": best,
        "to_best": statistics.geometric_mean(to_best),
        "to_none": means["adaptive"] / means["none"],
    }
    line = chain(
        [f"T={record['temperature']} {record['workload']} C={record['concurrency']}:"],
        (f"{name} {speed / means['none']:.3f}" for name, speed in means.items()),
        [f"| best {'/'.join(best)}, adaptive/best {record['to_best']:.3f}, {record['choice']}"],
    )
    print(*line, flush=True)


if __name__ == "__main__":
    main()
