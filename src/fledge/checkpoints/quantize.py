"""Quantises a target or a drafter by rounding to nearest, in the format of compressed-tensors.

    fp8         E4M3, a scale for each row
    fp8-dynamic the same, and activations in E4M3 with a scale for each token; in other formats they are not quantised
    fp8-block   E4M3, a scale for each block of 128 x 128; all matrices must consist of whole blocks, as others require
    int8        a scale for each row
    int4        a scale for each group of 128 columns, or of 64 or 32 if 128 does not divide every width, else each row

Embedding, head, the routers of experts and a drafter's `fc` are not quantised. The result names its source in its
provenance, so that drafters for the one are accepted for the other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.checkpoints.formats.at_load import QUANTIZABLE
from fledge.checkpoints.formats.compressed_tensors import METHOD
from fledge.checkpoints.formats.dense import DENSE
from fledge.checkpoints.reading import PROVENANCE_FILE, read_drafter
from fledge.checkpoints.target import (
    TEMPLATE_FILES,
    TOKENIZER_FILES,
    identify_target,
    language_tensors,
    read_target_config,
    target_files,
)
from fledge.checkpoints.tensors import TensorFiles, refuse_existing, write_model
from fledge.checkpoints.weights import linear_of, weight_format
from fledge.devices import choose_device
from fledge.errors import CheckpointError
from fledge.kernels.cache_codes import FP8, FP8_MAX
from fledge.kernels.quantize_rows import quantize_rows
from fledge.kernels.quantized_linear import INT4_OFFSET, QuantizedWeight, in_fewest_bits, pack_halves
from fledge.models.hf_config import ConfigFields
from fledge.models.target import FAMILIES
from fledge.version import __version__

Width = Literal["fp8", "fp8-dynamic", "fp8-block", "int8", "int4"]
WIDTHS: tuple[Width, ...] = get_args(Width)
_BLOCK = 128
_GROUPS = (128, 64, 32)
# Factors tried on the scale of an integer group: clipping its extremes may cost less than a coarser step everywhere.
_SHRINK_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_COPIED = (*TOKENIZER_FILES, *TEMPLATE_FILES, "generation_config.json")


Importance = Mapping[str, Tensor]  # [columns] of each linear, by our names of linears, stacked ones included


@dataclass(frozen=True, kw_only=True)
class QuantizedCheckpoint:
    """A summary of what was written."""

    linears: int
    calibrated: int  # how many of them had an `importance`
    group_size: int | None  # None: a scale for each row or block
    bytes_before: int
    bytes_after: int


def quantize_target(
    source: Path, destination: Path, width: Width, importance: Importance | None = None, *, name: str | None = None
) -> QuantizedCheckpoint:
    """Write `source`, an unquantised target, with quantised weights. Refuses an existing destination.

    `importance` is the mean square of each input column of a linear: scales of integers then minimise the error of
    outputs instead of weights. `name` is the source as the user gave it.
    """
    family = FAMILIES[read_target_config(source).family]
    if target_files(source, family.name).has_stacks:
        raise CheckpointError(f"{source}: experts of {family.name} lie in one tensor, and are not quantised here")
    names = {stored: family.our_name(one) for one, stored in language_tensors(TensorFiles(source).infos).items()}
    copied = [source / one for one in _COPIED if (source / one).is_file()]
    made_from = {"name": name or str(source), **identify_target(source)}
    return _write(source, destination, width, names, importance or {}, {"quantized_from": made_from}, copied)


def quantize_drafter(source: Path, destination: Path, width: Width) -> QuantizedCheckpoint:
    """Write a drafter with quantised layers. Refuses an existing destination."""
    checkpoint = read_drafter(source)
    names = {stored: ours for ours, stored in checkpoint.stored_names.items()}
    provenance = {**(checkpoint.provenance or {}), "quantized": width}
    return _write(source, destination, width, names, {}, provenance, [])


def _write(
    source: Path,
    destination: Path,
    width: Width,
    names: Mapping[str, str],
    importance: Importance,
    provenance: Mapping[str, Any],
    copied: list[Path],
) -> QuantizedCheckpoint:
    """names: stored -> ours, before stacking."""
    refuse_existing(destination)
    fields, files = ConfigFields.from_file(source / "config.json"), TensorFiles(source)
    if weight_format(fields, files) is not DENSE:
        raise CheckpointError(f"{source}: is quantised already; give the checkpoint that it was made from")
    matrices = {stored: ours for stored, ours in names.items() if len(files.infos[stored].shape) == 2}
    linears = {stored: ours.removesuffix(".weight") for stored, ours in matrices.items() if ours.endswith(".weight")}
    chosen = {stored: ours for stored, ours in linears.items() if QUANTIZABLE.fullmatch(ours)}
    uneven = [stored for stored in sorted(chosen) if any(size % _BLOCK for size in files.infos[stored].shape)]
    if width == "fp8-block" and uneven:
        shape = " x ".join(map(str, files.infos[uneven[0]].shape))
        raise CheckpointError(f"{source}: '{uneven[0]}' is {shape}, no multiple of {_BLOCK}; use --quantize fp8")
    group = _group_size({files.infos[stored].shape[1] for stored in chosen}) if width == "int4" else None
    known = {stored: importance.get(one, importance.get(linear_of(one))) for stored, one in chosen.items()}
    device = choose_device("auto")
    tensors: dict[str, Tensor] = {}
    for stored in files.infos:
        tensor = files.read(stored)
        if stored not in chosen:
            tensors[stored] = tensor
            continue
        for kind, made in _stored(tensor.to(device), width, group, known[stored]).items():
            tensors[stored.removesuffix("weight") + kind] = made.cpu()
    ignored = sorted({"lm_head", *(name.removesuffix(".weight") for name in matrices.keys() - chosen.keys())})
    # compressed-tensors quantises all linears that are not ignored, so list the towers of a multimodal checkpoint.
    towers = {_part(name) for name in files.infos.keys() - names.keys()} - {_part(name) for name in names}
    ignored += sorted(rf"re:(.*\.)?{re.escape(tower)}\..*" for tower in towers)
    values = {**fields.values, "quantization_config": _config(width, group, ignored)}
    origin = {**provenance, "fledge_version": __version__}
    write_model(destination, tensors, {"config.json": values, PROVENANCE_FILE: origin}, copied)
    return QuantizedCheckpoint(
        linears=len(chosen),
        calibrated=sum(one is not None for one in known.values()),
        group_size=group,
        bytes_before=sum(file.stat().st_size for file in files.files),
        bytes_after=sum(file.stat().st_size for file in destination.glob("*.safetensors")),
    )


def _part(name: str) -> str:
    """The top-level module that a stored tensor belongs to."""
    return name.removeprefix("model.").partition(".")[0]


def quantized_weight(matrix: Tensor, width: Width) -> QuantizedWeight:
    """Quantise a matrix in memory: the result is what would be loaded after writing it."""
    columns = matrix.shape[1]
    group = _group_size({columns}) if width == "int4" else _BLOCK if width == "fp8-block" else None
    stored = _stored(matrix, width, group, packs=False)
    codes, scales = stored["weight"], stored["weight_scale"]
    if width == "fp8-block":
        scales = scales.repeat_interleave(_BLOCK, dim=0)
    return QuantizedWeight(
        kind="int4" if width == "int4" else "int8" if width == "int8" else "fp8",
        columns=columns,
        group_size=group or columns,
        codes=pack_halves(codes + INT4_OFFSET)
        if width == "int4"
        else codes.to(torch.int8)
        if width == "int8"
        else codes,
        scales=in_fewest_bits(scales),
        activations="token" if width == "fp8-dynamic" else None,
    )


def _group_size(columns: set[int]) -> int | None:
    return next((size for size in _GROUPS if all(count % size == 0 for count in columns)), None)


def _stored(
    matrix: Tensor, width: Width, group: int | None, importance: Tensor | None = None, *, packs: bool = True
) -> dict[str, Tensor]:
    """The stored tensors of one linear, by suffix. Without `packs`, integers are not packed into words."""
    values = matrix.float()
    if width == "fp8-block":
        blocks = values.view(len(values) // _BLOCK, _BLOCK, -1, _BLOCK)
        scales = _scales_for(blocks.abs().amax((1, 3)), FP8_MAX)
        codes = (blocks / scales[:, None, :, None]).view_as(values)
        return {"weight": codes.to(FP8), "weight_scale": scales}
    if width in ("fp8", "fp8-dynamic"):
        rows = quantize_rows(values)
        return {"weight": rows.codes, "weight_scale": rows.scales}
    bits = 8 if width == "int8" else 4
    size = group or values.shape[1]
    weights = None if importance is None else importance.to(values).view(-1, size)
    codes, scales = _integers(values.view(len(values), -1, size), bits, matrix.dtype, weights)
    if not packs:
        return {"weight": codes.view_as(values), "weight_scale": scales}
    return {
        "weight_packed": _packed(codes.view_as(values), bits),
        "weight_scale": scales.to(matrix.dtype),
        "weight_shape": torch.tensor(values.shape),
    }


def _scales_for(largest: Tensor, highest: float) -> Tensor:
    """The scale with which the code `highest` represents `largest`; 1 where that is 0."""
    return torch.where(largest > 0, largest / highest, 1.0)


def _integers(groups: Tensor, bits: int, dtype: torch.dtype, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """groups [rows, groups, size] -> signed codes of the same shape and scales [rows, groups], rounded to `dtype`.

    The scale of each group is the one in `_SHRINK_FACTORS` with the least squared error, weighted by importance
    [groups, size]. 8-bit groups without importance use the full range.
    """
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    widest = _scales_for(groups.abs().amax(-1), highest + 0.5)
    best_error = torch.full_like(widest, torch.inf)
    codes, scales = torch.zeros_like(groups), widest
    for factor in _SHRINK_FACTORS if bits == 4 or importance is not None else _SHRINK_FACTORS[:1]:
        scale = (widest * factor).to(dtype).float()
        rounded = (groups / scale[..., None]).round().clamp(lowest, highest)
        squares = (rounded * scale[..., None] - groups).square()
        error = (squares if importance is None else squares * importance).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        scales = torch.where(better, scale, scales)
        codes = torch.where(better[..., None], rounded, codes)
    return codes, scales


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes [rows, columns] into int32 words along the columns, the first code in the lowest bits."""
    per_word = 32 // bits
    unsigned = F.pad(codes.to(torch.int64) + (1 << (bits - 1)), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(0, 32, bits, device=codes.device)
    return (unsigned.view(len(codes), -1, per_word) << shifts).sum(-1).to(torch.int32)  # wraps to negative numbers


def _config(width: Width, group: int | None, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` in the format of compressed-tensors."""
    weights: dict[str, Any] = {"num_bits": 4 if width == "int4" else 8, "type": "int" if "int" in width else "float"}
    weights |= {"symmetric": True, "dynamic": False, "group_size": group, "block_structure": None}
    weights["strategy"] = "block" if width == "fp8-block" else "group" if group else "channel"
    if width == "fp8-block":
        weights["block_structure"] = [_BLOCK, _BLOCK]
    inputs = {**weights, "dynamic": True, "strategy": "token"} if width == "fp8-dynamic" else None
    form = "pack-quantized" if "int" in width else "float-quantized"
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group_0, "format": form}},
        "ignore": ignored,
    }
