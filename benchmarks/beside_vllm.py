r"""Fledge beside vLLM on one GPU, in one run: tokens per second of a user, or milliseconds of a step, and their ratio.

    python benchmarks/beside_vllm.py [--vllm-python PYTHON] [--vllm-path FOLDER] [--out FOLDER] [--after FILE] \
        8b,1b fp8,fp8-dynamic,int4 mla,moe

Each word is a wave: the engines of all its parts start together, and only when all have started is anything timed, one
engine at a time, in turns; with --after FILE, only when that file exists too, so that engines can start beside other
work on the GPU, whose end it tells. The parts, and the gigabytes of GPU memory that they need:

    8b 85, 1b 36        the bundled pair enlarged to these shapes; with K drafts in vLLM, Fledge chooses up to K
    fp8, int4 32, 24    the 8b target in fewer bits (weights alone), one request
    fp8-dynamic 32      vLLM with activations in FP8 too, which Fledge does not do
    moe 67, mla 36      random weights of large shapes, no drafts: a step; Fledge starts when vLLM has ended
    bundled             the pair as it is, for trying this out

Closed loop: so many requests in flight, greedy, the next is sent when one ends; prompts of HumanEval and MT-Bench in
turns (of 8b, those of HumanEval alone too), the same for both engines, others in each repeat. A user's rate is the mean
over requests of tokens / time in flight. Every cell is a line of beside.jsonl as soon as it is measured. An engine that
fails says why, and the rest goes on.
"""

import argparse
import contextlib
import fcntl
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside_worker import Worker, WorkerError

HERE = Path(__file__).parent
WORKLOADS = ("humaneval", "mt_bench")
LONGEST_PROMPT = 1024
MAX_MODEL_LEN = 2048
MAX_TOKENS = 96
REQUESTS = {1: 10, 4: 24, 16: 48, 64: 128, 256: 512}
STEPS_PROMPT, STEPS_SHORT, STEPS_LONG = 128, 16, 112  # a step is what the longer answers take longer
VLLM_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # else it must be installed
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is compared: a target, and how many requests at once."""

    target: str  # in the folder of models, or a shape
    drafter: str | None = None
    concurrencies: tuple[int, ...]
    coding: tuple[int, ...] = ()  # so many requests at once of the first set alone too

    @property
    def is_random(self) -> bool:
        return self.drafter is None


PARTS = {
    "8b": Part(target="8b", drafter="8b-drafter", concurrencies=(1, 4, 16, 64, 256), coding=(1, 4, 16)),
    "1b": Part(target="1b", drafter="1b-drafter", concurrencies=(1, 4, 16, 64, 256)),
    "fp8": Part(target="8b-fp8", drafter="8b-drafter", concurrencies=(1,)),
    "fp8-dynamic": Part(target="8b-fp8-dynamic", drafter="8b-drafter", concurrencies=(1, 16, 64)),
    "int4": Part(target="8b-int4", drafter="8b-drafter", concurrencies=(1,)),
    "moe": Part(target="qwen3-30b-a3b", concurrencies=(1, 4, 16)),
    "mla": Part(target="deepseek-v2-lite", concurrencies=(1, 4, 16)),
    "bundled": Part(target="bundled", drafter="bundled-drafter", concurrencies=(1, 4), coding=(1,)),
}


@dataclass(frozen=True, kw_only=True)
class Models:
    """Where targets and drafters lie, made of a small pair where they do not yet."""

    folder: Path
    target: str
    drafter: str

    def path(self, name: str) -> Path:
        if (HERE / "shapes" / name).is_dir():
            return HERE / "shapes" / name
        given = {"bundled": self.target, "bundled-drafter": self.drafter}
        return Path(given[name]) if name in given else self.folder / name

    def prepare(self, parts: list[Part]) -> None:
        """Make what is missing. One process does it; others wait for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in dict.fromkeys(part.target for part in parts):
                if not self.path(name).exists():
                    started = time.perf_counter()
                    self._make(name)
                    print(f"made {name} in {time.perf_counter() - started:.0f} s", flush=True)

    def _make(self, name: str) -> None:
        shape, _, kind = name.partition("-")
        path, plain = self.path(name), self.path(shape)
        if kind and not plain.exists():
            self._make(shape)
        if not kind:
            size = {"1b": "1b-deep"}.get(shape, shape)  # the bundled target has more layers than the shape 1b
            words = [sys.executable, "-m", "fledge", "bench", "inflate", self.target, str(path), "--shape", size]
            words += ["--drafter", self.drafter, "--drafter-out", f"{path}-drafter", "--quiet"]
            words += ["--dtype", "bfloat16"]
            subprocess.run(words, check=True)
        else:
            from fledge.checkpoints.quantize import quantize_target  # noqa: PLC0415 - imports torch

            quantize_target(plain, path, kind)  # type: ignore[arg-type]


def read_prompts(target: Path) -> list[list[int]]:
    """The prompts of the sets in turns, as token ids."""
    from fledge.evaluation.workloads import load_workload, tokenised  # noqa: PLC0415 - imports torch

    sets = [tokenised(load_workload(name), target) for name in WORKLOADS]
    turns = [turn for turn in zip(*sets, strict=False) if max(map(len, turn)) <= LONGEST_PROMPT]
    return [list(ids) for turn in turns for ids in turn]


def random_prompts(target: Path, count: int) -> list[list[int]]:
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(STEPS_PROMPT)] for _ in range(count)]


def cache_bytes(target: Path, prompts: list[list[int]], concurrency: int) -> int:
    """Room for keys and values of the longest that can be in flight at once, and one request of any length."""
    config = json.loads((target / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    row = 2 * config["num_key_value_heads"] * width
    if "kv_lora_rank" in config:
        row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    longest = sorted((len(ids) for ids in prompts), reverse=True)
    several = (longest * (concurrency // len(longest) + 1))[:concurrency]
    tokens = sum(several) + concurrency * (MAX_TOKENS + 64) + MAX_MODEL_LEN
    layers = config["num_hidden_layers"] + 2  # with the drafter's
    return max(2**30, int(2 * tokens * layers * row))


@dataclass(kw_only=True)
class Comparison:
    """One part on its way: its engines, and what is asked of them."""

    name: str
    part: Part
    prompts: list[list[int]]
    engines: dict[tuple[str, int], "Engine"]  # by whose it is and K
    rows: list[dict[str, Any]]

    def measure(self, repeats: int, out: Path) -> None:
        """Cell by cell, in turns. An engine that has failed is left out from then on."""
        for depth in sorted({k for _, k in self.engines}):
            several = {whose: engine for (whose, k), engine in self.engines.items() if k == depth}
            if self.part.is_random:  # ours has no room beside the other
                for whose, engine in several.items():
                    for concurrency in self.part.concurrencies:
                        for repeat in range(repeats):
                            self._cell({whose: engine}, depth, concurrency, repeat, out)
                    engine.worker.close()
                continue
            for concurrency in self.part.concurrencies:
                for repeat in range(repeats):
                    in_turn = dict(reversed(several.items())) if repeat % 2 else several
                    self._cell(in_turn, depth, concurrency, repeat, out)
                    if concurrency in self.part.coding:
                        self._cell(in_turn, depth, concurrency, repeat, out, coding=True)

    def _cell(
        self,
        engines: dict[str, "Engine"],
        depth: int,
        concurrency: int,
        repeat: int,
        out: Path,
        *,
        coding: bool = False,
    ) -> None:
        for whose, engine in engines.items():
            if engine.failed:
                continue
            part = f"{self.name} {WORKLOADS[0]}" if coding else self.name
            row: dict[str, Any] = {"part": part, "K": depth, "C": concurrency, "engine": whose, "repeat": repeat}
            stride = len(WORKLOADS) if coding else 1
            try:
                row |= engine.steps(concurrency) if self.part.is_random else engine.load(concurrency, repeat, stride)
                self.keep(row, out)
            except WorkerError as error:
                self.give_up(whose, depth, error, out)

    def keep(self, row: dict[str, Any], out: Path) -> None:
        self.rows.append(row)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def give_up(self, whose: str, depth: int, error: WorkerError, out: Path) -> None:
        """Ask nothing more of an engine."""
        self.engines[whose, depth].failed = True
        print(f"{self.name} K={depth} {whose}: {error}", flush=True)
        self.keep({"part": self.name, "K": depth, "engine": whose, "error": str(error).partition("\n")[0]}, out)


@dataclass(kw_only=True)
class Engine:
    """A worker and how deep it drafts; ours has several depths in one process."""

    worker: Worker
    depth: int
    prompts: int
    failed: bool = False
    _warm: int = 0  # the concurrency that it was last warmed up for

    def load(self, concurrency: int, repeat: int, stride: int) -> dict[str, Any]:
        count = REQUESTS[concurrency]
        about = {"concurrency": concurrency, "depth": self.depth}
        if self._warm != concurrency:
            self.worker.ask({**about, "first": 0, "requests": max(2, concurrency), "max_tokens": 32}, 120)
            self._warm = concurrency
        about |= {"first": repeat * count * stride % self.prompts, "stride": stride, "requests": count}
        return self.worker.ask({**about, "max_tokens": MAX_TOKENS}, 120)

    def steps(self, concurrency: int) -> dict[str, Any]:
        """Of two runs of all at once, one longer, the difference: prompts are read in both."""
        about = {"concurrency": concurrency, "depth": 0, "first": 0, "requests": concurrency, "ignore_eos": True}
        if self._warm != concurrency:
            self.worker.ask({**about, "max_tokens": STEPS_SHORT}, 120)
            self._warm = concurrency
        short, long = (self.worker.ask({**about, "max_tokens": n}, 120) for n in (STEPS_SHORT, STEPS_LONG))
        step = (long["seconds"] - short["seconds"]) / (STEPS_LONG - STEPS_SHORT)
        return {**long, "ms_a_step": round(1e3 * step, 3)}


def start(name: str, models: Models, options: argparse.Namespace, live: list[Worker]) -> Comparison:
    """Start the engines of a part, and do not wait for them."""
    part = PARTS[name]
    target = models.path(part.target)
    prompts = random_prompts(target, max(part.concurrencies)) if part.is_random else read_prompts(target)
    file = models.folder / f"{name}-prompts.json"
    file.write_text(json.dumps(prompts))
    depths = (0,) if part.is_random else tuple(options.depths)
    common = {
        "prompts": str(file.resolve()),
        "max_num_seqs": max(part.concurrencies),
        "max_model_len": MAX_MODEL_LEN,
        "ahead_seconds": options.ahead_seconds,
        "kv_cache_bytes": cache_bytes(target, prompts, max(part.concurrencies)),
        "drafter": None if part.drafter is None else str(models.path(part.drafter).resolve()),
        "is_random": part.is_random,
        "cpu": options.cpu,
    }
    engines: dict[tuple[str, int], Engine] = {}

    def launch(whose: str, several: tuple[int, ...], python: str, path: Path, env: dict[str, str]) -> None:
        setup = {**common, "engine": whose, "target": str(path.resolve()), "depths": several}
        title = f"{name}-{whose}-{'-'.join(map(str, several))}"
        worker = Worker(title, python, setup, env, options.logs, late=part.is_random and whose == "fledge")
        live.append(worker)
        engines.update({(whose, k): Engine(worker=worker, depth=k, prompts=len(prompts)) for k in several})

    if "vllm" in options.engines:
        for depth in depths:
            path = str(Path(options.vllm_path).resolve()) if options.vllm_path else ""
            cache = str(models.folder.resolve() / "vllm-cache" / f"{name}-{depth}")
            env = {**VLLM_SETTINGS, "PYTHONPATH": path, "VLLM_CACHE_ROOT": cache}
            launch("vllm", (depth,), options.vllm_python, target, env)
    if "fledge" in options.engines:
        ours = {"PYTHONPATH": str(HERE.parent / "src"), "FLEDGE_COSTS": "0"}
        launch("fledge", depths, sys.executable, target, ours)
    return Comparison(name=name, part=part, prompts=prompts, engines=engines, rows=[])


def wait_for(file: Path | None) -> None:
    """Until it exists, if there is one to wait for."""
    began = time.monotonic()
    while file is not None and not file.exists():
        time.sleep(0.2)
    if file is not None:
        print(f"waited {time.monotonic() - began:.0f} s for {file}", flush=True)


def run_wave(names: list[str], models: Models, options: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    live: list[Worker] = []
    rows: list[dict[str, Any]] = []
    try:
        models.prepare([PARTS[name] for name in names])
        comparisons = [start(name, models, options, live) for name in names]
        until = time.monotonic() + options.start_seconds
        for comparison in comparisons:
            for (whose, depth), engine in comparison.engines.items():
                if engine.worker.late:
                    continue
                try:
                    ready = engine.worker.wait_until_ready(until - time.monotonic())
                    print(f"{comparison.name} K={depth} {whose}: {ready}", flush=True)
                except WorkerError as error:
                    comparison.give_up(whose, depth, error, out)
        wait_for(options.after)
        for comparison in comparisons:
            comparison.measure(options.repeats, out)
            rows += comparison.rows
            print(table(comparison.rows), flush=True)
            for engine in comparison.engines.values():
                engine.worker.close()
    finally:
        for worker in live:
            worker.close()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """vLLM beside Fledge: a ratio above 1 says that Fledge is faster."""
    lines = [
        "| part | K | C | | vLLM | Fledge | ratio | of each repeat | requests each |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    measured = [row for row in rows if "error" not in row]
    for part, depth, concurrency in dict.fromkeys((row["part"], row["K"], row["C"]) for row in measured):
        cell = [row for row in measured if (row["part"], row["K"], row["C"]) == (part, depth, concurrency)]
        is_step = "ms_a_step" in cell[0]
        key, unit = ("ms_a_step", "ms a step") if is_step else ("user_tokens_per_second", "tokens/s of a user")
        found = {
            whose: {row["repeat"]: row[key] for row in cell if row["engine"] == whose} for whose in ("vllm", "fledge")
        }
        both = sorted(found["vllm"].keys() & found["fledge"].keys())
        both = [r for r in both if min(found["vllm"][r], found["fledge"][r]) > 0]  # a difference of noise tells nothing
        ratios = [(found["fledge"][r] / found["vllm"][r]) ** (-1 if is_step else 1) for r in both]
        means = {whose: statistics.mean(values.values()) if values else None for whose, values in found.items()}
        shown = {whose: "-" if mean is None else f"{mean:.4g}" for whose, mean in means.items()}
        ratio = f"{statistics.geometric_mean(ratios):.3f}" if ratios else ""
        each = ", ".join(f"{one:.2f}" for one in ratios)
        requests = sum(row["requests"] for row in cell) // max(1, sum(map(bool, found.values())))
        values = [part, depth, concurrency, unit, shown["vllm"], shown["fledge"], ratio, each, requests]
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("waves", nargs="*", default=["8b,1b", "fp8,fp8-dynamic,int4", "mla,moe"])
    parser.add_argument("--target", default=str(HERE.parent / "src/fledge/bundled/fledgling"))
    parser.add_argument("--drafter", default=str(HERE.parent / "src/fledge/bundled/fledgling-eagle3.1"))
    parser.add_argument("--models", type=Path, default=Path("build/beside"), help="what is made is kept here")
    parser.add_argument("--prepare", action="store_true", help="only make the models")
    parser.add_argument("--engines", default="vllm,fledge", type=lambda text: text.split(","))
    parser.add_argument("--depths", default=[0, 3], type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, help="in each cell; for trying this out")
    parser.add_argument("--start-seconds", type=float, default=240.0, help="for all engines of a wave to start")
    parser.add_argument("--ahead-seconds", type=float, default=40.0, help="that ours captures graphs for at most")
    parser.add_argument("--after", type=Path, metavar="FILE", help="nothing is timed before it exists")
    parser.add_argument("--vllm-python", default=os.environ.get("FLEDGE_VLLM_PYTHON", sys.executable))
    parser.add_argument("--vllm-path", help="a folder with vLLM, where its Python has none")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/beside/results")))
    parser.add_argument("--logs", type=Path, default=Path("build/beside/logs"))
    parser.add_argument("--cpu", action="store_true", help="float32, for trying this out")
    options = parser.parse_args()
    unknown = {name for wave in options.waves for name in wave.split(",")} - PARTS.keys()
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended
    models = Models(folder=options.models, target=options.target, drafter=options.drafter)
    waves = [wave.split(",") for wave in options.waves]
    if options.prepare:
        models.prepare([PARTS[name] for wave in waves for name in wave])
        return
    if options.requests:
        REQUESTS.update(dict.fromkeys(REQUESTS, options.requests))
    for folder in (options.out, options.logs):
        folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    try:
        for wave in waves:
            try:
                rows += run_wave(wave, models, options, options.out / "beside.jsonl")
            except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
                print(f"{','.join(wave)}: {error}", flush=True)
            print(f"{','.join(wave)}: done after {time.monotonic() - began:.0f} s", flush=True)
    finally:
        text = table(rows)
        (options.out / "beside.md").write_text(text + "\n")
        with contextlib.suppress(OSError), (options.out / "beside.log").open("w") as log:
            for file in sorted(options.logs.glob("*.log")):
                log.write(f"==== {file.name}\n" + "".join(file.open(errors="replace").readlines()[-300:]))
        print(text, flush=True)
    sys.exit(0 if rows and not any("error" in row for row in rows) else 1)


if __name__ == "__main__":
    main()
