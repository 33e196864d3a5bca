"""Batch-invariant mode: a token's bits do not depend on the other rows of its pass.

Batch size, draft depth, chains or trees, chunks of a prompt, prefix cache hits and preemption do not change what the
target computes for a token. So greedy answers are the same with and without speculation, and in any batch. The drafter
is not changed: it only proposes.

On a GPU linear layers and attention use invariant kernels (`kernels/invariant_linear.py`,
`kernels/invariant_attention.py`) or launches (quantised weights: `kernels/fragment_linear.py`; experts:
`kernels/experts.py`); norms, rotation, gates and sampling work row by row anyway. On a CPU the C layers are always
invariant.

The kernels rely on the order of summation within a GPU's matrix instructions, which is not documented. So it is tested
when an engine starts.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fledge.errors import ConfigError
from fledge.kernels import invariant_attention as attention
from fledge.kernels._triton import HAS_TRITON
from fledge.kernels.experts import MANY_PAIRS
from fledge.kernels.invariant_linear import ALIGNED, invariant_linear
from fledge.kernels.paged_attention import WIDE_HEAD
from fledge.kernels.quantized_linear import quantized_linear
from fledge.layers.linear import Linear, compute_weight
from fledge.layers.mlp import SparseMLP, host_runs_experts
from fledge.layers.quantized import QuantizedLinear
from fledge.models.target.decoder import TargetModel
from fledge.native.decoder import NativeTarget


def set_batch_invariant(target: TargetModel, wanted: bool, *, drafts_trees: bool = False) -> None:
    """Switch a target's batch-invariant mode on or off. Raises ConfigError if it cannot be batch-invariant."""
    weight = compute_weight(target)
    if wanted and (problem := _obstacle(target, weight, drafts_trees)):
        raise ConfigError(f"batch_invariant: {problem}")
    wanted = wanted and weight.device.type == "cuda"
    _set(target, wanted)
    if wanted and (what := differing(target)):
        _set(target, False)
        raise ConfigError(f"batch_invariant: on this GPU {what} has other bits among others than alone")


def _set(target: TargetModel, wanted: bool) -> None:
    for module in target.modules():
        if isinstance(module, Linear | SparseMLP):
            module.batch_invariant = wanted
        if isinstance(module, QuantizedLinear):
            module.compute_invariantly(wanted)


def _obstacle(target: TargetModel, weight: Tensor, drafts_trees: bool) -> str | None:
    modules = list(target.modules())
    if weight.device.type != "cuda":
        if drafts_trees:
            return "on a CPU not for draft trees, whose nodes lie in another order than a chain's"
        if isinstance(target, NativeTarget):
            return None
        if any(isinstance(module, SparseMLP) for module in modules):
            return "on a CPU not for a mixture of experts, whose sums depend there on who shares an expert"
        return "on a CPU it takes the C layers, and they do not run here"
    if not HAS_TRITON:
        return "it takes Triton, which is not installed"
    if weight.element_size() != 2:
        return f"on a GPU it takes bfloat16 or float16, and this target is {str(weight.dtype).removeprefix('torch.')}"
    if host_runs_experts(target):
        return "not for experts that are not all stored alike, or whose columns have an order of their own"
    if target.config.layer.latent is not None or target.config.layer.head_dim > WIDE_HEAD:
        return "not for latent attention, nor for heads wider than 256"
    linears = [module for module in modules if isinstance(module, Linear | QuantizedLinear)]
    if any(linear.in_features * weight.element_size() % ALIGNED for linear in linears):
        return f"the rows of a weight are no multiple of {ALIGNED} bytes long"
    return None


def _one_of_each(target: TargetModel) -> Iterable[Linear | QuantizedLinear | SparseMLP]:
    """Return one linear layer of each shape and weight format, and one layer of experts."""
    found: dict[object, Linear | QuantizedLinear | SparseMLP] = {}
    for module in target.modules():
        if isinstance(module, SparseMLP):
            found.setdefault(SparseMLP, module)
        elif isinstance(module, Linear | QuantizedLinear) and not getattr(module, "is_joined", False):
            layout: tuple[object, ...] = module.in_features, module.out_features
            if isinstance(module, QuantizedLinear):
                layout += module.kind, module.group_size, module.zeros is None, module.order is None, module.activations
            found.setdefault(layout, module)
    return found.values()


def _product(module: Linear | QuantizedLinear | SparseMLP, rows: Tensor) -> Tensor:
    if isinstance(module, Linear):
        return invariant_linear(rows, module.weight)
    if isinstance(module, QuantizedLinear):
        return quantized_linear(rows, module.quantized, invariant=True)
    mixed: Tensor = module(rows)
    return mixed


def differing(target: TargetModel) -> str | None:
    """Compare results of single rows with those in a batch, for linear layers and attention; return what differs."""
    layer, weight = target.config.layer, compute_weight(target)
    generator = torch.Generator(weight.device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=generator)

    for module in _one_of_each(target):
        rows = numbers(MANY_PAIRS + 1 if isinstance(module, SparseMLP) else 300, module.in_features)
        product = _product(module, rows)
        if any(not torch.equal(_product(module, rows[:count]), product[:count]) for count in (1, 20, 70)):
            return "a row of a product"
    block, tokens = 64, attention.PIECE + 44
    keys, values = numbers(2, -(-tokens // block), block, layer.num_kv_heads, layer.head_dim)
    query = numbers(tokens, layer.num_heads, layer.head_dim)
    table = torch.arange(len(keys), dtype=torch.int32, device=weight.device)[None]

    def attend(first: int) -> Tensor:
        context = torch.tensor([first], device=weight.device)
        return attention.invariant_attention(
            query[first:], keys, values, table, context, scale=0.1, max_context=tokens, max_queries=tokens - first
        )

    whole = attend(0)
    if any(not torch.equal(attend(first), whole[first:]) for first in (tokens - 1, tokens - 6)):
        return "a query"
    return None
