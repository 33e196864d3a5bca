"""The bundled pair on a CPU: Fledge and transformers on the same prompts, greedy, float32, in one run.

    python benchmarks/bundled_peers.py [--threads 2] [--out results.json]

Fledge decodes without speculation and with each drafter. transformers decodes plainly and by prompt lookup, its own
assisted generation that needs no second model (it has no EAGLE, and no smaller chat model has this tokenizer). Fledge
beside vLLM is `fledge bench offline --engine vllm`.

Contenders take turns prompt by prompt, or at a concurrency of n by n prompts that are asked together: one computes, the
others wait. Each has a clock that runs while it computes. Writes what `fledge bench report` reads.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from fledge.bench.contenders import contenders, draft_modes
from fledge.bench.offline import ClosedLoop, Models, cycled, load_models, make_engine
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
PAUSE = 0.3  # threads of OpenMP spin a while after their last work, and would take the next one's cores


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


def _record(
    question: Prompt,
    tokens: Sequence[int],
    first: float,
    done: float,
) -> RequestRecord:
    return RequestRecord(
        prompt=question.id,
        sent=0.0,
        first_token=first,
        done=done,
        prompt_tokens=len(question.token_ids),
        output_tokens=len(tokens),
        digest=token_digest(tokens),
    )


def local_peers(options: argparse.Namespace, models: Models, asking: Asking, longest: int) -> list[Peer]:
    """Ours and transformers', in this process."""
    base = EngineConfig(max_model_len=longest, max_num_seqs=max(options.concurrency), enable_prefix_caching=False)
    peers: list[Peer] = []
    configs = {name: drafter.config for name, drafter in models.drafters.items()}
    for contender in contenders(configs, options.target, draft_modes([options.depth], "", [])):
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
                seconds, answered = peer.answer(group)
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
            settings=self.settings,
            provenance=self.provenance,
            status="complete" if complete else "partial",
            notes=notes if complete else (*notes, "interrupted: not everything was measured"),
        )


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
    parser.add_argument("--baseline", default=PLAIN)
    parser.add_argument("--title", default="The bundled pair on a CPU, beside transformers")
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
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
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
    results = run.results(complete=complete)
    write_results(results, options.out)
    if results.cells:
        print_results(Summary(results, results.baseline), Console(highlight=False, width=140))
    sys.exit(0 if complete else 130)


if __name__ == "__main__":
    main()
