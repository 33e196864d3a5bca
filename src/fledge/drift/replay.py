"""Drafts the rounds of finished sequences again, all rounds at once, and records how the drafter behaves.

After each verification the engine rewrites the drafter's rows from the target's features. So what a round drafts
depends only on the verified text before it, and one pass over the finished text restores the state before every round:

    target    one pass over x0 .. xn                       features h0 .. hn
    drafter   one pass over rows (h_t, x_{t+1})            its keys and values, and the first draft of every round
    depth d   one pass over all rounds                     the d-th draft of every round

A round that begins when `start` tokens are known drafts from row `start - 2`, and its d-th draft is for position
`start + d - 1`. The text also determines where rounds begin, since it is what the target chose: a round accepts the
drafts that match the text, adds one token of the target, and the next round begins after that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.drift.prompts import Segment
from fledge.drift.storages import RECENT_TOKENS, CausalPass, DraftedRows, Rounds, Rows, VerifiedRows
from fledge.engine.outputs import RoundRecord
from fledge.kernels.argmax import argmax_rows
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetModel, TargetStates

MAX_SCORES = 1 << 25  # most attention weights that exist at a time
_MAX_LOGITS = 1 << 25  # most logits that exist at a time, unless that is less than
_MIN_ROUNDS = 256  # rounds
_DRAWN = 1 << 14  # noise vectors that are cached: all drafters get the same ones


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What the rounds of one sequence drafted, and how. On the CPU; [rounds, depth, ...] unless said otherwise."""

    starts: Tensor  # [rounds] int64
    drafts: Tensor  # int64, target ids
    confidence: Tensor  # the drafter's probability of its draft
    hidden_rms: Tensor  # of the hidden state before the final norm (EAGLE-1 has none)
    head_rms: Tensor  # of what the head reads
    feature_rms: Tensor  # of the state that is fed to the next depth
    head_cosine: Tensor  # with the target's final state at the same position; NaN where there is none
    feature_cosine: Tensor  # of the state fed to the next depth with the feature made of the target's states
    mass: Tensor  # [rounds, depth, layers, heads, segments]
    recent: Tensor  # [rounds, depth, layers, heads]: mass on the last rows that are visible, of any segment
    entropy: Tensor  # [rounds, depth, layers, heads]
    distance: Tensor  # [rounds, depth, layers, heads]
    visible: Tensor  # [rounds, depth, segments] int64: rows that are visible
    fused_rms: Tensor  # [rounds]: of the feature from the target that the round begins with
    contributions: Tensor  # [rounds, parts]: norm of what each input adds to that feature, see `fusion_parts`


@dataclass(frozen=True, kw_only=True)
class FinishedText:
    """A prompt with its answer, whose rounds are drafted again."""

    states: TargetStates  # the target's of the tokens, of the layers that the drafter reads
    tokens: Sequence[int]
    segments: Sequence[Segment]  # what each token is part of
    starts: Sequence[int]  # where rounds may begin, ascending, each 2 to len(tokens)
    beyond: Sequence[int] = ()  # tokens that the target would have generated next, if they are known


def rounds_taken(
    starts: Sequence[int], leading: Sequence[int], *, depth: int, known: int, limit: int
) -> list[RoundRecord]:
    """Return the rounds that speculation of this `depth` takes through a text of `known` tokens.

    `starts` are all positions of the answer; `leading` has for each of them how many drafts in a row match the text.
    Each round begins after the drafts that the one before accepted, and one token more. Nothing is drafted for
    positions from `limit` - 1 on. Drafts for positions after the last known token are not counted.
    """
    found, i = list[RoundRecord](), 0
    while i < len(starts):
        room = min(depth, limit - 1 - starts[i])
        if room <= 0:
            break
        told = min(room, known - starts[i])
        accepted = min(leading[i], told)
        found.append(RoundRecord(starts[i], room if accepted < told else accepted, accepted))
        i += accepted + 1
    return found


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A change of the drafter's state before it is fed to the next depth; by default none."""

    noise: float = 0.0  # standard deviation of Gaussian noise, relative to the state's RMS
    pin: bool = False  # scale the state to its RMS at depth 1 of the same round
    seed: int = 0

    def __call__(self, feature: Tensor, first: Tensor, starts: Sequence[int], depth: int) -> Tensor:
        """Return the changed `feature` [rounds, hidden] to feed to `depth`; `first` is the feature of depth 1.

        The noise of a round is seeded with seed, start and depth, so drafters of the same width get the same noise.
        """
        if self.pin:
            feature = feature * (_rms(first) / _rms(feature).clamp(min=1e-30)).to(feature.dtype)[:, None]
        if self.noise:
            seeds = ((self.seed << 40) + (start << 12) + depth for start in starts)
            drawn = torch.stack([_drawn(seed % 2**63, feature.shape[-1]) for seed in seeds])
            scaled = self.noise * _rms(feature)[:, None] * drawn.to(feature.device)
            feature = feature + scaled.to(feature.dtype)
        return feature


NO_INTERVENTION = Intervention()


@lru_cache(maxsize=_DRAWN)
def _drawn(seed: int, width: int) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def fusion_parts(drafter: Drafter) -> tuple[str, ...]:
    """Return the names of fc's inputs: EAGLE-3's target layers, or EAGLE-1's embedding and final state."""
    return tuple(f"layer {i}" for i in drafter.aux_layer_ids) or ("embedding", "final state")


@torch.inference_mode()
def target_states(
    target: TargetModel, texts: Sequence[Sequence[int]], aux_layer_ids: tuple[int, ...]
) -> list[TargetStates]:
    """Run the target over texts in one pass. Returns the states [tokens, ...] of each."""
    rows = Rows([len(text) for text in texts], target.embed_tokens.weight.device)
    tokens = torch.tensor([token for text in texts for token in text], device=rows.place.device)
    states = target(tokens, rows.place, CausalPass(rows), aux_layer_ids)
    aux = [None] * len(texts) if states.aux is None else states.aux.split(rows.counts)
    pairs = zip(states.final.split(rows.counts), aux, strict=True)
    return [TargetStates(final=final, aux=of_layers) for final, of_layers in pairs]


class Replay:
    """A drafter that has read finished texts and drafts any of their rounds again.

    `max_scores` bounds the attention weights that exist at a time.
    """

    @torch.inference_mode()
    def __init__(
        self,
        drafter: Drafter,
        texts: Sequence[FinishedText],
        *,
        recent_tokens: int = RECENT_TOKENS,
        max_scores: int = MAX_SCORES,
    ) -> None:
        for one in texts:
            assert list(one.starts) == sorted(one.starts)
            assert 2 <= one.starts[0] <= one.starts[-1] <= len(one.tokens) == len(one.segments)
        self._drafter, self._texts, self._max_scores = drafter, texts, max_scores
        states = _joined([one.states for one in texts])
        self._rows = rows = Rows([len(one.tokens) for one in texts], states.final.device)
        self._starts = [start for one in texts for start in one.starts]
        begins = [(i, start - 2) for i, one in enumerate(texts) for start in one.starts]
        self._kinds = torch.tensor([kind for one in texts for kind in one.segments], device=rows.place.device)
        self._verified = verified = VerifiedRows(rows, self._kinds, begins, recent_tokens)
        # The token after the last one is not known, but no round sees the row that reads it.
        after = torch.tensor([token for one in texts for token in (*one.tokens[1:], 0)], device=rows.place.device)
        read = list[Tensor]()
        with drafter.fc.register_forward_hook(lambda _module, inputs, _output: read.append(inputs[0][verified.index])):
            self._truth = states.final, drafter.fuse(states)
            first = drafter(after, self._truth[1], rows.place, verified)
        self._first = DraftStates(**{name: whole[verified.index] for name, whole in vars(first).items()})
        self._read = read[0]  # [begins, ...]: fc's inputs in the rows that rounds begin from

    @torch.inference_mode()
    def matching_drafts(self, depth: int, intervention: Intervention = NO_INTERVENTION) -> list[list[int]]:
        """Return for each text and each of its `starts` how many drafts in a row match the text, at most `depth`."""
        drafter, verified = self._drafter, self._verified
        said = [[*one.tokens, *one.beyond, *[-1] * (depth + 1)] for one in self._texts]
        text = Rows([len(one) for one in said], self._kinds.device)
        flat = torch.tensor([token for one in said for token in one], device=self._kinds.device)
        before = text.offsets[verified.sequences] + verified.slots + 1  # [begins]: the last token that a round knows
        found = [0] * len(self._starts)
        for rounds in self._pieces(depth):
            storage = DraftedRows(verified, rounds, max(1, depth - 1), records=False)
            step = self._first_step(rounds)
            first = step.feature
            for d in range(1, depth + 1):
                numbers = storage.rounds.numbers
                drafts = drafter.to_target_ids(argmax_rows(drafter.logits(step.head)))
                stands = (drafts == flat[before[storage.rounds.index] + d]).nonzero()[:, 0]
                which = stands.tolist()
                for i in which:
                    found[numbers[i]] = d
                if not which or d == depth:
                    break
                storage, drafts, first = storage.only(which), drafts[stands], first[stands]
                starts = [self._starts[number] for number in storage.rounds.numbers]
                fed = intervention(step.feature[stands], first, starts, d + 1)
                step = drafter(drafts, fed, storage.rounds.slots + d, storage)
        counts = iter(found)
        return [[next(counts) for _ in one.starts] for one in self._texts]

    @torch.inference_mode()
    def draft(
        self, starts: Sequence[Sequence[int]], depth: int, intervention: Intervention = NO_INTERVENTION
    ) -> list[Replayed]:
        """Draft again, to `depth`, the rounds of each text that begin at the given ones of its `starts`.

        States are recorded before the `intervention`.
        """
        numbers, base = list[int](), 0
        for text, chosen in zip(self._texts, starts, strict=True):
            where = {start: base + i for i, start in enumerate(text.starts)}
            numbers += [where[start] for start in chosen]
            base += len(text.starts)
        drafter, verified, pieces = self._drafter, self._verified, list[dict[str, Tensor]]()
        for rounds in self._pieces(depth, numbers):
            storage = DraftedRows(verified, rounds, max(1, depth - 1))
            step = self._first_step(rounds)
            begun = [self._starts[number] for number in rounds.numbers]
            recorded, fed_first = [self._record(step, storage, 1)], step.feature
            for d in range(2, depth + 1):
                fed = intervention(step.feature, fed_first, begun, d)
                step = drafter(recorded[-1]["drafts"], fed, rounds.slots + d - 1, storage)
                recorded.append(self._record(step, storage, d))
            pieces.append({name: torch.stack([one[name] for one in recorded], dim=1) for name in recorded[0]})
        index = torch.tensor(numbers, device=self._kinds.device)
        found = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        found["starts"] = verified.slots[index] + 2
        found["visible"] = self._visible(index, depth)
        found["fused_rms"] = _rms(self._truth[1][verified.index[index]])
        found["contributions"] = _contributions(self._read[index], drafter.fc.weight, len(fusion_parts(drafter)))
        counts = [len(chosen) for chosen in starts]
        split = {name: torch.split(x.cpu(), counts) for name, x in found.items()}
        return [Replayed(**{name: parts[i] for name, parts in split.items()}) for i in range(len(counts))]

    def _pieces(self, depth: int, numbers: Sequence[int] | None = None) -> Iterator[Rounds]:
        """Yield the rounds (all, unless `numbers` are given) in pieces that fit into memory."""
        verified, vocabulary = self._verified, self._drafter.config.draft_vocab_size
        heads = max(query.shape[1] for _, query, *_ in verified.layers)
        scores = self._max_scores // (heads * (self._rows.longest + depth))
        most = max(1, min(scores, max(_MIN_ROUNDS, _MAX_LOGITS // vocabulary)))
        piece, longest, sequences = list[int](), 0, 0
        given = range(len(self._starts)) if numbers is None else numbers
        for _, group in groupby(given, key=lambda number: verified.begins[number][0]):
            several = list(group)
            if piece and (sequences + 1) * max(longest, len(several)) > most:
                yield verified.rounds(piece)
                piece, longest, sequences = [], 0, 0
            while len(several) > most:
                yield verified.rounds(several[:most])
                several = several[most:]
            piece, longest, sequences = piece + several, max(longest, len(several)), sequences + 1
        if piece:
            yield verified.rounds(piece)

    def _first_step(self, rounds: Rounds) -> DraftStates:
        """Return the states that these rounds make their first drafts from."""
        return DraftStates(**{name: whole[rounds.index] for name, whole in vars(self._first).items()})

    def _visible(self, rounds: Tensor, depth: int) -> Tensor:
        """Return the number of visible rows of each segment at each draft step, [rounds, depth, segments]."""
        verified, rows = self._verified, self._rows
        # [sequences, rows + 1, segments]: rows before each
        before = F.pad(rows.pad(F.one_hot(self._kinds, len(Segment))).cumsum(1), (0, 0, 1, 0))
        steps, ends = torch.arange(depth, device=rounds.device), verified.slots[rounds][:, None] + 1
        window = rows.longest + depth if verified.window is None else verified.window
        sequences = verified.sequences[rounds][:, None]
        visible = before[sequences, ends] - before[sequences, torch.minimum((ends + steps - window).clamp(min=0), ends)]
        visible[..., Segment.DRAFTED] += steps.clamp(max=window)
        return visible

    def _record(self, step: DraftStates, storage: DraftedRows, depth: int) -> dict[str, Tensor]:
        """Return the fields of `Replayed` for one draft step of some rounds, [rounds, ...] each."""
        drafter, rows = self._drafter, self._rows
        drafts, confidence = drafter.top_token(step.head)
        sequences = self._verified.sequences[storage.rounds.index]
        places = storage.rounds.slots + depth  # positions of the target's states that the drafter's approximate
        is_there = places < rows.lengths[sequences]
        index = rows.offsets[sequences] + torch.where(is_there, places, 0)
        attention, storage.records = storage.records, []
        assert attention is not None
        return {
            "drafts": drafts,
            "confidence": confidence,
            "hidden_rms": _rms(step.hidden),
            "head_rms": _rms(step.head),
            "feature_rms": _rms(step.feature),
            "head_cosine": _cosine(step.head, self._truth[0], index, is_there),
            "feature_cosine": _cosine(step.feature, self._truth[1], index, is_there),
            **{name: torch.stack([record[name] for record in attention], dim=1) for name in attention[0]},
        }


def _joined(states: Sequence[TargetStates]) -> TargetStates:
    aux = [one.aux for one in states if one.aux is not None]
    return TargetStates(final=torch.cat([one.final for one in states]), aux=torch.cat(aux) if aux else None)


def _contributions(read: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Return the norm of each input's contribution to fc's output, [rounds, parts]: fc is a sum over its inputs."""
    pairs = zip(read.chunk(parts, dim=-1), weight.chunk(parts, dim=1), strict=True)
    return torch.stack([F.linear(part, piece).float().norm(dim=-1) for part, piece in pairs], dim=1)


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean(-1).sqrt()


def _cosine(states: Tensor, truth: Tensor, index: Tensor, is_there: Tensor) -> Tensor:
    """Cosine of states [rounds, hidden] with the target's at `index`; NaN where there is none to compare with."""
    if states.shape[-1] != truth.shape[-1]:  # a drafter narrower than its target
        return states.new_full(index.shape, torch.nan, dtype=torch.float32)
    return F.cosine_similarity(states.float(), truth[index].float(), dim=-1).masked_fill(~is_there, torch.nan)
