"""Drafting again every round of a finished sequence, all rounds at once, with everything about it recorded.

After each verification the engine rewrites the drafter's rows from real target features. So what a round drafts
depends on the verified text before it and on nothing else, and one pass over the finished text restores the state
before every round:

    target    one pass over x0 .. xn                       features h0 .. hn
    drafter   one pass over rows (h_t, x_{t+1})            its keys and values, and the first draft of every round
    depth d   one pass over all rounds                     the d-th draft of every round

A round that begins when `start` tokens are known drafts from row `start - 2`, and its d-th draft is for place
`start + d - 1`. The engine itself is not touched: the tokens it produced are what they are without a probe.

The drafter is the module that serves; only where its keys and values live is different: in storages that record where
attention goes, and reduce it to position classes as they compute it. `VerifiedRows` is its pass over the verified text,
`DraftedRows` the draft steps of many rounds at once: round r sees the verified rows up to its own slot, as serving does
after each resynchronisation, and the rows it drafted itself.

                verified rows        drafted by round 0   drafted by round 1
    round 0     x x x . . .          x x                  . .
    round 1     x x x x x .          . .                  x x
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift.prompts import Segment
from fledge.engine.outputs import RoundRecord
from fledge.kernels.argmax import argmax_rows
from fledge.kernels.paged_attention import masked_attention, window_at
from fledge.layers.attention import AttentionSpec, Heads
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetModel, TargetStates

MAX_SCORES = 1 << 25  # attention weights that exist at a time, whatever the context
RECENT_TOKENS = 4
_MAX_ROUNDS = 256  # that draft together
_WINDOW_CHUNK = 1024  # queries of a layer with a sliding window that are computed together


class CausalPass:
    """`KeyValueStorage` for one pass of a target over one sequence. Keeps nothing, forms no square matrix."""

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        window, chunked = spec.sliding_window, spec.chunked
        return causal_attention(query, key, value, scale=spec.scale, window=window, chunked=chunked, sinks=heads.sinks)


class VerifiedRows:
    """`KeyValueStorage` for the drafter's pass over verified rows 0 .. n - 1, which it keeps.

    `slots`, ascending, are the rows from which rounds begin to draft. `segments` [n] int64 says what each row is part
    of, `recent_tokens` how many of the last rows that a query sees, its own among them, are its recent window. `layers`
    has of each layer what it is, the queries [rounds, heads, head_dim] of the slots, and all keys and values
    [kv_heads, n, dim], at least float32.
    """

    def __init__(self, slots: Sequence[int], segments: Tensor, recent_tokens: int = RECENT_TOKENS) -> None:
        self.recent_tokens = recent_tokens
        self.slots = torch.tensor(slots, device=segments.device)  # [rounds]
        self.layers: list[tuple[AttentionSpec, Tensor, Tensor, Tensor]] = []
        self._seen = [slot + 1 for slot in slots]  # verified rows that each round sees; on the host, not to wait for it
        # Attention weights times this give the mass of each segment and, in the last column, the mean distance from the
        # last row: the rounds are near it, and distances to far rows should not drown those to near ones.
        places = torch.arange(len(segments), device=segments.device)
        self._last = len(segments) - 1
        self._summary = torch.cat([F.one_hot(segments, len(Segment)), (self._last - places)[:, None]], dim=1)

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        assert spec.layer == len(self.layers), "one pass, layer by layer"
        query, key, value = heads.finished()
        keys, values = (_wide(side).transpose(0, 1).contiguous() for side in (key, value))
        self.layers.append((spec, query[self.slots], keys, values))
        self._summary = self._summary.to(keys.dtype)
        return causal_attention(query, key, value, scale=spec.scale, window=spec.sliding_window)

    @property
    def window(self) -> int | None:
        """The widest of all layers; None: a layer sees everything."""
        windows = [spec.sliding_window for spec, *_ in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    def look(
        self, layer: int, rounds: slice, query: Tensor, own: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from query [rounds, heads, head_dim] of some rounds to verified and `own` rows of a layer.

        `own` are the keys and values, each [rounds, n, kv_heads, dim], that each round drafted, its current row the
        last. Returns the attention [rounds, heads, value_dim] and where it went, [rounds, heads, ...] each: `mass` over
        segments, which sums to 1, `recent`, that of the recent window, whose size is the same at every depth, `entropy`
        in nats, and `distance`, the mean in tokens from query to key.
        """
        (spec, _, *sides), slots, seen = self.layers[layer], self.slots[rounds], self._seen[rounds][-1]
        keys, values = (side[:, :seen] for side in sides)
        grouped = _wide(query).view(len(query), len(keys), -1, query.shape[-1])
        wide = grouped.transpose(0, 1) * spec.scale  # [kv, rounds, group, dim]
        scores = torch.bmm(wide.flatten(1, 2), keys.mT).view(*wide.shape[:3], seen)
        places = torch.arange(seen, device=slots.device).expand(len(slots), -1)  # [rounds, keys]: where keys are
        hidden = places > slots[:, None]
        if own is not None:
            own_keys, own_values = (_wide(side).permute(2, 0, 1, 3) for side in own)  # [kv, rounds, n, dim]
            scores = torch.cat([scores, wide @ own_keys.mT], dim=-1)
            drafted_places = slots[:, None] + torch.arange(1, own_keys.shape[2] + 1, device=slots.device)
            places = torch.cat([places, drafted_places], dim=1)
            hidden = F.pad(hidden, (0, own_keys.shape[2]))
        if spec.sliding_window is not None:
            last = slots[:, None] if own is None else places[:, -1:]
            hidden = hidden | (places <= last - spec.sliding_window)
        scores.masked_fill_(hidden[:, None], -torch.inf)
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
        near = position - torch.arange(self.recent_tokens, device=slots.device)  # [rounds, recent]: places
        columns = torch.where(near <= slots[:, None], near.clamp(min=0), seen + near - slots[:, None] - 1)
        recent = weights.gather(-1, columns[:, None].expand(*weights.shape[:3], -1)) * (near >= 0)[:, None]
        record = {"mass": summary[..., :-1], "recent": recent.sum(-1), "distance": distance}
        record["entropy"] = torch.special.entr(weights).sum(-1)
        # [kv_heads, rounds, group, ...] -> [rounds, heads, ...]
        by_round = {name: x.transpose(0, 1).flatten(1, 2) for name, x in ({"mixed": mixed} | record).items()}
        return by_round.pop("mixed").to(query.dtype), by_round


class DraftedRows:
    """`KeyValueStorage` for draft steps of some rounds, [rounds] leading: pass k is the draft step at depth k + 2.

    `records` are those of the last draft step, by layer, for whoever reads them to take away.
    """

    def __init__(self, verified: VerifiedRows, rounds: slice) -> None:
        self._verified = verified
        self._rounds = rounds
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer and pass, each [rounds, kv_heads, head_dim]
        # The first draft comes from the verified text alone.
        self.records = [verified.look(i, rounds, kept[1][rounds])[1] for i, kept in enumerate(verified.layers)]

    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        several = self._own.setdefault(spec.layer, [])
        several.append((key, value))
        keys, values = (torch.stack(side, dim=1) for side in zip(*several, strict=True))
        mixed, record = self._verified.look(spec.layer, self._rounds, query, (keys, values))
        self.records.append(record)
        return mixed


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all rows of one sequence. query [n, heads, head_dim], key and value [n, kv_heads, head_dim].

    `window`, `chunked`, `sinks` [heads]: as of `paged_attention`.
    """
    group, rows = query.shape[1] // key.shape[1], len(query)
    # Heads first, [1, heads, n, head_dim]. Keys and values are repeated, because not every backend that avoids the
    # square matrix takes grouped heads.
    query = query.transpose(0, 1)[None]
    key, value = (side.repeat_interleave(group, dim=1).transpose(0, 1)[None] for side in (key, value))
    window = rows if window is None else window
    if window >= rows and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)[0].transpose(0, 1)
    parts = []
    for low in range(0, rows, _WINDOW_CHUNK):
        high, start = min(low + _WINDOW_CHUNK, rows), max(0, low - window + 1)
        places = torch.arange(start, high, device=query.device)
        distance = places[low - start :, None] - places
        visible = (distance >= 0) & (distance < window_at(places[low - start :, None], window, chunked))
        queries, keys, values = query[:, :, low:high], key[:, :, start:high], value[:, :, start:high]
        parts.append(masked_attention(queries, keys, values, visible, scale, None if sinks is None else sinks[:, None]))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What the rounds of one sequence drafted, and how. On the CPU; [rounds, depth, ...] unless said otherwise."""

    starts: Tensor  # [rounds] int64
    drafts: Tensor  # int64, target ids
    confidence: Tensor  # the drafter's probability of its draft
    hidden_rms: Tensor  # of the hidden state before the final norm (EAGLE-1 has none)
    head_rms: Tensor  # of what the head reads
    feature_rms: Tensor  # of what the next depth is fed
    head_cosine: Tensor  # with the target's final state at the same place; NaN where there is none
    feature_cosine: Tensor  # of what the next depth is fed with what the target's state would have fed it
    mass: Tensor  # [rounds, depth, layers, heads, segments]
    recent: Tensor  # [rounds, depth, layers, heads]: mass of the last rows that are seen, whatever they are part of
    entropy: Tensor  # [rounds, depth, layers, heads]
    distance: Tensor  # [rounds, depth, layers, heads]
    visible: Tensor  # [rounds, depth, segments] int64: rows that could be looked at
    fused_rms: Tensor  # [rounds]: of the feature from the target that the round begins with
    contributions: Tensor  # [rounds, parts]: norm of what each input adds to that feature, see `fusion_parts`

    def only(self, rounds: Sequence[int]) -> "Replayed":
        """Some of the rounds."""
        return Replayed(**{field.name: getattr(self, field.name)[list(rounds)] for field in fields(self)})


def rounds_taken(replayed: Replayed, tokens: Sequence[int], limit: int) -> list[tuple[int, RoundRecord]]:
    """The rounds that speculation takes through a text: where each is in `replayed`, and how it went.

    `replayed` has a round from every place of the answer on. Each begins after what the one before accepted and one
    token more; its drafts are accepted as far as they are the text, which is what the target chose. Nothing is drafted
    for places from `limit` - 1 on, and what would be after the text's end is nobody's fault: it does not count.
    """
    found, i = [], 0
    starts, drafts = replayed.starts.tolist(), replayed.drafts.tolist()
    while i < len(starts):
        start = starts[i]
        room = min(len(drafts[i]), limit - 1 - start)
        if room <= 0:
            break
        pairs = list(zip(drafts[i][:room], tokens[start:], strict=False))
        accepted = next((n for n, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
        found.append((i, RoundRecord(start, room if accepted < len(pairs) else accepted, accepted)))
        i += accepted + 1
    return found


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """What is done to a drafter's state on its way to the next depth: nothing, unless asked for."""

    noise: float = 0.0  # deviation of Gaussian noise added to it, times its RMS
    pin: bool = False  # scaled to its RMS at depth 1 of the same round
    seed: int = 0

    def __call__(self, feature: Tensor, first: Tensor, starts: Sequence[int], depth: int) -> Tensor:
        """Of `feature` [rounds, hidden] on its way to `depth`; `first` is that of depth 1.

        The noise of a round follows from seed, start and depth: drafters of a width get the same.
        """
        if self.pin:
            feature = feature * (_rms(first) / _rms(feature).clamp(min=1e-30)).to(feature.dtype)[:, None]
        if self.noise:
            seeds = ((self.seed << 40) + (start << 12) + depth for start in starts)
            drawn = [
                torch.randn(feature.shape[-1], generator=torch.Generator().manual_seed(seed % 2**63)) for seed in seeds
            ]
            scaled = self.noise * _rms(feature)[:, None] * torch.stack(drawn).to(feature.device)
            feature = feature + scaled.to(feature.dtype)
        return feature


AS_IT_IS = Feeding()


def fusion_parts(drafter: Drafter) -> tuple[str, ...]:
    """Names of what fc sums up: EAGLE-3's target layers, or EAGLE-1's embedding and final state."""
    return tuple(f"layer {i}" for i in drafter.aux_layer_ids) or ("embedding", "final state")


@torch.inference_mode()
def target_states(target: TargetModel, tokens: Sequence[int], aux_layer_ids: tuple[int, ...]) -> TargetStates:
    """One pass of a target over a text: states [tokens, ...]."""
    text = torch.tensor(tokens, device=target.embed_tokens.weight.device)
    positions = torch.arange(len(tokens), device=text.device)
    return target(text, positions, CausalPass(), aux_layer_ids)  # type: ignore[no-any-return]


@torch.inference_mode()
def replay(
    states: TargetStates,
    drafter: Drafter,
    tokens: Sequence[int],
    segments: Sequence[Segment],
    starts: Sequence[int],
    *,
    depth: int,
    recent_tokens: int = RECENT_TOKENS,
    feeding: Feeding = AS_IT_IS,
    max_scores: int = MAX_SCORES,
) -> Replayed:
    """Draft again, `depth` tokens deep, the rounds of the finished sequence `tokens` that began at `starts` tokens.

    `states` are the target's of the tokens, of the layers that the drafter reads. `starts` ascend, each 2 to
    len(tokens); `segments` names what each token is part of. Sizes of states are recorded before `feeding`.
    """
    assert list(starts) == sorted(starts)
    assert 2 <= starts[0] <= starts[-1] <= len(tokens) == len(segments)
    text = torch.tensor(tokens, device=states.final.device)
    positions = torch.arange(len(tokens), device=text.device)
    rows = starts[-1] - 1  # of the drafter that any round sees
    kinds = torch.tensor(segments[:rows], device=text.device)
    verified = VerifiedRows([start - 2 for start in starts], kinds, recent_tokens)
    fused, parts = list[Tensor](), []
    with drafter.fc.register_forward_hook(lambda _module, inputs, _output: fused.append(inputs[0][verified.slots])):
        truth = states.final, drafter.fuse(states)
        first = drafter(text[1 : rows + 1], truth[1][:rows], positions[:rows], verified)
    heads = max(query.shape[1] for _, query, *_ in verified.layers)
    chunk = max(1, min(_MAX_ROUNDS, max_scores // (heads * (rows + depth))))
    for rounds in (slice(low, low + chunk) for low in range(0, len(starts), chunk)):
        slots = verified.slots[rounds]
        storage = DraftedRows(verified, rounds)
        step = DraftStates(**{name: whole[slots] for name, whole in vars(first).items()})
        recorded = [_record(drafter, step, storage, truth, slots + 1)]
        fed_first = step.feature
        for d in range(2, depth + 1):
            fed = feeding(step.feature, fed_first, starts[rounds], d)
            step = drafter(recorded[-1]["drafts"], fed, slots + d - 1, storage)
            recorded.append(_record(drafter, step, storage, truth, slots + d))
        parts.append({name: torch.stack([one[name] for one in recorded], dim=1) for name in recorded[0]})
    slots = verified.slots
    steps, ends = torch.arange(depth, device=slots.device), slots[:, None] + 1
    before = F.pad(F.one_hot(kinds, len(Segment)).cumsum(0), (0, 0, 1, 0))  # [rows + 1, segments]: rows before each
    window = len(tokens) + depth if verified.window is None else verified.window
    visible = before[ends] - before[torch.minimum((ends + steps - window).clamp(min=0), ends)]
    visible[..., Segment.DRAFTED] += steps.clamp(max=window)
    return Replayed(
        starts=torch.tensor(starts),
        visible=visible.cpu(),
        fused_rms=_rms(truth[1][slots]).cpu(),
        contributions=_contributions(fused[0], drafter.fc.weight, len(fusion_parts(drafter))).cpu(),
        **{name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]},
    )


def _record(
    drafter: Drafter, step: DraftStates, storage: DraftedRows, truth: tuple[Tensor, Tensor], places: Tensor
) -> dict[str, Tensor]:
    """The fields of `Replayed` that one draft step of some rounds fills in, [rounds, ...] each.

    `truth` is what the target says at every place, its final state and the feature made of its states, [n, hidden]
    each, and `places` [rounds] where the state is that the drafter's stands for.
    """
    logits = drafter.logits(step.head)
    wide = logits.float()
    attention, storage.records = storage.records, []
    return {
        "drafts": drafter.to_target_ids(argmax_rows(logits)),
        "confidence": (wide.amax(-1) - wide.logsumexp(-1)).exp(),
        "hidden_rms": _rms(step.hidden),
        "head_rms": _rms(step.head),
        "feature_rms": _rms(step.feature),
        "head_cosine": _cosine(step.head, truth[0], places),
        "feature_cosine": _cosine(step.feature, truth[1], places),
        **{name: torch.stack([record[name] for record in attention], dim=1) for name in attention[0]},
    }


def _contributions(read: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Norm of what each part of what fc has read adds to its output, [rounds, parts]: fc is a sum over its inputs."""
    pairs = zip(read.chunk(parts, dim=-1), weight.chunk(parts, dim=1), strict=True)
    return torch.stack([F.linear(part, piece).float().norm(dim=-1) for part, piece in pairs], dim=1)


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean(-1).sqrt()


def _cosine(states: Tensor, truth: Tensor, places: Tensor) -> Tensor:
    """Of states [rounds, hidden] with those of the target at `places`; NaN where there is nothing to compare with."""
    if states.shape[-1] != truth.shape[-1]:  # a drafter narrower than its target
        return states.new_full(places.shape, torch.nan, dtype=torch.float32)
    there = truth[places.clamp(max=len(truth) - 1)]
    return F.cosine_similarity(states.float(), there.float(), dim=-1).masked_fill(places >= len(truth), torch.nan)
