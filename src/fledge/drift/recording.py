"""Storages that record where attention goes, and reduce it to position classes as they compute it.

The drafter is the module that serves; only where its keys and values live is different. `VerifiedRows` is its pass over
the verified text, `DraftedRows` the draft steps of many rounds at once: round r sees the verified rows up to its own
slot, as serving does after each resynchronisation, and the rows it drafted itself.

                verified rows        drafted by round 0   drafted by round 1
    round 0     x x x . . .          x x                  . .
    round 1     x x x x x .          . .                  x x

Weights exist for a bounded number of pairs at a time, whatever the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift.segments import Segment
from fledge.layers.attention import AttentionSpec, ProjectedHeads

MAX_SCORES = 1 << 25  # attention weights that exist at a time
_WINDOW_CHUNK = 1024  # queries of a layer with a sliding window that are computed together


@dataclass(frozen=True, kw_only=True)
class AttentionRecord:
    """Where the attention of one layer went in one draft step of some rounds. float32, or float64 for such models."""

    mass: Tensor  # [rounds, heads, segments]: sums to 1 over segments
    entropy: Tensor  # [rounds, heads], in nats
    distance: Tensor  # [rounds, heads]: mean distance in tokens from query to key


class CausalPass:
    """`KeyValueStorage` for one pass of a target over one sequence. Keeps nothing, forms no square matrix."""

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        return causal_attention(*heads.finished(), scale=spec.scale, window=spec.sliding_window)


class VerifiedRows:
    """`KeyValueStorage` for the drafter's pass over verified rows 0 .. n - 1, which it keeps.

    `slots`, ascending, are the rows from which rounds begin to draft: their attention, which is that of the first
    draft, is recorded. `segments` [n] int64 says what each row is part of.
    """

    def __init__(self, slots: Sequence[int], segments: Tensor, *, max_scores: int = MAX_SCORES) -> None:
        self.slots = torch.tensor(slots, device=segments.device)  # [rounds]
        self._seen = [slot + 1 for slot in slots]  # verified rows that each round sees; on the host, not to wait for it
        self._max_scores = max_scores
        self.records: list[AttentionRecord] = []  # by layer
        self._keys: list[Tensor] = []  # by layer, each [kv_heads, n, head_dim], at least float32
        self._values: list[Tensor] = []
        # Attention weights times this give the mass of each segment and, in the last column, the mean distance from the
        # last row: the rounds are near it, and distances to far rows should not drown those to near ones.
        places = torch.arange(len(segments), device=segments.device)
        self._last = len(segments) - 1
        self._summary = torch.cat([F.one_hot(segments, len(Segment)), (self._last - places)[:, None]], dim=1)

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        assert spec.layer == len(self._keys), "one pass, layer by layer"
        assert spec.sliding_window is None, "drafters have no windows"
        query, key, value = heads.finished()
        self._keys.append(_wide(key).transpose(0, 1).contiguous())
        self._values.append(_wide(value).transpose(0, 1).contiguous())
        self._summary = self._summary.to(self._keys[0].dtype)
        _, record = self.look(query[self.slots], 0, spec)
        self.records.append(record)
        return causal_attention(query, key, value, scale=spec.scale)

    def look(
        self, query: Tensor, first: int, spec: AttentionSpec, own: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, AttentionRecord]:
        """Attend from query [rounds, heads, head_dim], of the rounds from `first` on, to verified and `own` rows.

        `own` are the keys and values, each [rounds, n, kv_heads, head_dim], that each round drafted, its current row
        the last. Returns the attention, like query, and its record.
        """
        drafted = 0 if own is None else own[0].shape[1]
        per_round = query.shape[1] * (self._seen[first + len(query) - 1] + drafted)
        step = max(1, self._max_scores // per_round)
        parts = [
            self._look(
                query[low : low + step],
                slice(first + low, first + min(low + step, len(query))),
                spec,
                None if own is None else (own[0][low : low + step], own[1][low : low + step]),
            )
            for low in range(0, len(query), step)
        ]
        records = [record for _, record in parts]
        return torch.cat([mixed for mixed, _ in parts]), AttentionRecord(
            mass=torch.cat([record.mass for record in records]),
            entropy=torch.cat([record.entropy for record in records]),
            distance=torch.cat([record.distance for record in records]),
        )

    def _look(
        self, query: Tensor, which: slice, spec: AttentionSpec, own: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, AttentionRecord]:
        rounds, _, head_dim = query.shape
        slots, seen = self.slots[which], self._seen[which][-1]
        keys, values = self._keys[spec.layer][:, :seen], self._values[spec.layer][:, :seen]
        kv_heads = len(keys)
        grouped = _wide(query).view(rounds, kv_heads, -1, head_dim)
        wide = grouped.transpose(0, 1) * spec.scale  # [kv, rounds, group, dim]
        scores = torch.bmm(wide.flatten(1, 2), keys.mT).view(kv_heads, rounds, -1, seen)
        hidden = torch.arange(seen, device=slots.device) > slots[:, None]  # [rounds, seen]
        scores.masked_fill_(hidden[:, None], -torch.inf)
        if own is not None:
            own_keys, own_values = (_wide(side).permute(2, 0, 1, 3) for side in own)  # [kv, rounds, n, dim]
            scores = torch.cat([scores, wide @ own_keys.mT], dim=-1)
        weights = scores.softmax(-1)  # [kv, rounds, group, seen + n]
        verified, drafted = weights[..., :seen], weights[..., seen:]
        mixed = torch.bmm(verified.flatten(1, 2), values).view(wide.shape)
        summary = verified @ self._summary[:seen]  # [kv, rounds, group, segments + 1]
        position = slots[:, None] + drafted.shape[-1]  # [rounds, 1], of the queries
        distance = summary[..., -1] + verified.sum(-1) * (position - self._last)
        if own is not None:
            mixed = mixed + drafted @ own_values
            summary[..., Segment.DRAFTED] += drafted.sum(-1)
            distance += (drafted * torch.arange(drafted.shape[-1] - 1, -1, -1, device=slots.device)).sum(-1)
        return _by_round(mixed).to(query.dtype), AttentionRecord(
            mass=_by_round(summary[..., :-1]),
            entropy=_by_round(torch.special.entr(weights).sum(-1)),
            distance=_by_round(distance),
        )


class DraftedRows:
    """`KeyValueStorage` for draft steps of some rounds, [rounds] leading: pass k is the draft step at depth k + 2."""

    def __init__(self, verified: VerifiedRows, first: int) -> None:
        """`first` is the number of the first of the rounds."""
        self._verified = verified
        self._first = first
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, each [rounds, passes, kv_heads, head_dim]
        self._records: list[AttentionRecord] = []

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        assert spec.sliding_window is None, "drafters have no windows"
        query, key, value = heads.finished()
        own = (key[:, None], value[:, None])
        if spec.layer in self._own:
            earlier = self._own[spec.layer]
            own = (torch.cat([earlier[0], own[0]], dim=1), torch.cat([earlier[1], own[1]], dim=1))
        self._own[spec.layer] = own
        mixed, record = self._verified.look(query, self._first, spec, own)
        self._records.append(record)
        return mixed

    def take_records(self) -> list[AttentionRecord]:
        """Return the records of the last pass, by layer."""
        records, self._records = self._records, []
        return records


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Attention of all rows of one sequence. query [n, heads, head_dim], key and value [n, kv_heads, head_dim]."""
    group = query.shape[1] // key.shape[1]
    # Heads first, [1, heads, n, head_dim]. Keys and values are repeated, because not every backend that avoids the
    # square matrix takes grouped heads.
    query = query.transpose(0, 1)[None]
    key, value = (side.repeat_interleave(group, dim=1).transpose(0, 1)[None] for side in (key, value))
    rows = query.shape[2]
    if window is None or window >= rows:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        parts = [_windowed(query, key, value, low, scale, window) for low in range(0, rows, _WINDOW_CHUNK)]
        mixed = torch.cat(parts, dim=2)
    return mixed[0].transpose(0, 1)


def _windowed(query: Tensor, key: Tensor, value: Tensor, low: int, scale: float, window: int) -> Tensor:
    """The queries from `low` on, as many as are computed together."""
    high, start = min(low + _WINDOW_CHUNK, query.shape[2]), max(0, low - window + 1)
    places = torch.arange(start, high, device=query.device)
    distance = places[low - start :, None] - places
    return F.scaled_dot_product_attention(
        query[:, :, low:high],
        key[:, :, start:high],
        value[:, :, start:high],
        attn_mask=(distance >= 0) & (distance < window),
        scale=scale,
    )


def _by_round(x: Tensor) -> Tensor:
    """[kv_heads, rounds, group, ...] -> [rounds, heads, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
