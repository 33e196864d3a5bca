"""A linear layer whose matrix is in eight or four bits. It takes the place of a `Linear` of a loaded model."""

import torch
from torch import Tensor, nn

from fledge.kernels.quantize_rows import CodedRows
from fledge.kernels.quantized_linear import QuantizedWeight, dequantize, for_gpu, quantized_linear


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
        laid = for_gpu(self.quantized, self.dtype, invariant=wanted) if self.codes.is_cuda else self.quantized
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
