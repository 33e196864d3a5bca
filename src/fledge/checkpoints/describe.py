"""What a checkpoint is, as plain data: `fledge inspect` prints it as tables or as JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.contract import check
from fledge.checkpoints.formats.drafter_config import FLAGS, as_outputs
from fledge.checkpoints.reading import DrafterCheckpoint
from fledge.checkpoints.tensors import TensorFiles, TensorInfo
from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, TargetConfig
from fledge.models.drafter.variants import name_of

# What the parts are called, by how our tensor names begin.
_PARTS = {"fc": "fusion", "fc_norm": "fusion", "input_norm": "fusion", "layers": "layers", "norm": "norm"}
_PARTS |= {"embed_tokens": "embedding", "lm_head": "head"}


def describe_drafter(
    checkpoint: DrafterCheckpoint, target: TargetConfig | None = None, target_directory: Path | None = None
) -> dict[str, Any]:
    config = checkpoint.config
    findings = check(checkpoint, target, target_directory)
    stated, ids = config.aux_layer_ids is not None, (config.resolved(target) if target else config).aux_layer_ids
    sound = not any(finding.severity == "error" for finding in findings)
    return {
        "kind": "drafter",
        "directory": str(checkpoint.directory),
        "variant": name_of(config),
        "format": checkpoint.format,
        "flags": {flag: getattr(config, flag) for flag in FLAGS},
        "aux_layer_ids": None if config.architecture is Architecture.EAGLE1 else _aux_ids(ids, stated=stated),
        "vocabulary": {
            "size": config.vocab_size,
            "draft_size": config.draft_vocab_size,
            "coverage": round(config.draft_vocab_size / config.vocab_size, 4),
        },
        "num_layers": config.num_layers,
        "target_hidden_size": config.target_hidden_size,
        **_describe_layer(config.layer),
        "max_positions": config.max_positions,
        "embedding": "own" if config.own_embedding else "the target's",
        "head": "own" if config.own_head else "the target's",
        "dtype": config.dtype,
        "size": _sizes((name, checkpoint.info(name)) for name in checkpoint.stored_names),
        "made_for": asdict(checkpoint.target) if checkpoint.target else None,
        "provenance": checkpoint.provenance,
        "sound": sound,
        "fits_target": sound if target else None,
        "findings": [finding.as_dict() for finding in findings],
    }


def describe_target(config: TargetConfig, files: TensorFiles) -> dict[str, Any]:
    names = ((name.removeprefix("model."), info) for name, info in files.infos.items())
    return {
        "kind": "target",
        "directory": str(files.directory),
        "family": config.family,
        "num_layers": config.num_layers,
        **_describe_layer(config.layer),
        "vocabulary": {"size": config.vocab_size},
        "max_positions": config.max_positions,
        "head": "the embedding matrix" if config.tied_head else "own",
        "sliding_window": next((window for window in config.sliding_windows if window), None),
        "aux_layer_ids": _aux_ids(config.default_aux_layer_ids, stated=False),
        "dtype": config.dtype,
        "size": _sizes(names),
    }


def _aux_ids(ids: Sequence[int] | None, *, stated: bool) -> dict[str, Any]:
    return {"inputs": ids and list(ids), "outputs": ids and as_outputs(ids), "stated": stated}


def _describe_layer(layer: LayerConfig) -> dict[str, Any]:
    """Shapes and switches; the kinds of parts only where they are not the ordinary ones."""
    values, ordinary = asdict(layer), {"experts": None, "norm_placement": "pre", "qk_norm_whole": False}
    rope = {field: value for field, value in values.pop("rope").items() if value is not None}
    if rope["type"] == "default":
        rope = {"theta": rope["theta"], "partial_factor": rope["partial_factor"], "type": "default"}
    if rope["partial_factor"] == 1:
        del rope["partial_factor"]
    kept = {field: value for field, value in values.items() if field not in ordinary or value != ordinary[field]}
    return {**kept, "rope": rope}


def _sizes(tensors: Iterable[tuple[str, TensorInfo]]) -> dict[str, Any]:
    """Parameters (floating-point values) and bytes, in all and by part."""
    parts: dict[str, dict[str, int]] = {}
    for name, info in tensors:
        part = _PARTS.get(name.partition(".")[0], "vocabulary maps")
        count = math.prod(info.shape)
        sizes = parts.setdefault(part, {"parameters": 0, "bytes": 0})
        sizes["parameters"] += count if part != "vocabulary maps" else 0
        sizes["bytes"] += count * getattr(getattr(torch, info.dtype, None), "itemsize", 1)
    totals = {unit: sum(part[unit] for part in parts.values()) for unit in ("parameters", "bytes")}
    return {**totals, "parts": dict(sorted(parts.items()))}
