"""Every kernel against its reference, on the CPU under Triton's interpreter: small and awkward shapes."""

import os

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

from fledge.kernels.paged_attention import SplitLaunch
from fledge.layers.config import LatentConfig
from tests.unit.kernels import cases, code_cases, expert_cases, latent_cases
from tests.unit.kernels.quantized_cases import KINDS

CPU = "cpu"
dtypes = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
# The interpreter multiplies bfloat16 matrices by their bit patterns: those are checked on a GPU.
dot_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
# A few dozen keys are several pieces, and a piece a few steps.
MANY_SPLITS = SplitLaunch(slots=5, min_split=16, block_m=16, block_n=16, num_warps=4, num_stages=1)


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 96), (5, 1000), (2, 2049)])
def test_rms_norm(rows, size, dtype):
    cases.rms_norm(rows, size, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 320), (5, 96)])
def test_draft_input(rows, size, dtype):
    cases.draft_input(rows, size, dtype, CPU)


@dtypes
def test_rms_norm_of_heads(dtype):
    cases.rms_norm_heads(5, 3, 80, dtype, CPU)


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 520), (33, 100)])
def test_swiglu(rows, size, dtype):
    cases.swiglu(rows, size, dtype, CPU)


@dot_dtypes
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 70), (16, 33)])
def test_skinny_linear(rows, columns, wide, dtype):
    launch = {"WIDE": wide, "BLOCK_N": 32, "BLOCK_K": 128, "num_stages": 3}
    cases.skinny_linear(rows, columns, 1024, dtype, CPU, launch=launch)


@dtypes
@pytest.mark.parametrize(("rows", "experts", "size"), [(1, 5, 96), (3, 9, 1500)])
def test_norm_and_router(rows, experts, size, dtype):
    expert_cases.add_norm_router(rows, experts, size, dtype, CPU)


@pytest.mark.parametrize(
    ("experts", "chosen", "options"),
    [
        (5, 2, {"normalised": False}),
        (16, 4, {"scale": 2.5, "is_biased": True}),
        (20, 3, {"n_group": 4, "topk_group": 2}),
        (16, 4, {"n_group": 4, "topk_group": 2, "is_biased": True}),
    ],
)
def test_route(experts, chosen, options):
    expert_cases.route(3, experts, chosen, CPU, **options)


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize(
    ("rows", "count", "chosen", "dtype"),
    [(1, 8, 3, torch.float16), (3, 8, 2, torch.float32), (9, 20, 2, torch.float32), (41, 3, 1, torch.float16)],
)
def test_experts(rows, count, chosen, limit, dtype):
    """A lone row; by row and by expert, with fewer pairs than experts and with more; and the shared one's parts."""
    expert_cases.experts(rows, count, chosen, 72, 40, dtype, CPU, limit, parts=0 if limit else 2)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_experts_in_codes(case):
    """Fewer pairs than experts, and more; columns of which a step, or a group, is not a part."""
    expert_cases.coded_experts(2, 8, 2, 192, 128, case, torch.float16, CPU)
    expert_cases.coded_experts(9, 3, 2, 128, 160 if case[1] in (16, 32) else 128, case, torch.float32, CPU, 0.7)


@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_experts_in_codes_of_rows_in_codes(activations):
    case = ("fp8", None, False)
    expert_cases.coded_experts(3, 4, 2, 96, 64, case, torch.float16, CPU, activations=activations)


@dtypes
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_store(norm, dtype):
    """Four heads in a program, some of which are not there, as is a quarter of each half."""
    cases.rope_store(6, 6, 3, 24, dtype, CPU, norm=norm)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "norm"), [(1, 4, 4, True), (6, 5, 1, False)])
def test_rope_and_store_of_whole_heads(tokens, heads, kv_heads, norm):
    cases.rope_store(tokens, heads, kv_heads, 16, torch.float32, CPU, norm=norm)


def test_rope_and_store_in_fp8():
    code_cases.rope_store(6, 2, 24, torch.float16, CPU)


def test_attention_to_fp8_keys_and_values():
    codes = {"codes": (0.02, 0.5)}
    for launch in (None, MANY_SPLITS):
        cases.paged_attention([37, 0, 90], 4, 6, 2, 24, torch.float32, CPU, tree="each", launch=launch, **codes)
    cases.prefill_attention([(0, 37), (21, 1)], 6, 2, 24, torch.float32, CPU, window=13, **codes)
    cases.paged_attention([37, 0], 3, 6, 1, 288, torch.float16, CPU, latent=True, codes=(0.03, 0.03))


def test_keys_that_weigh_little_count():
    code_cases.light_keys(torch.float16, CPU)
    code_cases.light_keys(torch.float16, CPU, (0.25, 0.5))


@dot_dtypes
@pytest.mark.parametrize("launch", [None, MANY_SPLITS], ids=["default", "many splits"])
@pytest.mark.parametrize("tree", [None, "each"])
def test_paged_attention(launch, tree, dtype):
    cases.paged_attention([37, 0, 90], 4, 6, 2, 24, dtype, CPU, tree=tree, launch=launch)


@pytest.mark.parametrize(("block_size", "queries"), [(16, 7), (32, 1), (64, 3)])
def test_paged_attention_block_sizes_and_query_counts(block_size, queries):
    cases.paged_attention(
        [70, 5], queries, 8, 2, 16, torch.float32, CPU, block_size=block_size, launch=MANY_SPLITS, max_context=300
    )


@pytest.mark.parametrize(
    ("launch", "windows", "tree"),
    [
        (None, (1, 20), None),
        (None, (2, 64), "shared"),
        (MANY_SPLITS, (1, 2, 20, 64), None),
        (MANY_SPLITS, (1, 20), "shared"),
        (MANY_SPLITS, (2, 64), "each"),
    ],
)
def test_paged_attention_sliding_window(launch, windows, tree):
    """With one tree for each, in one piece: the rows that earlier passes stored, below."""
    for window in windows:
        cases.paged_attention([75, 3, 0], 5, 4, 2, 16, torch.float32, CPU, window=window, tree=tree, launch=launch)


@pytest.mark.parametrize(("window", "tree", "launch"), [(6, "each", None), (40, None, MANY_SPLITS)])
def test_attention_within_chunks(window, tree, launch):
    """A chunk ends among the queries, just before them, or long after."""
    kinds = {"window": window, "chunked": True}
    cases.paged_attention([75, 3, 120, -5], 5, 4, 2, 16, torch.float32, CPU, tree=tree, launch=launch, **kinds)
    cases.prefill_attention([(0, 50), (78, 3)], 4, 2, 24, torch.float32, CPU, **kinds)


def test_paged_attention_spreads_a_long_sequence_among_short_ones():
    contexts = [3, 200, 0, 7, 1, 90, 2]
    cases.paged_attention(contexts, 2, 4, 2, 16, torch.float32, CPU, launch=MANY_SPLITS)


def test_attention_with_sinks():
    """In one piece, and in several, of which the combination adds it once."""
    for launch in (None, MANY_SPLITS):
        cases.paged_attention([75, 3, -4], 4, 6, 2, 24, torch.float32, CPU, window=30, with_sinks=True, launch=launch)
    cases.prefill_attention([(0, 37), (21, 1)], 6, 2, 24, torch.float32, CPU, window=30, with_sinks=True)


def test_paged_attention_rows_that_are_not_there():
    cases.paged_attention([-3, 20], 3, 4, 2, 16, torch.float32, CPU, launch=MANY_SPLITS)
    cases.paged_attention([-3, 20], 3, 4, 2, 16, torch.float32, CPU)


def test_paged_attention_tree_of_64_in_several_row_blocks():
    cases.paged_attention([20], 64, 1, 1, 16, torch.float32, CPU, tree="each", launch=MANY_SPLITS)
    cases.paged_attention([20], 30, 2, 1, 16, torch.float32, CPU, tree="each", before=34, launch=MANY_SPLITS)


@pytest.mark.parametrize(
    ("window", "trees"), [(None, ("shared", "each")), (1, ("each",)), (3, ("each",)), (20, ("each",))]
)
def test_paged_attention_over_rows_that_earlier_passes_stored(window, trees):
    for tree in trees:
        cases.paged_attention([75, 3, 0], 5, 4, 2, 16, torch.float32, CPU, window=window, tree=tree, before=9)


def test_paged_attention_does_not_depend_on_the_bound():
    """A graph is captured for the longest context and replayed for short ones."""
    for bound in (50, 1000, 131072):
        cases.paged_attention([50, 9], 2, 4, 1, 16, torch.float32, CPU, max_context=bound)


@dot_dtypes
@pytest.mark.parametrize("window", [None, 1, 13])
def test_prefill_attention(window, dtype):
    cases.prefill_attention([(0, 37), (21, 1), (40, 20)], 6, 2, 24, dtype, CPU, window=window)


@dot_dtypes
@pytest.mark.parametrize(("tokens", "interleaved"), [(18, True), (2, False)])
@torch.no_grad()
def test_latent_heads(tokens, interleaved, dtype):
    config = LatentConfig(q_lora_rank=None, kv_lora_rank=72, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20)
    latent_cases.latent_heads(tokens, 3, config, dtype, CPU, interleaved=interleaved)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_to_latent_rows_as_wide_as_they_come(with_sinks):
    kinds = {"latent": True, "with_sinks": with_sinks}
    cases.paged_attention([37, 0], 3, 6, 1, 288, torch.float32, CPU, tree="each", **kinds)
    cases.prefill_attention([(0, 7), (21, 1)], 6, 1, 288, torch.float32, CPU, **kinds)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_prefill_attention_block_sizes(block_size):
    cases.prefill_attention([(70, 33), (0, 5)], 7, 1, 16, torch.float32, CPU, block_size=block_size)


@dtypes
@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 4096), (4, 9001)])
def test_argmax(rows, vocab, dtype):
    cases.argmax(rows, vocab, dtype, CPU)


@pytest.mark.parametrize(("batch", "depth"), [(1, 1), (7, 3), (2, 16)])
def test_accept(batch, depth):
    cases.accept(batch, depth, 5000, torch.float32, CPU)


def test_accept_without_drafts():
    cases.accept(3, 0, 50, torch.float32, CPU)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (150, 2)])
def test_uniforms(rows, columns):
    cases.uniforms(rows, columns, CPU)
