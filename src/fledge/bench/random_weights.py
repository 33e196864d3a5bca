"""Random weights for enlarged models: reproducible on one kind of device, and fast to generate."""

import functools

import torch
from torch import Tensor, nn

RANDOM_STD = 0.02


def randomise(module: nn.Module, seed: int) -> None:
    """Random matrices, norms of one, and zero output projections, so that a layer adds nothing to the stream."""
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            parameter.zero_()
        elif parameter.dim() == 2:
            random_matrix(parameter, seed * 16 + number)
        else:
            parameter.fill_(1)


def random_matrix(matrix: Tensor, seed: int) -> None:
    """Fill with normal numbers. On a CPU all matrices are slices of one long vector, because drawing takes minutes."""
    if matrix.device.type != "cpu":
        matrix.normal_(std=RANDOM_STD, generator=torch.Generator(matrix.device).manual_seed(seed))
        return
    numbers, flat = _random_numbers(matrix.dtype), matrix.view(-1)
    begin = seed * 7_368_787 % len(numbers)  # a prime, so that slices begin far from each other
    written = 0
    while written < len(flat):
        stretch = numbers[begin : begin + len(flat) - written]
        flat[written : written + len(stretch)] = stretch
        begin, written = 0, written + len(stretch)


@functools.cache
def _random_numbers(dtype: torch.dtype) -> Tensor:
    """Normal numbers. Their count is prime, so that no two rows of a matrix are equal, whatever its width."""
    numbers = torch.empty(16_777_213).normal_(std=RANDOM_STD, generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype)
