"""Time to the first token on a GPU: prompts read through CUDA graphs, and launched kernel by kernel, in turns.

    python benchmarks/first_token.py [--inflate 8b] [--depth 5] [--lengths 20,100,300,600,1000] [--out results.json]

One request at a time, random tokens: what is measured is from the engine's `add_request` to the first token read.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fledge.bench.contenders import contenders, draft_modes
from fledge.bench.offline import load_models, make_engine
from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.provenance import run_provenance


def seconds_to_first_token(engine: LLMEngine, prompt: list[int], number: int) -> float:
    started = time.perf_counter()
    engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=2))
    request = engine.requests[str(number)]
    while request.first_token_at is None:
        engine.step()
    taken = request.first_token_at - started
    while engine.has_unfinished:
        engine.step()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--drafter", default=DRAFTERS["EAGLE-3.1"])
    parser.add_argument("--inflate", help="enlarge the pair to this shape first")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--lengths", default="20,100,300,600,1000")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    models = load_models(arguments.target, [arguments.drafter], dtype="auto", device="auto", inflate=arguments.inflate)
    base = EngineConfig(max_model_len=max(lengths) + 64, max_num_seqs=4, enable_prefix_caching=False)
    configs = {name: drafter.config for name, drafter in models.drafters.items()}
    contender = contenders(configs, arguments.target, draft_modes([arguments.depth], "", []))[-1]
    eager = replace(base, enforce_eager=True)
    engines = {
        "graphs": make_engine(models, contender, base, [1]),
        "kernel by kernel": make_engine(models, contender, eager, [1]),
    }
    generator = random.Random(0)
    vocabulary = models.target.config.vocab_size
    found: dict[int, dict[str, float]] = {}
    for length in lengths:
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(arguments.repeats + 3):
            prompt = [generator.randrange(vocabulary) for _ in range(length)]
            for name, engine in engines.items():
                taken[name].append(seconds_to_first_token(engine, prompt, number))
        found[length] = {name: statistics.median(several[3:]) for name, several in taken.items()}
    table = Table("prompt tokens", *(f"{name}, ms" for name in engines), "ratio")
    for length, by_name in found.items():
        values = list(by_name.values())
        table.add_row(str(length), *(f"{1000 * value:.2f}" for value in values), f"{values[1] / values[0]:.2f}x")
    Console().print(table)
    if arguments.out is not None:
        results = {
            "milliseconds": {length: {name: 1000 * v for name, v in by.items()} for length, by in found.items()},
            "depth": arguments.depth,
            "inflated": arguments.inflate,
            "provenance": run_provenance(),
        }
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
