"""Times every kernel on the GPU against its floor and the plain-torch alternative: a table and one JSON line.

    PYTHONPATH=src python benchmarks/kernel_times.py [--only paged] [--sweep]

The floor is the larger of bytes / copy bandwidth and operations / bf16 matrix rate, both measured first, and never
below the time of a launch of nothing. Calls are captured in a CUDA graph, as the engine runs them, and rotate over
enough inputs that caches larger than the L2 are read from memory. `--sweep` times other launch parameters of the
attention kernels, for whoever changes `choose_launch`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.accept import accept_greedy
from fledge.kernels.argmax import argmax_rows
from fledge.kernels.filters import Filters, RowSettings
from fledge.kernels.paged_attention import SplitLaunch, choose_launch, paged_attention
from fledge.kernels.prefill_attention import paged_prefill_attention
from fledge.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from fledge.kernels.rope_store import rope_and_store
from fledge.kernels.sample import choose, sample_rows
from fledge.kernels.skinny_linear import linear
from fledge.kernels.swiglu import swiglu

DTYPE = torch.bfloat16
CALLS = 24  # in one graph
REPLAYS = 15
NUCLEUS = (40, torch.int64), (0.95, torch.float64), (0.0, torch.float32)  # top-k, top-p, min-p


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    bandwidth: float  # bytes / s
    matrix: float  # operations / s
    launch: float  # s

    def floor(self, moved: float, operations: float = 0.0) -> float:
        return max(moved / self.bandwidth, operations / self.matrix, self.launch)


@dataclass(frozen=True, kw_only=True)
class Result:
    kernel: str
    shape: str
    us: float
    floor_us: float
    torch_us: float | None
    gb_s: float
    tflop_s: float


def time_calls(calls: Sequence[Callable[[], object]], total: int = CALLS) -> float:
    """Return the seconds of one call: median over replays of a graph of `total` calls, taken in turns."""
    for call in calls[:2]:
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(total):
                calls[number % len(calls)]()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / total)
    return sorted(times)[len(times) // 2] * 1e-3


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 30, device="cuda", dtype=DTYPE)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / time_calls([lambda: torch.neg(source, out=target)], 4)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    matrix = 2 * 8192**3 / time_calls([lambda: a @ b], 4)
    one = torch.zeros(1, device="cuda")
    return Ceilings(bandwidth=bandwidth, matrix=matrix, launch=time_calls([lambda: one.add_(1)]))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


class Bench:
    """Collects results; `only` picks kernels by a part of their name."""

    def __init__(self, ceilings: Ceilings, only: str | None) -> None:
        self.ceilings = ceilings
        self.only = only
        self.results: list[Result] = []

    def wants(self, kernel: str) -> bool:
        return self.only is None or self.only in kernel

    def add(
        self,
        kernel: str,
        shape: str,
        calls: Sequence[Callable[[], object]],
        torch_calls: Sequence[Callable[[], object]] | None,
        moved: float,
        operations: float = 0.0,
        total: int = CALLS,
    ) -> None:
        seconds = time_calls(calls, total)
        torch_seconds = None
        if torch_calls is not None:
            try:
                torch_seconds = time_calls(torch_calls, min(total, 8))
            except RuntimeError as error:
                print(f"torch alternative of {kernel} {shape}: {str(error).splitlines()[0][:100]}")
        result = Result(
            kernel=kernel,
            shape=shape,
            us=seconds * 1e6,
            floor_us=self.ceilings.floor(moved, operations) * 1e6,
            torch_us=None if torch_seconds is None else torch_seconds * 1e6,
            gb_s=moved / seconds * 1e-9,
            tflop_s=operations / seconds * 1e-12,
        )
        self.results.append(result)
        other = "       -" if result.torch_us is None else f"{result.torch_us:8.1f}"
        share = 100 * result.floor_us / result.us
        print(
            f"{kernel:16s} {shape:40s} {result.us:8.1f} {result.floor_us:8.1f} {share:5.0f}% {other} "
            f"{result.gb_s:7.0f} {result.tflop_s:6.0f}",
            flush=True,
        )


def bench_elementwise(bench: Bench) -> None:
    for rows, hidden in ((4, 2048), (4, 4096), (64, 4096), (256, 4096), (8192, 4096)):
        x, residual, weight = randn(rows, hidden), randn(rows, hidden), randn(hidden)
        if bench.wants("rms_norm"):
            bench.add(
                "rms_norm",
                f"{rows} x {hidden}",
                [lambda x=x, w=weight: rms_norm(x, w, 1e-6)],
                [lambda x=x, w=weight: rms_norm_reference(x, w, 1e-6)],
                2 * x.nbytes,
            )
        if bench.wants("add_rms_norm"):
            bench.add(
                "add_rms_norm",
                f"{rows} x {hidden}",
                [lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-6)],
                [lambda x=x, r=residual, w=weight: rms_norm_reference(x + r, w, 1e-6)],
                4 * x.nbytes,
            )
    if bench.wants("swiglu"):
        for rows in (4, 64, 256, 8192):
            x = randn(rows, 2 * 14336)
            bench.add(
                "swiglu",
                f"{rows} x 14336",
                [lambda x=x: swiglu(x)],
                [lambda x=x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]],
                1.5 * x.nbytes,
            )
    if bench.wants("rope_store"):
        for tokens, norm in ((4, False), (4, True), (64, False), (256, False), (8192, False)):
            bench_rope(bench, tokens, norm=norm)


LINEAR = (  # columns, size: query-key-value, output, gate-up, down and head of 8B, then of 1B
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (32000, 4096),
    (3072, 2048),
    (2048, 2048),
    (16384, 2048),
    (2048, 8192),
    (32000, 2048),
)


def bench_linear(bench: Bench) -> None:
    """Weights rotate so that none of them is still in the L2 when its turn comes again."""
    for columns, size in LINEAR:
        weights = [randn(columns, size) for _ in range(max(3, int(4e8) // (2 * columns * size)))]
        for rows in (1, 4, 16, 32, 64):
            x = randn(rows, size)
            bench.add(
                "linear",
                f"{rows} x {size} -> {columns}",
                [lambda x=x, w=w: linear(x, w) for w in weights],
                [lambda x=x, w=w: F.linear(x, w) for w in weights],
                weights[0].nbytes,
                2.0 * rows * columns * size,
                total=max(CALLS, len(weights)),
            )


def bench_rope(bench: Bench, tokens: int, *, norm: bool) -> None:
    heads, kv_heads, head_dim = 32, 8, 128
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim)
    cache = randn(2, 2048, 16, kv_heads, head_dim)
    positions = torch.randint(0, 131072, (tokens,), device="cuda")
    slots = torch.randperm(2048 * 16, device="cuda")[:tokens]
    frequencies = 500000.0 ** -(torch.arange(0, head_dim, 2, device="cuda").float() / head_dim)
    weights = (randn(head_dim), randn(head_dim)) if norm else (None, None)
    inputs = (qkv, positions, frequencies, 1.0, slots, cache[0], cache[1], heads, kv_heads, head_dim, *weights)
    bench.add(
        "rope_store",
        f"{tokens} tokens, 32/8 x 128{', norm' if norm else ''}",
        [lambda: rope_and_store(*inputs)],
        None,  # the reference filters slots on the host and cannot be captured
        2 * qkv.nbytes,
    )


def paged_inputs(
    batch: int, context: int, queries: int, heads: int, kv_heads: int, head_dim: int, block_size: int, sets: int
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    blocks = -(-(context + queries) // block_size)
    out = []
    for _ in range(sets):
        caches = torch.randn(2, batch * blocks, block_size, kv_heads, head_dim, device="cuda", dtype=DTYPE)
        tables = torch.randperm(batch * blocks, device="cuda").view(batch, blocks).to(torch.int32)
        lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        out.append((randn(batch, queries, heads, head_dim), caches[0], caches[1], tables, lengths))
    return out


PAGED = (  # batch, context, queries, heads, kv_heads, head_dim, block_size, max_context
    (1, 200, 4, 32, 8, 128, 16, None),
    (1, 200, 4, 32, 8, 128, 16, 131072),
    (1, 200, 1, 32, 8, 64, 16, 131072),
    (1, 4096, 4, 32, 8, 128, 16, None),
    (1, 32768, 4, 32, 8, 128, 16, None),
    (1, 131072, 1, 32, 8, 128, 16, None),
    (1, 131072, 4, 32, 8, 128, 16, None),
    (1, 131072, 4, 32, 8, 128, 64, None),
    (1, 131072, 16, 32, 8, 128, 16, None),
    (4, 200, 4, 32, 8, 128, 16, None),
    (16, 200, 4, 32, 8, 128, 16, 131072),
    (16, 4096, 4, 32, 8, 128, 16, None),
    (64, 200, 4, 32, 8, 128, 16, None),
    (64, 200, 4, 32, 8, 128, 16, 131072),
    (64, 4096, 4, 32, 8, 128, 16, None),
    (1, 200, 1, 32, 8, 64, 64, 131072),
    (16, 4096, 4, 32, 8, 128, 64, None),
    (64, 200, 4, 32, 8, 128, 64, 131072),
    (1, 300, 4, 32, 8, 128, 64, 131072),
    (4, 300, 4, 32, 8, 128, 64, 131072),
    (16, 300, 4, 32, 8, 128, 64, 131072),
)


def bench_paged(bench: Bench) -> None:
    for batch, context, queries, heads, kv_heads, head_dim, block_size, bound in PAGED:
        moved = 2.0 * batch * (context + queries) * kv_heads * head_dim * 2
        sets = max(1, min(6, int(6e8 / moved)))
        inputs = paged_inputs(batch, context, queries, heads, kv_heads, head_dim, block_size, sets)
        scale = head_dim**-0.5
        rows = queries * heads // kv_heads
        dense = randn(batch, kv_heads, context + queries, head_dim)
        packed = randn(batch, kv_heads, rows, head_dim)
        mask = torch.ones(rows, context + queries, dtype=torch.bool, device="cuda")
        longest = context if bound is None else bound
        bench.add(
            "paged_attention",
            f"B{batch} L{context} Q{queries} D{head_dim} page{block_size}{'' if bound is None else ' bound 128k'}",
            [lambda i=i, n=longest, s=scale: paged_attention(*i, scale=s, max_context=n) for i in inputs],
            [lambda q=packed, k=dense, m=mask: F.scaled_dot_product_attention(q, k, k, attn_mask=m)],
            moved,
            4.0 * batch * (context + queries) * queries * heads * head_dim,
            total=CALLS if moved < 1e8 else 6,
        )


def bench_tree_and_window(bench: Bench) -> None:
    tree = torch.tensor([[(2 << i) - 1 if i < 63 else -1 for i in range(64)]], device="cuda")  # a chain, as a tree
    depths = torch.arange(64, device="cuda")[None]
    for context in (200, 4096):
        inputs = paged_inputs(1, context, 64, 32, 8, 128, 16, 4)
        moved = 2.0 * (context + 64) * 8 * 128 * 2
        attend = partial(paged_attention, scale=0.1, max_context=context, tree_mask=tree, key_depths=depths)
        calls = [lambda i=i, attend=attend: attend(*i) for i in inputs]
        bench.add("paged_attention", f"B1 L{context} tree of 64 D128", calls, None, moved)
    mixed = paged_inputs(64, 16384, 4, 32, 8, 128, 16, 1)[0]
    lengths = torch.full_like(mixed[4], 200)
    lengths[7] = 16384
    bench.add(
        "paged_attention",
        "B64 L200 and one of 16384 Q4 D128",
        [lambda: paged_attention(*mixed[:4], lengths, scale=0.1, max_context=131072)],
        None,
        2.0 * (16388 + 63 * 204) * 8 * 128 * 2,
    )
    inputs = paged_inputs(16, 16384, 4, 32, 8, 128, 16, 1)
    bench.add(
        "paged_attention",
        "B16 L16384 Q4 D128 window 1024",
        [lambda i=i: paged_attention(*i, scale=0.1, max_context=16384, sliding_window=1024) for i in inputs],
        None,
        2.0 * 16 * 1028 * 8 * 128 * 2,
    )


PREFILL = (  # batch, context, new tokens, heads, kv_heads, head_dim, block_size
    (1, 0, 64, 32, 8, 128, 16),
    (8, 0, 128, 32, 8, 128, 16),
    (1, 0, 4096, 32, 8, 128, 16),
    (1, 0, 4096, 32, 8, 128, 64),
    (8, 0, 4096, 32, 8, 128, 16),
    (8, 0, 4096, 32, 8, 128, 64),
    (8, 0, 4096, 32, 8, 64, 16),
    (8, 0, 4096, 32, 8, 64, 64),
    (1, 28672, 4096, 32, 8, 128, 64),
)


def prefill_inputs(
    batch: int, context: int, new: int, heads: int, kv_heads: int, head_dim: int, page: int = 16
) -> tuple[Tensor, ...]:
    _, keys, values, tables, lengths = paged_inputs(batch, context, new, heads, kv_heads, head_dim, page, 1)[0]
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new
    return randn(batch * new, heads, head_dim), keys, values, tables, starts, lengths


def prefill_operations(batch: int, context: int, new: int, heads: int, head_dim: int) -> float:
    return 4.0 * batch * heads * head_dim * (context * new + new * (new + 1) / 2)


def bench_prefill(bench: Bench) -> None:
    for batch, context, new, heads, kv_heads, head_dim, page in PREFILL:
        inputs = prefill_inputs(batch, context, new, heads, kv_heads, head_dim, page)
        alternative = None
        if context == 0:
            q, k = randn(batch, heads, new, head_dim), randn(batch, kv_heads, new, head_dim)
            alternative = [lambda q=q, k=k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)]
        bench.add(
            "prefill",
            f"B{batch} context {context} new {new} D{head_dim} page{page}",
            [lambda i=inputs, n=new, d=head_dim: paged_prefill_attention(*i, n, scale=d**-0.5)],
            alternative,
            2.0 * inputs[0].nbytes,
            prefill_operations(batch, context, new, heads, head_dim),
            total=4,
        )


def bench_decisions(bench: Bench) -> None:
    for rows, vocab in ((4, 32000), (4, 128256), (64, 128256), (256, 128256)):
        logits = randn(rows, vocab)
        drafts = torch.zeros(rows // 4, 3, dtype=torch.int64, device="cuda")
        temperature = torch.ones(rows, device="cuda")
        uniforms = torch.rand(rows, dtype=torch.float64, device="cuda")
        shape = f"{rows} x {vocab}"
        if bench.wants("argmax"):
            bench.add(
                "argmax", shape, [lambda x=logits: argmax_rows(x)], [lambda x=logits: x.argmax(-1)], logits.nbytes
            )
        if bench.wants("accept_greedy"):
            shaped = logits.view(rows // 4, 4, vocab)
            bench.add("accept_greedy", shape, [lambda x=shaped, d=drafts: accept_greedy(d, x)], None, logits.nbytes)
        for name, few, filters in (("sample", False, None), ("sample_few", True, None), ("filter_few", True, NUCLEUS)):
            if not bench.wants(name):
                continue
            # All rows are drawn, or those of one request of the four rows that a round of three drafts has.
            sampled = torch.arange(rows, device="cuda") < (4 if few else rows)
            columns = None if filters is None else Filters(*(torch.full_like(temperature, f).to(d) for f, d in filters))
            settings = RowSettings(sampled, temperature, columns)
            drawn, request = torch.empty(2, rows, dtype=torch.int64, device="cuda")
            torch.arange(rows, out=request)
            bench.add(
                name,
                shape,
                [lambda x=logits, r=request, s=settings, u=uniforms, d=drawn: sample_rows(x, r, s, u, d)],
                [lambda x=logits, t=temperature, u=uniforms: choose((x.float() / t[:, None]).softmax(-1), u)],
                logits.nbytes,
            )


def sweep_paged() -> None:
    """Other launch parameters at the shapes that matter most. Prints microseconds, best first."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for batch, context, page in (
        (1, 131072, 16),
        (1, 4096, 16),
        (1, 300, 16),
        (16, 300, 16),
        (16, 300, 64),
        (16, 4096, 16),
        (16, 4096, 64),
        (64, 300, 16),
        (64, 300, 64),
    ):
        moved = 2.0 * batch * context * 8 * 128 * 2
        inputs = paged_inputs(batch, context, 4, 32, 8, 128, page, max(1, min(4, int(6e8 / moved))))
        default = choose_launch(inputs[0][0], 8, batch=inputs[0][0].shape[0], queries=inputs[0][0].shape[1])
        tiles = ((32, 4, 3), (32, 4, 5), (64, 4, 3), (64, 4, 5), (128, 4, 3))
        times: dict[SplitLaunch, float] = {}
        for block_n, num_warps, num_stages in tiles:
            for per_processor, min_split in ((2, 128), (3, 128), (4, 128), (2, 256), (4, 256)):
                launch = replace(
                    default,
                    slots=per_processor * processors // 8,
                    min_split=min_split,
                    block_n=block_n,
                    num_warps=num_warps,
                    num_stages=num_stages,
                )
                calls = [partial(paged_attention, *i, scale=0.1, max_context=131072, launch=launch) for i in inputs]
                times[launch] = time_calls(calls, 8)
        print(f"paged_attention B{batch} L{context} Q4 page{page}; chosen {times[default] * 1e6:.1f} us")
        for launch, seconds in sorted(times.items(), key=lambda item: item[1])[:12]:
            print(
                f"  {seconds * 1e6:8.1f} us  slots {launch.slots} min {launch.min_split} "
                f"n {launch.block_n} warps {launch.num_warps} stages {launch.num_stages}",
                flush=True,
            )


def sweep_prefill() -> None:
    tiles = (  # block_m, block_n, num_warps, num_stages
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
        (256, 64, 8, 5),
        (256, 32, 8, 3),
    )
    for batch, new, head_dim, page in ((4, 4096, 128, 16), (4, 4096, 128, 64), (4, 4096, 64, 16), (8, 128, 128, 16)):
        inputs = prefill_inputs(batch, 0, new, 32, 8, head_dim, page)
        operations = prefill_operations(batch, 0, new, 32, head_dim)
        print(f"prefill B{batch} new {new} D{head_dim} page{page}")
        for block_m, block_n, num_warps, num_stages in tiles:
            launch = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
            call = partial(paged_prefill_attention, *inputs, new, scale=head_dim**-0.5)
            try:
                with mock.patch("fledge.kernels.prefill_attention.choose_launch", lambda chosen=launch, **_: chosen):
                    seconds = time_calls([call], 3 if new > 1000 else 12)
            except Exception as error:  # a tile that does not fit
                print(f"  {launch}: {type(error).__name__} {str(error)[:80]}")
                continue
            print(f"  {operations / seconds * 1e-12:6.0f} TFLOP/s {seconds * 1e6:8.1f} us  {launch}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="kernels whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="time other launch parameters of the attention kernels")
    parser.add_argument("--json", help="also write the JSON line to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernel_times.py times GPU kernels and found no CUDA device")
    with torch.inference_mode():
        if arguments.sweep:
            sweep_prefill()
            sweep_paged()
            return
        ceilings = measure_ceilings()
        print(
            f"{torch.cuda.get_device_name()}: copy {ceilings.bandwidth * 1e-12:.2f} TB/s, "
            f"bf16 product {ceilings.matrix * 1e-12:.0f} TFLOP/s, a launch in a graph {ceilings.launch * 1e6:.1f} us"
        )
        print(
            f"{'kernel':16s} {'shape':40s} {'us':>8s} {'floor':>8s} {'':>6s} {'torch':>8s} {'GB/s':>7s} {'TFLOP':>6s}"
        )
        bench = Bench(ceilings, arguments.only)
        bench_elementwise(bench)
        if bench.wants("linear"):
            bench_linear(bench)
        if bench.wants("paged_attention"):
            bench_paged(bench)
            bench_tree_and_window(bench)
        if bench.wants("prefill"):
            bench_prefill(bench)
        bench_decisions(bench)
    line = json.dumps(
        {
            "benchmark": "kernels",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "dtype": str(DTYPE),
            "ceilings": asdict(ceilings),
            "results": [asdict(result) for result in bench.results],
        }
    )
    print(line)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
