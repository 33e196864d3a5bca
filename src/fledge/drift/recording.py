"""Storages that record where attention goes, and reduce it to position classes as they compute it.

The drafter is the module that serves; only where its keys and values live is different. `VerifiedRows` is its pass over
the verified text, `DraftedRows` the draft steps of many rounds at once: round r sees the verified rows up to its own
slot, as serving does after each resynchronisation, and the rows it drafted itself.

                verified rows        drafted by round 0   drafted by round 1
    round 0     x x x . . .          x x                  . .
    round 1     x x x x x .          . .                  x x

How many heads there are and how wide keys and values are is read from what a layer projects, not assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift.segments import Segment
from fledge.layers.attention import AttentionSpec, ProjectedHeads

_WINDOW_CHUNK = 1024  # queries of a layer with a sliding window that are computed together


# Where the attention of one layer went in one draft step of some rounds. float32, or float64 for such models.
#   mass      [rounds, heads, segments]: sums to 1 over segments
#   entropy   [rounds, heads], in nats
#   distance  [rounds, heads]: mean distance in tokens from query to key
AttentionRecord = dict[str, Tensor]


class CausalPass:
    """`KeyValueStorage` for one pass of a target over one sequence. Keeps nothing, forms no square matrix."""

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        return causal_attention(*heads.finished(), scale=spec.scale, window=spec.sliding_window)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """What one layer leaves of the verified text. At least float32."""

    spec: AttentionSpec
    query: Tensor  # [rounds, heads, head_dim]: of the rows from which rounds begin to draft
    keys: Tensor  # [kv_heads, n, head_dim]
    values: Tensor  # [kv_heads, n, value_dim]


class VerifiedRows:
    """`KeyValueStorage` for the drafter's pass over verified rows 0 .. n - 1, which it keeps.

    `slots`, ascending, are the rows from which rounds begin to draft. `segments` [n] int64 says what each row is part
    of.
    """

    def __init__(self, slots: Sequence[int], segments: Tensor) -> None:
        self.slots = torch.tensor(slots, device=segments.device)  # [rounds]
        self.layers: list[_Layer] = []
        self._seen = [slot + 1 for slot in slots]  # verified rows that each round sees; on the host, not to wait for it
        # Attention weights times this give the mass of each segment and, in the last column, the mean distance from the
        # last row: the rounds are near it, and distances to far rows should not drown those to near ones.
        places = torch.arange(len(segments), device=segments.device)
        self._last = len(segments) - 1
        self._summary = torch.cat([F.one_hot(segments, len(Segment)), (self._last - places)[:, None]], dim=1)

    @property
    def num_heads(self) -> int:
        """Query heads of the widest layer: with the rows that are seen they say what a round's weights take."""
        return max(kept.query.shape[1] for kept in self.layers)

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        assert spec.layer == len(self.layers), "one pass, layer by layer"
        assert spec.sliding_window is None, "drafters have no windows"
        query, key, value = heads.finished()
        keys, values = (_wide(side).transpose(0, 1).contiguous() for side in (key, value))
        self.layers.append(_Layer(spec=spec, query=query[self.slots], keys=keys, values=values))
        self._summary = self._summary.to(keys.dtype)
        return causal_attention(query, key, value, scale=spec.scale)

    def look(
        self, layer: int, rounds: slice, query: Tensor, own: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, AttentionRecord]:
        """Attend from query [rounds, heads, head_dim] of some rounds to verified and `own` rows of a layer.

        `own` are the keys and values, each [rounds, n, kv_heads, dim], that each round drafted, its current row the
        last. Returns the attention [rounds, heads, value_dim] and its record.
        """
        kept, slots, seen = self.layers[layer], self.slots[rounds], self._seen[rounds][-1]
        keys, values = kept.keys[:, :seen], kept.values[:, :seen]
        grouped = _wide(query).view(len(query), len(keys), -1, query.shape[-1])
        wide = grouped.transpose(0, 1) * kept.spec.scale  # [kv, rounds, group, dim]
        scores = torch.bmm(wide.flatten(1, 2), keys.mT).view(*wide.shape[:3], seen)
        hidden = torch.arange(seen, device=slots.device) > slots[:, None]  # [rounds, seen]
        scores.masked_fill_(hidden[:, None], -torch.inf)
        if own is not None:
            own_keys, own_values = (_wide(side).permute(2, 0, 1, 3) for side in own)  # [kv, rounds, n, dim]
            scores = torch.cat([scores, wide @ own_keys.mT], dim=-1)
        weights = scores.softmax(-1)  # [kv, rounds, group, seen + n]
        verified, drafted = weights[..., :seen], weights[..., seen:]
        mixed = torch.bmm(verified.flatten(1, 2), values).view(*wide.shape[:3], -1)
        summary = verified @ self._summary[:seen]  # [kv, rounds, group, segments + 1]
        position = slots[:, None] + drafted.shape[-1]  # [rounds, 1], of the queries
        distance = summary[..., -1] + verified.sum(-1) * (position - self._last)
        if own is not None:
            mixed = mixed + drafted @ own_values
            summary[..., Segment.DRAFTED] += drafted.sum(-1)
            distance += (drafted * torch.arange(drafted.shape[-1] - 1, -1, -1, device=slots.device)).sum(-1)
        record = {"mass": summary[..., :-1], "entropy": torch.special.entr(weights).sum(-1), "distance": distance}
        # [kv_heads, rounds, group, ...] -> [rounds, heads, ...]
        by_round = {name: x.transpose(0, 1).flatten(1, 2) for name, x in ({"mixed": mixed} | record).items()}
        return by_round.pop("mixed").to(query.dtype), by_round


class DraftedRows:
    """`KeyValueStorage` for draft steps of some rounds, [rounds] leading: pass k is the draft step at depth k + 2."""

    def __init__(self, verified: VerifiedRows, rounds: slice) -> None:
        self._verified = verified
        self._rounds = rounds
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer and pass, each [rounds, kv_heads, head_dim]
        # The first draft comes from the verified text alone.
        self._records = [verified.look(i, rounds, kept.query[rounds])[1] for i, kept in enumerate(verified.layers)]

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        several = self._own.setdefault(spec.layer, [])
        several.append((key, value))
        keys, values = (torch.stack(side, dim=1) for side in zip(*several, strict=True))
        mixed, record = self._verified.look(spec.layer, self._rounds, query, (keys, values))
        self._records.append(record)
        return mixed

    def take_records(self) -> list[AttentionRecord]:
        """Return the records of the last draft step, by layer."""
        records, self._records = self._records, []
        return records


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Attention of all rows of one sequence. query [n, heads, head_dim], key and value [n, kv_heads, head_dim]."""
    group, rows = query.shape[1] // key.shape[1], len(query)
    # Heads first, [1, heads, n, head_dim]. Keys and values are repeated, because not every backend that avoids the
    # square matrix takes grouped heads.
    query = query.transpose(0, 1)[None]
    key, value = (side.repeat_interleave(group, dim=1).transpose(0, 1)[None] for side in (key, value))
    if window is None or window >= rows:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)[0].transpose(0, 1)
    parts = []
    for low in range(0, rows, _WINDOW_CHUNK):
        high, start = min(low + _WINDOW_CHUNK, rows), max(0, low - window + 1)
        places = torch.arange(start, high, device=query.device)
        distance = places[low - start :, None] - places
        visible = (distance >= 0) & (distance < window)
        queries, keys, values = query[:, :, low:high], key[:, :, start:high], value[:, :, start:high]
        parts.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
