"""What a round costs: milliseconds per decode step or speculation round of the whole engine, and its two ends.

The engine is driven as `LLM.generate` drives it, scheduler and sampling included; only text is left out.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fledge.bench.shapes import SHAPES, make_pair
from fledge.decoding.params import SamplingParams
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.models.config import TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel

PROMPT_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """One cell of the table."""

    shape: str
    depth: int
    concurrency: int
    milliseconds: float  # per round, without the fastest and the slowest tenth
    mean_milliseconds: float  # all rounds, and the wait for the last one
    schedule_milliseconds: float  # of which the host spent planning


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What the device can do, measured in the same run."""

    copy_terabytes_per_second: float
    bf16_teraflops: float


def measure_rounds(
    shape: str,
    depth: int,
    concurrencies: list[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int = 100,
    enforce_eager: bool = False,
) -> Iterator[RoundTime]:
    """Yield the time of a round at `depth` for every concurrency."""
    target, drafter = make_pair(shape, dtype, device)
    for concurrency in concurrencies:
        engine = make_engine(
            target, drafter, depth=depth, concurrency=concurrency, max_model_len=1024, enforce_eager=enforce_eager
        )
        yield _time_rounds(engine, shape, depth, concurrency, rounds)
        del engine


def make_engine(
    target: TargetModel,
    drafter: Drafter,
    *,
    depth: int,
    concurrency: int,
    max_model_len: int,
    enforce_eager: bool = False,
) -> LLMEngine:
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=concurrency,
        max_num_batched_tokens=8192,
        speculative_config=SpeculativeConfig(model="random", num_speculative_tokens=depth) if depth else None,
        enforce_eager=enforce_eager,
        enable_prefix_caching=False,
    )
    return LLMEngine(target, drafter if depth else None, config)


def _time_rounds(engine: LLMEngine, shape: str, depth: int, concurrency: int, rounds: int) -> RoundTime:
    add_prompts(engine, concurrency, PROMPT_TOKENS, max_tokens=800)
    # Warm up until every prompt is read and a few rounds have run (graphs captured, kernels compiled).
    for _ in range(8 + concurrency * PROMPT_TOKENS // 8192):
        engine.step()
    _synchronize(engine)
    planned = engine.stats().schedule_seconds
    times = []
    begun = time.perf_counter()
    for _ in range(rounds):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    _synchronize(engine)
    whole = time.perf_counter() - begun
    # On a GPU the host runs one launch behind, so a step takes as long as a round only on average: no median.
    kept = sorted(times)[rounds // 10 : rounds - rounds // 10]
    return RoundTime(
        shape=shape,
        depth=depth,
        concurrency=concurrency,
        milliseconds=1e3 * sum(kept) / len(kept),
        mean_milliseconds=1e3 * whole / rounds,
        schedule_milliseconds=1e3 * (engine.stats().schedule_seconds - planned) / rounds,
    )


def measure_prefill(
    shape: str, *, device: torch.device, dtype: torch.dtype, prompts: int, tokens: int
) -> dict[str, float]:
    """Read `prompts` prompts of `tokens` tokens: seconds, and arithmetic done per second."""
    target, drafter = make_pair(shape, dtype, device)
    seconds = []
    for _ in range(3):
        engine = make_engine(target, drafter, depth=0, concurrency=prompts, max_model_len=tokens + 64)
        add_prompts(engine, prompts, tokens, max_tokens=1)
        _synchronize(engine)
        started = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        _synchronize(engine)
        seconds.append(time.perf_counter() - started)
        del engine
    flops = prompts * prefill_flops(SHAPES[shape], tokens)
    return {"seconds": min(seconds), "teraflops": flops / min(seconds) / 1e12}


def measure_long_context(
    shape: str, *, device: torch.device, dtype: torch.dtype, tokens: int, depth: int, rounds: int = 50
) -> dict[str, float]:
    """Decode at the end of a context of `tokens` tokens: milliseconds per round, and bytes read per second."""
    target, drafter = make_pair(shape, dtype, device)
    engine = make_engine(target, drafter, depth=depth, concurrency=1, max_model_len=tokens + 1024)
    add_prompts(engine, 1, tokens, max_tokens=900)
    started = time.perf_counter()
    while engine.stats().output_tokens == 0:
        engine.step()
    _synchronize(engine)
    prefill = time.perf_counter() - started
    for _ in range(8):
        engine.step()
    _synchronize(engine)
    started = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    _synchronize(engine)
    per_round = (time.perf_counter() - started) / rounds
    read = round_bytes(target, drafter, tokens, depth)
    return {
        "prefill_seconds": prefill,
        "milliseconds": 1e3 * per_round,
        "gigabytes_per_round": read / 1e9,
        "terabytes_per_second": read / per_round / 1e12,
    }


def round_bytes(target: TargetModel, drafter: Drafter, tokens: int, depth: int) -> int:
    """Weights and keys and values that a round must read: the target's once, the drafter's `depth` times."""

    def weights(model: torch.nn.Module) -> int:
        return sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "embed_tokens" not in n)

    def cache(model: TargetModel | Drafter) -> int:
        config = model.config
        return 2 * config.num_layers * config.layer.kv_size * target.lm_head.weight.element_size() * tokens

    return weights(target) + cache(target) + depth * (weights(drafter) + cache(drafter))


def prefill_flops(config: TargetConfig, tokens: int) -> float:
    """Multiply-adds of the matrices and of causal attention, counted as two operations each."""
    layer = config.layer
    per_token = layer.hidden_size * (2 * layer.query_size + 2 * layer.kv_size + 3 * layer.intermediate_size)
    attention = 2 * 2 * layer.query_size * tokens * tokens / 2
    return config.num_layers * (2 * per_token * tokens + attention)


def measure_limits(device: torch.device) -> DeviceLimits:
    """Copy bandwidth and matrix rate of a GPU."""
    source = torch.empty(2**32, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    copy_seconds = _device_seconds(lambda: copy.copy_(source))
    product_seconds = _device_seconds(lambda: a @ b)
    return DeviceLimits(
        copy_terabytes_per_second=2 * source.numel() / copy_seconds / 1e12,
        bf16_teraflops=2 * 8192**3 / product_seconds / 1e12,
    )


def _device_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def add_prompts(engine: LLMEngine, count: int, tokens: int, *, max_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab = engine.info.vocab_size
    for number in range(count):
        prompt = torch.randint(vocab, (tokens,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(number), prompt, params)


def _synchronize(engine: LLMEngine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
