"""KV cache of one sequence in contiguous tensors: the storage of the reference loop.

Deliberately simple: the attention mask is computed from stored positions, so the same code covers causal decoding,
sliding windows and draft trees. Faster storages are tested against it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.cache_codes import decode, encode
from fledge.kernels.paged_attention import masked_attention, window_at
from fledge.layers.attention import AttentionSpec, Heads


class DenseCache:
    """Grows with each pass; rows are removed by `truncate` (after a chain) or `keep` (after a draft tree).

    With `dtype`, rows are rounded as in a cache of that dtype.
    """

    def __init__(
        self, num_layers: int, device: torch.device | str = "cpu", *, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype
        self._stored: list[tuple[Tensor, ...]] = [()] * num_layers  # key and value, each [rows, kv_heads, head_dim]
        self._positions = torch.empty(0, dtype=torch.int64, device=device)  # [length]

    @property
    def length(self) -> int:
        return len(self._positions)

    def extend(self, positions: Tensor, visible: Tensor | None = None) -> "DensePass":
        """Append rows at `positions` [rows] and return the storage for the forward pass that fills them.

        `visible` [rows, n]: attention mask over the last n rows, which include the new ones; all rows before those are
        visible. By default the mask is causal.
        """
        rows = len(positions)
        start = self.length
        self._positions = torch.cat([self._positions, positions])
        if visible is None:
            visible = torch.ones(rows, rows, dtype=torch.bool, device=positions.device).tril()
        earlier = visible.new_ones(rows, self.length - visible.shape[1])
        distance = positions[:, None] - self._positions[None, :]
        visible = torch.cat([earlier, visible], dim=1)
        return DensePass(cache=self, start=start, visible=visible, positions=positions, distance=distance)

    def truncate(self, length: int) -> None:
        """Remove all rows from `length` on."""
        assert 0 <= length <= self.length
        self._positions = self._positions[:length]

    def keep(self, start: int, rows: Tensor) -> None:
        """Keep the rows before `start`, and `rows` (ascending indices relative to `start`) of those after it."""
        kept = torch.cat([torch.arange(start, device=rows.device), start + rows])
        self._positions = self._positions[kept]
        self._stored = [tuple(side[kept] for side in sides) for sides in self._stored]

    def write(self, spec: AttentionSpec, start: int, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Store `rows` (keys and values) of one layer at `start`, and return all rows of the layer up to their end."""
        if self.dtype is not None:
            rows = tuple(
                decode(encode(new, self.dtype, scale), new.dtype, scale)
                for new, scale in zip(rows, spec.kv_scales, strict=True)
            )
        sides = self._stored[spec.layer] or tuple(new[:0] for new in rows)
        self._stored[spec.layer] = tuple(torch.cat([s[:start], new]) for s, new in zip(sides, rows, strict=True))
        return self._stored[spec.layer]


@dataclass(frozen=True, kw_only=True)
class DensePass:
    """One forward pass over a `DenseCache`. Implements `KeyValueStorage` for tokens without a batch dimension."""

    cache: DenseCache
    start: int
    visible: Tensor  # bool [rows, cache length]
    positions: Tensor  # [rows]
    distance: Tensor  # query position - key position [rows, cache length]

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        cached = heads.for_cache(len(self.visible))
        keys, values = cached.read(*self.cache.write(spec, self.start, cached.rows))
        visible = self.visible
        if spec.sliding_window is not None:
            visible = visible & (self.distance < window_at(self.positions[:, None], spec.sliding_window, spec.chunked))
        query, keys, values = (x.transpose(0, 1)[None] for x in (cached.query, keys, values))  # [1, heads, rows, dim]
        sinks = None if heads.sinks is None else heads.sinks[:, None]
        mixed = masked_attention(query, keys, values, visible, spec.scale, sinks, spec.softcap)
        return cached.leave(mixed[0].transpose(0, 1))
