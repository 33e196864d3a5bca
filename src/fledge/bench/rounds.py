"""What a round costs: milliseconds per decode step or round of the whole engine; only text is left out."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from fledge.bench.inflate import empty_model, shape_named
from fledge.checkpoints.quantize import Width, quantized_weight
from fledge.checkpoints.target import read_target_config
from fledge.decoding.params import SamplingParams
from fledge.engine.config import FP8_CACHE_DTYPES, EngineConfig, SpeculativeConfig
from fledge.engine.engine import LLMEngine
from fledge.errors import ConfigError, FledgeError
from fledge.kernels.cache_codes import FP8
from fledge.layers.linear import Linear, compute_weight
from fledge.layers.quantized import QuantizedLinear
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_3_1, build
from fledge.models.target.decoder import TargetModel

PROMPT_TOKENS = 128
LONG_CONTEXT_ROUNDS = 50
LEAST_LAYERS = 6  # EAGLE-3 reads the inputs of layers 2, L / 2 and L - 3

Pair = tuple[TargetModel, Drafter]


def make_pair(name: str, dtype: torch.dtype, device: torch.device) -> Pair:
    """Return a random target of a named shape, or of a directory's config.json, and a one-layer EAGLE-3.1 drafter."""
    shape = read_target_config(Path(name)) if Path(name, "config.json").is_file() else shape_named(name)
    config = replace(shape, dtype=str(dtype).removeprefix("torch."))
    if config.num_layers < LEAST_LAYERS:
        raise ConfigError(f"{name}: {config.num_layers} layers, of which a drafter cannot read three; least: 6")
    target = empty_model(lambda: TargetModel(config), dtype, device)
    drafter = empty_model(lambda: build(EAGLE_3_1.config_for(config)), dtype, device)
    for parameter in (*target.parameters(), *drafter.parameters()):
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else torch.nn.init.ones_(parameter)
    drafter.share_with(target)
    return target.eval().requires_grad_(False), drafter.eval().requires_grad_(False)


def quantize_linears(model: TargetModel | Drafter, width: Width) -> None:
    """Round the matrices of the layers to fewer bits where they are.

    Routers of experts and `kv_b_proj`, which is read as a matrix, stay.
    """
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for name, module in list(layers.named_modules()):
        if isinstance(module, Linear) and name.endswith("_proj") and not name.endswith("kv_b_proj"):
            if width == "fp8-block" and any(size % 128 for size in module.weight.shape):
                raise ConfigError(f"fp8-block: {name} is {list(module.weight.shape)}, no multiples of 128")
            parent, _, own = name.rpartition(".")
            weight = quantized_weight(module.weight, width)
            setattr(layers.get_submodule(parent), own, QuantizedLinear(weight, module.bias, module.weight.dtype))


def weights_read(target: TargetModel, rows: int) -> int:
    """Bytes of weights that a pass over so many rows reads at least, each of its experts as likely as any other."""
    experts, total = target.config.layer.experts, 0
    for name, parameter in chain(target.named_parameters(), target.named_buffers()):
        share = 1.0
        if experts is not None and ".experts." in name:
            share -= (1 - experts.num_experts_per_token / experts.num_experts) ** rows
        total += 0 if "embed_tokens" in name else int(share * parameter.nbytes)
    return total


def measure_round(pair: Pair, depth: int, concurrency: int, rounds: int, options: EngineConfig) -> dict[str, float]:
    """Milliseconds of a round: without the fastest and slowest tenth; of all; and of which the host spent planning."""
    engine = prompted_engine(pair, depth, concurrency, PROMPT_TOKENS, 800, options, room=1024)
    # Warm up until every prompt is read and a few rounds have run (graphs captured, kernels compiled).
    for _ in range(8 + concurrency * PROMPT_TOKENS // 8192):
        engine.step()
    planned = engine.stats().schedule_seconds
    times = []

    def step() -> None:
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)

    whole = _seconds(engine.device, step, rounds)
    if len(engine.requests) < concurrency:
        raise FledgeError("requests failed while rounds were timed: see the log above")
    # On a GPU the host runs one launch behind, so a step takes as long as a round only on average: no median.
    kept = sorted(times)[rounds // 10 : rounds - rounds // 10]
    return {
        "depth": depth,
        "concurrency": concurrency,
        "milliseconds": 1e3 * sum(kept) / len(kept),
        "mean_milliseconds": 1e3 * whole,
        "schedule_milliseconds": 1e3 * (engine.stats().schedule_seconds - planned) / rounds,
        "weights_gigabytes": weights_read(pair[0], concurrency * (depth + 1)) / 1e9,
    }


def measure_prefill(pair: Pair, prompts: int, tokens: int, options: EngineConfig) -> dict[str, float]:
    """Read `prompts` prompts of `tokens` tokens: seconds, and arithmetic done per second."""

    def seconds() -> float:
        engine = prompted_engine(pair, 0, prompts, tokens, 1, options, room=tokens + 64)
        return _seconds(engine.device, lambda: _step_while(engine, lambda: engine.has_unfinished))

    best = min(seconds() for _ in range(3))
    # Multiply-adds of the matrices and of causal attention, counted as two operations each.
    config, layer = pair[0].config, pair[0].config.layer
    per_token = layer.hidden_size * (2 * layer.query_size + 2 * layer.kv_size + 3 * layer.intermediate_size)
    flops = config.num_layers * (2 * per_token * tokens + 2 * layer.query_size * tokens**2)
    return {"seconds": best, "teraflops": prompts * flops / best / 1e12}


def measure_long_context(pair: Pair, tokens: int, depth: int, requests: int, options: EngineConfig) -> dict[str, float]:
    """Decode at the ends of contexts of `tokens` tokens: milliseconds per round, and bytes read per second."""
    engine = prompted_engine(pair, depth, requests, tokens, 900, options, room=tokens + 1024)
    waiting = engine.requests.values()
    prefill = _seconds(engine.device, lambda: _step_while(engine, lambda: any(one.num_output == 0 for one in waiting)))
    for _ in range(8):
        engine.step()
    per_round = _seconds(engine.device, engine.step, LONG_CONTEXT_ROUNDS)
    size = 0  # weights and keys and values that a round must read: the target's once, the drafter's `depth` times
    dtype = FP8 if options.kv_cache_dtype in FP8_CACHE_DTYPES else compute_weight(pair[0]).dtype
    parts: list[tuple[TargetModel | Drafter, int]] = [(pair[0], 1), (pair[1], depth)]
    for model, times in parts:
        weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
        cached = model.config.num_layers * model.config.layer.kv_cache.bytes_per_token(dtype) * tokens * requests
        size += times * (weights + cached)
    return {
        "requests": requests,
        "prefill_seconds": prefill,
        "milliseconds": 1e3 * per_round,
        "gigabytes_per_round": size / 1e9,
        "terabytes_per_second": size / per_round / 1e12,
    }


def measure_limits(device: torch.device) -> dict[str, float]:
    """Copy bandwidth and matrix rate of a GPU."""
    source = torch.empty(2**32, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    found = []
    for work in (lambda: copy.copy_(source), lambda: a @ b):
        _seconds(device, work, 3)
        found.append(_seconds(device, work, 10))
    return {
        "copy_terabytes_per_second": 2 * source.numel() / found[0] / 1e12,
        "bf16_teraflops": 2 * 8192**3 / found[1] / 1e12,
    }


def prompted_engine(
    pair: Pair, depth: int, prompts: int, tokens: int, max_tokens: int, options: EngineConfig, *, room: int
) -> LLMEngine:
    """An engine with so many random prompts to answer; `options` are some of `EngineConfig`'s."""
    target, drafter = pair
    speculation = SpeculativeConfig(model="random", num_speculative_tokens=max(1, depth), adaptive=False)
    config = replace(
        options,
        max_model_len=room,
        max_num_seqs=prompts,
        max_num_batched_tokens=8192,
        speculative_config=speculation if depth else None,
        enable_prefix_caching=False,
    )
    engine = LLMEngine(target, drafter if depth else None, config)
    generator = torch.Generator().manual_seed(0)
    for number in range(prompts):
        prompt = torch.randint(engine.info.vocab_size, (tokens,), generator=generator).tolist()
        engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    return engine


def _step_while(engine: LLMEngine, condition: Callable[[], bool]) -> None:
    while condition():
        engine.step()


def _seconds(device: torch.device, work: Callable[[], object], times: int = 1) -> float:
    """How long `work` takes on the mean, with what it leaves to the device."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - started) / times
