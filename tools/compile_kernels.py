"""Compile the Triton kernels for a data-centre GPU on a machine that has none.

    python tools/compile_kernels.py [part of a name ...]

Triton's interpreter, under which the tests run kernels without a GPU, takes code that the compiler refuses. Here the
compiler runs down to the binary, with shapes that models have, and nothing is launched: results are not looked at, but
the machine code is, for a race that has been there before (`tools/sass.py`).
Prints what each kernel takes of shared memory, of which an H100 has 227 KiB for a program.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tools.sass import disassembled, overwritten_operands
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

from fledge.kernels import _overlap, invariant_attention
from fledge.kernels.dequantize import dequantize_rows_triton
from fledge.kernels.experts import choose_launch as choose_experts_launch
from fledge.kernels.experts import few_experts
from fledge.kernels.fragment_linear import fragment_linear_triton
from fledge.kernels.invariant_linear import choose_tiles, tiled_linear
from fledge.kernels.quantize_rows import quantize_rows
from fledge.kernels.rms_norm import quantized_add_rms_norm, quantized_rms_norm
from fledge.kernels.scaled_linear import choose_launch as choose_codes_launch
from fledge.kernels.skinny_linear import skinny_linear_triton
from fledge.kernels.swiglu import quantized_swiglu
from fledge.layers.config import LatentConfig
from tests.unit.kernels import (
    admit_cases,
    cases,
    code_cases,
    expert_cases,
    invariant_cases,
    latent_cases,
    quantized_cases,
    sampling_cases,
    tree_cases,
)
from tests.unit.kernels.test_round_ends import test_both_ends_of_a_round as round_ends

BF16, CPU = torch.bfloat16, "cpu"


def _invariant_attention(head_dim: int) -> None:
    """A prompt; a chain, its keys in pieces and not; a tree."""
    given = invariant_cases.Attended([600], 32, 8, head_dim, BF16, CPU)
    given.chunks([(0, 0, 600)])
    with mock.patch.object(invariant_attention, "processors", return_value=132):
        for bound in (600, 2**28):
            given.chains([(0, 590)], 6, max_context=bound)
    given.attend(given.queries[0][:40], [600], [0], max_queries=40, tree_mask=torch.ones(1, 40, dtype=torch.int64))


def _tiles(columns: int, size: int) -> None:
    """Every launch that an H200 has for this shape."""
    x, weight = torch.empty(1, size, dtype=BF16), torch.empty(columns, size, dtype=BF16)
    launches = {choose_tiles(rows=2**n, columns=columns, size=size, processors=132) for n in range(13)}
    for launch in sorted(launches, key=repr):
        tiled_linear(x, weight, None, launch)


def _fragments(case: quantized_cases.Case, dtype: torch.dtype) -> None:
    """Every launch that is chosen for this kind of weight."""
    kind, group, with_zeros = case
    weight = quantized_cases.quantized(kind, *quantized_cases.SHAPE, group, with_zeros=with_zeros, device="meta")
    bias = torch.empty(quantized_cases.SHAPE[0], dtype=dtype, device="meta")
    invariant = [one for several in quantized_cases.invariant_launches(weight) for one in several]
    for rows, launch in [*quantized_cases.launches(weight), *invariant]:
        x = torch.empty(rows, weight.columns, dtype=dtype, device="meta")
        fragment_linear_triton(x, weight, bias, launch=launch)


def _dequantize(case: quantized_cases.Case) -> None:
    kind, group, with_zeros = case
    for rows, columns in (quantized_cases.SHAPE, (40, 1024)):  # in fragments, and as stored
        weight = quantized_cases.quantized(kind, rows, columns, group, with_zeros=with_zeros, device="meta")
        dequantize_rows_triton(weight, 0, rows, BF16)


def _coded_experts(case: quantized_cases.Case, dtype: torch.dtype, hidden: int, size: int) -> None:
    """Every launch for experts in codes: of a row, of some, of many."""
    kind, group, with_zeros = case
    given = {"with_zeros": with_zeros, "device": "meta", "is_stored": True}
    gate_up = quantized_cases.quantized(kind, 8 * 2 * size, hidden, group, **given)
    down = quantized_cases.quantized(kind, 8 * hidden, size, group, **given)
    for rows, pairs, is_roomy in (
        (1, 4, True),
        (6, 24, True),
        (40, 160, True),
        (1000, 4000, True),
        (1000, 4000, False),
    ):
        x = torch.empty(rows, hidden, dtype=dtype, device="meta")
        weights = torch.empty(rows, 4, device="meta")
        launch = choose_experts_launch(pairs, rows, in_codes=True, is_roomy=is_roomy)
        few_experts(x, weights, weights.long(), (gate_up, None), (down, None), launch=launch)


def _codes(columns: int, size: int) -> None:
    """Every launch that an H200 has for codes with codes."""
    given = {"with_zeros": False, "device": "meta", "activations": "token"}
    weight = quantized_cases.quantized("fp8", columns, size, None, **given)
    for rows in (1, 16, 32):
        launch = choose_codes_launch(rows=rows, columns=columns, size=size, processors=132)
        x = quantize_rows(torch.empty(rows, size, dtype=BF16, device="meta"))
        if launch is not None:
            scales = x.scales, weight.scales
            skinny_linear_triton(x.codes, weight.codes, None, launch=launch, scales=scales, dtype=BF16)


def _coded(size: int) -> None:
    x, weight = torch.empty(3, size, dtype=BF16), torch.empty(size, dtype=BF16)
    quantized_rms_norm(x, weight, cases.EPS)
    quantized_add_rms_norm(x, x, weight, cases.EPS)
    quantized_swiglu(torch.empty(3, 2 * size, dtype=BF16))
    quantize_rows(x, torch.empty(())).dequantized()


CASES: dict[str, Callable[[], None]] = {
    "uniforms": partial(cases.uniforms, 7, 4, CPU),
    "sample": partial(sampling_cases.sample, 12, 9001, BF16, CPU),
    "sample with filters": partial(sampling_cases.sample, 12, 9001, BF16, CPU, filtering=True),
    "sample with filters, adjusted": partial(sampling_cases.sample, 12, 9001, torch.float32, CPU, filtering=True),
    "adjust": partial(sampling_cases.adjust, 5, 3, 9001, BF16, CPU),
    "adjust admitted": partial(sampling_cases.adjust, 5, 3, 9001, BF16, CPU, flat=True),
    "probabilities": partial(sampling_cases.probabilities, 7, 9001, CPU),
    "reject": partial(sampling_cases.reject, 6, 3, 9001, CPU),
    "reject with filters": partial(sampling_cases.reject, 6, 3, 9001, CPU, filtering=True),
    "argmax": partial(cases.argmax, 4, 9001, BF16, CPU),
    "accept": partial(cases.accept, 7, 3, 5000, BF16, CPU),
    "admit": partial(admit_cases.admit, 48, 5, 100, CPU),
    "swiglu": partial(cases.swiglu, 3, 4096, BF16, CPU),
    "rms_norm": partial(cases.rms_norm, 3, 4096, BF16, CPU),
    "round_ends": partial(round_ends, 3, 2, 4),
    "top_rows": partial(tree_cases.top_rows, 4, 9001, 8, BF16, CPU),
    "trees": partial(tree_cases.trees, 8, 32, 5, 9001, CPU),
    "add_norm_router": partial(expert_cases.add_norm_router, 2, 128, 2048, BF16, CPU),
    "add_norm_router with long rows": partial(expert_cases.add_norm_router, 2, 256, 7168, BF16, CPU),
    "route": partial(expert_cases.route, 3, 256, 8, CPU, n_group=8, topk_group=4, is_biased=True),
    "experts of a lone row": partial(expert_cases.experts, 1, 128, 8, 2048, 768, BF16, CPU),
    "experts of a lone row and a shared one": partial(expert_cases.experts, 1, 16, 6, 2048, 1408, BF16, CPU, parts=2),
    "experts": partial(expert_cases.experts, 2, 16, 8, 2048, 768, BF16, CPU),
    "experts clamped": partial(expert_cases.experts, 2, 16, 4, 2880, 2880, BF16, CPU, 7.0),
    "experts and a shared one": partial(expert_cases.experts, 2, 16, 6, 2048, 1408, BF16, CPU, parts=2),
    "experts of many rows": partial(expert_cases.experts, 16, 16, 8, 2048, 768, BF16, CPU, 7.0),
    "draft_input": partial(cases.draft_input, 5, 2048, BF16, CPU),
}
for case in quantized_cases.KINDS:
    for dtype in (BF16, torch.float16) if case in (("fp8", None, False), ("int4", 128, True)) else (BF16,):
        CASES[f"quantized_linear {case} {dtype}"] = partial(_fragments, case, dtype)
        CASES[f"experts in codes {case} {dtype}"] = partial(_coded_experts, case, dtype, 2048, 768)
    CASES[f"dequantize {case}"] = partial(_dequantize, case)
CASES["experts in codes of gpt-oss"] = partial(_coded_experts, ("fp4", 32, False), BF16, 2880, 2880)
for norm in (False, True):
    CASES[f"rope_store {norm=}"] = partial(cases.rope_store, 18, 32, 8, 128, BF16, CPU, norm=norm)
for head_dim in (64, 128):
    paged = partial(cases.paged_attention, [300, 5, 70], 4, 32, 8, head_dim, BF16, CPU, block_size=64)
    prefill = partial(cases.prefill_attention, [(0, 300), (5, 70)], 32, 8, head_dim, BF16, CPU, block_size=64)
    for name, options in {
        "": {},
        " sinks": {"with_sinks": True},
        " sinks window": {"with_sinks": True, "window": 128},
        " chunks": {"window": 128, "chunked": True},
    }.items():
        CASES[f"paged_attention {head_dim}{name}"] = partial(paged, **options)
        CASES[f"prefill_attention {head_dim}{name}"] = partial(prefill, **options)
    CASES[f"paged_attention {head_dim} fp8"] = partial(paged, codes=(0.5, 0.25))
    wide = partial(cases.paged_attention, [300, 5, 70], 16, 32, 8, head_dim, BF16, CPU, block_size=64, tree="each")
    CASES[f"paged_attention {head_dim} fp8 tree of 16"] = partial(wide, codes=(1.0, 1.0))
    CASES[f"prefill_attention {head_dim} fp8"] = partial(prefill, codes=(0.5, 0.25))
    ragged = partial(admit_cases.ragged_attention, [(300, 4), (5, 1), (70, 3)], 32, 8, head_dim, BF16, CPU)
    CASES[f"paged_attention {head_dim} ragged"] = partial(ragged, block_size=64)
    CASES[f"paged_attention {head_dim} tree"] = partial(paged, tree="each")
for heads in (16, 64, 128):  # DeepSeek's and Kimi's: latent rows of 512 and 64 rotated
    latent = {"block_size": 64, "latent": True}
    rows = LatentConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for tokens in (1, 8):
        kind = partial(latent_cases.latent_heads, tokens, heads, rows, BF16, CPU, interleaved=True)
        CASES[f"latent_heads {heads} of {tokens}"] = kind
    CASES[f"paged_attention latent {heads}"] = partial(
        cases.paged_attention, [300, 5, 70], 4, heads, 1, 576, BF16, CPU, **latent
    )
    CASES[f"prefill_attention latent {heads}"] = partial(
        cases.prefill_attention, [(0, 300), (5, 70)], heads, 1, 576, BF16, CPU, **latent
    )
CASES["paged_attention latent fp8"] = partial(
    cases.paged_attention, [300, 5, 70], 4, 16, 1, 576, BF16, CPU, block_size=64, latent=True, codes=(0.5, 0.5)
)
CASES["prefill_attention latent fp8"] = partial(
    cases.prefill_attention, [(0, 300), (5, 70)], 16, 1, 576, BF16, CPU, block_size=64, latent=True, codes=(0.5, 0.5)
)
for columns in (28672, 5120, 4096, 2048):
    CASES[f"skinny_linear {columns}"] = partial(cases.skinny_linear, 1, columns, 2048, BF16, CPU)
for columns, size in ((28672, 4096), (6144, 4096), (4096, 14336)):
    CASES[f"scaled_linear {columns} x {size}"] = partial(_codes, columns, size)
    CASES[f"norms and gates in codes, {size}"] = partial(_coded, size)
CASES["rope_store fp8"] = partial(code_cases.rope_store, 32, 8, 128, BF16, CPU)
for head_dim in (64, 128):
    CASES[f"invariant_attention {head_dim}"] = partial(_invariant_attention, head_dim)
for columns, size in ((6144, 4096), (4096, 14336), (448, 320)):
    CASES[f"invariant_linear {columns} x {size}"] = partial(_tiles, columns, size)


class NoGPU:
    """What the compiler asks a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main(parts: list[str]) -> int:
    compiled: list[str] = []

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **settings: Any) -> None:
            found = kernel.warmup(*args, grid=grid, **settings)
            compiled.append(f"{kernel.fn.__name__} {found.metadata.shared / 1024:.0f} KiB")
            if races := overwritten_operands(disassembled(found.asm["cubin"])):
                raise RuntimeError(f"registers are written that a product may still read: {races[0]}")

        return run

    def overlapping(_device: torch.device, *, early: bool = False) -> dict[str, Any]:
        return {"OVERLAP": 2 if early else 1, "launch_pdl": True}

    driver.set_active(NoGPU())
    failed = 0
    users = [module for name, module in sys.modules.items() if name.startswith("fledge.kernels.")]
    patches = [
        mock.patch.object(module, "overlapping", overlapping) for module in users if hasattr(module, "overlapping")
    ]
    patches.append(mock.patch.object(jit.JITFunction, "__getitem__", compile_only))
    patches.append(mock.patch("fledge.kernels._triton.is_on_gpu", return_value=True))
    for patch in patches:
        patch.start()
    for name, case in CASES.items():
        if parts and not any(part in name for part in parts):
            continue
        begin, problem = time.time(), ""
        compiled.clear()
        try:
            with torch.no_grad():
                case()
        except AssertionError:  # nothing was computed
            pass
        except Exception as error:
            failed += 1
            problem = f"FAILED: {error}"
            while (error := error.__cause__ or error.__context__) is not None:  # from a kernel to what it calls
                problem += f"\n{error}"
        print(f"{name}: {problem or ', '.join(dict.fromkeys(compiled))} ({time.time() - begin:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    assert _overlap.HAS_TRITON, "needs Triton"
    sys.exit(main(sys.argv[1:]))
