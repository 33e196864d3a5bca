"""A linear layer that small batches do not starve.

Decoding multiplies a few rows with a large matrix. On a GPU a kernel of our own takes the few rows, and cuBLAS the
many. Models construct `Linear` and nothing else: whoever has the weights in another form (a quantised checkpoint, a
layout for CPUs) puts a module with the same `forward` in its place.
"""

from torch import Tensor, nn

from fledge.kernels.skinny_linear import linear


class Linear(nn.Linear):
    """`nn.Linear` with the same parameters and results."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
