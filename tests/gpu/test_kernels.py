"""Every kernel against its reference on a GPU, at the shapes models have. Also runs as a script where pytest is not.

PYTHONPATH=src:. python tests/gpu/test_kernels.py
"""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)

from fledge.kernels.paged_attention import paged_attention
from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.quantized_linear import to_gpu_layout
from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.layers.config import ExpertsConfig, LatentConfig, LayerConfig, RopeConfig
from fledge.layers.mlp import SparseMLP
from fledge.layers.paged_cache import PagedCache
from fledge.layers.rope import RotaryEmbedding
from tests.gpu.script import run_checks
from tests.unit.kernels import (
    admit_cases,
    cases,
    code_cases,
    expert_cases,
    fused_cases,
    invariant_cases,
    latent_cases,
    quantized_cases,
    sampling_cases,
)

GPU = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHECKS: dict[str, Callable[[], None]] = {}
_HEADS = LayerConfig(
    hidden_size=128,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    rope=RopeConfig(),
)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@check
def rms_norm() -> None:
    for dtype in cases.DTYPES:
        for rows, size in ((1, 4096), (7, 5120), (4, 3 * 8192), (1000, 2048), (33, 1000)):
            cases.rms_norm(rows, size, dtype, GPU)
        cases.rms_norm_heads(65, 32, 128, dtype, GPU)


@check
def uniforms() -> None:
    for rows, columns in ((1, 1), (7, 4), (512, 8)):
        cases.uniforms(rows, columns, GPU)


@check
def draft_input() -> None:
    for dtype in cases.DTYPES:
        for rows, size in ((1, 4096), (7, 320), (300, 2048)):
            cases.draft_input(rows, size, dtype, GPU)


@check
def fused_linear() -> None:
    for shape in fused_cases.SHAPES:
        fused_cases.products(shape)


@check
def swiglu() -> None:
    for dtype in cases.DTYPES:
        for rows, size in ((1, 14336), (64, 8192), (5, 1001)):
            cases.swiglu(rows, size, dtype, GPU)


@check
def skinny_linear() -> None:
    for dtype in (BF16, FP16):
        for rows in (1, 3, 8, 9, 16):
            for columns, size in ((28672, 4096), (6144, 4096), (4096, 14336), (2048, 2048), (5120, 2048), (1001, 512)):
                cases.skinny_linear(rows, columns, size, dtype, GPU)


@check
def invariant_linear() -> None:
    """Every kind of launch, at the shapes of an 8B model, a 1B one and the bundled one, of no whole steps."""
    big = ((28672, 4096), (6144, 4096), (4096, 14336), (4096, 4096))
    for columns, size in (*big, (3072, 2048), (2048, 8192), (768, 320), (320, 704)):
        for dtype in (BF16, FP16):
            invariant_cases.linear(columns, size, dtype, GPU, (1, 2, 5, 8, 16, 17, 32, 33, 64, 65, 128, 300, 1100))


@check
def invariant_attention() -> None:
    for heads, kv_heads, head_dim in ((32, 8, 128), (5, 1, 64), (16, 8, 256)):
        invariant_cases.attention([1500, 700, 300], heads, kv_heads, head_dim, BF16, GPU)
        for context in (10, 250, 1000):
            invariant_cases.tree_attention(context, 40, heads, kv_heads, head_dim, BF16, GPU)
    sinks = torch.randn(64, device=GPU).to(BF16)
    invariant_cases.attention([700], 64, 8, 64, BF16, GPU, sliding_window=128, sinks=sinks)
    invariant_cases.attention([700], 40, 8, 128, BF16, GPU, sliding_window=200, chunked=True)


@check
def quantized_linear() -> None:
    """Every launch chosen for tall, middling and short matrices; each takes a second or more to compile."""
    for kind, group, with_zeros in quantized_cases.KINDS:
        weight = quantized_cases.quantized(kind, *quantized_cases.SHAPE, group, with_zeros=with_zeros, device=GPU)
        quantized_cases.dequantized(weight, BF16)
        for rows, launch in quantized_cases.launches(weight):
            quantized_cases.fragment_linear(rows, weight, BF16, GPU, launch=launch)
    few, some = ([quantized_cases.KINDS[i] for i in chosen] for chosen in ((4, 9), (0, 4, 9, 11)))
    quantized_cases.quantized_linear(40, 272, 2048, FP16, GPU, kinds=some)
    for rows, columns, size in ((3, 256, 3584), (12, 256, 640), (300, 256, 384), (3, 40, 384)):  # the last as stored
        quantized_cases.quantized_linear(rows, columns, size, FP16, GPU, kinds=few)


@check
def invariant_quantized_linear() -> None:
    """Launches of the batch-invariant mode, for few rows and for many, then what is dequantised for it, and codes of x.

    Tall and short matrices, and a GPU without products of warp groups, for some kinds only: launches are compiled.
    """
    for number, (kind, group, with_zeros) in enumerate(quantized_cases.KINDS):
        weight = quantized_cases.quantized(kind, *quantized_cases.SHAPE, group, with_zeros=with_zeros, device=GPU)
        tall, middling, *others = quantized_cases.invariant_launches(weight)
        for launches in (tall, middling, *others) if number in (0, 8) else (tall,) if number % 2 else (middling,):
            quantized_cases.invariant_fragment_linear(weight, BF16, GPU, launches)
    few = [quantized_cases.KINDS[i] for i in (0, 4, 9)]
    for columns, size in ((272, 2048), (256, 640), (40, 384)):  # in chains, in one, and as stored
        weights = [
            quantized_cases.quantized(kind, columns, size, group, with_zeros=zeros, device=GPU)
            for kind, group, zeros in few
        ]
        weights.append(quantized_cases.shuffled(weights[-1]))
        invariant_cases.quantized_linear(weights, FP16, GPU, (1, 9, 17, 70, 300))
    for columns in (4096, 40):
        stored = quantized_cases.quantized(
            "fp8", columns, 4096, None, with_zeros=False, device=GPU, activations="token"
        )
        quantized_cases.decoded_rows(5, 4096, BF16, GPU)
        for weight in (stored, to_gpu_layout(stored, invariant=True)):
            invariant_cases.quantized_linear([weight], BF16, GPU, (1, 17, 70, 300))


@check
def scaled_linear() -> None:
    """By our kernels and by torch, whose sums are in fewer bits; and what neither takes, rounded and dequantised."""
    for dtype in cases.DTYPES:
        for rows, size in ((2, 4096), (7, 300), (33, 14336), (600, 2048)):
            quantized_cases.quantize_rows(rows, size, dtype, GPU)
            quantized_cases.coded_results(rows, size, dtype, GPU)
    for columns, size in ((28672, 1024), (6144, 4096), (4096, 14336)):
        for rows in (4, 16, 32):
            quantized_cases.scaled_linear(rows, columns, size, BF16, GPU, units=2)
    for rows in (33, 70, 256, 300):
        quantized_cases.scaled_linear(rows, 4096, 4096, BF16, GPU, units=2)
    odd = ((3, 528, 1024, FP16), (300, 528, 1024, FP16), (5, 40, 384, BF16), (3, 50, 136, FP32))
    for rows, columns, size, dtype in odd:
        quantized_cases.scaled_linear(rows, columns, size, dtype, GPU, units=3)


@check
def rope_store() -> None:
    for dtype in cases.DTYPES:
        for norm in (False, True):
            for tokens, heads, kv_heads, head_dim in (
                (4, 32, 8, 128),
                (100, 28, 4, 128),
                (700, 9, 3, 64),
                (30, 4, 4, 80),
            ):
                cases.rope_store(tokens, heads, kv_heads, head_dim, dtype, GPU, norm=norm)


@check
def paged_attention_shapes() -> None:
    contexts = [3000, 0, 17, 1023, 512]
    for dtype in cases.DTYPES:
        cases.paged_attention(contexts, 4, 32, 8, 128, dtype, GPU)
        cases.paged_attention(contexts, 4, 32, 8, 128, dtype, GPU, max_context=131072)
    cases.paged_attention(contexts, 1, 32, 8, 64, BF16, GPU, block_size=32)
    cases.paged_attention(contexts, 16, 28, 4, 128, BF16, GPU, block_size=64)
    cases.paged_attention(contexts, 7, 16, 8, 256, BF16, GPU)
    cases.paged_attention(contexts, 3, 12, 12, 80, FP16, GPU)
    cases.paged_attention(contexts, 4, 64, 8, 64, BF16, GPU, window=128, with_sinks=True)
    cases.paged_attention(contexts, 4, 40, 8, 128, BF16, GPU, window=500, chunked=True)
    cases.paged_attention(contexts, 4, 64, 8, 64, BF16, GPU, max_context=131072, with_sinks=True)


@check
def paged_attention_long() -> None:
    cases.paged_attention([131072 - 4], 4, 32, 8, 128, BF16, GPU)


@check
def paged_attention_batches() -> None:
    for batch in (64, 200):
        cases.paged_attention([(37 * i) % 900 for i in range(batch)], 4, 32, 8, 128, BF16, GPU, max_context=40000)
    cases.paged_attention([200] * 40 + [30000] + [100] * 20, 4, 32, 8, 128, BF16, GPU, block_size=64)


@check
def paged_attention_absent_rows() -> None:
    cases.paged_attention([-4, 100, -4], 4, 8, 2, 64, BF16, GPU)
    cases.paged_attention([-4, 100, -4], 4, 8, 2, 64, BF16, GPU, max_context=9000)


@check
def paged_attention_windows_and_trees() -> None:
    contexts = [3000, 0, 17, 1023]
    for tree in (None, "shared", "each"):
        for queries in (5, 16, 64):
            for window in (None, 1, 200):
                cases.paged_attention(contexts, queries, 16, 4, 128, BF16, GPU, window=window, tree=tree)


@check
@torch.no_grad()
def heads_of_latent_attention() -> None:
    config = LatentConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for tokens, heads, dtype in ((1, 16, BF16), (4, 128, BF16), (50, 16, BF16), (5, 16, FP32)):
        latent_cases.latent_heads(tokens, heads, config, dtype, GPU, interleaved=True)


@check
def attention_to_latent_rows() -> None:
    for dtype in cases.DTYPES:
        for heads in (16, 128):  # DeepSeek V2 Lite and V3
            cases.paged_attention([3000, 0, 17, 1023], 4, heads, 1, 576, dtype, GPU, latent=True)
            cases.prefill_attention([(0, 300), (300, 1), (1000, 129)], heads, 1, 576, dtype, GPU, latent=True)
    cases.paged_attention([3000, 0, 17, 1023], 16, 16, 1, 576, BF16, GPU, tree="each", block_size=64, latent=True)


@check
def fp8_keys_and_values() -> None:
    for dtype in cases.DTYPES:
        for heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (9, 3, 64), (12, 12, 80)):
            code_cases.rope_store(heads, kv_heads, head_dim, dtype, GPU)
            codes = {"codes": (0.02, 0.5)}
            cases.paged_attention([3000, 0, 17], 4, heads, kv_heads, head_dim, dtype, GPU, **codes)
            cases.prefill_attention([(0, 700), (300, 1)], heads, kv_heads, head_dim, dtype, GPU, block_size=64, **codes)
    for contexts, queries, options in (
        ([131072 - 4], 4, {}),
        ([3000, 0, 17, -16], 16, {"tree": "each"}),
        ([3000, 0, 17], 5, {"tree": "each", "window": 200}),
        ([3000, 0, 17], 4, {"window": 128, "with_sinks": True, "max_context": 9000}),
        ([200] * 40 + [30000] + [100] * 20, 4, {}),
    ):
        cases.paged_attention(contexts, queries, 32, 8, 128, BF16, GPU, block_size=64, codes=(0.02, 0.5), **options)
    for dtype in cases.DTYPES:
        code_cases.light_keys(dtype, GPU, (0.25, 0.5))
    cases.paged_attention([3000, 0, 17], 4, 16, 1, 576, BF16, GPU, latent=True, codes=(0.05, 0.05))
    cases.prefill_attention([(0, 300), (300, 1)], 16, 1, 576, BF16, GPU, latent=True, codes=(0.05, 0.05))


@check
def prefill() -> None:
    for dtype in cases.DTYPES:
        cases.prefill_attention([(0, 700), (300, 1), (1000, 129)], 32, 8, 128, dtype, GPU)
    for window in (1, 100):
        cases.prefill_attention([(0, 700), (300, 1), (1000, 129)], 28, 4, 128, BF16, GPU, window=window)
    cases.prefill_attention([(0, 700), (5, 3)], 32, 8, 64, BF16, GPU, block_size=32)
    cases.prefill_attention([(0, 700), (300, 1), (1000, 129)], 32, 8, 128, BF16, GPU, block_size=64)
    cases.prefill_attention([(0, 300), (5, 3)], 16, 8, 256, BF16, GPU, block_size=64)
    cases.prefill_attention([(0, 300), (5, 3)], 12, 12, 80, FP16, GPU)
    cases.prefill_attention([(0, 10)], 12, 4, 128, BF16, GPU)
    cases.prefill_attention([(0, 700), (300, 1)], 64, 8, 64, BF16, GPU, window=128, with_sinks=True)


@check
def admitted_drafts() -> None:
    for batch, depth, admitted in ((1, 3, 1), (16, 3, 24), (256, 5, 640), (500, 7, 1000)):
        admit_cases.admit(batch, depth, admitted, GPU)
    chunks = [(3000, 4), (0, 1), (17, 2), (1023, 1), (512, 3)]
    for dtype in cases.DTYPES:
        admit_cases.ragged_attention(chunks, 32, 8, 128, dtype, GPU)
    admit_cases.ragged_attention(chunks * 40, 32, 8, 128, BF16, GPU, block_size=64)
    admit_cases.ragged_attention(chunks, 64, 8, 64, BF16, GPU, window=128, with_sinks=True)
    admit_cases.ragged_attention(chunks, 16, 8, 256, BF16, GPU)


@check
def argmax() -> None:
    for dtype in cases.DTYPES:
        for rows, vocab in ((1, 32000), (64, 128256), (3, 151936), (5, 7)):
            cases.argmax(rows, vocab, dtype, GPU)


@check
def accept() -> None:
    for batch, depth in ((1, 1), (64, 3), (7, 16), (5, 0)):
        cases.accept(batch, depth, 32000, BF16, GPU)


@check
def sample() -> None:
    for dtype in cases.DTYPES:
        for rows, vocab in ((64, 32000), (100, 128256), (20, 11)):
            for filtering in (False, True):
                sampling_cases.sample(rows, vocab, dtype, GPU, filtering=filtering)
            sampling_cases.bounds(rows, vocab, dtype, GPU)


@check
def adjust() -> None:
    for dtype in cases.DTYPES:
        for batch, depth, vocab in ((17, 3, 32000), (5, 5, 128256), (3, 1, 40)):
            for flat in (False, True):
                sampling_cases.adjust(batch, depth, vocab, dtype, GPU, flat=flat)


@check
def drawn_drafts() -> None:
    for vocab in (1500, 32000, 128256):
        sampling_cases.probabilities(20, vocab, GPU)
        for filtering in (False, True):
            for batch, depth, flat in ((12, 3, False), (12, 5, True), (3, 1, True)):
                sampling_cases.reject(batch, depth, vocab, GPU, filtering=filtering, flat=flat)


@check
def caches_beyond_two_billion_elements() -> None:
    """Block ids times strides pass 2**31: the last block of a 2.3-billion-element cache."""
    num_blocks, kv_heads, head_dim = 140_000, 8, 128
    cache = torch.empty(num_blocks, 16, kv_heads, head_dim, dtype=BF16, device=GPU)
    cache[-4:] = torch.randn(4, 16, kv_heads, head_dim, device=GPU)
    tables = torch.tensor([[num_blocks - 1, num_blocks - 3, num_blocks - 2, num_blocks - 4]], dtype=torch.int32).to(GPU)
    small = cache[-4:].clone()
    small_tables = torch.tensor([[3, 1, 2, 0]], dtype=torch.int32, device=GPU)
    lengths = torch.tensor([50], dtype=torch.int32, device=GPU)
    query = torch.randn(1, 4, 32, head_dim, device=GPU, dtype=BF16)
    expected = paged_attention(query, small, small, small_tables, lengths, scale=0.1)
    assert torch.equal(paged_attention(query, cache, cache, tables, lengths, scale=0.1), expected)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=GPU)
    chunk = paged_prefill_attention(query[0], cache, cache, tables, starts, lengths, 4, scale=0.1)
    expected = paged_prefill_attention(query[0], small, small, small_tables, starts, lengths, 4, scale=0.1)
    assert torch.equal(chunk, expected)


@check
def captured_graphs_follow_the_lengths() -> None:
    """A graph captured for one set of lengths, replayed for another, gives what an eager call gives; twice the same."""
    keys, values, tables = cases.paged_cache([5000, 300], 8, 128, 16, BF16, GPU)
    query = torch.randn(2, 4, 32, 128, device=GPU, dtype=BF16)
    lengths = torch.tensor([100, 4], dtype=torch.int32, device=GPU)

    def attend() -> torch.Tensor:
        return paged_attention(query, keys, values, tables, lengths, scale=0.1, max_context=4096)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for new in ([4096, 200], [0, 0], [1000, 290]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out)
        assert torch.equal(out, attend())


@check
def experts() -> None:
    for count, chosen, options in ((128, 8, {}), (160, 6, {"n_group": 8, "topk_group": 3, "scale": 16.0})):
        expert_cases.route(70, count, chosen, GPU, **options)
    expert_cases.route(70, 256, 8, GPU, n_group=8, topk_group=4, is_biased=True)
    for rows, count, size in ((1, 128, 2048), (4, 64, 2048), (8, 32, 2880), (3, 256, 7168)):
        for dtype in cases.DTYPES:
            expert_cases.add_norm_router(rows, count, size, dtype, GPU)
    for rows in (1, 4, 20, 100):
        for dtype in (BF16, torch.float16, FP32):
            expert_cases.experts(rows, 32, 4, 1024, 384, dtype, GPU)
        expert_cases.experts(rows, 32, 4, 720, 200, BF16, GPU, 1.5)
        expert_cases.experts(rows, 32, 4, 1024, 384, BF16, GPU, parts=2)
    expert_cases.experts(1, 128, 8, 2048, 768, BF16, GPU)
    expert_cases.experts(1, 64, 6, 2048, 1408, BF16, GPU, parts=2)


@check
def experts_in_codes() -> None:
    for case in quantized_cases.KINDS:
        for rows in (1, 6, 40):
            expert_cases.coded_experts(rows, 16, 4, 1024, 384, case, BF16, GPU)
        expert_cases.coded_experts(20, 16, 4, 1024, 384, case, torch.float16, GPU, 1.5)
    expert_cases.coded_experts(3, 8, 4, 2880, 2880, ("fp4", 32, False), BF16, GPU, 7.0)
    for activations in ("token", "tensor"):
        expert_cases.coded_experts(20, 16, 4, 1024, 384, ("fp8", None, False), BF16, GPU, activations=activations)


@check
@torch.no_grad()
def experts_can_be_captured() -> None:
    """As one expert after the other."""
    config = ExpertsConfig(num_experts=8, num_experts_per_token=2, intermediate_size=128)
    for dtype, rows, tolerance in ((BF16, 12, 2e-2), (BF16, 1, 2e-2), (FP32, 12, 1e-4)):
        mlp = SparseMLP(64, config).to(device=GPU, dtype=dtype)
        for parameter in mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x = torch.randn(rows, 64, device=GPU, dtype=dtype)
        expected = copy.deepcopy(mlp).cpu().double()
        mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mlp(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            wide = x.cpu().double()
            torch.testing.assert_close(out.cpu().double(), expected(wide), atol=tolerance, rtol=tolerance)


@check
@torch.no_grad()
def heads_that_rotate_in_part_are_stored() -> None:
    """The fused kernel does not take them; the plain way has to, on a GPU too, and in a graph."""
    config = replace(_HEADS, rope=RopeConfig(partial_factor=0.5))
    caches = [
        PagedCache(config.kv_cache, num_layers=1, num_blocks=4, block_size=16, dtype=FP32, device=torch.device(device))
        for device in ("cpu", GPU)
    ]
    qkv, positions, slots = (
        torch.randn(5, config.query_size + 2 * config.kv_size),
        torch.arange(5),
        torch.arange(20, 25),
    )
    spec = AttentionSpec(layer=0, scale=1.0, sliding_window=None)
    queries = []
    for cache, device in zip(caches, ("cpu", GPU), strict=True):
        rope = RotaryEmbedding(config.rope, config.head_dim).to(device)
        rotation = rope(positions.to(device), FP32)
        heads = ProjectedHeads(qkv=qkv.to(device), rotation=rotation, config=config, q_norm=None, k_norm=None)
        queries.append(cache.store(heads, spec, slots.to(device), rows=1).query.cpu())
    torch.testing.assert_close(queries[1], queries[0])
    torch.testing.assert_close(caches[1].keys.cpu(), caches[0].keys)
    assert torch.equal(queries[0].flatten(1)[:, 32:64], qkv[:, 32:64]), "the second half of a head stays as it is"


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_kernel(name: str) -> None:
        CHECKS[name]()


if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, sys.argv[1:]))
