"""What a weight format is, and the plain one: floating-point values, one matrix for each linear.

A weight format is one file of this package with a function `weight_format(quantization)`, which returns the format
if the `quantization_config` of a config.json is its own, else None. `fledge.checkpoints.weights` finds it there.
Norms, embeddings and biases are dense in every format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fledge.checkpoints import staging
from fledge.checkpoints.tensors import TensorInfo
from fledge.layers.linear import Linear

DENSE_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where weights go, and in which dtype."""

    device: torch.device | str
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class StoredLinear:
    """A linear [rows, columns] and what a checkpoint holds of it, by what follows its name in those of the tensors."""

    name: str  # as the checkpoint calls it; as we do, where it holds nothing
    rows: int
    columns: int
    held: Mapping[str, TensorInfo]


class WeightFormat(Protocol):
    """How a checkpoint stores the matrix of a linear, and how it becomes that linear again."""

    def stored_shapes(self, linear: StoredLinear) -> Mapping[str, tuple[int, ...]]:
        """The tensors that must stand for the matrix, by what follows the name of the linear in theirs."""
        ...

    def linear(
        self, empty: Linear, parts: Sequence[tuple[StoredLinear, Mapping[str, Tensor]]], placement: Placement
    ) -> nn.Module:
        """Return a module that computes `empty` with these tensors: itself, filled, or another with its forward.

        `parts` are the stored linears of which this one is made, rows joined in their order: query, key and value, or
        gate and up, or the linear itself. Each has the tensors of `stored_shapes`, and "bias" where there is one.
        """
        ...


class Dense:
    """float32, float16 or bfloat16."""

    def stored_shapes(self, linear: StoredLinear) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (linear.rows, linear.columns)}

    def linear(
        self, empty: Linear, parts: Sequence[tuple[StoredLinear, Mapping[str, Tensor]]], placement: Placement
    ) -> nn.Module:
        joined = {
            name: dense_tensor([tensors[name] for _, tensors in parts], like, placement)
            for name, like in empty.state_dict().items()
        }
        empty.load_state_dict(joined, assign=True)
        return empty


DENSE = Dense()


def dense_tensor(parts: Sequence[Tensor], like: Tensor, placement: Placement) -> Tensor:
    """Join rows. Floating-point values arrive in the placement's dtype, others in that of `like`.

    Always a copy: tensors mapped from a file are badly aligned, and would change with the file.
    """
    dtype = placement.dtype if like.is_floating_point() else like.dtype
    if torch.device(placement.device).type == "cuda" and len({part.dtype for part in parts}) == 1:
        return staging.joined(parts, placement.device).to(dtype)
    if len(parts) == 1:
        return parts[0].to(device=placement.device, dtype=dtype, copy=True)
    return torch.cat(list(parts)).to(device=placement.device, dtype=dtype)
