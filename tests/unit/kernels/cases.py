"""Kernel against reference at given shapes. Used on the CPU under Triton's interpreter and on a GPU at larger shapes.

Tolerances. Both sides compute in float32 and differ in the order of sums and in the last bits of exp, cos and sqrt:
1e-5 of the size of the numbers in float32. With 16-bit dtypes a rounding may then fall the other way: one unit in
the last place (2**-10 of a number in float16, 2**-7 in bfloat16), two where two rounded numbers are added.
The interpreter truncates where it should round to bfloat16, so there every rounding counts one unit: BFLOAT16_SLACK.
Attention rounds the softmax weights to the dtype before the second product, the reference does not have to; each
weight is off by half a unit and the sum averages them out: 1 unit of the largest values involved.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.decoding.random import Stream, uniform
from fledge.kernels import accept as accepting
from fledge.kernels import argmax as choosing
from fledge.kernels import rms_norm as norming
from fledge.kernels import swiglu as gating
from fledge.kernels.accept import accept_chain_reference
from fledge.kernels.argmax import argmax_rows_reference
from fledge.kernels.cache_codes import FP8, Scales, decode, encode
from fledge.kernels.paged_attention import SplitLaunch
from fledge.kernels.paged_attention import paged_attention as paged_attention_triton
from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.rms_norm import rms_norm_reference
from fledge.kernels.rope_store import rope_and_store as rope_and_store_triton
from fledge.kernels.skinny_linear import choose_launch as choose_skinny_launch
from fledge.kernels.skinny_linear import skinny_linear_triton
from tests.unit.kernels.interpreter import in_plain_torch, in_triton
from tests.unit.kernels.references import paged_attention_reference, rope_and_store_reference

rms_norm_triton, add_rms_norm_triton = in_triton(norming.rms_norm), in_triton(norming.add_rms_norm)
draft_input_triton, swiglu_triton = in_triton(norming.draft_input), in_triton(gating.swiglu)
argmax_rows_triton = in_triton(choosing.argmax_rows)
likeliest_rows_triton = in_triton(choosing.argmax_with_probability)
accept_chain_triton, accept_greedy_triton = in_triton(accepting.accept_chain), in_triton(accepting.accept_greedy)
paged_prefill_attention_triton = in_triton(paged_prefill_attention)
uniform_triton = in_triton(uniform)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BFLOAT16_SLACK = 4.0 if INTERPRETED else 1.0
UNIT = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7 * BFLOAT16_SLACK}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def close(actual: Tensor, expected: Tensor, units: float, *, size: float | None = None) -> None:
    """Assert equality to `units` units in the last place of each number, or of numbers of the given size."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = units * UNIT[actual.dtype]
    if size is None:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * 1e-3)
    else:
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance * size)


def randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def rms_norm(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    x = randn(rows, size, dtype=dtype, device=device) * 3
    weight = randn(size, dtype=dtype, device=device)
    close(rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS), 2)
    residual = randn(rows, size, dtype=dtype, device=device)
    normed, total = add_rms_norm_triton(x, residual, weight, EPS)
    expected_normed, expected_total = in_plain_torch(norming.add_rms_norm)(x, residual, weight, EPS)
    close(total, expected_total, 1)
    if not (INTERPRETED and dtype == torch.bfloat16):
        assert torch.equal(total, expected_total), "one addition, rounded once"
    close(normed, expected_normed, 2)


def draft_input(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    tokens = torch.randint(0, 50, (rows,), device=device)
    embedding = randn(50, size, dtype=dtype, device=device)
    feature = randn(rows, 2 * size, dtype=dtype, device=device)[:, :size]  # rows apart from each other
    norms = [randn(size, dtype=dtype, device=device) for _ in range(2)]
    expected = in_plain_torch(norming.draft_input)(tokens, embedding, feature, *norms, EPS)
    close(draft_input_triton(tokens, embedding, feature, *norms, EPS), expected, 2)
    by_shape = draft_input_triton(tokens.view(rows, 1), embedding, feature.unsqueeze(1), *norms, EPS)
    assert by_shape.shape == (rows, 1, 2 * size)


def rms_norm_heads(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Heads taken from a wider projection: the rows are not neighbours in memory."""
    x = randn(tokens, heads + 3, head_dim, dtype=dtype, device=device)[:, :heads]
    weight = randn(head_dim, dtype=dtype, device=device)
    close(rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS), 2)


def swiglu(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    gate_up = randn(rows, 2 * size, dtype=dtype, device=device) * 4
    close(swiglu_triton(gate_up), in_plain_torch(gating.swiglu)(gate_up), 2)


def skinny_linear(
    rows: int, columns: int, size: int, dtype: torch.dtype, device: str, *, launch: dict[str, int] | None = None
) -> None:
    """Sums of `size` products: exact in float64, and rounded once here as in the kernel."""
    x = randn(rows, size, dtype=dtype, device=device)
    weight = randn(columns, size, dtype=dtype, device=device)
    bias = randn(columns, dtype=dtype, device=device)
    launch = launch or choose_skinny_launch(rows=rows, columns=columns, processors=132)
    assert launch is not None
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        out = skinny_linear_triton(x, weight, added, launch=launch)
        close(out, exact.to(dtype), 1, size=float(exact.abs().max()))
        alone = skinny_linear_triton(x[-1:], weight, added, launch=launch)
        if not INTERPRETED:  # numpy sums a matrix and a vector in different orders
            assert torch.equal(alone[0], out[-1]), "a row does not depend on its neighbours"


def rope_store(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, *, norm: bool
) -> None:
    block_size, num_blocks = 16, tokens // 16 + 4
    caches = torch.randn(num_blocks, 2, block_size, kv_heads, head_dim, device=device).to(dtype)  # k and v interleaved
    expected_caches = caches.clone()
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.randint(0, 131072, (tokens,), device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens]
    slots[::5] = -1
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    weights = [randn(head_dim, dtype=dtype, device=device) if norm else None for _ in range(2)]
    settings = (*weights, EPS)
    query = rope_and_store_triton(qkv, positions, frequencies, 1.25, slots, caches[:, 0], caches[:, 1], *settings)
    expected = rope_and_store_reference(
        qkv, positions, frequencies, 1.25, slots, expected_caches[:, 0], expected_caches[:, 1], *settings
    )
    # Two rounded products of numbers up to about 5 * 1.25 (and a weight up to 4 with the norm) are added.
    size = float(expected.abs().max())
    close(query, expected, 2, size=size)
    close(caches[:, 0], expected_caches[:, 0], 2, size=size)
    assert torch.equal(caches[:, 1], expected_caches[:, 1]), "values are copied; other slots are untouched"


def paged_cache(
    lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return caches and block tables for sequences of these lengths, in shuffled blocks; unused table entries are 0."""
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 2
    caches = torch.randn(num_blocks, 2, block_size, kv_heads, head_dim, device=device).to(dtype)
    order = torch.randperm(num_blocks - 1).add(1).tolist()  # block 0 belongs to nobody
    tables = torch.zeros(len(lengths), max(*blocks, 1) + 1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return caches[:, 0], caches[:, 1], tables.to(device)


def coded(keys: Tensor, values: Tensor, scales: Scales | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both caches, in FP8 if there are scales; and the rows that they hold, in float32."""
    if scales is None:
        return keys, values, keys.float(), values.float()
    codes = [encode(side, FP8, scale) for side, scale in zip((keys, values), scales, strict=True)]
    return *codes, *(decode(side, torch.float32, scale) for side, scale in zip(codes, scales, strict=True))


def random_tree(rows: int) -> tuple[Tensor, Tensor]:
    """Return the masks (bits) and the depths of a random tree, [rows] both; row 0 is the root."""
    mask = 1 << torch.arange(rows)
    depths = torch.zeros(rows, dtype=torch.int64)
    for node in range(1, rows):
        parent = int(torch.randint(0, node, ()))
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return mask, depths


def paged_attention(
    contexts: list[int],
    queries: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    block_size: int = 16,
    window: int | None = None,
    chunked: bool = False,
    tree: str | None = None,
    before: int = 0,
    max_context: int | None = None,
    with_sinks: bool = False,
    launch: SplitLaunch | None = None,
    latent: bool = False,
    codes: Scales | None = None,
) -> None:
    """`tree` is None, "shared" (one tree for the batch) or "each"; `before` of its rows are stored already.

    A context of -queries says "no row here". `latent`: the keys are the values too. `codes`: scales of an FP8 cache.
    """
    stored = before + queries
    keys, values, tables = paged_cache([c + stored for c in contexts], kv_heads, head_dim, block_size, dtype, device)
    keys, values, *rows = coded(keys, values, codes)
    keys, values, *rows = (keys, keys, rows[0], rows[0]) if latent else (keys, values, *rows)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    query = randn(len(contexts), queries, heads, head_dim, dtype=dtype, device=device)
    mask = depths = None
    if tree is not None:
        trees = [random_tree(stored) for _ in range(len(contexts) if tree == "each" else 1)]
        mask, depths = (torch.stack(side).to(device) for side in zip(*trees, strict=True))
        mask = mask[:, before:].contiguous()
    sinks = randn(heads, dtype=dtype, device=device) * 3 if with_sinks else None
    bound = max(0, *contexts) if max_context is None else max_context
    scale = 1 / math.sqrt(head_dim)
    actual = paged_attention_triton(
        query,
        keys,
        values[..., :0] if latent else values,
        tables,
        lengths,
        scale=scale,
        max_context=bound,
        sliding_window=window,
        chunked=chunked,
        tree_mask=mask,
        key_depths=depths,
        sinks=sinks,
        launch=launch,
        kv_scales=codes or (1.0, 1.0),
        value_dim=(1 << (head_dim - 1).bit_length()) // 2 if latent else None,
    )
    expected = paged_attention_reference(
        query.float(),
        *rows,
        tables,
        lengths,
        scale=scale,
        max_context=max(0, *contexts),
        sliding_window=window,
        chunked=chunked,
        tree_mask=mask,
        key_depths=depths,
        sinks=None if sinks is None else sinks.float(),
    )
    close(actual, expected[..., : actual.shape[-1]].to(dtype), 1, size=float(expected.abs().max().clamp(min=1.0)))
    for row, context in enumerate(contexts):
        if context + queries <= 0:
            assert not actual[row].any(), "a row that is not there gets zeros"


def prefill_attention(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    block_size: int = 16,
    window: int | None = None,
    chunked: bool = False,
    with_sinks: bool = False,
    latent: bool = False,
    codes: Scales | None = None,
) -> None:
    """`chunks` are (context, new tokens). `latent`: the keys are the values too. `codes`: scales of an FP8 cache."""
    contexts, lengths = [c for c, _ in chunks], [n for _, n in chunks]
    keys, values, tables = paged_cache([c + n for c, n in chunks], kv_heads, head_dim, block_size, dtype, device)
    keys, values, *rows = coded(keys, values, codes)
    given, rows = (keys[..., :0], rows[:1] * 2) if latent else (values, rows)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    query = randn(sum(lengths), heads, head_dim, dtype=dtype, device=device)
    sinks = randn(heads, dtype=dtype, device=device) * 3 if with_sinks else None
    scale = 1 / math.sqrt(head_dim)
    actual = paged_prefill_attention_triton(
        query,
        keys,
        given,
        tables,
        starts,
        context_lens,
        max(lengths),
        scale=scale,
        sliding_window=window,
        chunked=chunked,
        sinks=sinks,
        kv_scales=codes or (1.0, 1.0),
    )
    expected = in_plain_torch(paged_prefill_attention)(
        query.float(),
        *rows,
        tables,
        starts,
        context_lens,
        max(lengths),
        scale=scale,
        sliding_window=window,
        chunked=chunked,
        sinks=None if sinks is None else sinks.float(),
    )
    close(actual, expected.to(dtype), 1, size=float(expected.abs().max()))


def argmax(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = randn(rows, vocab, dtype=dtype, device=device)  # 16-bit rows of this length have ties at the top
    logits[0, :] = logits[0, 0]
    logits[-1, vocab // 2 :] = logits[-1].max() + 1
    expected = argmax_rows_reference(logits.cpu())  # torch promises the lowest index among equals on no device but
    first = (logits.cpu() == logits.cpu().amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)  # this one-liner does
    assert torch.equal(logits.cpu().gather(1, expected[:, None]), logits.cpu().gather(1, first[:, None]))
    assert torch.equal(argmax_rows_triton(logits).cpu(), first)
    offsets = torch.arange(vocab, device=device) * 3
    assert torch.equal(argmax_rows_triton(logits, offsets).cpu(), 4 * first)
    assert torch.equal(argmax_rows_reference(logits, offsets).cpu(), 4 * argmax_rows_reference(logits).cpu())
    chosen, confidence = likeliest_rows_triton(logits, offsets)
    assert torch.equal(chosen.cpu(), 4 * first)
    close(confidence, choosing.largest_probability(logits), 4)


def accept(batch: int, depth: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = randn(batch, depth + 1, vocab, dtype=dtype, device=device)
    choices = argmax_rows_triton(logits.flatten(0, 1)).view(batch, depth + 1)
    drafts = choices[:, :-1].clone()
    wrong = torch.rand(batch, depth, device=device) < 0.25
    drafts[wrong] = (drafts[wrong] + 1) % vocab
    for lengths in (None, torch.randint(0, depth + 1, (batch,), device=device)):
        expected = accept_chain_reference(drafts, choices, draft_lengths=lengths)
        for outcome in (
            accept_chain_triton(drafts, choices, draft_lengths=lengths),
            accept_greedy_triton(drafts, logits, draft_lengths=lengths),
        ):
            assert torch.equal(outcome.accepted, expected.accepted)
            assert torch.equal(outcome.tokens, expected.tokens)


def uniforms(rows: int, columns: int, device: str) -> None:
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,))
    position = torch.randint(0, 2**40, (rows, columns))
    position[0] = torch.arange(columns)
    spread = torch.stack([seed, seed], dim=1)[:, 0]  # not side by side
    for seeds, positions in (
        (seed, position[:, 0]),
        (seed[:, None], position),
        (seed[:1], position[0]),
        (spread, position[:, -1]),
        (seed[:, None], position[:, :-1]),
    ):
        for stream in Stream:
            found = uniform_triton(seeds.to(device), positions.to(device), stream)
            assert torch.equal(found.cpu(), uniform(seeds, positions, stream))
