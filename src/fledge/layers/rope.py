"""Rotary position embedding in the half-rotation layout of Hugging Face checkpoints, with its scaling rules."""

import math

import torch
from torch import Tensor, nn

from fledge.kernels.rope_store import rotate
from fledge.layers.config import RopeConfig


class Rotation:
    """The rotations of the tokens of one forward pass, for all its layers.

    A kernel can work from `positions` and `inverse_frequencies`; everything else uses `apply`, which computes cos and
    sin once and keeps them.
    """

    def __init__(
        self,
        positions: Tensor,
        inverse_frequencies: Tensor,
        magnitude: float,
        dtype: torch.dtype,
        *,
        interleaved: bool = False,
    ) -> None:
        self.positions = positions  # [*lead] int64
        self.inverse_frequencies = inverse_frequencies  # [rotary_dim / 2] float32
        self.magnitude = magnitude
        self.dtype = dtype
        self.interleaved = interleaved
        # Not a cached_property: that takes a lock on Python 3.11, which torch.compile cannot follow.
        self._cos_sin: tuple[Tensor, Tensor] | None = None  # [*lead, 1, rotary_dim], ready to broadcast over heads

    def apply(self, x: Tensor) -> Tensor:
        """Rotate every head of x [*lead, heads, head_dim], or as many of its first dimensions as have a frequency.

        Interleaved pairs are taken apart, and stay so: products of queries and keys do not know their order.
        """
        if self._cos_sin is None:
            angles = self.positions.unsqueeze(-1).float() * self.inverse_frequencies
            angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
            cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
            self._cos_sin = cos.to(self.dtype), sin.to(self.dtype)
        cos, sin = self._cos_sin
        rotary_dim = cos.shape[-1]
        if self.interleaved:
            x = torch.cat([x[..., :rotary_dim:2], x[..., 1:rotary_dim:2], x[..., rotary_dim:]], dim=-1)
        if rotary_dim == x.shape[-1]:
            return rotate(x, cos, sin)
        return torch.cat([rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]], dim=-1)


class RotaryEmbedding(nn.Module):
    """Turns positions into rotations. Holds the inverse frequencies in float32 whatever the model's dtype."""

    inverse_frequencies: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        frequencies, self.magnitude = inverse_frequencies(config, head_dim)
        self.interleaved = config.interleaved
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return Rotation(positions, self.inverse_frequencies, self.magnitude, dtype, interleaved=self.interleaved)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Follow the model to its device, but keep float32: rounding would shift every distant position."""
        precise = self.inverse_frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse_frequencies = precise.to(self.inverse_frequencies.device)
        return self


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the rotation speed of each dimension pair [rotary_dim / 2] and the factor on cos and sin."""
    head_dim = config.rotary_dim(head_dim)  # scaling rules know nothing of dimensions that do not rotate
    # On the CPU by name: models are built on the meta device before their weights arrive, and this is no weight.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (config.theta**exponents)
    if not head_dim:  # nothing rotates, whatever the others do
        return plain, 1.0
    match config.type:
        case "default" | "dynamic":  # dynamic scaling begins beyond `max_positions`, where nothing is computed
            return plain, 1.0
        case "linear":
            return plain / config.factor, 1.0
        case "llama3":
            return _llama3(plain, config), 1.0
        case "longrope":
            factors = config.long_factor if config.factor > 1 else config.short_factor
            return plain / torch.tensor(factors, device="cpu"), config.attention_factor or 1.0
        case "yarn":
            magnitude = config.attention_factor
            if magnitude is None and config.mscale and config.mscale_all_dim:
                magnitude = yarn_mscale(config.factor, config.mscale) / yarn_mscale(
                    config.factor, config.mscale_all_dim
                )
            return _yarn(plain, config, head_dim), magnitude or yarn_mscale(config.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much yarn sharpens attention over a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Slow rotations are divided by `factor`, fast ones kept, those between blended by wavelength."""
    assert config.original_max_positions is not None
    wavelength = 2 * math.pi / plain
    blend = (config.original_max_positions / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(plain: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Like llama3, but the blend is a linear ramp over dimensions between two numbers of full rotations."""
    assert config.original_max_positions is not None
    original = config.original_max_positions

    def dimension_with(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)
