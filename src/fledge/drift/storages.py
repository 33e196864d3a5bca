"""`KeyValueStorage`s of the probe, which record where attention goes while finished texts are drafted again.

The drafter is the same module that serves; only its storage is different. `VerifiedRows` is the storage of its pass
over the verified text, `DraftedRows` that of the draft steps of many rounds at once. A round sees the verified rows of
its sequence up to its own slot, as in serving after each resynchronisation, and the rows that it drafted itself.

                verified rows        drafted by round 0   drafted by round 1
    round 0     x x x . . .          x x                  . .
    round 1     x x x x x .          . .                  x x

Several sequences share a pass. Outside attention their rows lie one after another, without gaps; for attention they
are padded to a batch (`Rows`). Attention weights are summed up by segment at once and not kept.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift.prompts import Segment
from fledge.kernels.paged_attention import masked_attention, window_at
from fledge.layers.attention import AttentionSpec, Heads, at_least_float32

RECENT_TOKENS = 4
_WINDOW_CHUNK = 1024  # queries of a layer with a sliding window in one block


class Rows:
    """Rows of several sequences: one after another, [total, ...], or as a batch, [sequences, longest, ...]."""

    def __init__(self, counts: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.counts, self.longest = list(counts), max(counts)
        lengths = torch.tensor(self.counts)
        self.lengths = lengths.to(device)  # [sequences]
        self.offsets = (lengths.cumsum(0) - lengths).to(device)  # [sequences]: where each begins
        self._is_even = min(counts) == self.longest
        each = torch.repeat_interleave(torch.arange(len(counts)), lengths)
        self.sequence = each.to(device)  # [total]: whose row it is
        self.place = torch.arange(len(each), device=device) - self.offsets[self.sequence]  # [total]: in its sequence
        self._padded = self.sequence * self.longest + self.place

    def pad(self, x: Tensor) -> Tensor:
        shape = (len(self.counts), self.longest, *x.shape[1:])
        if self._is_even:
            return x.reshape(shape)
        batch = x.new_zeros(shape)
        batch.flatten(0, 1)[self._padded] = x
        return batch

    def flat(self, batch: Tensor) -> Tensor:
        rows = batch.flatten(0, 1)
        return rows if self._is_even else rows[self._padded]


class CausalPass:
    """`KeyValueStorage` for one pass of a target over sequences (None: one sequence). Keeps no keys and values."""

    def __init__(self, rows: Rows | None = None) -> None:
        self._rows = rows

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        query, *sides = heads.finished()
        rows = self._rows or Rows([len(query)], query.device)
        batch = [rows.pad(x) for x in (query, *sides)]
        return rows.flat(
            causal_attention(
                *batch,
                scale=spec.scale,
                window=spec.sliding_window,
                chunked=spec.chunked,
                sinks=heads.sinks,
                softcap=spec.softcap,
            )
        )


class Rounds:
    """Some rounds that draft together: ascending indices into the `begins` of `VerifiedRows`.

    `last` [sequences] is the last row of each sequence.
    """

    def __init__(self, numbers: Sequence[int], begins: Sequence[tuple[int, int]], last: Tensor) -> None:
        self.numbers = list(numbers)
        chosen = [begins[number] for number in numbers]
        counts = Counter(sequence for sequence, _ in chosen)
        present, device = list(counts), last.device
        is_run = len(present) == present[-1] - present[0] + 1  # a slice avoids a copy
        self.sequences = slice(present[0], present[-1] + 1) if is_run else torch.tensor(present, device=device)
        self.rows = Rows(list(counts.values()), device)
        self.index = torch.tensor(self.numbers, device=device)
        self.slots = torch.tensor([slot for _, slot in chosen], device=device)  # [rounds]
        self.seen = max(slot for _, slot in chosen) + 1  # verified rows that any of them sees
        self.padded_slots = self.rows.pad(self.slots)[..., None]  # [sequences, most rounds, 1]
        self.padded_last = last[self.sequences][:, None, None]  # [sequences, 1, 1]


class VerifiedRows:
    """`KeyValueStorage` for the drafter's pass over the verified rows of sequences; keeps their keys and values.

    `begins` are the (sequence, slot) pairs from which rounds may begin to draft, ascending. `segments` [total] int64 is
    the segment of each row. `recent_tokens`: the recent window of a query is so many of the last rows that it sees,
    its own included.

    `layers` has for each layer its spec, the queries [begins, heads, head_dim], and for all sequences the keys and
    values [sequences, kv_heads, longest, dim], at least float32. The values have extra columns by which attention is
    summed up: one for each segment, and the distance from the sequence's last row. (From the last row, because rounds
    are near it: measured from the first, large distances would cost the small ones their precision.)
    """

    def __init__(
        self,
        rows: Rows,
        segments: Tensor,
        begins: Sequence[tuple[int, int]],
        recent_tokens: int = RECENT_TOKENS,
    ) -> None:
        self.rows, self.begins, self.recent_tokens = rows, begins, recent_tokens
        self.sequences, self.slots = torch.tensor(begins, device=segments.device).T  # [begins] each
        self.index = rows.offsets[self.sequences] + self.slots  # [begins]: among all rows
        self.layers: list[tuple[AttentionSpec, Tensor, Tensor, Tensor]] = []
        distance = (rows.lengths - 1)[rows.sequence] - rows.place
        columns = torch.cat([F.one_hot(segments, len(Segment)), distance[:, None]], dim=1)
        self._columns = rows.pad(columns)[:, None]  # [sequences, 1, longest, segments + 1]

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        assert spec.layer == len(self.layers), "one pass, layer by layer"
        query, *sides = heads.finished()
        key, value = map(self.rows.pad, sides)
        self.keep(spec, query[self.index], key, value)
        batch = self.rows.pad(query), key, value
        return self.rows.flat(causal_attention(*batch, scale=spec.scale, window=spec.sliding_window))

    def keep(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep a layer's queries of `begins`, and its keys and values [sequences, longest, kv_heads, dim]."""
        keys, values = (at_least_float32(side).transpose(1, 2) for side in (key, value))
        columns = self._columns.to(values.dtype).expand(-1, values.shape[1], -1, -1)
        self.layers.append((spec, query, keys.contiguous(), torch.cat([values, columns], dim=-1)))

    @property
    def window(self) -> int | None:
        """The widest window of all layers; None: some layer has full attention."""
        windows = [spec.sliding_window for spec, *_ in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    def rounds(self, numbers: Sequence[int]) -> Rounds:
        return Rounds(numbers, self.begins, self.rows.lengths - 1)

    def attend_and_record(
        self,
        layer: int,
        rounds: Rounds,
        query: Tensor,
        own: tuple[Tensor, Tensor] | None = None,
        *,
        records: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from the queries [rounds, heads, head_dim] of some rounds to verified and `own` rows of a layer.

        `own` are the keys and values that each round drafted, each [sequences, most rounds, n, kv_heads, dim]; its
        current row is the last. Returns the attention [rounds, heads, value_dim] and, with `records`, where it went,
        [rounds, heads, ...] each: `mass` by segment, which sums to 1; `recent`, the mass on the recent window, whose
        size is the same at every depth; `entropy` in nats; `distance`, the mean distance in tokens from query to key.
        """
        spec, _, *sides = self.layers[layer]
        rows, seen, device = rounds.rows, rounds.seen, query.device
        keys, values = (side[rounds.sequences][:, :, :seen] for side in sides)  # [sequences, kv, seen, dim]
        slots = rounds.padded_slots
        padded = rows.pad(at_least_float32(query))
        grouped = padded.view(*padded.shape[:2], keys.shape[1], -1, padded.shape[-1])
        wide = grouped.transpose(1, 2) * spec.scale  # [sequences, kv, rounds, group, dim]
        shape = wide.shape[:4]
        scores = (wide.flatten(2, 3) @ keys.mT).view(*shape, seen)
        places = torch.arange(seen, device=device)
        hidden = places > slots  # [sequences, rounds, seen]
        position = slots  # of the queries
        if own is not None:
            own_keys, own_values = (side.permute(0, 3, 1, 2, 4) for side in own)  # [sequences, kv, rounds, n, dim]
            drafted_rows = own_keys.shape[3]
            position = slots + drafted_rows
            scores = torch.cat([scores, wide @ own_keys.mT], dim=-1)
            hidden = F.pad(hidden, (0, drafted_rows))
        if spec.sliding_window is not None:
            steps = torch.arange(1, scores.shape[-1] - seen + 1, device=device)
            all_places = torch.cat([places.expand(*slots.shape[:2], -1), slots + steps], dim=-1)
            hidden = hidden | (all_places <= position - spec.sliding_window)
        scores.masked_fill_(hidden[:, None, :, None], -torch.inf)
        weights = scores.softmax(-1)  # [sequences, kv, rounds, group, seen + n]
        verified, drafted = weights[..., :seen], weights[..., seen:]
        both = (verified.flatten(2, 3) @ values).view(*shape, -1)
        mixed, mass, far = torch.split(both, [values.shape[-1] - len(Segment) - 1, len(Segment), 1], dim=-1)
        if own is not None:
            mixed = mixed + drafted @ own_values

        def by_round(x: Tensor) -> Tensor:
            """[sequences, kv_heads, most rounds, group, ...] -> [rounds, heads, ...]."""
            return rows.flat(x.transpose(1, 2)).flatten(1, 2)

        if not records:
            return by_round(mixed).to(query.dtype), {}
        distance = far[..., 0] + mass.sum(-1) * (position - rounds.padded_last)[:, None]
        if own is not None:
            mass[..., Segment.DRAFTED] += drafted.sum(-1)
            distance += (drafted * torch.arange(drafted.shape[-1] - 1, -1, -1, device=device)).sum(-1)
        near = position - torch.arange(self.recent_tokens, device=device)  # [sequences, rounds, recent]: places
        columns = torch.where(near <= slots, near.clamp(min=0), seen + near - slots - 1)
        gathered = weights.gather(-1, columns[:, None, :, None].expand(*shape, -1))
        recent = (gathered * (near >= 0)[:, None, :, None]).sum(-1)
        entropy = torch.special.entr(weights).sum(-1)
        record = {"mass": mass, "recent": recent, "distance": distance, "entropy": entropy}
        return by_round(mixed).to(query.dtype), {name: by_round(x) for name, x in record.items()}


class DraftedRows:
    """`KeyValueStorage` for up to `steps` draft steps of some rounds, [rounds] leading: pass k is depth k + 2.

    `records` are the records of the last draft step by layer; the reader empties the list. None: nothing is recorded.
    """

    def __init__(self, verified: VerifiedRows, rounds: Rounds, steps: int, *, records: bool = True) -> None:
        self.rounds = rounds
        self._verified, self._steps = verified, steps
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, [sequences, most rounds, steps, kv_heads, dim]
        self._passes = Counter[int]()  # by layer
        self.records: list[dict[str, Tensor]] | None = None
        if records:  # the first draft comes from the verified text alone
            layers = enumerate(verified.layers)
            self.records = [verified.attend_and_record(i, rounds, kept[1][rounds.index])[1] for i, kept in layers]

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        query, *sides = heads.finished()
        new = [self.rounds.rows.pad(at_least_float32(side)) for side in sides]
        if spec.layer not in self._own:
            keys, values = (x.new_zeros(*x.shape[:2], self._steps, *x.shape[2:]) for x in new)
            self._own[spec.layer] = keys, values
        number = self._passes[spec.layer]
        self._passes[spec.layer] += 1
        for kept, x in zip(self._own[spec.layer], new, strict=True):
            kept[:, :, number] = x
        keys, values = (kept[:, :, : number + 1] for kept in self._own[spec.layer])
        records = self.records is not None
        mixed, record = self._verified.attend_and_record(
            spec.layer, self.rounds, query, (keys, values), records=records
        )
        if self.records is not None:
            self.records.append(record)
        return mixed

    def only(self, which: Sequence[int]) -> "DraftedRows":
        """Return the storage of some of the rounds, which continue without the others."""
        old, rounds = self.rounds, self._verified.rounds([self.rounds.numbers[i] for i in which])
        left = DraftedRows(self._verified, rounds, self._steps, records=False)
        index = torch.tensor(which, device=old.slots.device)
        for layer, sides in self._own.items():
            keys, values = (rounds.rows.pad(old.rows.flat(side)[index]) for side in sides)
            left._own[layer] = keys, values
        left._passes = self._passes.copy()
        return left


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of whole sequences: query [sequences, n, heads, head_dim], key and value [.., kv_heads, dim].

    Padding is at the end of a sequence, where its own rows do not see it. `window`, `chunked` and `sinks` [heads] are
    those of `paged_attention`, `softcap` that of `masked_attention`.
    """
    group, rows = query.shape[2] // key.shape[2], query.shape[1]
    # Keys and values are repeated, because not every memory-efficient backend supports grouped heads.
    query = query.transpose(1, 2)
    key, value = (side.repeat_interleave(group, dim=2).transpose(1, 2) for side in (key, value))
    window = rows if window is None else window
    if window >= rows and sinks is None and softcap is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)
    parts = []
    for low in range(0, rows, _WINDOW_CHUNK):
        high, start = min(low + _WINDOW_CHUNK, rows), max(0, low - window + 1)
        places = torch.arange(start, high, device=query.device)
        distance = places[low - start :, None] - places
        visible = (distance >= 0) & (distance < window_at(places[low - start :, None], window, chunked))
        queries, keys, values = query[:, :, low:high], key[:, :, start:high], value[:, :, start:high]
        own = None if sinks is None else sinks[:, None]
        parts.append(masked_attention(queries, keys, values, visible, scale, own, softcap))
    return torch.cat(parts, dim=2).transpose(1, 2)
