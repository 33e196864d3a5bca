"""Choosing and running experts against their definitions, at given shapes. See `cases.py`."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels import route as routing
from fledge.kernels.experts import MANY_PAIRS, choose_launch, few_experts, reads_codes, routed_experts
from fledge.kernels.quantize_rows import quantize_rows_reference
from fledge.kernels.quantized_linear import Activations, dequantize
from fledge.kernels.route import Routing, route_reference
from tests.unit.kernels.cases import EPS, close, randn
from tests.unit.kernels.interpreter import in_plain_torch, in_triton
from tests.unit.kernels.quantized_cases import Case, quantized

route_triton, add_norm_router_triton = in_triton(routing.route), in_triton(routing.add_norm_router)


def add_norm_router(rows: int, experts: int, size: int, dtype: torch.dtype, device: str) -> None:
    """One kernel against norm and product in torch; rows of the update are apart from each other."""
    x = randn(rows, 2 * size, dtype=dtype, device=device)[:, :size]
    residual, weight = randn(rows, size, dtype=dtype, device=device), randn(size, dtype=dtype, device=device)
    router, bias = randn(experts, size, dtype=dtype, device=device), randn(experts, dtype=dtype, device=device)
    for added in (None, bias):
        found = add_norm_router_triton(x, residual, weight, EPS, router, added)
        expected = in_plain_torch(routing.add_norm_router)(x, residual, weight, EPS, router, added)
        for one, other, units in zip(found, expected, (2, 1, 2), strict=True):
            close(one, other, units, size=float(other.abs().max()))
        alone = add_norm_router_triton(x[-1:], residual[-1:], weight, EPS, router, added)
        assert all(torch.equal(one[0], all_[-1]) for one, all_ in zip(alone, found, strict=True)), "row by row"


def route(rows: int, experts: int, chosen: int, device: str, *, is_biased: bool = False, **options: object) -> None:
    logits = randn(rows, experts, dtype=torch.float32, device=device)
    bias = randn(experts, dtype=torch.float32, device=device) * 0.1 if is_biased else None
    how = Routing(chosen=chosen, shared=2, **options)  # type: ignore[arg-type]
    weights, numbers = route_triton(logits, bias, how)
    expected_weights, expected_numbers = route_reference(logits, bias, how)
    assert torch.equal(numbers, expected_numbers)
    close(weights, expected_weights, 2)
    # Equal experts: any of them, but each once, and weights that belong to them.
    weights, numbers = route_triton(torch.zeros_like(logits), bias, how)
    assert all(len(set(one)) == len(one) and 0 <= min(one) <= max(one) < experts + 2 for one in numbers.tolist())
    numbers = route_triton(torch.full_like(logits, torch.nan), bias, how)[1][:, :chosen]
    assert 0 <= int(numbers.min()) <= int(numbers.max()) < experts, "a model gone wrong reads no foreign memory"


def experts(
    rows: int,
    count: int,
    chosen: int,
    hidden: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    limit: float | None = None,
    *,
    parts: int = 0,
) -> None:
    """`few_experts` against its definition in float64; with a `limit` also with biases. One row: `routed_experts` too.

    `parts`: of a shared expert, which every row chooses too.
    """
    x = randn(rows, hidden, dtype=dtype, device=device)
    gate_up = randn(count, 2 * size, hidden, dtype=dtype, device=device) * hidden**-0.5
    down = randn(count, hidden, size, dtype=dtype, device=device) * size**-0.5
    biases = [randn(*one.shape[:2], dtype=dtype, device=device) if limit else None for one in (gate_up, down)]
    numbers = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)])
    numbers = torch.cat([numbers, torch.arange(count, count + parts).expand(rows, -1)], dim=1).to(device)
    weights = torch.rand(numbers.shape, device=device)
    shared = None
    if parts:
        shared_gate_up = randn(2, parts, size, hidden, dtype=dtype, device=device) * hidden**-0.5
        shared_down = randn(hidden, parts, size, dtype=dtype, device=device) * size**-0.5
        shared = shared_gate_up.view(-1, hidden), shared_down.view(hidden, -1)
    matrices = (gate_up, biases[0]), (down, biases[1]), limit
    logits, bias = randn(rows, count, dtype=dtype, device=device), randn(count, dtype=torch.float32, device=device)
    how = Routing(chosen=chosen, shared=parts, scale=0.7)
    found = []
    if rows == 1:
        weights, numbers = route_reference(logits, bias, how)
        found.append(routed_experts(x, logits, bias, how, *matrices, shared=shared))
    found.append(few_experts(x, weights, numbers, *matrices, shared=shared))
    if parts:
        gate_up = torch.cat([gate_up, shared_gate_up.transpose(0, 1).flatten(1, 2)])
        down = torch.cat([down, shared_down.transpose(0, 1)])
    exact = defined(x, weights, numbers, gate_up, down, biases, limit)
    for one in found:
        close(one, exact.to(dtype), 2, size=float(exact.abs().max()))
    launches = [
        choose_launch(pairs, rows, invariant=invariant)
        for pairs in (numbers.numel(), MANY_PAIRS + 1)
        for invariant in (False, True)
    ]
    for launch in launches[1:]:
        out = few_experts(x, weights, numbers, *matrices, shared=shared, launch=launch)
        close(out, exact.to(dtype), 2, size=float(exact.abs().max()))


def defined(
    x: Tensor,
    weights: Tensor,
    numbers: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: Sequence[Tensor | None],
    limit: float | None,
    rounded: Callable[[Tensor], Tensor] = lambda middle: middle,
) -> Tensor:
    """What `few_experts` says, in float64; gate_up and down with a shared expert's parts behind the others."""
    expected = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, choice in [(row, choice) for row in range(len(x)) for choice in range(numbers.shape[1])]:
        number = int(numbers[row, choice])
        wide = [one.double() for one in (gate_up[number], x[row], down[number])]
        both = wide[0] @ wide[1] + (0 if biases[0] is None else biases[0][number].double())
        gate, up = both.chunk(2)
        if limit is None:
            middle = F.silu(gate) * up
        else:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            middle = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        said = wide[2] @ rounded(middle) + (0 if biases[1] is None else biases[1][number].double())
        expected[row] += weights[row, choice].double() * said
    return expected


def coded_experts(
    rows: int,
    count: int,
    chosen: int,
    hidden: int,
    size: int,
    case: Case,
    dtype: torch.dtype,
    device: str,
    limit: float | None = None,
    *,
    activations: Activations | None = None,
) -> None:
    """Experts in codes against the definition with what these stand for, by every launch; a row's bits are its own."""
    kind, group, with_zeros = case
    options = {"with_zeros": with_zeros, "device": device, "is_stored": True, "activations": activations}
    gate_up = quantized(kind, count * 2 * size, hidden, group, **options)  # type: ignore[arg-type]
    down = quantized(kind, count * hidden, size, group, **options)  # type: ignore[arg-type]
    assert reads_codes(gate_up)
    x = randn(rows, hidden, dtype=dtype, device=device) * 0.1
    numbers = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)]).to(device)
    weights = torch.rand(numbers.shape, device=device)
    sizes = (count, 2 * size), (count, hidden)
    biases = [randn(*one, dtype=dtype, device=device) if limit else None for one in sizes]
    matrices = (gate_up, biases[0]), (down, biases[1]), limit
    wide = dequantize(gate_up).view(*sizes[0], hidden), dequantize(down).view(*sizes[1], size)

    def rounded(rows: Tensor, input_scale: Tensor | None) -> Tensor:
        return rows if activations is None else quantize_rows_reference(rows, input_scale).dequantized()

    exact = defined(
        rounded(x, gate_up.input_scale),
        weights,
        numbers,
        *wide,
        biases,
        limit,
        lambda middle: rounded(middle.to(dtype)[None], down.input_scale)[0].double(),
    )
    units = 2 if activations is None else 2**6  # a middle value at an edge has the next code, a sixteenth away
    for pairs, invariant in ((numbers.numel(), False), (numbers.numel(), True), (MANY_PAIRS + 1, False)):
        launch = choose_launch(pairs, rows, in_codes=True, invariant=invariant)
        out = few_experts(x, weights, numbers, *matrices, launch=launch)
        close(out, exact.to(dtype), units, size=float(exact.abs().max()))
        others = x.flip(0).contiguous()
        others[-1] = x[-1]
        again = few_experts(others, weights, numbers, *matrices, launch=launch)
        assert torch.equal(again[-1], out[-1]), "a row does not depend on its neighbours"
