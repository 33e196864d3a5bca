"""Attention of training-time test: for all slots of packed rows at once, one draft step after another.

Pass 0 of a layer is causal within documents. Pass k is draft step k of every slot. It sees block 0 (the keys of pass 0)
up to its own slot, which is the verified text in serving, and its own slot of each later block, which are the tokens
drafted before:

                block 0, causal      block 1     block 2
    slot 0      x . . .              x . . .     x . . .
    slot 1      x x . .              . x . .     . x . .
    slot 2      x x x .              . . x .     . . x .
    slot 3      x x x x              . . . x     . . . x

With a sliding window, pass k is k positions further on and sees k positions less of block 0. Later blocks are always
within the window, because windows are wider than the draft is deep.

Attention to block 0 also returns its logsumexp: flex attention on a GPU, `document_attention` in plain torch elsewhere.
Each later block adds one score per slot and head; an online softmax merges them. So there is never a mask or a score
matrix over all blocks.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fledge.kernels.paged_attention import window_at
from fledge.layers.attention import AttentionSpec, Heads, at_least_float32
from fledge.training.data.examples import PackedBatch

Backend = Literal["auto", "reference", "flex"]
MASK_BLOCK = 128  # slots in a block of flex attention's mask
MIN_FLEX_HEAD_DIM = 16
MAX_SCORES = 1 << 22  # elements of the largest tensor of `document_attention`

# Of the passes so far, by layer, then by pass: key [rows, length, kv_heads, head_dim], value [.., kv_heads, value_dim].
Blocks = tuple[tuple[tuple[Tensor, Tensor], ...], ...]
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _untraced(function: Callable[_P, _T], *, recursive: bool = True) -> Callable[_P, _T]:
    """Decorator: torch.compile does not trace into the function; without `recursive`, it may compile its callees."""
    untraced: Callable[_P, _T] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return untraced


@_untraced
@functools.cache
def compiled(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """Return the function compiled. It is compiled again for each number of blocks and the like."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=dynamic)


class AttentionMass(NamedTuple):
    """Attention of one layer in one pass, mean over heads. Each float32 [rows, length], without gradient."""

    sink: Tensor  # on the first token of the slot's document
    own: Tensor  # on the drafter's own drafts, which are the later blocks


class DocumentLayout:
    """Which slots each slot of block 0 sees. Built once for a batch, for all layers and passes of drafter and target.

    A slot sees the slots from the start of its document to itself, a padding slot only itself; a sliding window moves
    the start forward. So the mask is one number per slot, and block masks are computed without a full mask.
    """

    def __init__(self, batch: PackedBatch, *, backend: Backend = "auto") -> None:
        self.backend: Backend = backend
        self.slots = torch.arange(batch.length, device=batch.document.device).expand_as(batch.document)
        before = torch.nn.functional.pad(batch.document[:, :-1], (1, 0), value=-2)
        starts = torch.where(batch.document != before, self.slots, 0).cummax(dim=1).values
        self.start = starts.where(batch.document >= 0, self.slots)  # [rows, length] int64: the document's first slot
        self._block_masks: dict[tuple[int | None, bool], BlockMask] = {}

    @_untraced
    def first_visible(self, window: int | None, chunked: bool = False) -> Tensor:
        """[rows, length] int64: the first slot that each slot sees. Never decreases along a row."""
        if window is None:
            return self.start
        return torch.maximum(self.start, self.slots - (window_at(self.slots - self.start, window, chunked) - 1))

    @_untraced
    def block_mask(self, window: int | None, chunked: bool = False) -> BlockMask:
        """Return the block mask of flex attention.

        A block of queries sees the key blocks from its first query's first key up to its own block. The key blocks from
        its last query's first key up to the one before its own are visible completely, unless the row ends in them.
        """
        if (window, chunked) in self._block_masks:
            return self._block_masks[window, chunked]
        first = self.first_visible(window, chunked)
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

        narrow = first.int()

        def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= narrow[row, query])

        parts = (*ordered(seen & ~whole), *ordered(whole))
        mask = BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=MASK_BLOCK, mask_mod=visible, seq_lengths=(length, length))
        self._block_masks[window, chunked] = mask
        return mask

    @_untraced
    def uses_flex(self, query: Tensor) -> bool:
        """Whether this layout and these heads [rows, length, heads, head_dim] go through flex attention."""
        if self.backend == "reference" or (self.backend == "auto" and not query.is_cuda):
            return False
        head_dim, length = query.shape[-1], query.shape[1]
        if head_dim >= MIN_FLEX_HEAD_DIM and length >= MASK_BLOCK:
            return True
        warnings.warn(
            f"head_dim {head_dim} and rows of {length} tokens: flex attention takes head_dim from "
            f"{MIN_FLEX_HEAD_DIM} and rows from {MASK_BLOCK} tokens; plain torch is used, which is slower",
            stacklevel=2,
        )
        return False


class TttStorage:
    """`KeyValueStorage` for passes over a `PackedBatch`, [rows, length] leading dimensions: pass k is draft step k.

    A target makes one pass, whose keys and values are not kept (`keep=False`). `earlier` are the `blocks` of previous
    draft steps: each step has its own storage, so that activation checkpointing can repeat it.
    """

    def __init__(
        self, layout: DocumentLayout, *, record: bool = False, earlier: Blocks = (), keep: bool = True
    ) -> None:
        self.layout, self.record, self._keep = layout, record, keep
        self.masses: dict[int, list[AttentionMass]] = {}  # by layer, one entry for each pass of this storage
        self._blocks = dict(enumerate(earlier))

    @property
    def blocks(self) -> Blocks:
        """The stored keys and values, by layer and pass."""
        return tuple(self._blocks[layer] for layer in range(len(self._blocks)))

    # Not traced into a compiled drafter: the number of blocks changes with each step, and the whole drafter would be
    # compiled again for each. The functions called here are compiled separately.
    @functools.partial(_untraced, recursive=False)
    def attend(self, heads: Heads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, head norms return float32
        blocks = (*self._blocks.get(spec.layer, ()), (key, value))
        window = None if spec.sliding_window is None else spec.sliding_window - (len(blocks) - 1)
        assert window is None or window > 0, "a window must be wider than the draft is deep"
        if self._keep:
            self._blocks[spec.layer] = blocks
        keys, values = zip(*blocks, strict=True)
        mixed: Tensor
        uses_flex = self.layout.uses_flex(query) and spec.softcap is None
        if uses_flex:
            mask = self.layout.block_mask(window, spec.chunked)
            mixed, lse = compiled(_flex)(query, keys[0], values[0], mask, spec.scale)
        else:
            first = self.layout.first_visible(window, spec.chunked)  # of targets, which make one pass
            mixed, lse = document_attention(query, keys[0], values[0], first, spec.scale, spec.softcap)
        if heads.sinks is not None:  # the sink takes its share of the softmax; only targets have sinks
            mixed = mixed * torch.sigmoid(lse - heads.sinks.to(lse.dtype))[..., None].to(mixed.dtype)
        if len(blocks) > 1:
            merge = compiled(merge_own) if uses_flex else merge_own
            mixed, lse = merge(query, mixed, lse, list(keys[1:]), list(values[1:]), spec.scale)
        if self.record:
            seen = self.layout.first_visible(window) == self.layout.start  # the first token may be outside the window
            mass = attention_mass(query, lse, keys, self.layout.start, spec.scale)
            mass = mass._replace(sink=mass.sink * seen)
            self.masses.setdefault(spec.layer, []).append(mass)
        return mixed


def merge_own(
    query: Tensor, mixed: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Merge attention over block 0 with each slot's own rows of the later blocks.

    query, mixed [rows, length, heads, head_dim], lse [rows, length, heads] (natural logarithm) of block 0, keys and
    values each [rows, length, kv_heads, head_dim]. Returns the same for all blocks together. Computed in float32.
    """
    wide = at_least_float32(_grouped(query, keys[0]))  # [rows, length, kv_heads, group, head_dim]
    lse = lse.view(wide.shape[:-1])
    scores = [(wide * at_least_float32(key)[..., None, :]).sum(-1) * scale for key in keys]
    highest = functools.reduce(torch.maximum, scores, lse).detach()
    first = (lse - highest).exp()
    weights = [(score - highest).exp() for score in scores]
    total = functools.reduce(torch.add, weights, first)
    joined = first[..., None] * at_least_float32(_grouped(mixed, keys[0]))
    for weight, value in zip(weights, values, strict=True):
        joined = joined + weight[..., None] * at_least_float32(value)[..., None, :]
    joined = joined / total[..., None]
    return joined.to(mixed.dtype).flatten(2, 3), (highest + total.log()).flatten(2, 3)


@_untraced
@torch.no_grad()
def attention_mass(query: Tensor, lse: Tensor, keys: Sequence[Tensor], start: Tensor, scale: float) -> AttentionMass:
    """Attention on the first token and on the slot's own drafts, given the logsumexp over all that a slot sees."""
    first, *own = keys
    wide = at_least_float32(_grouped(query, first))
    lse = lse.view(wide.shape[:-1])

    def mass(key: Tensor) -> Tensor:
        scores = (wide * at_least_float32(key)[..., None, :]).sum(-1) * scale
        return (scores - lse).exp().mean((-2, -1)).float()

    sink = mass(first.gather(1, start[..., None, None].expand_as(first)))
    return AttentionMass(sink=sink, own=sum(map(mass, own), torch.zeros_like(sink)))


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[rows, length, heads, head_dim] -> [rows, length, kv_heads, group, head_dim]."""
    return x.view(*x.shape[:2], key.shape[2], -1, x.shape[-1])


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


@_untraced
def document_attention(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch in which slot t sees slots first[t] .. t of its row.

    query [rows, length, heads, head_dim], key and value [rows, length, kv_heads, head_dim], first [rows, length] int64,
    never decreasing along a row. Returns attention like query, and the logsumexp of the scores [rows, length, heads],
    both differentiable. Computed in at least float32, for one row and some of its queries at a time, so that the
    largest tensor has a bounded size. The backward pass is written by hand, because PyTorch's CPU kernel has no
    gradient of the logsumexp and autograd takes 1.4 to 1.9 times as long. With a `softcap`, which only targets have,
    scores become softcap * tanh(score / softcap), and there is no gradient.
    """
    assert softcap is None or not query.requires_grad
    with torch.autocast(query.device.type, enabled=False):
        mixed, lse = _DocumentAttention.apply(query, key, value, first, scale, softcap)  # type: ignore[no-untyped-call]
    return mixed, lse


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        ctx.scale, ctx.chunks = scale, _chunks(query, first)
        mixed = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = at_least_float32(query.new_empty(query.shape[:-1]))
        for chunk in ctx.chunks:
            scores = _scores(chunk, query, key, first, scale, softcap)
            highest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            row, low, high, _ = chunk
            mixed[row, low:high] = _slots(torch.bmm(weights, _keys(chunk, value)) / total, high - low)
            lse[row, low:high] = _slots(highest + total.log(), high - low).squeeze(-1)
        ctx.save_for_backward(query, key, value, first, mixed, lse)
        return mixed, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, first, mixed, lse = ctx.saved_tensors
        kv_heads, grad_query = key.shape[2], torch.empty_like(query)
        grad_key, grad_value = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (key, value))
        # d score = weight * (d weight - sum(d out * out) + d lse)
        product = at_least_float32(grad_mixed) * at_least_float32(mixed)
        offset = at_least_float32(grad_lse) - product.sum(-1)  # [rows, length, heads]
        with torch.autocast(query.device.type, enabled=False):
            for chunk in ctx.chunks:
                row, low, high, start = chunk
                scores = _scores(chunk, query, key, first, ctx.scale)  # [kv_heads, group * queries, keys]
                weights = scores.sub_(_queries(chunk, lse[..., None], kv_heads)).exp_()
                grad_out = _queries(chunk, grad_mixed, kv_heads)
                grad_value[row, start:high] += torch.bmm(weights.mT, grad_out).transpose(0, 1)
                grad_scores = torch.bmm(grad_out, _keys(chunk, value).mT)
                grad_scores.add_(_queries(chunk, offset[..., None], kv_heads)).mul_(weights).mul_(ctx.scale)
                grad_query[row, low:high] = _slots(torch.bmm(grad_scores, _keys(chunk, key)), high - low)
                grad_key[row, start:high] += torch.bmm(grad_scores.mT, _queries(chunk, query, kv_heads)).transpose(0, 1)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


Chunk = tuple[int, int, int, int]  # row, first query, end of queries, first key


def _chunks(query: Tensor, first: Tensor) -> list[Chunk]:
    """Queries [low, high) of a row see keys [start, high). On a GPU `start` is 0, so as not to wait for the device."""
    rows, length, heads, _ = query.shape
    step = max(1, min(length, MAX_SCORES // (heads * length)))
    lows = range(0, length, step)
    starts = first[:, ::step].tolist() if first.device.type == "cpu" else [[0] * len(lows)] * rows
    return [(row, low, min(low + step, length), starts[row][i]) for row in range(rows) for i, low in enumerate(lows)]


def _scores(
    chunk: Chunk, query: Tensor, key: Tensor, first: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """[kv_heads, group * queries, keys], -inf where a key is not seen."""
    row, low, high, start = chunk
    scores = torch.bmm(_queries(chunk, query, key.shape[2]) * scale, _keys(chunk, key).mT)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    keys = torch.arange(start, high, device=query.device)
    hidden = (keys > keys[low - start :, None]) | (keys < first[row, low:high, None])
    scores.view(len(scores), -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return scores


def _queries(chunk: Chunk, x: Tensor, kv_heads: int) -> Tensor:
    """x [rows, length, heads, n] -> [kv_heads, group * queries, n] of the chunk, for grouped-query attention."""
    row, low, high, _ = chunk
    some = at_least_float32(x[row, low:high])
    return some.view(high - low, kv_heads, -1, x.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)


def _slots(x: Tensor, queries: int) -> Tensor:
    """The inverse of `_queries`: [kv_heads, group * queries, n] -> [queries, heads, n]."""
    return x.view(len(x), -1, queries, x.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)


def _keys(chunk: Chunk, x: Tensor) -> Tensor:
    """x [rows, length, kv_heads, head_dim] -> [kv_heads, keys, head_dim] of the chunk."""
    row, _, high, start = chunk
    return at_least_float32(x[row, start:high]).transpose(0, 1)
