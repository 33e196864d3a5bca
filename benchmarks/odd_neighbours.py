"""What one request with unusual wishes costs the plain ones beside it.

    python benchmarks/odd_neighbours.py --shape 8b --concurrency 16,4 --out odd-neighbours.json

C plain greedy requests decode with adaptive drafts, and one more beside them: plain too, or with log-probabilities,
penalties, a grammar and so on. Tokens per second of the C plain ones, over those beside a plain neighbour. Kind by kind
both take turns, `--repeats` times, with the same prompts; the interval is that of the mean logarithm over repeats
(Student). What a kind needs is captured in a first turn, which is told apart, and the same for all depths; after
`--seconds` no kind begins. Below each ratio is, of both, what may be the cause of it: milliseconds of a step and of the
host's part of it, tokens of a plain request in a step, the parts of the most frequent round on the device, and which
rounds ran how often, `3/26x17:20` for 20 of 17 requests that drafted 3 each and verified 26 of them in all (no `/`: all
of them). If graphs were captured meanwhile, or others ran in their place, it says how many.
With `--shape` the bundled pair has the cost of a large one (`fledge bench inflate`) and its own text and acceptance.
The grammar is a stand-in that allows every other token id: what a parser takes is not measured, what masks take is.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice, product
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
from fledge.engine.graphs import GraphRunner
from fledge.engine.llm import LLM
from fledge.engine.programs import RoundProgram
from fledge.engine.protocol import PhaseSeconds, RoundReport
from fledge.engine.runner import Launch, Runner, StepResults
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


@dataclass(kw_only=True)
class Turn:
    """What happened while the plain requests got their tokens."""

    rate: float  # tokens per second of theirs
    tokens: float  # of each of them, in a step
    step_ms: float
    host_ms: float  # of these, that the host did not wait
    captured: int  # graphs
    replaced: int  # rounds that ran as another graph, or as none
    rounds: list[RoundReport] = field(repr=False)

    def __str__(self) -> str:
        arms = Counter(map(_arm_of, self.rounds))
        usual = arms.most_common(1)[0][0]
        seconds = [one.seconds for one in self.rounds if _arm_of(one) == usual]
        parts = (f"{name} {1e3 * statistics.median(part):.2f}" for name, part in _parts(seconds))
        ran = " ".join(f"{arm}:{count}" for arm, count in arms.most_common())
        odd = f", captured {self.captured}, replaced {self.replaced}" if self.captured or self.replaced else ""
        return (
            f"{self.step_ms:.2f} ms a step (host {self.host_ms:.2f}), {self.tokens:.2f} tokens, {usual}: "
            f"{', '.join(parts)} ms; rounds {ran}{odd}"
        )

    def to_dict(self) -> dict[str, object]:
        of_arms = {
            arm: [one.seconds for one in self.rounds if _arm_of(one) == arm] for arm in map(_arm_of, self.rounds)
        }
        return {
            **{name: value for name, value in vars(self).items() if name != "rounds"},
            "rounds": Counter(map(_arm_of, self.rounds)),
            "device_ms": {
                arm: {name: 1e3 * statistics.median(part) for name, part in _parts(seconds)}
                for arm, seconds in of_arms.items()
            },
        }


def mean_turn(turns: Sequence[Turn]) -> Turn:
    """What several of them have been like on average; their rounds, captures and replacements together."""
    means = {
        name: statistics.mean(getattr(one, name) for one in turns) for name in ("rate", "tokens", "step_ms", "host_ms")
    }
    return Turn(
        captured=sum(one.captured for one in turns),
        replaced=sum(one.replaced for one in turns),
        rounds=list(chain.from_iterable(one.rounds for one in turns)),
        **means,
    )


def _arm_of(report: RoundReport) -> str:
    """Drafts of each request, and how many of all were verified if not all; with how many requests."""
    arm = str(report.verify.depth) + ("" if report.admit is None else f"/{report.admit}")
    return f"{arm}x{report.batch}" + ("" if report.draft == report.verify else f">{report.draft.depth}")


def _parts(seconds: Sequence[PhaseSeconds]) -> list[tuple[str, list[float]]]:
    return [(name, [getattr(one, name) for one in seconds]) for name in PhaseSeconds._fields]


class Recorder:
    """Takes down what a runner reads of each launch."""

    def __init__(self, runner: Runner) -> None:
        self._read = runner.read
        self.clear()
        runner.read = self.read  # type: ignore[method-assign]

    def clear(self) -> None:
        self.rounds: list[RoundReport] = []
        self.waited = 0.0  # seconds that the host had nothing to do

    def read(self, launch: Launch) -> StepResults:
        results = self._read(launch)
        self.waited += results.waited
        self.rounds += [] if results.report is None else [results.report]
        return results


class Batch:
    """One engine, with so many plain requests and one neighbour, again and again."""

    def __init__(self, llm: LLM, engine: LLMEngine, prompts: list[list[int]], tokens: int) -> None:
        self._llm, self._engine, self._prompts, self._tokens = llm, engine, prompts, tokens
        self._recorder = Recorder(engine.runner)

    def _counts(self) -> tuple[int, int]:
        graphs = self._engine.runner.graphs
        return (0, 0) if graphs is None else (len(graphs.captured), graphs.wanted.total())

    def run(self, kind: str, concurrency: int) -> Turn:
        """One turn, from when all have begun until each plain request has so many tokens, on average."""
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
        self._recorder.clear()
        captured, replaced = self._counts()
        steps, begun, before = 0, time.perf_counter(), sum(len(answer.token_ids) for answer in answers)
        done = before
        while done - before < concurrency * self._tokens:
            llm.advance()
            steps += 1
            done = sum(len(answer.token_ids) for answer in answers)
        seconds = time.perf_counter() - begun
        turn = Turn(
            rate=(done - before) / seconds,
            tokens=(done - before) / concurrency / steps,
            step_ms=1e3 * seconds / steps,
            host_ms=1e3 * (seconds - self._recorder.waited) / steps,
            captured=self._counts()[0] - captured,
            replaced=self._counts()[1] - replaced,
            rounds=self._recorder.rounds,
        )
        assert not any(job.is_finished for job in (*jobs, neighbour)), f"{kind}: an answer ended early"
        llm.forget([*jobs, neighbour])
        return turn

    def first_turn(self, kind: str, concurrency: int) -> float:
        """Seconds of a turn in which kernels may be compiled and graphs captured; then capture what it was without."""
        begun = time.perf_counter()
        self.run(kind, concurrency)
        seconds = time.perf_counter() - begun
        if self._engine.runner.graphs is not None:
            capture_wanted(self._engine.runner.graphs)
        return seconds


@torch.inference_mode()
def capture_wanted(graphs: GraphRunner) -> None:
    """Capture what steps did without, and rounds for the same wishes at all depths: the controller may choose any."""
    unusual = [one for one in graphs.captured if isinstance(one, RoundProgram) and (one.asked or one.adjusting)]
    alike = [one._replace(verify=arm, draft=arm, admit=None) for one in unusual for arm in graphs.arms]
    alike += [one._replace(admit=admit) for one in alike for admit in graphs.budgets.sizes(one.batch, one.verify.depth)]
    for program in dict.fromkeys([*graphs.wanted, *map(graphs.padded_round, alike)]):
        graphs.capture(program)


def warm_up(engine: LLMEngine) -> None:
    """Capture rounds in all sizes, and time those of plain requests: an idle engine would capture more."""
    engine.warm_up()
    graphs = engine.runner.graphs
    if graphs is not None:
        largest, tokens = engine.config.max_num_seqs, engine.config.max_num_batched_tokens
        missing = graphs.missing(graphs.arms, max_batch=largest, max_tokens=tokens)
        with torch.inference_mode():
            for program in missing:
                if isinstance(program, RoundProgram):
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
    batch = Batch(LLM.from_engine(engine, tokenizer), engine, prompts, args.tokens)
    cells = []
    for concurrency, kind in product(sizes, kinds):
        if time.perf_counter() - begun > args.seconds:
            print(f"C={concurrency:<3} {kind:18} left out: time is up", flush=True)
            continue
        first = [batch.first_turn(one, concurrency) for one in ("plain", kind)]
        turns = [("plain", kind), (kind, "plain")] * args.repeats
        done = [[batch.run(one, concurrency) for one in turn] for turn in turns[: args.repeats]]
        plain, odd = zip(*(turn[:: 1 if i % 2 == 0 else -1] for i, turn in enumerate(done)), strict=True)
        value, low, high = ratio([one.rate for one in odd], [one.rate for one in plain])
        both = {"plain": mean_turn(plain), "odd": mean_turn(odd)}
        cells.append(
            {"concurrency": concurrency, "kind": kind, "ratio": [value, low, high]}
            | {f"{name} rates": [one.rate for one in turns] for name, turns in (("plain", plain), ("odd", odd))}
            | {name: turn.to_dict() for name, turn in both.items()}
        )
        means = " ".join(f"{turn.rate:8.1f}" for turn in both.values())
        cold = " and ".join(f"{seconds:.2f}" for seconds in first)
        print(f"C={concurrency:<3} {kind:18} {means} tokens/s  {value:.3f} ({low:.3f} to {high:.3f}), first {cold} s")
        for name, turn in both.items():
            print(f"      {name:5} {turn}", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"arguments": vars(args), "cells": cells}, default=str, indent=1) + "\n")
    worst = min(cells, key=lambda cell: cell["ratio"][0])
    print(f"worst: C={worst['concurrency']}, {worst['kind']}, {worst['ratio'][0]:.3f}")


if __name__ == "__main__":
    main()
