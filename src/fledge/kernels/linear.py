"""x W^T + bias of plain numbers: which kernel takes it.

Few rows go to kernels of our own (`fused_linear` for a model's head, `skinny_linear`), many to cuBLAS.
"""

import torch.nn.functional as F
from torch import Tensor

from fledge.kernels._triton import has_room, processors, runs_triton
from fledge.kernels.fused_linear import MOST_ROWS, can_fuse, fused_linear
from fledge.kernels.skinny_linear import choose_launch, skinny_linear_triton


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias for x [..., size], weight [columns, size] and bias [columns]."""
    if runs_triton(x, weight, bias) and _suits(x, weight):
        rows, columns, available = x.numel() // x.shape[-1], weight.shape[0], processors(x.device)
        if rows <= MOST_ROWS and columns >= 128 * available and bias is None and can_fuse(weight):  # a model's head
            return fused_linear(x, weight)
        launch = choose_launch(rows=rows, columns=columns, processors=available)
        if launch is not None:
            return skinny_linear_triton(x, weight, bias, launch=launch)
    return F.linear(x, weight, bias)


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take this product: 16-bit numbers, whole steps along the rows, a GPU with room for them."""
    return (
        x.numel() > 0
        and x.shape[-1] % 512 == 0
        and x.dtype == weight.dtype
        and x.element_size() == 2
        and weight.is_contiguous()
        and has_room(x.device)
    )
