"""The batch-invariant mode: a token's bits do not depend on its company.

How many rows share a pass, how deep is drafted, chains or trees, which chunks a prompt is read in, what of it was found
in the prefix cache, whether the request was preempted: none of it changes what the target computes for a token, so
greedy answers are the same with and without speculation, and in any batch. The drafter is left as it is: it proposes.

On a GPU linear layers and attention have kernels of their own for that (`kernels/invariant_linear.py`,
`kernels/invariant_attention.py`); norms, rotation, gates and sampling see to one row at a time anyway. On a CPU the C
layers compute that way always.
"""

from torch import Tensor

from fledge.errors import ConfigError
from fledge.kernels._triton import HAS_TRITON
from fledge.kernels.paged_attention import WIDE_HEAD
from fledge.layers.block import SparseMLP
from fledge.layers.linear import Linear, compute_weight
from fledge.layers.quantized import QuantizedLinear
from fledge.models.target.decoder import TargetModel
from fledge.native.decoder import NativeTarget


def set_batch_invariant(target: TargetModel, wanted: bool) -> None:
    """Let a target compute so, or as is fastest. A ConfigError says why it cannot."""
    weight = compute_weight(target)
    if wanted and (problem := _obstacle(target, weight)):
        raise ConfigError(f"batch_invariant: {problem}")
    for module in target.modules():
        if isinstance(module, Linear):
            module.batch_invariant = wanted and weight.device.type == "cuda"


def _obstacle(target: TargetModel, weight: Tensor) -> str | None:
    if weight.device.type != "cuda":
        return None if isinstance(target, NativeTarget) else "on a CPU it takes the C layers, and they do not run here"
    modules = list(target.modules())
    if not HAS_TRITON:
        return "it takes Triton, which is not installed"
    if weight.element_size() != 2:
        return f"on a GPU it takes bfloat16 or float16, and this target is {str(weight.dtype).removeprefix('torch.')}"
    if any(isinstance(module, SparseMLP) for module in modules):
        return "not for a mixture of experts, whose sums depend on who shares an expert"
    if target.config.layer.latent is not None or target.config.layer.head_dim > WIDE_HEAD:
        return "not for latent attention, nor for heads wider than 256"
    if any(isinstance(module, QuantizedLinear) for module in modules):
        return "not for quantised weights"
    return None
