"""The fused draft loss against its reference on a GPU, at the shapes training has, and how fast it is.

PYTHONPATH=src:. python tests/gpu/test_draft_loss.py            # checks, then one JSON line
PYTHONPATH=src:. python tests/gpu/test_draft_loss.py --checks   # checks only
"""

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)

from fledge.kernels.draft_loss import DraftLoss, draft_loss
from tests.gpu.script import run_checks
from tests.unit.kernels import draft_loss_cases as cases
from tests.unit.kernels.draft_loss_cases import KINDS, Case, draft_loss_reference

GPU = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
ROWS, VOCAB = 16384, 32000
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@check
def kernel_at_many_shapes() -> None:
    for kind, kl_weight in KINDS:
        for dtype in cases.DTYPES:
            for rows, vocab in ((64, 32000), (9, 128256), (5, 151936), (33, 1001), (3, 7), (2, 1)):
                cases.kernel_against_reference(rows, 1 + rows // 2, vocab, dtype, GPU, kind, kl_weight)
        for num_warps in (1, 4, 8, 32):
            cases.kernel_against_reference(20, 10, 32000, BF16, GPU, kind, kl_weight, num_warps=num_warps)
        cases.kernel_against_reference(20, 10, 4099, FP32, GPU, kind, kl_weight, target_dtype=BF16)
        cases.kernel_against_reference(20, 10, 4099, BF16, GPU, kind, kl_weight, strided=True)


@check
def hard_rows() -> None:
    """Rows of weight zero that hold NaN, -inf in the target, certainty and uniformity."""
    for kind, kl_weight in KINDS:
        case = Case.random(6, 6, 5003, dtype=BF16, device=GPU)
        case.target_rows = torch.arange(6, device=GPU)
        case.weight[0] = 0.0
        case.logits[0] = case.target_logits[0] = float("nan")
        case.target_logits[1, 100:] = float("-inf")
        case.target_logits[2] = float("-inf")
        case.target_logits[3] = 0.0
        case.target_logits[4, 7] = case.logits[4, 4000] = 1000.0
        case.logits[5] = 0.0
        case.target_log_total = case.target_logits.float().logsumexp(-1)
        case.target_log_total[2] = 0.0
        actual, gradient = case.run(draft_loss, kind, kl_weight)
        expected, expected_gradient = case.run(draft_loss_reference, kind, kl_weight)
        assert gradient.isfinite().all()
        assert not gradient[[0, 2]].any()
        assert torch.equal(actual.choice, expected.choice)
        torch.testing.assert_close(actual.row_loss, expected.row_loss, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(gradient[:5], expected_gradient[:5], rtol=2.0**-7, atol=1e-6)


@check
def equal_logits_choose_the_lowest() -> None:
    case = Case.random(4, 4, 32000, dtype=BF16, device=GPU)
    case.logits[0] = 0.0
    case.logits[1, [31999, 20000, 4097]] = 90.0
    case.logits[2, 31999] = 90.0
    case.logits[3, [4096, 4095]] = 90.0
    assert case.run(draft_loss, "kl", 0.0)[0].choice.tolist() == [0, 4097, 31999, 4095]


@check
def more_than_two_billion_logits() -> None:
    """Offsets pass 2**31: the last rows of a [70000, 32000] matrix get what they get alone."""
    rows = 70_000
    logits = torch.randn(rows, VOCAB, device=GPU, dtype=BF16)
    target = torch.randn(8, VOCAB, device=GPU, dtype=BF16)
    log_total = target.float().logsumexp(-1)
    target_rows = torch.arange(rows, device=GPU) % 8
    weight = torch.ones(rows, device=GPU)
    small = draft_loss(logits[-3:].clone(), target, target_rows[-3:], log_total, weight[-3:], kind="lk")
    large = draft_loss(from_layer(logits), target, target_rows, log_total, weight, kind="lk")
    assert torch.equal(large.row_loss[-3:], small.row_loss)
    large.total.backward()


@check
def compiled_heads_and_the_engine_of_autograd() -> None:
    """Behind a compiled layer, in place, scaled: the weights' gradients are those of the reference."""
    head = nn.Linear(256, 5003, bias=False, device=GPU, dtype=BF16)
    body = nn.Sequential(nn.Linear(256, 256, device=GPU, dtype=BF16), nn.Tanh(), head)
    hidden = torch.randn(40, 256, device=GPU, dtype=BF16)
    case = Case.random(40, 20, 5003, dtype=BF16, device=GPU)
    parameters = list(body.parameters())

    def total(function: Callable[..., DraftLoss], layers: Callable[[Tensor], Tensor]) -> Tensor:
        return 0.25 * function(layers(hidden), *case.rest(), kind="soft_ce").total

    expected = torch.autograd.grad(total(draft_loss_reference, body), parameters)
    for layers in (body, torch.compile(body)):
        actual = torch.autograd.grad(total(draft_loss, layers), parameters)
        for ours, reference in zip(actual, expected, strict=True):
            error = (ours.float() - reference.float()).norm() / reference.float().norm()
            assert error < 2.0**-6, error  # two bfloat16 roundings more, and the compiled layer's own


class _FromLayer(torch.autograd.Function):
    """Memory that looks like a layer's output to autograd, at no cost of its own."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(()).float(), None


def from_layer(values: Tensor) -> Tensor:
    return _FromLayer.apply(torch.zeros((), device=values.device, requires_grad=True), values)


def measured(step: Callable[[], object], prepare: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median time in milliseconds, and the peak memory in GiB above what was there before."""
    times = []
    extra = 0
    for repeat in range(repeats + 2):
        prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        if repeat >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times), extra / 2**30


def measurements(rows: int, vocab: int) -> dict[str, Any]:
    original = 3.0 * torch.randn(rows, vocab, device=GPU, dtype=BF16)
    target = 3.0 * torch.randn(rows, vocab, device=GPU, dtype=BF16)
    work = torch.empty_like(original)
    log_total = torch.cat([part.float().logsumexp(-1) for part in target.split(1024)])
    target_rows = (torch.arange(rows, device=GPU) + 1).clamp(max=rows - 1)
    ones = torch.ones(rows, device=GPU)
    some = (torch.rand(rows, device=GPU) < 0.5).float()
    bytes_of_one = work.numel() * work.element_size()
    copy_ms, _ = measured(lambda: work.copy_(original), lambda: None, 20)
    copy_rate = 2 * bytes_of_one / copy_ms / 1e6  # GB/s

    def timed(function: Callable[..., DraftLoss], kind: str, *, weight: Tensor, scale: float = 1.0, **options: Any):
        def step() -> None:
            result = function(from_layer(work), target, target_rows, log_total, weight, kind=kind, **options)
            (result.total if scale == 1.0 else result.total * scale).backward()

        return measured(step, lambda: work.copy_(original), 5 if function is draft_loss_reference else 20)

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "rows": rows,
        "draft_vocab": vocab,
        "dtype": "bfloat16",
        "copy_gb_per_s": round(copy_rate),
    }
    for kind, options in (("soft_ce", {}), ("kl", {}), ("lk", {"kl_weight": 0.1})):
        fused_ms, fused_gib = timed(draft_loss, kind, weight=ones, **options)
        eager_ms, eager_gib = timed(draft_loss_reference, kind, weight=ones, **options)
        # What must move: the logits and the target are read once, the gradient is written once.
        report[kind] = {
            "fused_ms": round(fused_ms, 3),
            "eager_ms": round(eager_ms, 3),
            "times_faster": round(eager_ms / fused_ms, 1),
            "fused_peak_gib": round(fused_gib, 3),
            "eager_peak_gib": round(eager_gib, 3),
            "share_of_copy_bandwidth": round(3 * bytes_of_one / fused_ms / 1e6 / copy_rate, 3),
            "fused_ms_by_warps": {
                warps: round(timed(draft_loss, kind, weight=ones, num_warps=warps, **options)[0], 3)
                for warps in (4, 8, 16, 32)
            },
        }
    report["soft_ce"]["fused_ms_with_scaling"] = round(timed(draft_loss, "soft_ce", weight=ones, scale=0.5)[0], 3)
    report["soft_ce"]["fused_ms_half_the_rows_taught"] = round(timed(draft_loss, "soft_ce", weight=some)[0], 3)
    return report


if "pytest" in sys.modules:
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("name", CHECKS)
    def test_draft_loss(name: str) -> None:
        CHECKS[name]()


def main(arguments: list[str]) -> int:
    failed = run_checks(CHECKS, [part for part in arguments if not part.startswith("--")])
    torch.cuda.empty_cache()
    if "--checks" not in arguments:
        print(json.dumps(measurements(ROWS, VOCAB)), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
