"""Quantised checkpoints of tiny models, written down from the definition of each format, in plain numpy.

`FORMATS` has, by a name, what config.json says of the weights, and a function that stores one matrix: it returns the
tensors, by what follows the linear's name, and the matrix in float32 that they mean. And what is multiplied with it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
GROUP = 16
INPUT_SCALE = 0.005  # some inputs are larger than 448 of these
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    store: Callable[[Tensor], Stored]
    multiplied: Callable[[Tensor], Tensor] = lambda x: x


def _fp8(matrix: Tensor, rows: int, columns: int, scale: str, *, shape: tuple[int, ...] | None = None) -> Stored:
    """Blocks of rows x columns, each with a scale."""
    blocks = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    scales, codes, meant = torch.zeros(blocks), torch.zeros_like(matrix).to(torch.float8_e4m3fn), matrix.clone()
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = matrix[at].abs().max() / 448
            codes[at] = (matrix[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, scale: scales if shape is None else scales.reshape(shape)}, meant


def _float8(x: Tensor, scale: Tensor) -> Tensor:
    """x as E4M3 with this scale, in its own dtype."""
    return ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _by_token(x: Tensor) -> Tensor:
    return torch.stack([_float8(row, row.float().abs().max() / 448) for row in x])


def _by_tensor(x: Tensor) -> Tensor:
    return _float8(x, torch.tensor(INPUT_SCALE))


def _with_input_scale(stored: Stored, name: str = "input_scale") -> Stored:
    return {**stored[0], name: torch.tensor(INPUT_SCALE)}, stored[1]


def _integers(matrix: Tensor, bits: int, group: int, symmetric: bool, groups: np.ndarray | None = None) -> tuple:
    """Unsigned codes [rows, columns], zeros and float16 scales [rows, groups], and what they mean."""
    w, high = matrix.numpy(), 2**bits - 1
    groups = np.arange(w.shape[1]) // group if groups is None else groups
    count = int(groups.max()) + 1
    codes, zeros = np.zeros(w.shape, np.int64), np.zeros((len(w), count), np.int64)
    scales, meant = np.zeros((len(w), count), np.float16), np.zeros_like(w)
    for g in range(count):
        part = w[:, groups == g]
        if symmetric:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) / (high // 2), high // 2 + 1
        else:
            low = np.minimum(part.min(1), 0)
            scales[:, g] = (np.maximum(part.max(1), 0) - low) / high
            zeros[:, g] = np.rint(-low / scales[:, g]).clip(0, high)
        scale, zero = scales[:, g, None].astype(np.float32), zeros[:, g, None]
        codes[:, groups == g] = (np.rint(part / scale) + zero).clip(0, high)
        meant[:, groups == g] = (codes[:, groups == g] - zero).astype(np.float32) * scale
    return codes, zeros, torch.from_numpy(scales), torch.from_numpy(meant)


def _words(values: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last axis; value i of a word goes to place places[i]."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    words = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        words |= padded[:, i::per_word].astype(np.uint32) << np.uint32(bits * (places[i] if places else i))
    return torch.from_numpy(words.view(np.int32).copy())


def _packed(matrix: Tensor, bits: int, group: int, symmetric: bool, ordered: bool = False) -> Stored:
    """compressed-tensors: zero points are packed along the rows."""
    groups = _shuffled_groups(matrix.shape[1], group) if ordered else None
    codes, zeros, scales, meant = _integers(matrix, bits, group, symmetric, groups)
    tensors = {"weight_packed": _words(codes, bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor(matrix.shape)
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T, bits).t()
    return tensors | ({"weight_g_idx": torch.from_numpy(groups.astype(np.int32))} if ordered else {}), meant


def _gptq(matrix: Tensor, bits: int, less: int, ordered: bool) -> Stored:
    groups = _shuffled_groups(matrix.shape[1], GROUP) if ordered else np.arange(matrix.shape[1]) // GROUP
    codes, zeros, scales, meant = _integers(matrix, bits, GROUP, symmetric=False, groups=groups)
    tensors = {"qweight": _words(codes, bits).t(), "qzeros": _words((zeros.T - less) % 2**bits, bits)}
    return tensors | {"scales": scales.t(), "g_idx": torch.from_numpy(groups.astype(np.int32))}, meant


def _without_order(stored: Stored) -> Stored:
    return {kind: tensor for kind, tensor in stored[0].items() if kind != "g_idx"}, stored[1]


def _shuffled_groups(columns: int, group: int) -> np.ndarray:
    return np.random.default_rng(columns).permutation(np.arange(columns) // group)


def _awq(matrix: Tensor) -> Stored:
    codes, zeros, scales, meant = _integers(matrix, 4, GROUP, symmetric=False)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    return {
        "qweight": _words(codes.T, 4, places),
        "qzeros": _words(zeros.T, 4, places),
        "scales": scales.t(),
    }, meant


def _int8(matrix: Tensor) -> Stored:
    scales = (matrix.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (matrix / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def _e2m1(matrix: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and what they mean, for scales [rows, groups] that are floats."""
    spread = scales.repeat_interleave(group, 1).numpy()
    scaled = matrix.numpy() / spread
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    meant = np.where(scaled < 0, -E2M1[codes], E2M1[codes]) * spread
    codes = codes + 8 * (scaled < 0)
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)), torch.from_numpy(meant)


def _nvfp4(matrix: Tensor, codes: str, whole: str, divides: bool) -> Stored:
    largest = matrix.unflatten(1, (-1, 16)).abs().amax(-1) / 6
    factor = 448 / largest.max()
    scales = (largest * factor).to(torch.float8_e4m3fn)
    stored = factor if divides else 1 / factor
    meant_scales = scales.float() / stored if divides else scales.float() * stored
    packed, meant = _e2m1(matrix, meant_scales, 16)
    return {codes: packed, "weight_scale": scales, whole: stored.reshape(1) if divides else stored}, meant


def mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents, and what they mean."""
    exponents = matrix.unflatten(1, (-1, 32)).abs().amax(-1).log2().floor() - 2
    packed, meant = _e2m1(matrix, torch.exp2(exponents), 32)
    return packed, (exponents + 127).to(torch.uint8), meant


def _mxfp4(matrix: Tensor) -> Stored:
    packed, exponents, meant = mxfp4(matrix)
    return {"weight_packed": packed, "weight_scale": exponents}, meant


def _compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    activations = None if inputs is None else numbers | inputs
    group = {"targets": ["Linear"], "weights": numbers | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _ints(**weights: Any) -> dict[str, Any]:
    return _compressed("pack-quantized", type="int", **weights)


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
_GROUPS = {"strategy": "group", "group_size": GROUP}

_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "data_type": "int"}


def _quark(weight: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    numbers = {"dtype": "fp8_e4m3", "is_dynamic": False, "symmetric": True, "group_size": None}
    said = {"weight": numbers | weight, "input_tensors": numbers | inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "exclude": ["lm_head"],
        "global_quant_config": said,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
    }


FORMATS = {
    "ct-fp8-tensor": Format(
        _compressed("float-quantized", strategy="tensor"), lambda w: _fp8(w, *w.shape, "weight_scale", shape=(1,))
    ),
    "ct-fp8-channel": Format(
        _compressed("float-quantized", strategy="channel"), lambda w: _fp8(w, 1, w.shape[1], "weight_scale")
    ),
    "ct-fp8-dynamic": Format(
        _compressed("float-quantized", {"strategy": "token", "dynamic": True}, strategy="channel"),
        lambda w: _fp8(w, 1, w.shape[1], "weight_scale"),
        _by_token,
    ),
    "ct-fp8-static": Format(
        _compressed("float-quantized", {"strategy": "tensor"}, strategy="tensor"),
        lambda w: _with_input_scale(_fp8(w, *w.shape, "weight_scale", shape=(1,))),
        _by_tensor,
    ),
    "ct-fp8-block": Format(
        _compressed(  # with activations that stay as they are
            "float-quantized",
            {"strategy": "group", "group_size": 24, "dynamic": True},
            strategy="block",
            block_structure=[12, 24],
        ),
        lambda w: _fp8(w, 12, 24, "weight_scale"),
    ),
    "ct-int8": Format(  # with activations that stay as they are
        _compressed(
            "int-quantized", {"type": "int", "strategy": "token", "dynamic": True}, type="int", strategy="channel"
        ),
        _int8,
    ),
    "ct-int8-packed": Format(
        _ints(num_bits=8, strategy="channel", group_size=-1), lambda w: _packed(w, 8, w.shape[1], True)
    ),
    "ct-int4": Format(_ints(num_bits=4, **_GROUPS), lambda w: _packed(w, 4, GROUP, True)),
    "ct-int4-zeros": Format(_ints(num_bits=4, symmetric=False, **_GROUPS), lambda w: _packed(w, 4, GROUP, False)),
    "ct-int4-act-order": Format(
        _ints(num_bits=4, actorder="group", **_GROUPS), lambda w: _packed(w, 4, GROUP, True, ordered=True)
    ),
    "ct-nvfp4": Format(
        _compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
        lambda w: _nvfp4(w, "weight_packed", "weight_global_scale", divides=True),
    ),
    "ct-mxfp4": Format(_compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32), _mxfp4),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]},
        lambda w: _fp8(w, 16, 16, "weight_scale_inv"),
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: _with_input_scale(_fp8(w, *w.shape, "weight_scale", shape=()), "activation_scale"),
        _by_tensor,
    ),
    "fp8-dynamic": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w: _fp8(w, *w.shape, "weight_scale", shape=()),
        _by_token,
    ),
    "gptq": Format({**_GPTQ, "bits": 4}, lambda w: _gptq(w, 4, 1, ordered=False)),
    "gptq-act-order": Format({**_GPTQ, "bits": 4, "desc_act": True}, lambda w: _gptq(w, 4, 1, ordered=True)),
    "gptq-v2-int8": Format(
        {**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, lambda w: _gptq(w, 8, 0, ordered=False)
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "auto-round": Format(
        {**_AUTO_ROUND, "packing_format": "auto_round:auto_gptq"},
        lambda w: _without_order(_gptq(w, 4, 1, ordered=False)),
    ),
    "auto-round-int8": Format(  # of all linears but one, by two ways to name some
        {
            **_AUTO_ROUND,
            "quant_method": "auto_round",
            "extra_config": {r"layers\.\d+\..*": {"bits": 8}, "lm_head": {"bits": 16}},
        },
        lambda w: _without_order(_gptq(w, 8, 1, ordered=False)),
    ),
    "auto-round-awq": Format({**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, _awq),
    "fbgemm-fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        lambda w: _fp8(w, 1, w.shape[1], "weight_scale"),
        _by_token,
    ),
    "quark-tensor": Format(
        _quark({"qscheme": "per_tensor"}, {"qscheme": "per_tensor"}),
        lambda w: _with_input_scale(_fp8(w, *w.shape, "weight_scale", shape=())),
        _by_tensor,
    ),
    "quark-channel": Format(
        _quark({"qscheme": "per_channel", "ch_axis": 0}, {"qscheme": "per_channel", "is_dynamic": True}),
        lambda w: _fp8(w, 1, w.shape[1], "weight_scale", shape=(-1,)),
        _by_token,
    ),
    "modelopt-fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]},
        lambda w: _with_input_scale(_fp8(w, *w.shape, "weight_scale", shape=())),
        _by_tensor,
    ),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        lambda w: _nvfp4(w, "weight", "weight_scale_2", divides=False),
    ),
}


def is_linear(name: str) -> bool:
    return name.endswith(("proj.weight", "fc.weight"))


def quantize_checkpoint(
    source: Path, stored: Path, meant: Path, form: Format, is_plain: Callable[[str], bool] = lambda _name: False
) -> None:
    """Write a dense checkpoint again: quantised, and as the dense one that means the same."""
    tensors, quantised, dense = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if is_linear(name) and not is_plain(name):
            parts, dense[name] = form.store(tensor.float())
            quantised |= {name.removesuffix("weight") + kind: part.contiguous() for kind, part in parts.items()}
        else:
            quantised[name] = dense[name] = tensor
    fields = json.loads((source / "config.json").read_text())
    for directory, contents, more in ((stored, quantised, {"quantization_config": form.config}), (meant, dense, {})):
        directory.mkdir(parents=True)
        save_file(contents, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps({**fields, **more}))
