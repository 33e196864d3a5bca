"""A batch-invariant engine on a GPU: a thousand answers in bf16, the same whatever shares their passes.

Also runs as a script where pytest is not:  PYTHONPATH=src:. python tests/gpu/test_exact.py [part of a name ...]

The bundled pair, or what FLEDGLING_DIR and DRAFTER_DIR name; and some hundred answers of a random pair whose weights
are in fewer bits, or whose MLPs are experts.
"""

import functools
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)

from fledge.bench.rounds import quantize_linears
from fledge.checkpoints.quantize import Width
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.engine.llm import LLM
from fledge.engine.tokenizer import encode_chat
from fledge.evaluation.workloads import load_workload
from fledge.layers.config import ExpertsConfig
from fledge.models.config import TargetConfig
from tests.engine_cases import add_request
from tests.gpu.script import run_checks
from tests.gpu.test_engine import WIDE, agreeing_pair, on_gpu

TARGET = os.environ.get("FLEDGLING_DIR", "fledgling")
DRAFTER = os.environ.get("DRAFTER_DIR", "fledgling-eagle3.1")
COUNT = 1000
CHECKS: dict[str, Callable[[], None]] = {}
TREE = {"num_speculative_tokens": 5, "tree_width": 4, "tree_budget": 16}
# Depths, few and many at once, prompts in chunks, and a cache that is full long before all rows are taken.
MIXES: dict[str, dict[str, Any]] = {
    "K = 1, 100 at once": {"max_num_seqs": 100, "depth": 1},
    "K = 3, 16 at once, prompts in chunks": {"max_num_seqs": 16, "depth": 3, "max_num_batched_tokens": 256},
    "K = 5, 256 at once": {"max_num_seqs": 256, "depth": 5},
    "K = 7, 64 at once, preempted": {"depth": 7, "num_blocks": 60},
    "adaptive, 64 at once": {"depth": 3, "adaptive": True},
    "trees, 24 at once": {"max_num_seqs": 24, "tree": TREE},
}
GRAPHS = (1, 4, 16, 64)  # batch sizes: an engine that captures all takes longer to start than to answer


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def make_prompts(llm: LLM) -> list[list[int]]:
    """Random tokens, a third of them behind one of a few stems, and the packaged conversations."""
    chance = random.Random(3)
    packaged = [one for one in load_workload("short", sample=COUNT // 3).prompts if one.messages]
    prompts = [encode_chat(llm.tokenizer, one.messages[:1])[:300] for one in packaged]
    vocab = llm.target.config.vocab_size
    stems = [[chance.randrange(vocab) for _ in range(200)] for _ in range(8)]
    while len(prompts) < COUNT:
        stem = chance.choice(stems)[: chance.randint(64, 200)] if chance.random() < 0.5 else []
        prompts.append(stem + [chance.randrange(vocab) for _ in range(chance.randint(4, 300 - len(stem)))])
    chance.shuffle(prompts)
    return prompts


def open_llm(
    *,
    max_num_seqs: int = 64,
    depth: int = 0,
    adaptive: bool = False,
    tree: Mapping[str, Any] | None = None,
    **options: Any,
) -> LLM:
    values = {"dtype": "bfloat16", "device": "cuda", "max_model_len": 512, "max_num_batched_tokens": 1024, **options}
    values["max_num_seqs"] = max_num_seqs
    values["cudagraph_capture_sizes"] = [size for size in GRAPHS if size <= max_num_seqs]
    if "num_blocks" not in values:
        values["kv_cache_bytes"] = 2**30
    if depth or tree:
        chain = {"num_speculative_tokens": depth}
        values["speculative_config"] = {"model": DRAFTER, "adaptive": adaptive, **(tree or chain)}
    return LLM(TARGET, **values)


def answer(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def count_different(name: str, prompts: list[list[int]], expected: list[list[int]], **options: Any) -> int:
    """How many answers of an engine are not the expected ones."""
    begun = time.perf_counter()
    llm = open_llm(**options)
    ready = time.perf_counter()
    found = answer(llm, prompts)
    different = sum(one != other for one, other in zip(found, expected, strict=True))
    stats = llm.engine.stats()
    print(
        f"  {name}: {different} of {len(prompts)} differ; {stats.preemptions} preemptions, {stats.prefix_hits} tokens "
        f"found in the prefix cache ({ready - begun:.1f} s to start, {time.perf_counter() - ready:.1f} s)",
        flush=True,
    )
    assert stats.preemptions > 0 or "num_blocks" not in options, "nobody was preempted"
    llm.close()
    del llm
    gc.collect()
    return different


@check
def exact() -> None:
    """No answer depends on the batch, the depth, trees, chunks, prefix hits or preemption. Without the mode some do."""
    llm = open_llm(batch_invariant=True, max_num_seqs=256)
    prompts = make_prompts(llm)
    expected = answer(llm, prompts)
    few = {"max_num_seqs": 1, "batch_invariant": True}
    wrong = {"alone": count_different("K = 0, one at a time", prompts[:60], expected[:60], **few)}
    for name, options in MIXES.items():
        wrong[name] = count_different(name, prompts, expected, batch_invariant=True, **options)
    assert not any(wrong.values()), wrong
    assert count_different("without the mode", prompts, expected, depth=5) > 0, "the check cannot tell"


def of_a_random_pair(width: Width | None, config: TargetConfig = WIDE) -> None:
    """As `exact`, of a random pair that is wide enough for sums to be in several chains, in fewer bits or not."""
    target, drafter = on_gpu(*agreeing_pair(config, strength=0.45), torch.bfloat16)
    if width is not None:
        quantize_linears(target, width)
    chance = random.Random(0)
    prompts = [[chance.randrange(WIDE.vocab_size) for _ in range(chance.randint(2, 120))] for _ in range(300)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)

    def answers(prompts: list[list[int]], depth: int = 0, *, adaptive: bool = False, **options: Any) -> list[list[int]]:
        chain = SpeculativeConfig(model="given", num_speculative_tokens=depth, adaptive=adaptive) if depth else None
        values = {"batch_invariant": True, "max_num_seqs": 64, **options}
        config = EngineConfig(max_model_len=256, num_blocks=1000, speculative_config=chain, **values)
        engine = LLMEngine(target, drafter if depth else None, config)
        requests = [add_request(engine, str(i), prompt, params) for i, prompt in enumerate(prompts)]
        while engine.has_unfinished:
            engine.step()
        return [request.output for request in requests]

    expected = answers(prompts)
    wrong = {}
    for name, count, options in (
        ("K = 0, one at a time", 30, {"max_num_seqs": 1}),
        ("K = 3, one at a time", 30, {"max_num_seqs": 1, "depth": 3}),
        ("K = 3, 16 at once, prompts in chunks", 300, {"max_num_seqs": 16, "depth": 3, "max_num_batched_tokens": 64}),
        ("K = 3, 64 at once", 300, {"depth": 3}),
        ("adaptive, 64 at once", 300, {"depth": 3, "adaptive": True}),
        ("K = 3, 64 at once, without the mode", 300, {"depth": 3, "batch_invariant": False}),
    ):
        begun = time.perf_counter()
        found = answers(prompts[:count], **options)
        wrong[name] = sum(one != other for one, other in zip(found, expected, strict=False))
        print(
            f"  {width or 'bfloat16'}, {name}: {wrong[name]} of {count} differ ({time.perf_counter() - begun:.1f} s)",
            flush=True,
        )
    assert wrong.pop(name) > 0, "the check cannot tell"
    assert not any(wrong.values()), wrong


for width in ("fp8", "int4", "fp8-block", "fp8-dynamic"):
    CHECKS[f"exact_in_{width}"] = functools.partial(of_a_random_pair, width)
EXPERTS = ExpertsConfig(num_experts=16, num_experts_per_token=4, intermediate_size=512)
MIXTURE = replace(WIDE, layer=replace(WIDE.layer, experts=EXPERTS))
for width in (None, "int4", "fp8-block", "fp8-dynamic"):
    CHECKS[f"exact_experts_in_{width or 'bfloat16'}"] = functools.partial(of_a_random_pair, width, MIXTURE)


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_exact(name: str) -> None:
        with torch.no_grad():
            CHECKS[name]()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    with torch.no_grad():
        sys.exit(run_checks(CHECKS, sys.argv[1:]))
