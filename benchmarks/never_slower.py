"""Is the controller ever slower than the best fixed depth, or than no drafting? One engine, all arms, one run.

    python benchmarks/never_slower.py --shape 8b --concurrency 1,4,16,64,256 --out never-slower.json

Arms: no drafting, fixed depths (`K=3`; `K=3 drawn` with sampled drafts, where something is sampled), with `--tree WxN`
a fixed tree, and the controller (`adaptive`), which goes through all cells with what it has learned, and learns nothing
from the other arms' rounds. Each cell is a closed loop: C requests in flight until all were submitted; tokens of that
time over that time. With `--shape` the bundled pair has the cost of a large one (`fledge bench inflate`) and its own
text and acceptance.

Arms take turns, `--repeats` times. The largest of several noisy figures is too large, so the best fixed arm of a repeat
is the one that was best in the other repeats.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

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
from fledge.engine.estimator import DraftOutcome
from fledge.engine.request import Request
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.evaluation.workloads import load_workload

Requests = Iterator[tuple[list[int], SamplingParams]]


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

    def observe(self, outcomes: Sequence[DraftOutcome], *, is_tree: bool) -> None:
        pass

    def observe_end(self, request: Request) -> None:
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

    def requests(self, workload: str, temperature: float, count: int) -> Requests:
        """Of lengths from a half to one and a half: if answers ended at once, prompts would come in bursts."""
        for i, prompt in enumerate(islice(cycle(self._prompts[workload]), count)):
            longest = round(self._max_tokens * (0.5 + i * 0.618 % 1))
            yield prompt, SamplingParams(temperature=temperature, max_tokens=longest)

    def run(self, policy: DepthPolicy, phases: list[tuple[int, Requests]]) -> dict:
        """Tokens per second while there were requests to submit; phases (concurrency, requests) follow each other."""
        engine = self._engine
        engine._depth_policy = policy
        adapts = isinstance(policy, AdaptiveDepth)
        engine._costs = self._costs if adapts else RoundCosts()
        engine.admission = self._admission if adapts else None
        before, started, length = engine.stats(), self._clock(), 0.0
        for concurrency, requests in phases:
            for seed, (prompt, params) in enumerate(requests):
                while len(engine.requests) >= concurrency:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="fledgling")
    parser.add_argument("--drafter", default="fledgling-eagle3.1")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--depths", default="1,2,3,4,5,6,7")
    parser.add_argument("--tree", help="a tree of the deepest depth too: WIDTHxNODES, as 8x32")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--workloads", default="humaneval,mt_bench")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--generations", type=int, default=3, help="requests for each of those in flight")
    parser.add_argument("--least", type=int, default=12, help="requests in a cell at least")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="tokens per second of one busy CPU thread, not of time")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--changing", action="store_true", help="also a load that changes in size and content")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    depths = [int(d) for d in args.depths.split(",")]
    sizes = [int(c) for c in args.concurrency.split(",")]
    temperatures = [float(t) for t in args.temperatures.split(",")]

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
    workloads = args.workloads.split(",")
    prompts = {
        name: [encode_chat(tokenizer, prompt.first_messages) for prompt in load_workload(name, sample=96).prompts]
        for name in workloads
    }
    speculation = {"model": args.drafter, "num_speculative_tokens": max(depths)}
    if args.tree:
        speculation |= dict(zip(("tree_width", "tree_budget"), map(int, args.tree.split("x")), strict=True))
    config = EngineConfig(
        speculative_config=speculation,
        max_num_seqs=max(sizes),
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    adaptive = AdaptiveDepth(max(depths), max(sizes), tree=bool(args.tree))
    engine = LLMEngine(target, drafter, config, adaptive, eos_ids=target.config.eos_ids)
    started = time.perf_counter()
    engine.warm_up()
    while engine.work_ahead():
        pass
    gc.collect()
    gc.freeze()  # as the server does: looking through what stays holds everybody up for 0.2 s now and then
    print(f"warmed up in {time.perf_counter() - started:.1f} s", flush=True)
    arms: dict[str, DepthPolicy] = {"none": OneArm(Arm(0)), **{f"K={d}": OneArm(Arm(d)) for d in depths}}
    if args.tree:
        arms[f"tree {args.tree}"] = OneArm(Arm(max(depths), is_tree=True))
    sampled: dict[str, DepthPolicy] = {
        "none": arms["none"],
        f"K={depths[0]}": arms[f"K={depths[0]}"],  # argmax drafts: deeper ones are never the best
        **{f"K={d} drawn": OneArm(Arm(d), drawn=True) for d in depths[:3]},
    }
    loop = Loop(engine, prompts, args.max_tokens, time.process_time if args.cpu_time else time.perf_counter)
    cells = []

    def measure(phases: Callable[[], list[tuple[int, Requests]]], **cell: object) -> None:
        turns = {**(sampled if cell["temperature"] == 1 else arms), "adaptive": adaptive}
        speeds: dict[str, list[float]] = {name: [] for name in turns}
        lengths = {}
        for _ in range(args.repeats):
            for name, policy in turns.items():
                result = loop.run(policy, phases())
                speeds[name].append(result["tokens_per_second"])
                lengths[name] = result["acceptance_length"]
        choice = adaptive.choice and adaptive.choice._asdict()
        cells.append(report({**cell, "speeds": speeds, "acceptance_length": lengths, "choice": choice}))
        save()

    def save() -> None:
        worst = {what: min(cell[what] for cell in cells) for what in ("to_best", "to_none")}
        if args.out:
            text = json.dumps({"arguments": vars(args), "cells": cells, "worst": worst}, default=str, indent=1)
            args.out.write_text(text + "\n")
        print(f"worst so far: adaptive / best fixed {worst['to_best']:.3f}, adaptive / none {worst['to_none']:.3f}")

    for temperature, workload, concurrency in itertools.product(temperatures, workloads, sizes):
        count = max(args.generations * concurrency, args.least)
        load = partial(loop.requests, workload, temperature)
        loop.run(arms["none"], [(concurrency, load(min(concurrency, 8)))])
        measure(
            lambda: [(concurrency, load(count))],  # noqa: B023 - called before the loop goes on
            temperature=temperature,
            workload=workload,
            concurrency=concurrency,
        )
    if args.changing:
        most = max(sizes)
        measure(
            lambda: [
                (4, loop.requests(workloads[-1], 0.0, 24)),
                (most, loop.requests(workloads[-1], 1.0, 2 * most)),
                (min(16, most), loop.requests(workloads[0], 0.0, 96)),
            ],
            temperature="0, 1, 0",
            workload="changing",
            concurrency=f"4, {most}, {min(16, most)}",
        )


def report(cell: dict) -> dict:
    """Add how the controller compares, and say it."""
    speeds = cell["speeds"]
    fixed = [name for name in speeds if name != "adaptive"]
    repeats = range(len(speeds["none"]))
    to_best, best = [], []
    for this in repeats:
        others = [r for r in repeats if r != this] or [this]
        best.append(max(fixed, key=lambda name: sum(speeds[name][r] for r in others)))
        to_best.append(speeds["adaptive"][this] / speeds[best[-1]][this])
    means = {name: statistics.mean(values) for name, values in speeds.items()}
    cell |= {
        "best": best,
        "to_best": statistics.geometric_mean(to_best),
        "to_none": means["adaptive"] / means["none"],
    }
    line = chain(
        [f"T={cell['temperature']} {cell['workload']} C={cell['concurrency']}:"],
        (f"{name} {speed / means['none']:.3f}" for name, speed in means.items()),
        [f"| best {'/'.join(best)}, adaptive/best {cell['to_best']:.3f}, {cell['choice']}"],
    )
    print(*line, flush=True)
    return cell


if __name__ == "__main__":
    main()
