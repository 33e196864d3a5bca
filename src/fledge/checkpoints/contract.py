"""Checks that a drafter's files, its config and its target agree, and describes checkpoints for `fledge inspect`.

vLLM accepts most violations: a missing tensor stays uninitialised, without d2t draft ids map to the wrong tokens, a
wrong layer id feeds the wrong features. Output stays correct because every draft is verified, so the only symptom is a
low acceptance. Here each violation is a named finding; docs/checkpoints.md lists them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats.drafter_config import D2T, FLAGS, T2D, as_outputs, their_name
from fledge.checkpoints.formats.quantized import WeightSummary
from fledge.checkpoints.reading import PROVENANCE_FILE, DrafterCheckpoint
from fledge.checkpoints.target import identify_target, language_tensors, summarize_target_weights
from fledge.checkpoints.tensors import TensorFiles, not_finite
from fledge.checkpoints.weights import stored_shapes, summarize_weights, weight_names, without_weights
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import DraftVocabulary
from fledge.models.drafter.variants import build, name_of
from fledge.models.target import FAMILIES

# A field in the config of drafters that `fledge bench inflate` made: rows of the head, and draft ids, are repeated.
INFLATED = "fledge_inflated"
# Names of parts for the table of sizes, by the first component of our tensor names.
_PARTS = {"fc": "fusion", "fc_norm": "fusion", "input_norm": "fusion", "layers": "layers", "norm": "norm"}
_PARTS |= {"embed_tokens": "embedding", "lm_head": "head", "vocabulary": "vocabulary maps", "t2d": "vocabulary maps"}
# Commands that support a target: any target, and those that the engine runs.
_ANY_VERBS, _ENGINE_VERBS = ("inspect", "convert"), ("generate", "serve", "eval", "drift", "bench", "train")


def check(
    checkpoint: DrafterCheckpoint, target: TargetConfig | None = None, target_directory: Path | None = None
) -> list[Finding]:
    """Return all findings about a checkpoint, errors first; with `target`, also whether it fits that target.

    With `target_directory`, also whether the drafter was trained for these weights. Reads all weights once, to look for
    values that are not finite.
    """
    config = checkpoint.config
    tensors = list(_tensor_findings(checkpoint))
    findings = [*checkpoint.findings, *tensors, *_config_findings(config)]
    if all(found.fixed_by_convert for found in tensors):
        findings += [*_vocabulary_findings(checkpoint), *_value_findings(checkpoint)]
    if target is not None:
        findings += [*_aux_findings(config, target), *_target_findings(checkpoint, target)]
    elif config.architecture is Architecture.EAGLE3 and config.aux_layer_ids is None:
        findings.append(finding("aux-ids-omitted", default="(2, L//2, L-3) of an L-layer target"))
    if target_directory is not None:
        findings += identity_findings(checkpoint, target_directory)
    return sorted(findings, key=lambda found: found.severity != "error")


def _config_findings(config: DrafterConfig) -> Iterator[Finding]:
    """Findings about the config alone."""
    for own, name, part in (
        (config.own_embedding, "shared-embedding-width", "embed_tokens"),
        (config.own_head, "shared-head-width", "lm_head"),
    ):
        if not own and config.target_hidden_size != config.hidden_size:
            yield finding(name, width=config.target_hidden_size, own_width=config.hidden_size, part=part)
    if config.fc_bias:
        yield finding("fc-bias")


def _aux_findings(config: DrafterConfig, target: TargetConfig) -> Iterator[Finding]:
    ids, layers, default = config.aux_layer_ids, target.num_layers, list(target.default_aux_layer_ids)
    if config.architecture is Architecture.EAGLE1:
        return
    if ids is None and (len(default) != config.num_aux_states or default != sorted(set(default)) or min(default) < 0):
        yield finding("aux-ids-required", count=config.num_aux_states, default=default, layers=layers)
    elif ids is None:
        yield finding("aux-ids-omitted", default=f"{default} (outputs {as_outputs(default)})")
    elif max(ids) > layers:
        yield finding("aux-ids-out-of-range", found=list(ids), layers=layers)
    elif list(ids) == as_outputs(default):
        yield finding("aux-ids-look-like-outputs", found=list(ids), default=default)
    elif list(ids) == [i + 1 for i in default]:
        yield finding("aux-ids-shifted-twice", found=list(ids), default=default)


def _target_findings(checkpoint: DrafterCheckpoint, target: TargetConfig) -> Iterator[Finding]:
    config, reference = checkpoint.config, checkpoint.target
    if config.vocab_size != target.vocab_size:
        yield finding("vocabulary-size", found=config.vocab_size, target=target.vocab_size)
    if (width := config.target_hidden_size) != target.hidden_size:
        field = "target_hidden_size" if "target_hidden_size" in checkpoint.fields else "hidden_size"
        yield finding("target-hidden-size", field=field, found=width, target=target.hidden_size)
    own, rope = replace(config.layer.rope, interleaved=False), target.layer.as_drafter.rope
    if own not in (rope, replace(target.layer.rope, interleaved=False)):
        yield finding("rope-differs", found=_rope_difference(own, rope), target=_rope_difference(rope, own))
    if config.max_positions < target.max_positions:
        yield finding("max-positions-short", found=config.max_positions, target=target.max_positions)
    family = FAMILIES.get(target.family)
    if family and reference and reference["architectures"] and not family.is_of(reference["architectures"]):
        found, made_for = reference["architectures"], reference["name_or_path"] or "another target"
        yield finding("verifier-differs", found=found, expected=family.architecture, target=made_for)


def identity_findings(checkpoint: DrafterCheckpoint, target: Path) -> Iterator[Finding]:
    """Findings if the target's directory is not that of the target in the drafter's provenance."""
    made_for = (checkpoint.provenance or {}).get("target")
    if not isinstance(made_for, dict):
        return
    here, whose = identify_target(target), made_for.get("name") or "another target"
    # A quantised copy has other weights, and counts as the same target.
    origins = [{one.get(field) for field in ("weights_digest", "quantized_from")} - {None} for one in (made_for, here)]
    for name, field in (("tokenizer-differs", "vocabulary_digest"), ("target-differs", "weights_digest")):
        if field == "weights_digest" and origins[0] & origins[1]:
            continue
        if made_for.get(field) and here[field] and made_for[field] != here[field]:
            classes = [f"{one['architecture']} " if one.get("architecture") else "" for one in (made_for, here)]
            found, expected = f"{classes[0]}{made_for[field]}", f"{classes[1]}{here[field]}"
            yield finding(name, file=PROVENANCE_FILE, whose=whose, made_for=found, target=expected)


def _rope_difference(rope: RopeConfig, other: RopeConfig) -> str:
    """The values of `rope` in the fields in which the two differ."""
    return ", ".join(f"{field} {value}" for field, value in asdict(rope).items() if value != getattr(other, field))


# Names of findings (missing, unexpected, wrong shape) by prefix of the tensor's name; the first that matches.
_TENSORS = {
    "fc_norm.": ("fc-norm-missing", "fc-norm-flag-off", "tensor-shape"),
    "input_norm.": ("input-norm-missing", "input-norm-flag-off", "tensor-shape"),
    "fc.": ("tensor-missing", "tensor-unexpected", "fc-width"),
    "embed_tokens.": ("tensor-missing", "tensor-unexpected", "embedding-shape"),
    "lm_head.": ("lm-head-missing", "tensor-unexpected", "head-shape"),
    D2T: ("d2t-missing", "tensor-unexpected", "d2t-shape"),
    "": ("tensor-missing", "tensor-unexpected", "tensor-shape"),
}


def _tensor_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """Missing and unexpected tensors and those of a wrong shape; one finding for each kind, which names the first."""
    with without_weights():
        form = checkpoint.weight_format
        expected = stored_shapes(build(checkpoint.config), form, checkpoint.stored_names, checkpoint.files.infos)
    stored = weight_names(checkpoint.stored_names, form, expected).keys() - {T2D}
    if D2T in stored and D2T not in expected:
        stored -= {D2T}
        name = "d2t-without-reduction" if checkpoint.read(D2T).any() else "d2t-identity"
        yield finding(name, file=checkpoint.info(D2T).file.name)
    # EAGLE-1's fc reads no aux states; and if fc_norm is on, the flag does not explain an extra norm.
    is_eagle1 = checkpoint.config.architecture is Architecture.EAGLE1
    ordinary = ("fc.", "fc_norm.", "input_norm.") if is_eagle1 else ()
    noticed: dict[str, list[tuple[str, str, str]]] = {}
    for tensor in sorted(expected.keys() | stored, key=lambda tensor: (tensor in stored, tensor in expected, tensor)):
        wants, has = expected.get(tensor), checkpoint.info(tensor).shape if tensor in stored else None
        names = next(names for start, names in _TENSORS.items() if tensor.startswith(start) and start not in ordinary)
        if has is None:
            name, *texts = names[0], "no such tensor", f"one of shape {list(wants or ())}"
        elif wants is None:
            name, *texts = names[1], "a tensor", "none"
            name = "tensor-unexpected" if name == "fc-norm-flag-off" and checkpoint.config.fc_norm else name
        else:
            name, *texts = names[2], f"shape {list(has)}", f"shape {list(wants)}"
        if has != wants:
            noticed.setdefault(name, []).append((tensor, texts[0], texts[1]))
    midlayer = any("midlayer." in stored for stored in checkpoint.files.infos)
    for name, [(first, found, wanted), *others] in noticed.items():
        more = f" (and {len(others)} more like it)" if others else ""
        # A missing tensor is named in this checkpoint's spelling.
        field, path = their_name(first, midlayer=midlayer), checkpoint.files.files[0]
        if first in stored:
            field, path = checkpoint.stored_names[first], checkpoint.info(first).file
        yield finding(name, field=field, found=found + more, expected=wanted, file=path.name)


def _vocabulary_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """Findings about the draft vocabulary. Requires that all tensors exist and have the right shapes."""
    config = checkpoint.config
    if not config.reduced_vocab:
        return
    d2t, about_d2t = checkpoint.read(D2T), partial(finding, file=checkpoint.info(D2T).file.name)
    if d2t.dtype not in (torch.int64, torch.int32):
        yield about_d2t("d2t-dtype", found=d2t.dtype)
        return
    d2t = d2t.to(torch.int64)
    t2d = checkpoint.read(T2D).bool() if T2D in checkpoint.stored_names else None
    vocabulary = DraftVocabulary(len(d2t), config.vocab_size)
    vocabulary.d2t.copy_(d2t)
    ids = vocabulary.target_ids
    if t2d is not None and t2d.shape == (config.vocab_size,) and torch.equal(t2d.nonzero().flatten(), d2t):
        yield about_d2t("d2t-absolute")
    elif ids.min() < 0 or ids.max() >= config.vocab_size:
        found = f"target ids from {ids.min()} to {ids.max()}"
        yield about_d2t("d2t-out-of-range", found=found, last=config.vocab_size - 1)
    elif (distinct := len(set(ids.tolist()))) < len(ids) and INFLATED not in checkpoint.fields:
        yield about_d2t("d2t-not-injective", found=f"{len(ids)} draft ids for {distinct} target ids")
    elif t2d is not None and not torch.equal(t2d, vocabulary.in_draft):
        found = f"a t2d with {int(t2d.sum())} of {t2d.numel()} ids"
        yield about_d2t("t2d-mismatch", found=found, size=config.vocab_size, draft=len(d2t))
    elif not d2t.any():
        yield about_d2t("d2t-all-zero")
    elif (ids.diff() < 0).any():
        yield about_d2t("d2t-not-sorted")


def _value_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    for name, stored in sorted(checkpoint.stored_names.items()):
        tensor = checkpoint.read(name)
        if tensor.is_floating_point() and not_finite(tensor).any():
            yield finding("weights-not-finite", field=stored, file=checkpoint.info(name).file.name)
            return


def describe_drafter(
    checkpoint: DrafterCheckpoint, target: TargetConfig | None = None, target_directory: Path | None = None
) -> dict[str, Any]:
    config = checkpoint.config
    findings = check(checkpoint, target, target_directory)
    stated, ids = config.aux_layer_ids is not None, (config.resolved(target) if target else config).aux_layer_ids
    sound = not any(finding.severity == "error" for finding in findings)
    summary = summarize_weights(checkpoint.stored_names, checkpoint.files.infos, checkpoint.weight_format)
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
        "sliding_window": next((window for window in config.sliding_windows if window), None),
        "embedding": "own" if config.own_embedding else "the target's",
        "head": "own" if config.own_head else "the target's",
        "dtype": config.dtype,
        "weights": _describe_weights(summary),
        "size": _sizes(checkpoint.stored_names, checkpoint.files, summary),
        "made_for": checkpoint.target,
        "provenance": checkpoint.provenance,
        "sound": sound,
        "fits_target": sound if target else None,
        "findings": [finding.as_dict() for finding in findings],
    }


def describe_target(config: TargetConfig, files: TensorFiles, reason: str | None = None) -> dict[str, Any]:
    """Return what `fledge inspect` prints. `reason`: why the engine cannot run it, from `sketch_target_config`."""
    names = {name.removeprefix("model."): stored for name, stored in language_tensors(files.infos).items()}
    summary = None if reason is not None else summarize_target_weights(files)
    layer = _describe_layer(config.layer)
    verbs: tuple[str, ...] = (*_ENGINE_VERBS, *_ANY_VERBS)
    if config.logits_softcap is not None:  # a teacher's logits are a product
        verbs = tuple(verb for verb in verbs if verb != "train")
    if reason is not None:
        layer = {field: layer[field] for field in ("hidden_size", "rope")}
        verbs = _ANY_VERBS if config.family in FAMILIES else ("train", *_ANY_VERBS)  # through transformers
    return {
        "kind": "target",
        "directory": str(files.directory),
        "family": config.family,
        "verbs": verbs,
        "not_run_because": reason,
        "num_layers": config.num_layers,
        **layer,
        "vocabulary": {"size": config.vocab_size},
        "max_positions": config.max_positions,
        "head": "the embedding matrix" if config.tied_head else "own",
        "sliding_window": next((window for window in config.sliding_windows if window), None),
        "aux_layer_ids": _aux_ids(config.default_aux_layer_ids, stated=False),
        "dtype": config.dtype,
        "weights": _describe_weights(summary),
        "size": _sizes(names, files, summary),
    }


def _aux_ids(ids: Sequence[int] | None, *, stated: bool) -> dict[str, Any]:
    return {"inputs": ids and list(ids), "outputs": ids and as_outputs(ids), "stated": stated}


_KINDS = (
    *(
        "latent",
        "experts",
        "norm_placement",
        "norm_offset",
        "activation",
        "attention_scale",
        "softcap",
        "residual_multiplier",
    ),
    *("sinks", "qk_norm_whole", "rotated_norm", "temperature", "chunked"),
)
_ORDINARY_ROPE = (("partial_factor", 1.0), ("interleaved", False))


def _describe_layer(layer: LayerConfig) -> dict[str, Any]:
    """Shapes and flags of a layer; fields in `_KINDS` only where they differ from their defaults."""
    values, ordinary = asdict(layer), {field: getattr(LayerConfig, field) for field in _KINDS}
    # Without the per-dimension factors of longrope.
    rope = {f: value for f, value in values.pop("rope").items() if value is not None and not isinstance(value, tuple)}
    if rope["type"] == "default":
        rope = {field: rope[field] for field in ("theta", "partial_factor", "interleaved", "type")}
    rope = {field: value for field, value in rope.items() if (field, value) not in _ORDINARY_ROPE}
    kept = {field: value for field, value in values.items() if field not in ordinary or value != ordinary[field]}
    return {**kept, "rope": rope}


def _describe_weights(summary: WeightSummary | None) -> dict[str, Any] | None:
    """Format and kinds of quantised weights, and which linears are dense; None if nothing is quantised."""
    if summary is None:
        return None
    return {"format": summary.format, "kinds": dict(summary.kinds), "dense": list(summary.dense)}


def _sizes(names: Mapping[str, str], files: TensorFiles, summary: WeightSummary | None) -> dict[str, Any]:
    """Number of parameters (a quantised value counts as one) and bytes, in total and by part. names: ours -> stored."""
    parts: dict[str, dict[str, int]] = {}
    quantized = dict(summary.parameters) if summary else {}
    for name, stored in names.items():
        info, (linear, _, kind) = files.infos[stored], stored.rpartition(".")
        part = _PARTS.get(name.partition(".")[0], "other")
        count = parameters = math.prod(info.shape)
        if linear in quantized and kind != "bias":
            parameters, quantized[linear] = quantized[linear], 0  # counted with the first of its tensors
        sizes = parts.setdefault(part, {"parameters": 0, "bytes": 0})
        sizes["parameters"] += parameters if part != "vocabulary maps" else 0
        sizes["bytes"] += count * getattr(getattr(torch, info.dtype, None), "itemsize", 1)
    totals = {unit: sum(part[unit] for part in parts.values()) for unit in ("parameters", "bytes")}
    return {**totals, "parts": dict(sorted(parts.items()))}
