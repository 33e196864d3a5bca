"""Kernels of the batch-invariant mode: a row has the same bits in whatever company, and is right.

Used on a GPU, and on a CPU under Triton's interpreter with matrix products in the order of a GPU's
(`stepwise_products`): numpy's depends on the shape.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels import invariant_attention as kernels
from fledge.kernels import quantized_linear as multiplying
from fledge.kernels.invariant_linear import invariant_linear
from fledge.kernels.quantize_rows import quantize_rows_reference
from fledge.kernels.quantized_linear import QuantizedWeight, dequantize
from tests.unit.kernels.cases import close, paged_cache, randn, random_tree
from tests.unit.kernels.interpreter import in_triton
from tests.unit.kernels.references import paged_attention_reference


@contextlib.contextmanager
def stepwise_products() -> Iterator[None]:
    """Let the interpreter add 16 products at a time to what it has, as matrix instructions do."""
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_settings: object) -> Any:
        left, right, acc = a.data.astype(np.float64), b.data.astype(np.float64), d.data
        for start in range(0, left.shape[-1], 16):
            acc = (acc + left[..., start : start + 16] @ right[..., start : start + 16, :]).astype(acc.dtype)
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def linear(columns: int, size: int, dtype: torch.dtype, device: str, counts: Sequence[int]) -> None:
    """A row alone and among others, as many as `counts` say: launches of every kind."""
    x = randn(max(counts), size, dtype=dtype, device=device)
    weight = randn(columns, size, dtype=dtype, device=device)
    bias = randn(columns, dtype=dtype, device=device)
    exact = F.linear(x.double(), weight.double(), bias.double())
    numbers = sorted({0, *(count - 1 for count in counts)})
    alone = torch.cat([invariant_linear(x[i : i + 1], weight, bias) for i in numbers])
    close(alone, exact[numbers].to(dtype), 1, size=float(exact.abs().max()))
    for count in counts:
        inside = [i for i in numbers if i < count]
        out = invariant_linear(x[:count], weight, bias)
        assert out.shape == (count, columns)
        different = (out[inside] != alone[: len(inside)]).sum(-1).tolist()
        assert not any(different), f"{columns} x {size}, {count} rows: {different} of {columns} numbers differ"


def quantized_linear(
    weights: Sequence[QuantizedWeight], dtype: torch.dtype, device: str, counts: Sequence[int]
) -> None:
    """As `linear`, with the public function, for weights in fewer bits; the matrix may be rounded to `dtype`."""
    for weight in weights:
        columns, size = len(weight.scales), weight.columns
        x, bias = randn(max(counts), size, dtype=dtype, device=device), randn(columns, dtype=dtype, device=device)
        rounded = x
        if weight.activations is not None:
            rounded = quantize_rows_reference(x, weight.input_scale).dequantized()
        exact = F.linear(rounded.double(), dequantize(weight).double(), bias.double())
        multiply = in_triton(functools.partial(multiplying.quantized_linear, invariant=True))
        whole = multiply(x, weight, bias)
        close(whole, exact.to(dtype), 2, size=float(exact.abs().max()))
        for count in counts:
            first = max(counts) - count  # other neighbours, and rows elsewhere in a tile
            same(multiply(x[first:], weight, bias), whole[first:], f"{weight.kind} {columns} x {size}, {count} rows")


class Attended:
    """Sequences in a paged cache, with a query at each position, and the attention of each alone."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        **settings: Any,
    ) -> None:
        self.block_size = settings.pop("block_size", 64)
        self.settings: dict[str, Any] = {"scale": 1 / math.sqrt(head_dim), **settings}
        self.lengths, self.device = lengths, device
        self.keys, self.values, self.tables = paged_cache(
            [length + 70 for length in lengths], kv_heads, head_dim, self.block_size, dtype, device
        )
        self.queries = [randn(length, heads, head_dim, dtype=dtype, device=device) for length in lengths]

    def attend(self, query: Tensor, contexts: Sequence[int], rows: Sequence[int], **more: Any) -> Tensor:
        """Attention of flat queries of the sequences `rows`."""
        context_lens = torch.tensor(contexts, device=self.device)
        bound = more.pop("max_context", max(self.lengths))
        tables = self.tables[list(rows)].contiguous()
        return kernels.invariant_attention(
            query, self.keys, self.values, tables, context_lens, max_context=bound, **self.settings, **more
        )

    def chunks(self, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of parts (sequence, from, to) of prompts, in one pass."""
        query = torch.cat([self.queries[row][start:stop] for row, start, stop in parts])
        sizes = [stop - start for _, start, stop in parts]
        starts = torch.tensor([0, *sizes], device=self.device).cumsum(0).to(torch.int32)
        rows, contexts, _ = zip(*parts, strict=True)
        out = self.attend(query, contexts, rows, query_starts=starts, max_queries=max(sizes))
        return list(out.split(sizes))

    def chains(self, places: Sequence[tuple[int, int]], count: int, **more: Any) -> Tensor:
        """Attention of `count` queries of each (sequence, from), in one pass: [chains, count, heads, head_dim]."""
        query = torch.cat([self.queries[row][start : start + count] for row, start in places])
        rows, contexts = zip(*places, strict=True)
        return self.attend(query, contexts, rows, max_queries=count, **more).unflatten(0, (-1, count))


def same(one: Tensor, other: Tensor, what: str) -> None:
    different = int((one != other).sum())
    assert not different, f"{what}: {different} of {one.numel()} numbers differ"


def attention(
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    cuts: Sequence[int] = (1, 100, 255),
    counts: Sequence[int] = (1, 2, 6, 16),
    ends: Sequence[int] = (16, 63, 64, 65, 256, 257),
    **settings: Any,
) -> None:
    """Prompts whole and cut, tokens alone, in chains that end there and in batches, split and folded; the reference."""
    given = Attended(lengths, heads, kv_heads, head_dim, dtype, device, **settings)
    whole = given.chunks([(row, 0, length) for row, length in enumerate(lengths)])
    window, chunked = settings.get("sliding_window"), settings.get("chunked", False)
    sinks = settings.get("sinks")
    for row, length in enumerate(lengths):
        expected = paged_attention_reference(
            given.queries[row][None].float(),
            given.keys.float(),
            given.values.float(),
            given.tables[row : row + 1],
            torch.zeros(1, dtype=torch.int64, device=device),
            scale=given.settings["scale"],
            max_context=0,
            sliding_window=window,
            chunked=chunked,
            sinks=None if sinks is None else sinks.float(),
        )[0]
        close(whole[row], expected.to(dtype), 1, size=float(expected.abs().max()))
        for cut in cuts:
            first, second = given.chunks([(row, 0, cut), (row, cut, length)])
            same(torch.cat([first, second]), whole[row], f"a prompt of {length} cut at {cut}")
    for count, end in itertools.product(counts, {*ends, *lengths}):
        places = [(row, end - count) for row, length in enumerate(lengths) if count <= end <= length]
        for several in [places[:1]] + ([places * 3] if len(places) > 1 else []):
            for bound in (max(lengths), 2**28):  # split, and folded
                out = given.chains(several, count, max_context=bound)
                for (row, start), chain in zip(several, out, strict=True):
                    same(chain, whole[row][start : start + count], f"{count} queries from {start} of {lengths[row]}")


def tree_attention(
    context: int, nodes: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, **settings: Any
) -> None:
    """Each path of a tree has the bits of a chain that has the same tokens."""
    given = Attended([context + nodes], heads, kv_heads, head_dim, dtype, device, **settings)
    mask, _ = random_tree(nodes)
    query = given.queries[0][context:]
    out = given.attend(query, [context], [0], max_queries=nodes, tree_mask=mask[None].to(device))
    sides = [side.clone() for side in (given.keys, given.values)]

    def slot(place: int) -> tuple[int, int]:
        return int(given.tables[0, place // given.block_size]), place % given.block_size

    for node in {nodes - 1, nodes // 2, int(mask.argmax())}:
        path = [bit for bit in range(nodes) if int(mask[node]) >> bit & 1]
        for side, kept in zip((given.keys, given.values), sides, strict=True):
            for depth, ancestor in enumerate(path):
                side[slot(context + depth)] = kept[slot(context + ancestor)]
        chain = given.attend(query[path].contiguous(), [context], [0], max_queries=len(path))
        same(out[path], chain, f"the path to node {node} of a tree behind {context}")
        given.keys.copy_(sides[0])
        given.values.copy_(sides[1])
