"""Is the controller ever slower than the best fixed depth, or than no drafting? One engine, all arms, one run.

    python benchmarks/never_slower.py --shape 8b --concurrency 1,4,16,64,256 --out never-slower.json

Arms: no drafting, fixed depths, and the controller (`adaptive`), which goes through all cells with what it has learned,
and learns nothing from the other arms' rounds. Each cell is a closed loop: C requests in flight until all were
submitted; tokens of that time over that time. With `--shape` the bundled pair has the cost of a large one (`fledge
bench inflate`) and its own text and acceptance.
"""

import argparse
import json
import time
from collections.abc import Collection, Iterator
from itertools import chain, cycle, islice
from pathlib import Path

import torch

from fledge.bench.inflate import SHAPES, inflate_drafter, inflate_target
from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.controller import AdaptiveDepth, DepthPolicy, wanted_depth
from fledge.engine.costs import CostTable
from fledge.engine.engine import LLMEngine
from fledge.engine.request import Request
from fledge.engine.runner import RoundProgram
from fledge.engine.sampler import SamplingMode
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.evaluation.workloads import load_workload

Requests = Iterator[tuple[list[int], SamplingParams]]


class OneDepth:
    """Always the same depth."""

    choice = None

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.depths = (depth,)

    def depth(self, requests: Collection[Request], costs: CostTable) -> int:  # noqa: ARG002 - the policy's contract
        return min(self._depth, wanted_depth(requests))

    def observe(self, request: Request, *, drafted: int, accepted: int) -> None:
        pass

    def observe_round(self, *, depth: int, seconds: float) -> None:
        pass


class Loop:
    """A closed loop on one engine."""

    def __init__(self, engine: LLMEngine, prompts: dict[str, list[list[int]]], max_tokens: int) -> None:
        self._engine, self._prompts, self._max_tokens = engine, prompts, max_tokens
        self._number = 0
        self._costs = {"adaptive": engine._stats.costs}  # what the other arms measure is not for the controller

    def requests(self, workload: str, temperature: float, count: int) -> Requests:
        for i, prompt in enumerate(islice(cycle(self._prompts[workload]), count)):
            yield prompt, SamplingParams(temperature=temperature, max_tokens=self._max_tokens, seed=i)

    def run(self, policy: DepthPolicy, phases: list[tuple[int, Requests]]) -> dict:
        """Tokens per second while there were requests to submit; phases (concurrency, requests) follow each other."""
        engine = self._engine
        engine._depth_policy = policy
        engine._stats.costs = self._costs["adaptive"] if isinstance(policy, AdaptiveDepth) else CostTable()
        engine._sampled_costs = self._costs.get("sampled") if isinstance(policy, AdaptiveDepth) else None
        before, started, length = engine.stats(), time.perf_counter(), 0.0
        for concurrency, requests in phases:
            for prompt, params in requests:
                while len(engine.requests) >= concurrency:
                    engine.step()
                engine.add_request(str(self._number), prompt, params, eos_ids=engine.info.eos_ids)
                self._number += 1
            length = time.perf_counter() - started
        tokens = engine.stats().output_tokens - before.output_tokens
        while engine.has_unfinished:
            engine.step()
        if isinstance(policy, AdaptiveDepth) and engine._sampled_costs is not None:
            self._costs["sampled"] = engine._sampled_costs
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
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--workloads", default="humaneval,mt_bench")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--generations", type=int, default=3, help="requests for each of those in flight")
    parser.add_argument("--least", type=int, default=12, help="requests in a cell at least")
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
    config = EngineConfig(
        speculative_config={"model": args.drafter, "num_speculative_tokens": max(depths)},
        max_num_seqs=max(sizes),
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    adaptive = AdaptiveDepth(max(depths), max(sizes))
    engine = LLMEngine(target, drafter, config, adaptive, eos_ids=target.config.eos_ids)
    started = time.perf_counter()
    engine.warm_up()
    print(f"warmed up in {time.perf_counter() - started:.1f} s", flush=True)
    arms: dict[str, DepthPolicy] = {
        "none": OneDepth(0),
        **{f"K={d}": OneDepth(d) for d in depths},
        "adaptive": adaptive,
    }
    every_depth = sorted({0, *depths, *adaptive.depths})
    if engine.runner.graphs is not None:
        with torch.inference_mode():
            for mode in (SamplingMode.GREEDY, *([SamplingMode.SAMPLED] if any(temperatures) else [])):
                for size in reversed(engine.runner.graphs.sizes):
                    for depth in every_depth:
                        engine.runner.graphs.capture(RoundProgram(size, depth, depth, mode))
        print(f"{len(engine.runner.graphs.captured)} graphs, {time.perf_counter() - started:.1f} s", flush=True)
    loop = Loop(engine, prompts, args.max_tokens)
    cells = []
    for temperature in temperatures:
        for workload in workloads:
            for concurrency in sizes:
                count = max(args.generations * concurrency, args.least)
                loop.run(arms["K=3"], [(concurrency, loop.requests(workload, temperature, min(concurrency, 8)))])
                cell = {"temperature": temperature, "workload": workload, "concurrency": concurrency, "arms": {}}
                for name, policy in arms.items():
                    cell["arms"][name] = loop.run(policy, [(concurrency, loop.requests(workload, temperature, count))])
                cell["choice"] = adaptive.choice and adaptive.choice._asdict()
                cells.append(report(cell))
                if args.out:
                    args.out.write_text(json.dumps({"arguments": vars(args), "cells": cells}, default=str, indent=1))
    if args.changing:
        cell = {"workload": "changing", "temperature": "0, 1", "concurrency": f"4, {max(sizes)}, 16", "arms": {}}
        for name, policy in arms.items():
            phases = [
                (4, loop.requests(workloads[-1], 0.0, 24)),
                (max(sizes), loop.requests(workloads[-1], 1.0, 2 * max(sizes))),
                (min(16, max(sizes)), loop.requests(workloads[0], 0.0, 96)),
            ]
            cell["arms"][name] = loop.run(policy, phases)
        cells.append(report(cell))
    worst = {what: min(cell[what] for cell in cells) for what in ("to_best", "to_none")}
    print(f"worst cell: adaptive / best fixed {worst['to_best']:.3f}, adaptive / none {worst['to_none']:.3f}")
    if args.out:
        text = json.dumps({"arguments": vars(args), "cells": cells, "worst": worst}, default=str, indent=1)
        args.out.write_text(text + "\n")


def report(cell: dict) -> dict:
    speeds = {name: arm["tokens_per_second"] for name, arm in cell["arms"].items()}
    fixed = {name: speed for name, speed in speeds.items() if name != "adaptive"}
    best = max(fixed, key=lambda name: fixed[name])
    cell |= {"best": best, "to_best": speeds["adaptive"] / fixed[best], "to_none": speeds["adaptive"] / fixed["none"]}
    line = chain(
        [f"T={cell['temperature']} {cell['workload']} C={cell['concurrency']}:"],
        (f"{name} {speed / fixed['none']:.2f}" for name, speed in speeds.items()),
        [f"| best {best}, adaptive/best {cell['to_best']:.3f}, {cell.get('choice')}"],
    )
    print(*line, flush=True)
    return cell


if __name__ == "__main__":
    main()
