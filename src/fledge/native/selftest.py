"""A self-test of a library that was just loaded, against torch: a miscompiled one would change outputs unnoticed."""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.argmax import argmax_rows_reference
from fledge.kernels.quantize_rows import quantize_rows_reference
from fledge.kernels.quantized_linear import INT4_OFFSET, Kind, QuantizedWeight, dequantize, pack_halves
from fledge.kernels.rope_store import rotate
from fledge.kernels.swiglu import swiglu
from fledge.native.bindings import struct, struct_type
from fledge.native.panels import BFLOAT16, FLOAT32, quantized_panels

# Odd sizes, so that every vectorised loop has a remainder.
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _DIM = 40, 38, 4, 2, 12
_CONTEXT, _ROWS, _BLOCK = 21, 7, 5
_EPS = 1e-5
_FACTOR = 0.75  # on what is added to the residual stream
# Philox4x32-10, stream 0: seed 0 at position 0 (its first known answer), and seed -5 at position 3 << 33.
_UNIFORMS = [0.3990464708489645, 0.6384416703370993]


def check(library: ctypes.CDLL) -> None:
    """Raise OSError if results differ from torch's, or bits of a row depend on the batch. Takes milliseconds."""
    source = torch.Generator("cpu").manual_seed(0)
    for is_bfloat16 in (False, True):
        layer = _Layer(library, source, is_bfloat16)
        cache = _random(source, 2, _CONTEXT + _ROWS, _KV_HEADS, _DIM)
        stream = _random(source, _ROWS, _HIDDEN)
        found = layer.run_native(stream, cache.clone(), _CONTEXT)
        if not torch.allclose(found, layer.run_torch(stream, cache), rtol=1e-4, atol=1e-4):
            raise OSError("a decoder layer fails its self-test (miscompiled?)")
        alone = [layer.run_native(stream[i : i + 1], cache, _CONTEXT + i) for i in range(_ROWS)]
        if not torch.equal(torch.cat(alone), found):
            raise OSError("a row's bits depend on its company in the self-test (miscompiled?)")
    _check_quantized(library, source)
    logits = (3 * _random(source, 6, 45)).round()
    logits[0, 44], logits[1, 7], logits[2], logits[3, 44] = 10, torch.nan, -torch.inf, torch.nan
    chosen = torch.empty(len(logits), dtype=torch.int64)
    library.fledge_argmax_rows(logits, None, chosen, None, *logits.shape, torch.get_num_threads())
    if not torch.equal(chosen, argmax_rows_reference(logits)):
        raise OSError("the choice of the largest fails its self-test (miscompiled?)")
    _check_drawing(library, source)
    drafts, choices = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2, 9, 8], [4, 5, 6, 7]])
    tokens, accepted = torch.empty_like(choices), torch.empty(2).long()
    library.fledge_accept_chain(drafts, choices, None, tokens, accepted, 2, 4, 3)
    if [*tokens.flatten(), *accepted] != [1, 2, 9, -1, 4, 5, 6, 7, 2, 3]:
        raise OSError("the acceptance of drafts fails its self-test (miscompiled?)")


def _check_drawing(library: ctypes.CDLL, source: torch.Generator) -> None:
    """Check sampling and rejection sampling against probabilities in float64."""
    numbers = torch.empty(2, dtype=torch.float64)
    library.fledge_philox_uniforms(torch.tensor([0, -5]), torch.tensor([0, 3 << 33]), numbers, 2, 0)
    if numbers.tolist() != _UNIFORMS:
        raise OSError("random numbers fail their self-test (miscompiled?)")
    logits, temperature, threads = 2 * _random(source, 6, 1300), 0.7, torch.get_num_threads()
    p = (logits / temperature).double().softmax(-1)
    p[3:] *= p[3:] >= p[3:].topk(9).values[:, -1:]  # the second request has a top-k
    p /= p.sum(-1, keepdim=True)
    request, both = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True, True])
    single, double = torch.float32, torch.float64
    filters = torch.tensor([0, 9]), torch.ones(2, dtype=double), torch.zeros(2, dtype=single)
    chunks = torch.empty(6, 2, dtype=single), torch.empty(6, 2, dtype=double)
    weighed = (torch.empty(6, dtype=single), torch.empty(6).long(), *chunks)
    given = (logits, request, both, torch.full((2,), temperature, dtype=single), *weighed)
    sizes = (*logits.shape, logits.stride(0))
    library.fledge_weigh_rows(*given, *filters, *sizes, threads)
    wanted, found = p.argmax(-1), torch.empty(6).long()
    library.fledge_draw_rows(*given, _middle(p, wanted), found, None, *sizes, threads)
    if not torch.equal(found, wanted):
        raise OSError("the drawing of tokens fails its self-test (miscompiled?)")
    # Two drafts each: the first request's first draft is rejected, the second request's are both accepted.
    q, drafts = p.view(2, 3, -1)[:, :2].flip(0).float().contiguous(), torch.tensor([[700, 701], [0, 0]])
    q[0, 0, 700], drafts[1] = 1.0, wanted[3:5]
    above = (p[:1] - q[0, :1]).clamp(min=0)
    corrected = torch.cat([above.argmax(-1), wanted[5:]])
    judging, correcting = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=double), torch.zeros(2, 3, dtype=double)
    correcting[0, 0], correcting[1, 2] = _middle(above, corrected[:1])[0], _middle(p[5:], wanted[5:])[0]
    tokens, accepted = torch.empty(2, 3).long(), torch.empty(2).long()
    drawn = (drafts, torch.tensor([0, 1]), both, torch.tensor([2, 2]), q, torch.arange(6))
    strides = (1300, 1300, 2600, 1300)
    library.fledge_reject_drafts(*given, *drawn, judging, correcting, tokens, accepted, 2, 3, *strides, threads)
    if [*tokens.flatten(), *accepted] != [corrected[0], -1, -1, *drafts[1], corrected[1], 0, 2]:
        raise OSError("the judging of drafts fails its self-test (miscompiled?)")


def _middle(weights: Tensor, tokens: Tensor) -> Tensor:
    """The uniforms [rows] in the middle of the intervals in which these tokens are sampled."""
    upper, own = (one.gather(1, tokens[:, None]).squeeze(1) for one in (weights.cumsum(-1), weights))
    return (upper - own / 2) / weights.sum(-1)


def _check_quantized(library: ctypes.CDLL, source: torch.Generator) -> None:
    """Check products with quantised weights against the dequantised weight in float32, and batch invariance.

    With `fp8`, x is quantised too.
    """
    rows, columns, group = 37, 24, 8
    scales = _random(source, rows, columns // group).abs()
    x, codes = _random(source, _ROWS, columns), _random(source, rows, columns)
    stored: dict[Kind, Tensor] = {
        "int8": (30 * codes).to(torch.int8),
        "int4": pack_halves((3 * codes).clamp(-8, 7) + INT4_OFFSET),
        "fp8": codes.to(torch.float8_e4m3fn),
    }
    for kind, made in stored.items():
        zeros = None if kind == "fp8" else scales.to(torch.int8)
        weight = QuantizedWeight(kind=kind, columns=columns, group_size=group, codes=made, scales=scales, zeros=zeros)
        panels = quantized_panels(weight, library.fledge_lanes(), paired=False)
        plain = torch.zeros(len(panels.words) * columns * 2 * library.fledge_lanes())
        sizes = {"columns": rows, "size": columns}
        dense = struct("Matrix", panels=plain, weight_type=FLOAT32, **sizes)
        library.fledge_pack(dense, dequantize(weight), plain)
        aligned = torch.zeros(panels.words.numel() + 16, dtype=torch.int32)
        aligned = aligned[-aligned.data_ptr() % 64 // 4 :][: panels.words.numel()].copy_(panels.words.flatten())
        held = {**panels.tensors(), "panels": aligned, "weight_type": panels.weight_type, "group": panels.group}
        quantized = struct("Matrix", **sizes, **held, quantizes_input=kind == "fp8")
        rounded = quantize_rows_reference(x).dequantized() if kind == "fp8" else x
        found = [torch.empty(_ROWS, rows) for _ in range(2)]
        for matrix, given, out in zip((dense, quantized), (rounded, x), found, strict=True):
            library.fledge_linear(matrix, given, columns, _ROWS, out, torch.get_num_threads())
        if not torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-5 * float(found[0].abs().max())):
            raise OSError(f"products with {kind} fail their self-test (miscompiled?)")
        alone = torch.empty(_ROWS, rows)
        for i in range(_ROWS):
            library.fledge_linear(quantized, x[i], columns, 1, alone[i], 1)
        if not torch.equal(alone, found[1]):
            raise OSError(f"a row's products with {kind} depend on its company in the self-test (miscompiled?)")


def _random(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float32, device="cpu")  # whatever torch's defaults are now


class _Layer:
    """A decoder layer with random weights for one sequence, in C and in torch."""

    def __init__(self, library: ctypes.CDLL, source: torch.Generator, is_bfloat16: bool) -> None:
        self.library = library
        qkv = (_HEADS + 2 * _KV_HEADS) * _DIM
        shapes = {"qkv": (qkv, _HIDDEN), "output": (_HIDDEN, _HEADS * _DIM)}
        shapes |= {"gate_up": (2 * _INNER, _HIDDEN), "down": (_HIDDEN, _INNER)}
        random = {name: _random(source, *shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
        self.weights = {name: weight.bfloat16().float() if is_bfloat16 else weight for name, weight in random.items()}
        self.bias = _random(source, qkv)
        self.norms = {name: _random(source, _HIDDEN).abs() + 0.5 for name in ("input_norm", "post_norm")}
        self.head_norms = {name: _random(source, _DIM).abs() + 0.5 for name in ("q_norm", "k_norm")}
        self.frequencies = _random(source, _DIM // 2).abs()
        self.scale = _DIM**-0.5
        sizes = {"heads": _HEADS, "kv_heads": _KV_HEADS, "head_dim": _DIM, "rotary_dim": _DIM}
        heads = struct("Heads", **sizes, window=0, eps=_EPS, scale=self.scale, **self.head_norms)
        matrices = {name: self._packed(name, is_bfloat16) for name in shapes}
        self.lowered = struct("Layer", heads=heads, eps=_EPS, **matrices, **self.norms)

    def _packed(self, name: str, is_bfloat16: bool) -> Any:
        weight = self.weights[name]
        sizes = {"columns": weight.shape[0], "size": weight.shape[1]}
        kind = {
            "weight_type": BFLOAT16 if is_bfloat16 else FLOAT32,
            "paired": name == "gate_up",
            "bias": self.bias if name == "qkv" else None,
            "factor": _FACTOR,
        }
        panels = self.library.panel_count(ctypes.byref(struct("Matrix", **sizes, **kind)))
        count = panels * weight.shape[1] * 2 * self.library.fledge_lanes()
        memory = torch.zeros(count, dtype=torch.int16 if is_bfloat16 else torch.float32)
        packed = struct("Matrix", panels=memory, **sizes, **kind)
        self.library.fledge_pack(packed, weight, memory)
        return packed

    def run_native(self, stream: Tensor, cache: Tensor, context: int) -> Tensor:
        """Return the stream after the layer. Writes keys and values to cache [2, tokens, KV heads, size]."""
        rows, blocks = len(stream), -(-cache.shape[1] // _BLOCK)
        table = torch.arange(blocks, dtype=torch.int32).flip(0)
        padded = F.pad(cache, (0, 0, 0, 0, 0, blocks * _BLOCK - cache.shape[1]))
        paged = padded.view(2, blocks, _BLOCK, _KV_HEADS, _DIM).flip(1)
        positions = torch.arange(context, context + rows)
        described = struct(
            "Pass",
            tokens=rows,
            sequences=1,
            rows=rows,
            positions=positions,
            slots=table[positions // _BLOCK] * _BLOCK + positions % _BLOCK,
            contexts=torch.tensor([context]),
            tables=table,
            table_stride=blocks,
            keys=paged[0],
            values=paged[1],
            layer_stride=0,
            block_size=_BLOCK,
            frequencies=self.frequencies,
            magnitude=1.0,
        )
        layers, out = (struct_type("Layer") * 1)(self.lowered), stream.clone()
        none = (ctypes.c_int64 * 0)()
        threads = torch.get_num_threads()
        self.library.fledge_decode(layers, 1, described, None, out, none, 0, None, None, 0.0, out, threads)
        cache.copy_(paged.flip(1).flatten(1, 2)[:, : cache.shape[1]])
        return out

    def run_torch(self, stream: Tensor, cache: Tensor) -> Tensor:
        rows = len(stream)
        normed = F.rms_norm(stream, (_HIDDEN,), self.norms["input_norm"], _EPS)
        heads = F.linear(normed, self.weights["qkv"], self.bias).view(rows, -1, _DIM)
        query, key = self._turned(heads[:, :_HEADS], "q_norm"), self._turned(heads[:, _HEADS:-_KV_HEADS], "k_norm")
        keys, values = (
            torch.cat([old[:_CONTEXT], new]) for old, new in zip(cache, (key, heads[:, -_KV_HEADS:]), strict=True)
        )
        seen = torch.ones(rows, _CONTEXT + rows, dtype=torch.bool).tril(_CONTEXT)
        query, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=self.scale, enable_gqa=True)
        stream = stream + _FACTOR * F.linear(mixed[0].transpose(0, 1).flatten(1), self.weights["output"])
        normed = F.rms_norm(stream, (_HIDDEN,), self.norms["post_norm"], _EPS)
        return stream + _FACTOR * F.linear(swiglu(F.linear(normed, self.weights["gate_up"])), self.weights["down"])

    def _turned(self, heads: Tensor, norm: str) -> Tensor:
        angles = torch.arange(_CONTEXT, _CONTEXT + len(heads))[:, None, None] * self.frequencies
        normed = F.rms_norm(heads, (_DIM,), self.head_norms[norm], _EPS)
        return rotate(normed, *(torch.cat([side, side], dim=-1) for side in (angles.cos(), angles.sin())))
