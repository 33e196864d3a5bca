"""A linear layer with 8-bit or 4-bit weights, which replaces a `Linear` of a loaded model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fledge.kernels.quantize_rows import QuantizedRows
from fledge.kernels.quantized_linear import (
    QuantizedWeight,
    dequantize,
    join_rows,
    quantized_linear,
    to_gpu_layout,
    to_stored_layout,
)


class QuantizedLinear(nn.Module):
    """A `Linear` with a quantised weight, and perhaps activations quantised to E4M3. For inference: no gradients."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    input_scale: Tensor | None
    bias: Tensor | None
    batch_invariant = False  # as in `Linear`; set by `compute_invariantly`
    is_joined = False  # its tensors are views of a larger matrix: see `join_quantized`

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        if quantized.codes.is_cuda:
            quantized = to_gpu_layout(quantized, dtype)
        self.in_fragments = quantized.in_fragments
        self.kind, self.group_size, self.activations = quantized.kind, quantized.group_size, quantized.activations
        self.in_features, self.out_features = quantized.columns, len(quantized.scales)
        self.dtype = dtype  # the model's compute dtype
        for name in ("codes", "scales", "zeros", "order", "input_scale"):
            self.register_buffer(name, getattr(quantized, name))
        self.register_buffer("bias", bias)

    def compute_invariantly(self, wanted: bool) -> None:
        """On a GPU: make bits of a row's result independent of the other rows, or not; changes the layout of codes."""
        self.batch_invariant = wanted
        if self.codes.is_cuda and not self.is_joined:
            laid = to_gpu_layout(self.quantized, self.dtype, invariant=wanted)
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
        """The dequantised matrix, computed on each access."""
        return dequantize(self.quantized, self.dtype)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        return quantized_linear(x, self.quantized, self.bias, invariant=self.batch_invariant)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


def join_quantized(linears: Mapping[str, Sequence[QuantizedLinear]]) -> dict[str, QuantizedWeight] | None:
    """Concatenate the rows of the linears under each name; None if those of any name differ in layout.

    The linears become views of the result, and those of a name share the largest of their input scales, if any.
    """
    joined = {
        name: join_rows([to_stored_layout(one.quantized) for one in several]) for name, several in linears.items()
    }
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
