"""How long it takes until an engine is ready, from the start of its process, stage by stage.

    python benchmarks/ready.py [--inflate 8b | --target DIR --drafter DIR] [--warm 2] [--limit 120] [--serve]

Without models of its own it enlarges the bundled pair first, as `fledge bench inflate` does, and times that. Then it
starts Python with an `LLM` again and again: first with nothing compiled and no costs kept, then warm, the last time
under a profiler (which makes Python slower; its stages are not for comparing). A start that would end beyond `--limit`
seconds is left out. `--serve` starts `fledge serve` instead and asks /health until it answers 200.

The stages are those that the package logs (`fledge.progress.timed`). A stage within another is part of it; what ran
aside, on another thread, is no part of the sum. Prints tables and one JSON line; with $OUT set, the profile goes there.
"""

import argparse
import cProfile
import json
import logging
import os
import pstats
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN_CALLS = 25
ASIDE = ", aside"  # ends the name of a stage on another thread


class StageLog(logging.Handler):
    """Collects the stages that the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.stages: list[Any] = []
        logger = logging.getLogger("fledge")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if (stage := getattr(record, "stage", None)) is not None:
            self.stages.append(stage)


def as_rows(stages: Sequence[Any], *, nested: bool = True) -> list[dict[str, Any]]:
    """In the order in which they began; those of one name within one other are one row, with their number.

    What ran aside comes last.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    open_: list[Any] = []
    for stage in sorted(stages, key=lambda one: (one.began, -one.seconds)):
        aside = stage.name.endswith(ASIDE)
        while not aside and open_ and open_[-1].began + open_[-1].seconds < stage.began + stage.seconds:
            open_.pop()
        within = tuple(one.name for one in open_) if nested and not aside else ()
        fresh = {"stage": stage.name, "depth": len(within), "seconds": 0.0, "count": 0}
        row = rows.setdefault((*within, stage.name), fresh)
        row["seconds"] += stage.seconds
        row["count"] += 1 if stage.count is None else stage.count
        if not aside:
            open_.append(stage)
    ordered = sorted(rows.values(), key=lambda row: row["stage"].endswith(ASIDE))
    return [{**row, "seconds": round(row["seconds"], 4)} for row in ordered]


def count_kernels() -> dict[str, int]:
    """How many kernels Triton compiles from now on, and finds in its cache; empty where it does not tell."""
    try:
        from triton import knobs  # noqa: PLC0415 - not on every machine
    except ImportError:
        return {}
    found = {"compiled": 0, "found": 0}

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found["found" if cache_hit else "compiled"] += 1

    knobs.compilation.listener = listen
    return found


def start_engine(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Be a process that builds an engine and answers one request; what it took, by the clock of its parent."""
    begun = time.perf_counter()
    log = StageLog()
    from fledge import LLM, SamplingParams  # noqa: PLC0415 - it is part of what is timed
    from fledge.engine.engine import LLMEngine  # noqa: PLC0415

    imported = time.perf_counter()
    kernels, profile = count_kernels(), cProfile.Profile()
    if asked["profile"]:
        profile.enable()
    speculation = {"model": asked["drafter"], "num_speculative_tokens": asked["depth"]}
    llm = LLM(asked["target"], speculative_config=speculation, max_num_seqs=asked["requests"])
    profile.disable()
    ready = time.perf_counter()
    assert isinstance(llm.engine, LLMEngine)
    graphs = llm.engine.runner.graphs
    told = {**kernels}
    events = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    next(events)
    first = time.perf_counter()
    for _ in events:
        pass
    if asked["profile"]:
        with Path(asked["profile"]).open("w", encoding="utf-8") as file:
            pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(SHOWN_CALLS)
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(SHOWN_CALLS)
    return {
        "ready": ready - asked["spawned"],
        "python": begun - asked["spawned"],
        "imports": imported - begun,
        "LLM": ready - imported,
        "first token": first - ready,
        "32 tokens": time.perf_counter() - ready,
        "graphs": 0 if graphs is None else len(graphs.captured),
        "kernels": told,
        "device": llm.engine.info.device,
        "stages": as_rows([one for one in log.stages if one.began < ready]),
    }


def inflate(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Be a process that enlarges the bundled pair. Its stages ran on several threads: their seconds are added up."""
    import torch  # noqa: PLC0415

    from fledge.bench.inflate import shape_named  # noqa: PLC0415
    from fledge.bench.inflate_files import Inflation, write_inflated  # noqa: PLC0415
    from fledge.checkpoints.source import DRAFTERS, TARGET  # noqa: PLC0415

    log, imported = StageLog(), time.perf_counter()
    drafters = ((DRAFTERS["EAGLE-3.1"], Path(asked["drafter"])),)
    write_inflated(
        Inflation(
            source=TARGET,
            destination=Path(asked["target"]),
            shape_name=asked["shape"],
            shape=shape_named(asked["shape"]),
            drafters=drafters,
            dtype=torch.bfloat16,
        )
    )
    ended = time.perf_counter()
    size = sum(file.stat().st_size for place in (asked["target"], asked["drafter"]) for file in Path(place).iterdir())
    return {
        "whole": ended - asked["spawned"],
        "imports": imported - asked["spawned"],
        "gigabytes": size / 1e9,
        "stages": as_rows(log.stages, nested=False),
    }


CHILDREN = {"engine": start_engine, "inflate": inflate}


def in_process(what: str, environment: Mapping[str, str], **asked: Any) -> dict[str, Any]:
    """Run one of `CHILDREN` in a fresh Python; exits with its error where it fails."""
    asked = {**asked, "spawned": time.perf_counter()}  # Linux: one clock for all processes
    command = [sys.executable, __file__, "--child", what, json.dumps(asked)]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{what}: ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def start_server(asked: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Start `fledge serve`, and end it when /health has answered 200."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculation = json.dumps({"model": asked["drafter"], "num_speculative_tokens": asked["depth"]})
    command = [sys.executable, "-m", "fledge", "serve", asked["target"], "--port", str(port)]
    command += ["--speculative-config", speculation, "--max-num-seqs", str(asked["requests"])]
    began = time.perf_counter()
    server = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                sys.exit(f"fledge serve: ended with status {server.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                    if answer.status == 200:
                        return {"ready": time.perf_counter() - began, "stages": []}
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.02)
    finally:
        server.terminate()
        server.wait()


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print one measurement as a table."""
    print(f"\n{name}")
    for key, value in found.items():
        if isinstance(value, float):
            print(f"  {key:<44}{value:>9.2f}" + ("" if key == "gigabytes" else " s"))
        elif key != "stages":
            print(f"  {key:<44}{value}")
    for row in found["stages"]:
        label = "  " * row["depth"] + row["stage"] + (f" ({row['count']})" if row["count"] > 1 else "")
        print(f"    {label:<42}{row['seconds']:>9.2f} s")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inflate", default="8b", help="the shape to enlarge the bundled pair to")
    parser.add_argument("--target", help="a target's directory, instead")
    parser.add_argument("--drafter", help="and its drafter's")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--warm", type=int, default=2, help="warm starts, besides the one under a profiler")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for all of it")
    parser.add_argument("--serve", action="store_true", help="time `fledge serve` until /health answers")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, asked = given.child
        print(json.dumps(CHILDREN[what](json.loads(asked))))
        return
    if (given.target is None) != (given.drafter is None):
        parser.error("--target and --drafter go together")
    began, results = time.perf_counter(), {}
    work = Path(tempfile.mkdtemp(prefix="fledge-ready-"))
    try:
        caches = {"TRITON_CACHE_DIR": str(work / "triton"), "FLEDGE_CACHE": str(work / "fledge")}
        pair = {"target": given.target or str(work / "target"), "drafter": given.drafter or str(work / "drafter")}
        if not given.target:
            results["inflating"] = in_process("inflate", caches, shape=given.inflate, **pair)
            show(f"inflating to {given.inflate}", results["inflating"])
        asked = {**pair, "depth": given.depth, "requests": given.requests}
        names = ["first start", *(f"warm start {i + 1}" for i in range(given.warm))]
        names += [] if given.serve else ["under a profiler"]
        expected = 0.0  # of the next start
        for name in names:
            if time.perf_counter() - began + expected > given.limit:
                print(f"\n{name}: left out, --limit {given.limit:g} would be passed")
                continue
            started = time.perf_counter()
            if given.serve:
                found = start_server(asked, caches)
            else:
                out = Path(os.environ.get("OUT", work)) / "ready_profile.txt"
                profile = str(out) if name == "under a profiler" else ""
                found = in_process("engine", caches, profile=profile, **asked)
                if profile:
                    print(out.read_text(encoding="utf-8").partition("Ordered by: internal")[0])
            took = time.perf_counter() - started
            expected = took / 2 if name == names[0] else took  # the first compiles
            results[name] = found
            show(name, found)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"whole": round(time.perf_counter() - began, 1), **results}))


if __name__ == "__main__":
    main()
