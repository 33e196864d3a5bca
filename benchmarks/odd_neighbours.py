"""What one request with unusual wishes costs the plain ones beside it.

    python benchmarks/odd_neighbours.py --shape 8b --concurrency 16,4 --out odd-neighbours.json

C plain greedy requests decode with adaptive drafts, and one more beside them: plain too, or with log-probabilities,
penalties, a grammar and so on. Tokens per second of the C plain ones, over those beside a plain neighbour. Kind by kind
both take turns, `--repeats` times, with the same prompts; the interval is that of the mean logarithm over repeats
(Student). What a kind needs is captured in a first turn, which is told apart; after `--seconds` no kind begins.
With `--shape` the bundled pair has the cost of a large one (`fledge bench inflate`) and its own text and acceptance.
The grammar is a stand-in that allows every other token id: what a parser takes is not measured, what masks take is.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice, product
from pathlib import Path

import torch

from fledge.bench.inflate import SHAPES, inflate_drafter, inflate_target
from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import load_target
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.constraint import Masks, TokenConstraint
from fledge.engine.engine import LLMEngine
from fledge.engine.llm import LLM
from fledge.engine.programs import RoundProgram
from fledge.engine.tokenizer import encode_chat, load_tokenizer
from fledge.evaluation.workloads import load_workload

PLAIN = {"temperature": 0.0}
KINDS: dict[str, dict] = {
    "plain": PLAIN,  # against itself: what chance alone makes of it
    "logprobs": PLAIN | {"logprobs": 5},
    "penalties": PLAIN | {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": PLAIN | {"logit_bias": {7: 5.0, 11: -100.0}},
    "min_tokens": PLAIN | {"min_tokens": 4096},
    "stop strings": PLAIN | {"stop": ["\n\n\n\n", "never said"]},
    "grammar": PLAIN,
    "temperature, seed": {"temperature": 1.0, "seed": 1},
    "temperature": {"temperature": 1.0},
    "top-k, top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}
LONG = 4096  # tokens: no answer ends by itself


class EveryOther:
    """Allows even ids and odd ones by turns."""

    is_complete = False

    def __init__(self, vocab_size: int) -> None:
        even = torch.arange(vocab_size) % 2 == 0
        self._allowed, self._length = (even, ~even), 0

    def masks(self, tokens: Sequence[int]) -> Masks:
        found: Masks = []
        for count, token in enumerate([*tokens, 0]):
            found.append(self._allowed[(self._length + count) % 2])
            if token % 2 != (self._length + count) % 2:
                break
        return found

    def accept(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)


class Batch:
    """One engine, with so many plain requests and one neighbour, again and again."""

    def __init__(self, llm: LLM, prompts: list[list[int]], tokens: int) -> None:
        self._llm, self._prompts, self._tokens = llm, prompts, tokens

    def run(self, kind: str, concurrency: int) -> float:
        """Tokens per second of the plain requests, from when all have begun until each has so many, on average."""
        llm, vocab_size = self._llm, self._llm.engine.info.vocab_size
        plain = SamplingParams.from_dict({**PLAIN, "max_tokens": LONG, "ignore_eos": True})
        odd = SamplingParams.from_dict({**KINDS[kind], "max_tokens": LONG, "ignore_eos": True})
        constraint: Callable[[], TokenConstraint] | None = None
        if kind == "grammar":
            constraint = lambda: EveryOther(vocab_size)  # noqa: E731
        first, *others = islice(cycle(self._prompts), concurrency + 1)
        jobs = [llm.submit(None, ids, plain) for ids in others]
        neighbour = llm.submit(None, first, odd, constraint)
        answers = [answer for job in jobs for answer in job.answers.values()]
        everybody = [*answers, *neighbour.answers.values()]
        while not all(answer.token_ids for answer in everybody):
            llm.advance()
        begun, before = time.perf_counter(), sum(len(answer.token_ids) for answer in answers)
        done = before
        while done - before < concurrency * self._tokens:
            llm.advance()
            done = sum(len(answer.token_ids) for answer in answers)
        seconds = time.perf_counter() - begun
        assert not any(job.is_finished for job in (*jobs, neighbour)), f"{kind}: an answer ended early"
        llm.forget([*jobs, neighbour])
        return (done - before) / seconds

    def first_turn(self, kind: str, concurrency: int) -> float:
        """Seconds of a turn in which kernels may be compiled and graphs captured; then capture what it was without."""
        begun = time.perf_counter()
        self.run(kind, concurrency)
        seconds = time.perf_counter() - begun
        graphs = self._llm.engine.runner.graphs
        if graphs is not None:
            with torch.inference_mode():
                for program in list(graphs.wanted):
                    graphs.capture(program)
        return seconds


def warm_up(engine: LLMEngine) -> None:
    """Capture the rounds of plain requests in all sizes, and time them: an idle engine would capture more."""
    engine.warm_up()
    graphs = engine.runner.graphs
    if graphs is not None:
        largest, tokens = engine.config.max_num_seqs, engine.config.max_num_batched_tokens
        missing = graphs.missing(graphs.arms, max_batch=largest, max_tokens=tokens)
        with torch.inference_mode():
            for program in missing:
                if isinstance(program, RoundProgram) and not program.adjusting:
                    graphs.capture(program)
        engine.warm_up()


def ratio(rates: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the paired ratios, and its 95 % interval."""
    logs = [math.log(one / other) for one, other in zip(rates, plain, strict=True)]
    mean, half = statistics.mean(logs), math.inf
    if len(logs) > 1:
        quantile = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(logs), 2.2)
        half = quantile * statistics.stdev(logs) / len(logs) ** 0.5
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fledgling")
    parser.add_argument("--drafter", default="fledgling-eagle3.1")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--concurrency", default="16,4")
    parser.add_argument("--kinds", default=",".join(name.replace(", ", "+") for name in KINDS))
    parser.add_argument("--tokens", type=int, default=64, help="of each plain request, in each turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=75.0, help="that measuring may take")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    sizes = [int(size) for size in args.concurrency.split(",")]
    kinds = [name.replace("+", ", ") for name in args.kinds.split(",")]

    started = time.perf_counter()
    small = load_target(resolve(args.target))
    drafter = load_drafter(resolve(args.drafter), small)
    if args.shape:
        shape = SHAPES[args.shape]
        target = inflate_target(small, shape, dtype, device)
        drafter = inflate_drafter(drafter, small, target, shape=shape)
    else:
        target, drafter = small.to(device, dtype), drafter.to(device, dtype)
    tokenizer = load_tokenizer(resolve(args.target))
    chats = load_workload("mt_bench", sample=max(sizes) + 1).prompts
    prompts = [encode_chat(tokenizer, chat.first_messages) for chat in chats]
    config = EngineConfig(
        speculative_config={"model": args.drafter, "num_speculative_tokens": args.depth},
        max_num_seqs=max(sizes) + 1,
        cudagraph_capture_sizes=[size + 1 for size in sizes],
        max_model_len=LONG + max(map(len, prompts)),
    )
    engine = LLMEngine(target, drafter, config, eos_ids=target.config.eos_ids)
    loaded = time.perf_counter()
    warm_up(engine)
    gc.collect()
    gc.freeze()  # as the server does
    begun = time.perf_counter()
    print(f"loaded in {loaded - started:.1f} s, warmed up in {begun - loaded:.1f} s", flush=True)
    batch = Batch(LLM.from_engine(engine, tokenizer), prompts, args.tokens)
    cells = []
    for concurrency, kind in product(sizes, kinds):
        if time.perf_counter() - begun > args.seconds:
            print(f"C={concurrency:<3} {kind:18} left out: time is up", flush=True)
            continue
        first = [batch.first_turn(one, concurrency) for one in ("plain", kind)]
        turns = [("plain", kind), (kind, "plain")] * args.repeats
        rates = [[batch.run(one, concurrency) for one in turn] for turn in turns[: args.repeats]]
        plain, odd = zip(*(turn[:: 1 if i % 2 == 0 else -1] for i, turn in enumerate(rates)), strict=True)
        value, low, high = ratio(odd, plain)
        cells.append(
            {"concurrency": concurrency, "kind": kind, "plain": plain, "odd": odd, "ratio": [value, low, high]}
        )
        means = f"{statistics.mean(plain):8.1f} {statistics.mean(odd):8.1f} tokens/s"
        cold = " and ".join(f"{seconds:.2f}" for seconds in first)
        print(
            f"C={concurrency:<3} {kind:18} {means}  {value:.3f} ({low:.3f} to {high:.3f}), first {cold} s", flush=True
        )
        if args.out:
            args.out.write_text(json.dumps({"arguments": vars(args), "cells": cells}, default=str, indent=1) + "\n")
    worst = min(cells, key=lambda cell: cell["ratio"][0])
    print(f"worst: C={worst['concurrency']}, {worst['kind']}, {worst['ratio'][0]:.3f}")


if __name__ == "__main__":
    main()
