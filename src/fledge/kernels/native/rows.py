"""Small operations on the rows of a round, each one call. The kernels of the same names tell what they compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.native.library import library


def runs_native(*tensors: Tensor | None) -> bool:
    """Whether a call on `tensors` can go to the library: integers and float32 on a CPU, of which no gradient is wanted.

    Neighbours in the last dimension must be neighbours in memory.
    """
    if torch.compiler.is_compiling():
        return False
    wants_gradient = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu" or (tensor.dtype != torch.float32 and tensor.is_floating_point()):
            return False
        if (wants_gradient and tensor.requires_grad) or (tensor.dim() > 0 and tensor.stride(-1) != 1):
            return False
    return library() is not None


def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape)
    side_by_side_native(x, [weight], eps, out)
    return out


def side_by_side_native(x: Tensor, weights: Sequence[Tensor], eps: float, out: Tensor) -> None:
    """Norm x [..., n * size] in n parts, each with its own weight [size], into out of the same shape."""
    rows, size = _as_rows(x), weights[0].shape[0]
    given, taken = rows.data_ptr(), out.data_ptr()
    for i, weight in enumerate(weights):
        _call().fledge_rms_norm(
            given + 4 * i * size,
            rows.stride(0),
            weight.data_ptr(),
            eps,
            taken + 4 * i * size,
            out.shape[-1],
            rows.shape[0],
            size,
        )


def add_rms_norm_native(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty(x.shape), torch.empty(x.shape)
    size = x.shape[-1]
    _call().fledge_add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // size,
        size,
    )
    return out, total


def draft_input_native(
    tokens: Tensor, embedding: Tensor, feature: Tensor, embedding_norm: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    size = feature.shape[-1]
    rows, tokens = _as_rows(feature), tokens.contiguous()
    out = torch.empty(*feature.shape[:-1], 2 * size)
    _call().fledge_draft_input(
        tokens.data_ptr(),
        embedding.data_ptr(),
        rows.data_ptr(),
        rows.stride(0),
        embedding_norm.data_ptr(),
        feature_norm.data_ptr(),
        eps,
        out.data_ptr(),
        rows.shape[0],
        size,
    )
    return out


def argmax_rows_native(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    offsets_at = None if offsets is None else offsets.data_ptr()
    _call().fledge_argmax(logits.data_ptr(), rows, vocab, offsets_at, out.data_ptr(), torch.get_num_threads())
    return out


def accept_chain_native(
    drafts: Tensor, choices: Tensor, draft_lengths: Tensor | None, logits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, accepted and last as `ChainOutcome` has them.

    With `logits` [batch, places, vocab] the choices are found there, and `choices` is what they are written to.
    """
    batch, places = choices.shape
    assert choices.is_contiguous()
    tokens = torch.empty(batch, places, dtype=torch.int64)
    accepted, last = torch.empty(2, batch, dtype=torch.int64)
    if logits is not None:
        assert logits.is_contiguous()
        rows, vocab = batch * places, logits.shape[-1]
        _call().fledge_argmax(logits.data_ptr(), rows, vocab, None, choices.data_ptr(), torch.get_num_threads())
    _call().fledge_accept(
        drafts.data_ptr(),
        drafts.stride(0),
        choices.data_ptr(),
        None if draft_lengths is None else draft_lengths.data_ptr(),
        batch,
        places,
        tokens.data_ptr(),
        accepted.data_ptr(),
        last.data_ptr(),
    )
    return tokens, accepted, last


def _as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _call():
    loaded = library()
    assert loaded is not None
    return loaded
