"""The attention of training-time test: all slots of packed rows at once, draft step after draft step.

Pass 0 of a layer is causal within documents. Pass k is draft step k of every slot: it sees block 0 (the keys of pass 0)
up to its own slot, as serving sees the verified text, and its own slot of each later block, as serving sees the tokens
drafted before:

                block 0, causal      block 1     block 2
    slot 0      x . . .              x . . .     x . . .
    slot 1      x x . .              . x . .     . x . .
    slot 2      x x x .              . . x .     . . x .
    slot 3      x x x x              . . . x     . . . x

Block 0 goes through attention that also returns its logsumexp; each later block is one score per slot and head; an
online softmax joins them. So no mask and no score matrix over all blocks ever exists.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.training.data.packing import PackedBatch
from fledge.training.document_attention import document_attention

Backend = Literal["auto", "reference", "flex"]
MASK_BLOCK = 128  # slots; flex attention skips or takes whole blocks of them
MIN_FLEX_HEAD_DIM = 16

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _untraced(function: Callable[_P, _T], *, recursive: bool = True) -> Callable[_P, _T]:
    """Decorator: not a part of any compiled caller; unless `recursive`, what the function calls is compiled."""
    untraced: Callable[_P, _T] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return untraced


_document_attention = _untraced(document_attention)


@_untraced
@functools.cache
def compiled(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """Return a module's function compiled, once for each number of blocks and the like that it is called with."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=dynamic)


@dataclass(frozen=True, kw_only=True)
class KeyValueBlock:
    """What one pass left in one layer."""

    key: Tensor  # [rows, length, kv_heads, head_dim]
    value: Tensor  # [rows, length, kv_heads, value_dim]


@dataclass(frozen=True, kw_only=True)
class AttentionMass:
    """Where the attention of one layer went in one pass, mean over heads. Each float32 [rows, length], no gradient."""

    sink: Tensor  # on the first token of the slot's document
    own: Tensor  # on what the drafter itself drafted: the later blocks


Blocks = tuple[tuple[KeyValueBlock, ...], ...]  # by layer, then by pass


class DocumentLayout:
    """Who sees whom in block 0 of a batch. Built once, for all layers and passes of drafter and target.

    A slot sees from the start of its document to itself, a padding slot only itself; a sliding window moves the start
    up. So one number per slot says it all, and block masks follow from it without looking at pairs of slots.
    """

    def __init__(self, batch: PackedBatch, *, backend: Backend = "auto") -> None:
        self.backend: Backend = backend
        slots = torch.arange(batch.length, device=batch.document.device).expand_as(batch.document)
        before = torch.nn.functional.pad(batch.document[:, :-1], (1, 0), value=-2)
        starts = torch.where(batch.document != before, slots, 0).cummax(dim=1).values
        self.slots = slots
        self.start = torch.where(batch.document < 0, slots, starts)  # [rows, length] int64: the document's first slot
        self._first_visible: dict[int | None, Tensor] = {None: self.start}
        self._block_masks: dict[int | None, BlockMask] = {}

    @_untraced
    def first_visible(self, window: int | None) -> Tensor:
        """[rows, length] int64: the first slot that each slot sees. Never decreases along a row."""
        if window not in self._first_visible:
            assert window is not None
            self._first_visible[window] = torch.maximum(self.start, self.slots - (window - 1))
        return self._first_visible[window]

    @_untraced
    def block_mask(self, window: int | None) -> BlockMask:
        if window not in self._block_masks:
            self._block_masks[window] = _block_mask(self.first_visible(window))
        return self._block_masks[window]

    @_untraced
    def uses_flex(self, query: Tensor) -> bool:
        """Whether this layout and these heads [rows, length, heads, head_dim] go through flex attention."""
        if self.backend == "reference" or (self.backend == "auto" and not query.is_cuda):
            return False
        head_dim, length = query.shape[-1], query.shape[1]
        if head_dim < MIN_FLEX_HEAD_DIM or length < MASK_BLOCK:
            _say_once(
                f"head_dim {head_dim} and rows of {length} tokens: flex attention takes head_dim from "
                f"{MIN_FLEX_HEAD_DIM} and rows from {MASK_BLOCK} tokens; plain torch is used, which is slower"
            )
            return False
        return True


class TttStorage:
    """`KeyValueStorage` for passes over a `PackedBatch`, [rows, length] leading dimensions: pass k is draft step k.

    One pass of a target over a batch is pass 0 of each of its layers; `keep=False` then spares the memory of its keys
    and values. `earlier` are the `blocks` that passes of another storage left: a step that must be repeatable
    (checkpointing) starts from them with a storage of its own. How many heads there are, and of what size, it reads
    from what it is given.
    """

    def __init__(
        self, layout: DocumentLayout, *, record: bool = False, earlier: Blocks = (), keep: bool = True
    ) -> None:
        self.layout = layout
        self.record = record
        self.masses: dict[int, list[AttentionMass]] = {}  # by layer, one entry for each pass of this storage
        self._blocks: dict[int, tuple[KeyValueBlock, ...]] = dict(enumerate(earlier))
        self._keep = keep

    @property
    def blocks(self) -> Blocks:
        """What has been stored, by layer and pass."""
        return tuple(self._blocks[layer] for layer in range(len(self._blocks)))

    # Not traced into a compiled drafter: the number of blocks differs from step to step, and everything around it
    # would be compiled again for each. What is called here is compiled on its own.
    @functools.partial(_untraced, recursive=False)
    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        query, key = query.to(value.dtype), key.to(value.dtype)  # head norms in float32 leave them wider under autocast
        blocks = (*self._blocks.get(spec.layer, ()), KeyValueBlock(key=key, value=value))
        assert len(blocks) == 1 or spec.sliding_window is None, "only targets have windows, and they make one pass"
        if self._keep:
            self._blocks[spec.layer] = blocks
        first, later = blocks[0], blocks[1:]
        mixed: Tensor
        uses_flex = self.layout.uses_flex(query)
        if uses_flex:
            mask = self.layout.block_mask(spec.sliding_window)
            mixed, lse = compiled(_flex)(query, first.key, first.value, mask, spec.scale)
        else:
            mixed, lse = _document_attention(
                query, first.key, first.value, self.layout.first_visible(spec.sliding_window), spec.scale
            )
        if later:
            merge = compiled(merge_own) if uses_flex else merge_own
            mixed, lse = merge(query, mixed, lse, [b.key for b in later], [b.value for b in later], spec.scale)
        if self.record:
            mass = attention_mass(query, lse, first.key, [b.key for b in later], self.layout.start, spec.scale)
            self.masses.setdefault(spec.layer, []).append(mass)
        return mixed


def merge_own(
    query: Tensor, mixed: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Add each slot's own rows of the later blocks to its attention over block 0.

    query, mixed [rows, length, heads, head_dim], lse [rows, length, heads] (natural logarithm) of block 0, keys and
    values each [rows, length, kv_heads, head_dim]. Returns the same for all blocks together. Computed in float32.
    """
    wide = _at_least_float32(_grouped(query, keys[0]))  # [rows, length, kv_heads, group, head_dim]
    lse = lse.view(wide.shape[:-1])
    scores = [(wide * _at_least_float32(key)[..., None, :]).sum(-1) * scale for key in keys]
    highest = functools.reduce(torch.maximum, scores, lse).detach()
    first = (lse - highest).exp()
    weights = [(score - highest).exp() for score in scores]
    total = functools.reduce(torch.add, weights, first)
    joined = first[..., None] * _at_least_float32(_grouped(mixed, keys[0]))
    for weight, value in zip(weights, values, strict=True):
        joined = joined + weight[..., None] * _at_least_float32(value)[..., None, :]
    joined = joined / total[..., None]
    return joined.to(mixed.dtype).flatten(2, 3), (highest + total.log()).flatten(2, 3)


@_untraced
@torch.no_grad()
def attention_mass(
    query: Tensor, lse: Tensor, first: Tensor, own: Sequence[Tensor], start: Tensor, scale: float
) -> AttentionMass:
    """Attention on the sink and on the slot's own drafts, from the logsumexp over all that a slot sees."""
    wide = _at_least_float32(_grouped(query, first))
    lse = lse.view(wide.shape[:-1])

    def mass(key: Tensor) -> Tensor:
        scores = (wide * _at_least_float32(key)[..., None, :]).sum(-1) * scale
        return (scores - lse).exp().mean((-2, -1)).float()

    sinks = first.gather(1, start[..., None, None].expand_as(first))
    return AttentionMass(sink=mass(sinks), own=sum((mass(key) for key in own), torch.zeros_like(mass(sinks))))


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[rows, length, heads, head_dim] -> [rows, length, kv_heads, group, head_dim]."""
    return x.view(*x.shape[:2], key.shape[2], -1, x.shape[-1])


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _block_mask(first: Tensor) -> BlockMask:
    """The mask of flex attention from the first visible slot of each slot, [rows, length], never decreasing.

    Of the blocks of keys, those from the first query's first key to the queries' own block are seen at all; those from
    the last query's first key to the block before their own are seen whole (but nothing is whole to a cut block).
    """
    length = first.shape[1]
    blocks = torch.arange(-(-length // MASK_BLOCK), device=first.device)
    begins = blocks * MASK_BLOCK
    lowest = first[:, begins]  # [rows, blocks]
    highest = first[:, (begins + MASK_BLOCK - 1).clamp(max=length - 1)]
    inside = blocks < blocks[:, None]  # [query blocks, key blocks]: before the queries' own
    seen = (inside | (blocks == blocks[:, None])) & (begins + MASK_BLOCK > lowest[..., None])
    whole = inside & (begins >= highest[..., None]) & (begins + MASK_BLOCK <= length)[:, None]

    def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
        chosen = chosen[:, None].int()  # [rows, 1 for all heads, query blocks, key blocks]
        return chosen.sum(-1, dtype=torch.int32), chosen.argsort(stable=True, dim=-1, descending=True).int()

    first = first.int()

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[row, query])

    return BlockMask.from_kv_blocks(
        *ordered(seen & ~whole), *ordered(whole), BLOCK_SIZE=MASK_BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention [rows, length, heads, head_dim] and its logsumexp [rows, length, heads]."""
    mixed, aux = flex_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[-2] != key.shape[-2],
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return mixed.transpose(1, 2), aux.lse.transpose(1, 2)


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
