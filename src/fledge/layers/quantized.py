"""A linear layer whose matrix is in eight or four bits. It takes the place of a `Linear` of a loaded model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fledge.kernels.quantize_rows import CodedRows
from fledge.kernels.quantized_linear import (
    QuantizedWeight,
    as_stored,
    dequantize,
    for_gpu,
    join_rows,
    quantized_linear,
)


class QuantizedLinear(nn.Module):
    """Computes what a `Linear` with the dequantised matrix does, of x as it is or rounded to eight bits too.

    For inference: no gradient reaches the weights.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    input_scale: Tensor | None
    bias: Tensor | None
    batch_invariant = False  # as a `Linear`'s; set by `compute_invariantly`
    is_joined = False  # its rows are some of those of a larger matrix: see `join_quantized`

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        if quantized.codes.is_cuda:
            quantized = for_gpu(quantized, dtype)
        self.in_fragments = quantized.in_fragments
        self.kind, self.group_size, self.activations = quantized.kind, quantized.group_size, quantized.activations
        self.in_features, self.out_features = quantized.columns, len(quantized.scales)
        self.dtype = dtype  # that the model computes in
        for name in ("codes", "scales", "zeros", "order", "input_scale"):
            self.register_buffer(name, getattr(quantized, name))
        self.register_buffer("bias", bias)

    def compute_invariantly(self, wanted: bool) -> None:
        """On a GPU: let a row have the same bits in whatever company, and the codes lie as suits that."""
        self.batch_invariant = wanted
        if self.codes.is_cuda and not self.is_joined:
            laid = for_gpu(self.quantized, self.dtype, invariant=wanted)
            self.codes, self.in_fragments = laid.codes, laid.in_fragments

    @property
    def quantized(self) -> QuantizedWeight:
        return QuantizedWeight(
            kind=self.kind,
            columns=self.in_features,
            group_size=self.group_size,
            codes=self.codes,
            scales=self.scales,
            zeros=self.zeros,
            order=self.order,
            in_fragments=self.in_fragments,
            activations=self.activations,
            input_scale=self.input_scale,
        )

    @property
    def weight(self) -> Tensor:
        """The dequantised matrix, for who needs it as such: made anew each time."""
        return dequantize(self.quantized, self.dtype)

    def forward(self, x: Tensor | CodedRows) -> Tensor:
        return quantized_linear(x, self.quantized, self.bias, invariant=self.batch_invariant)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


def join_quantized(linears: Mapping[str, Sequence[QuantizedLinear]]) -> dict[str, QuantizedWeight] | None:
    """As `linear.join_rows`, for each name: all rows, as stored; None where those of a name have not the same layout.

    Those that have are views of it then, and round x by one scale if they have scales for it.
    """
    joined = {name: join_rows([as_stored(one.quantized) for one in several]) for name, several in linears.items()}
    whole = {name: weight for name, weight in joined.items() if weight is not None}
    if len(whole) < len(joined):
        return None
    for name, weight in whole.items():
        first = 0
        for linear in linears[name]:
            rows = slice(first, first := first + linear.out_features)
            linear.is_joined, linear.in_fragments = True, False
            linear.codes, linear.scales = weight.codes[rows], weight.scales[rows]
            linear.zeros = None if weight.zeros is None else weight.zeros[rows]
            linear.input_scale = weight.input_scale
    return whole
