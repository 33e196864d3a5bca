"""Packed batches, and training-time test done the obvious way: a document at a time, with every mask written out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.layers.dense_cache import DenseCache
from fledge.models.config import Architecture
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.training.data.examples import PackedBatch
from fledge.training.recipe import FitSection
from fledge.training.ttt import Teacher, TeacherLogits
from tests.tiny_models import TINY_TARGET, drafter_configs

_NAMED = drafter_configs()
_WIDE_GQA = replace(TINY_TARGET.layer, num_heads=6, num_kv_heads=2, head_dim=8)
VARIANTS = {
    "eagle1": EAGLE_1.config_for(TINY_TARGET),
    "eagle3": EAGLE_3.config_for(TINY_TARGET),
    "eagle3.1": EAGLE_3_1.config_for(TINY_TARGET),
    "fc-norm-only": replace(EAGLE_3.config_for(TINY_TARGET), fc_norm=True),
    "norm-output-only": replace(EAGLE_3.config_for(TINY_TARGET), norm_output=True),
    "norm-before-residual": replace(EAGLE_3_1.config_for(TINY_TARGET), norm_before_residual=True),
    "two-layers": _NAMED["two-layers"],
    "windows": replace(_NAMED["two-layers"], sliding_windows=(7, 6)),  # depths of tests are below
    "gelu": EAGLE_3.config_for(TINY_TARGET, layer=replace(TINY_TARGET.layer, activation="gelu")),
    "grouped-heads": EAGLE_3_1.config_for(TINY_TARGET, layer=_WIDE_GQA),
    "head-norms": _NAMED["qwen3-style"],
    "latent": _NAMED["latent"],
    "reduced-vocabulary": replace(EAGLE_3_1.config_for(TINY_TARGET), draft_vocab_size=TINY_TARGET.vocab_size // 2),
}


@dataclass(frozen=True, kw_only=True)
class Document:
    length: int
    answer_from: int  # tokens from here on are the answer


def pack(rows: Sequence[Sequence[Document]], length: int, *, seed: int = 0, vocab_size: int = 40) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), length)
    batch = PackedBatch(
        tokens=torch.randint(vocab_size, shape, generator=generator),  # padding too: nobody may notice
        answer=torch.zeros(shape, dtype=torch.bool),
        document=torch.full(shape, -1),
        positions=torch.zeros(shape, dtype=torch.int64),
    )
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            end = start + document.length
            assert end <= length
            batch.answer[row, start + document.answer_from : end] = True
            batch.document[row, start:end] = number
            batch.positions[row, start:end] = torch.arange(document.length)
            start = end
    return batch


def usual_batch() -> PackedBatch:
    """Documents of many lengths, down to one token; full rows and padded ones."""
    d = Document
    return pack(
        [
            [d(length=9, answer_from=4), d(length=7, answer_from=2)],
            [d(length=1, answer_from=0), d(length=12, answer_from=9)],
            [d(length=3, answer_from=1), d(length=2, answer_from=1), d(length=6, answer_from=0)],
        ],
        16,
    )


def documents(batch: PackedBatch) -> Iterator[tuple[int, slice]]:
    """(row, slots) of each document."""
    for row in range(batch.rows):
        numbers = batch.document[row]
        for number in sorted(set(numbers[numbers >= 0].tolist())):
            slots = (numbers == number).nonzero().flatten()
            yield row, slice(int(slots[0]), int(slots[-1]) + 1)


def states_of(target: TargetModel, batch: PackedBatch, aux_layer_ids: tuple[int, ...]) -> TargetStates:
    """The target's states, each document by itself as serving computes it; noise at padding."""
    hidden = target.config.hidden_size
    final = torch.randn(batch.rows, batch.length, hidden)
    aux = torch.randn(batch.rows, batch.length, len(aux_layer_ids) * hidden) if aux_layer_ids else None
    for row, slots in documents(batch):
        tokens = batch.tokens[row, slots]
        positions = torch.arange(len(tokens))
        out = target(tokens, positions, DenseCache(target.config.num_layers).extend(positions), aux_layer_ids)
        final[row, slots] = out.final
        if aux is not None:
            assert out.aux is not None
            aux[row, slots] = out.aux
    return TargetStates(final=final, aux=aux)


def teacher_of(target: TargetModel, drafter: Drafter, states: TargetStates) -> TeacherLogits:
    return Teacher(target.lm_head.weight, drafter.vocabulary)(states.final)


def as_double(states: TargetStates) -> TargetStates:
    return replace(states, final=states.final.double(), aux=None if states.aux is None else states.aux.double())


@dataclass
class WrittenOutStorage:
    """All blocks side by side under one mask [length, blocks * length] for one document: causal, then diagonals."""

    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)
    weights: dict[int, list[Tensor]] = field(default_factory=dict)  # of each pass [heads, length, blocks * length]

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()  # [length, heads, head_dim]
        self.keys.setdefault(spec.layer, []).append(key)
        self.values.setdefault(spec.layer, []).append(value)
        length, group = len(query), query.shape[1] // key.shape[1]
        everything = torch.cat(self.keys[spec.layer]).repeat_interleave(group, dim=1)
        values = torch.cat(self.values[spec.layer]).repeat_interleave(group, dim=1)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if spec.sliding_window is not None:
            further = len(self.keys[spec.layer]) - 1  # positions that this pass is beyond its slots
            mask &= ~torch.ones(length, length, dtype=torch.bool).tril(further - spec.sliding_window)
        eye = torch.eye(length, dtype=torch.bool)
        mask = torch.cat([mask] + [eye] * (len(self.keys[spec.layer]) - 1), dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, everything) * spec.scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        self.weights.setdefault(spec.layer, []).append(weights)
        return torch.einsum("hqk,khd->qhd", weights, values)


def written_out_steps(
    drafter: Drafter, batch: PackedBatch, states: TargetStates, depth: int
) -> Iterator[tuple[int, slice, int, DraftStates]]:
    """(row, slots of a document, step k, states [document length, hidden]): the recipe, read aloud."""
    for row, slots in documents(batch):
        tokens, storage = batch.tokens[row, slots].tolist(), WrittenOutStorage()
        n = len(tokens)
        aux = None if states.aux is None else states.aux[row, slots]
        feature = drafter.fuse(TargetStates(final=states.final[row, slots], aux=aux))
        for k in range(depth):
            read = torch.tensor([tokens[t + 1 + k] if t + 1 + k < n else 0 for t in range(n)])
            out = drafter(read, feature, torch.arange(n) + k, storage)
            feature = out.feature
            yield row, slots, k, out


def written_out_loss(
    drafter: Drafter, target: TargetModel, batch: PackedBatch, states: TargetStates, settings: FitSection
) -> Tensor:
    """Soft cross-entropy, slot by slot."""
    counts = [0] * settings.depth
    sums = [torch.zeros((), dtype=states.final.dtype)] * settings.depth
    for row, slots, k, out in written_out_steps(drafter, batch, states, settings.depth):
        answer, final = batch.answer[row, slots], states.final[row, slots]
        target_logits = final @ target.lm_head.weight.T
        for t in range(len(answer) - 2 - k):
            if not answer[t + 2 + k]:
                continue
            counts[k] += 1
            wanted = target_logits[t + 1 + k]
            if drafter.config.architecture is Architecture.EAGLE1:
                sums[k] = sums[k] + settings.feature_weight * F.smooth_l1_loss(out.head[t], final[t + 1 + k])
            ids = torch.arange(len(wanted)) if drafter.vocabulary is None else drafter.vocabulary.target_ids
            if int(wanted.argmax()) in ids.tolist():
                log_q = drafter.logits(out.head[t]).log_softmax(-1)
                sums[k] = sums[k] - (wanted[ids].softmax(-1) * log_q).sum()
    total = torch.zeros((), dtype=states.final.dtype)
    for k in range(settings.depth):
        total = total + settings.depth_decay**k * sums[k] / max(counts[k], 1)
    return total
