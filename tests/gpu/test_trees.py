"""The kernels of draft trees on a GPU, and what a round of trees costs. Also runs as a script where pytest is not:

PYTHONPATH=src:. python tests/gpu/test_trees.py             the checks
PYTHONPATH=src:. python tests/gpu/test_trees.py times       a table: plain, chain and tree rounds at an 8B shape
PYTHONPATH=src:. python tests/gpu/test_trees.py kernels     the kernels of a tree round, by their time
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)

from fledge.bench.inflate import SHAPES, empty_model
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.protocol import PhaseSeconds
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_3_1, build
from fledge.models.target.decoder import TargetModel
from tests.gpu.script import run_checks
from tests.unit.kernels import cases, tree_cases

GPU = "cuda"
CHECKS: dict[str, Callable[[], None]] = {}
CHAIN: dict[str, Any] = {"model": "random", "num_speculative_tokens": 5}
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain 5": CHAIN,
    "tree 4x16 depth 5": {**CHAIN, "tree_width": 4, "tree_budget": 16},
    "tree 8x32 depth 5": {**CHAIN, "tree_width": 8, "tree_budget": 32},
}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@check
def top_rows() -> None:
    for dtype in cases.DTYPES:
        for rows, vocab, count in ((8, 32000, 8), (4, 128256, 8), (64, 32000, 8), (4, 32000, 64), (5, 1001, 1)):
            tree_cases.top_rows(rows, vocab, count, dtype, GPU)


@check
def trees() -> None:
    for width, budget, depth, vocab in (
        (8, 32, 5, 3000),
        (4, 16, 5, 200),
        (3, 9, 3, 20),
        (1, 4, 4, 6),
        (4, 63, 6, 3),
        (5, 2, 5, 11),
        (16, 63, 5, 100),
        (64, 63, 2, 200),
        (60, 63, 1, 200),
    ):
        for _ in range(3):
            tree_cases.trees(width, budget, depth, vocab, GPU)


@check
def attention_over_stored_rows() -> None:
    for tree in ("shared", "each"):
        for before, queries in ((8, 8), (24, 8), (0, 33), (31, 33)):
            for window in (None, 3, 200):
                options = {"window": window, "tree": tree, "before": before}
                cases.paged_attention([3000, 0, 17, 1023], queries, 16, 4, 128, torch.bfloat16, GPU, **options)


def make_pair() -> tuple[TargetModel, Drafter]:
    """Random models of Llama 8B's shape, with its vocabulary and a draft vocabulary of 32,000."""
    device, dtype = torch.device(GPU), torch.bfloat16
    config = replace(SHAPES["8b"], vocab_size=128256, dtype="bfloat16")
    drafter_config = replace(EAGLE_3_1.config_for(config), draft_vocab_size=32000)
    target = empty_model(lambda: TargetModel(config), dtype, device)
    drafter = empty_model(lambda: build(drafter_config), dtype, device)
    for parameter in (*target.parameters(), *drafter.parameters()):
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else torch.nn.init.ones_(parameter)
    assert drafter.vocabulary is not None
    drafter.vocabulary.d2t.copy_(3 * torch.arange(32000, device=device))
    drafter.share_with(target)
    return target.eval().requires_grad_(False), drafter.eval().requires_grad_(False)


def make_engine(pair: tuple[TargetModel, Drafter], mode: dict[str, Any] | None, requests: int) -> LLMEngine:
    """An engine in which all prompts are read, and rounds captured with and without their stamps."""
    target, drafter = pair
    config = EngineConfig(
        max_model_len=2048,
        max_num_seqs=requests,
        num_blocks=requests * 40,
        speculative_config=None if mode is None else SpeculativeConfig.from_dict({**mode, "adaptive": False}),
        enable_prefix_caching=False,
    )
    engine = LLMEngine(target, None if mode is None else drafter, config)
    generator = torch.Generator().manual_seed(0)
    for number in range(requests):
        prompt = torch.randint(target.config.vocab_size, (128,), generator=generator).tolist()
        engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
    for _ in range(8):
        engine.step()
    return engine


def measure(engine: LLMEngine, rounds: int = 100) -> tuple[float, PhaseSeconds]:
    """Milliseconds of a round: by the wall, untimed, and by the device's stamps, the medians of each part."""
    found: list[PhaseSeconds] = []
    read = engine.runner.read

    def spy(launch: Any) -> Any:
        results = read(launch)
        if results.report is not None and results.report.seconds is not None:
            found.append(results.report.seconds)
        return results

    with mock.patch("fledge.engine.runner.TIMED_ROUND", 10**9):
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            engine.step()
        torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - began) / rounds
    with mock.patch("fledge.engine.runner.TIMED_ROUND", 1), mock.patch.object(engine.runner, "read", spy):
        for _ in range(rounds):
            engine.step()
    assert engine.has_unfinished, "fewer rounds, or longer answers"
    middle = [1e3 * sorted(part)[len(part) // 2] for part in zip(*found[5:], strict=True)]
    return wall, PhaseSeconds(*middle)


def print_times(repeats: int = 3) -> None:
    pair = make_pair()
    print("| requests | round | wall ms | steps | verify ms | accept ms | draft ms |\n|---|---|---|---|---|---|---|")
    for requests in (1, 4):
        plain = 0.0
        for name, mode in MODES.items():
            engine = make_engine(pair, mode, requests)
            wall, parts = min(measure(engine) for _ in range(repeats))
            plain = plain or wall
            columns = " | ".join(f"{part:.3f}" for part in parts)
            print(f"| {requests} | {name} | {wall:.3f} | {wall / plain:.3f} | {columns} |", flush=True)
            del engine
            torch.cuda.empty_cache()


def print_kernels(name: str = "tree 8x32 depth 5", rounds: int = 20) -> None:
    engine = make_engine(make_pair(), MODES[name], 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            engine.step()
        torch.cuda.synchronize()
    table = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    print(f"{name}: microseconds and launches of a round")
    for event in table[:45]:
        print(f"{event.device_time_total / rounds:9.1f} {event.count / rounds:7.1f}  {event.key[:110]}")


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_trees(name: str) -> None:
        CHECKS[name]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["times"]:
        print_times()
    elif sys.argv[1:2] == ["kernels"]:
        print_kernels(*sys.argv[2:3])
    else:
        sys.exit(run_checks(CHECKS, sys.argv[1:]))
