"""Loads drafters (checked against their target), writes them for vLLM, SGLang and speculators, and converts them."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.contract import check
from fledge.checkpoints.finding import Finding
from fledge.checkpoints.formats.dense import DENSE, Placement
from fledge.checkpoints.formats.drafter_classes import Format
from fledge.checkpoints.formats.drafter_config import D2T, T2D, their_name, write_config
from fledge.checkpoints.reading import PROVENANCE_FILE, DrafterCheckpoint, read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import identify_target, sketch_target_config
from fledge.checkpoints.tensors import write_model
from fledge.checkpoints.weights import load_weights, stored_tensors, without_weights
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter, DraftVocabulary
from fledge.models.drafter.variants import build
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel
from fledge.version import __version__


def load_drafter(
    directory: Path, target: TargetModel | TargetConfig, *, target_directory: Path | None = None
) -> Drafter:
    """Load the drafter for `target`, in the dtype and on the device of a target model.

    If only the target's config is given: in the stored dtype on the CPU, and the caller must call `share_with` later.
    Raises CheckpointError for errors that `contract.check` finds, and issues its warnings as `CheckpointWarning`. With
    `target_directory`, also checks that the drafter was trained for that target.
    """
    model, target_config = (target, target.config) if isinstance(target, TargetModel) else (None, target)
    checkpoint = read_drafter(directory)
    raise_errors(checkpoint, findings := check(checkpoint, target_config, target_directory))
    for finding in findings:
        warnings.warn(finding.message(directory), CheckpointWarning, stacklevel=2)

    config = checkpoint.config.resolved(target_config)
    with without_weights():
        drafter = build(config)
    placement = Placement(device="cpu", dtype=getattr(torch, config.dtype))
    if model is not None:
        placement = Placement(device=model.embed_tokens.weight.device, dtype=model.embed_tokens.weight.dtype)
    load_weights(drafter, checkpoint.files, checkpoint.weight_names, checkpoint.weight_format, placement)
    drafter.to(device=placement.device)
    if model is not None:
        drafter.share_with(model)
    return drafter.eval()


def read_vocabulary(directory: Path) -> DraftVocabulary | None:
    """Return the drafter's reduced vocabulary; None if it has the target's."""
    checkpoint = read_drafter(directory)
    if not checkpoint.config.reduced_vocab:
        return None
    vocabulary = DraftVocabulary(checkpoint.config.draft_vocab_size, checkpoint.config.vocab_size)
    vocabulary.d2t.copy_(checkpoint.read(D2T))
    return vocabulary


def raise_errors(checkpoint: DrafterCheckpoint, findings: list[Finding]) -> None:
    """Raise CheckpointError for the first error among `findings`, with the number of others."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more; run `fledge inspect`)" if len(errors) > 1 else ""
        raise CheckpointError(errors[0].message(checkpoint.directory) + more)


def save_drafter(
    drafter: Drafter,
    directory: Path,
    *,
    to: Format = "vllm",
    target: Mapping[str, Any] | None = None,
    num_speculative_tokens: int = 3,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a directory that vLLM (and for "vllm" SGLang too) can load. Refuses an existing destination.

    An embedding or head that is shared with the target is not written. The speculators format also contains the
    `target` and a default draft length, `num_speculative_tokens`. `provenance` is written to a file of its own.
    """
    tensors = stored_tensors(drafter)
    dtype = str(tensors["layers.0.self_attn.o_proj.weight"].dtype).removeprefix("torch.")
    config = replace(drafter.config, dtype=dtype)
    shared = ([] if config.own_embedding else ["embed_tokens."]) + ([] if config.own_head else ["lm_head."])
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(shared))}
    fields = write_config(config, to, target, num_speculative_tokens)
    _write_drafter(directory, config, fields, tensors, provenance or {})


def convert_drafter(
    source: str | Path,
    destination: Path,
    *,
    to: Format,
    target: str | Path | None = None,
    num_speculative_tokens: int = 3,
) -> tuple[list[Finding], list[Finding]]:
    """Write `source` in the format `to`, with identical weights. Raises CheckpointError for errors that it cannot fix.

    Returns (findings that the conversion fixed, findings of the result). With a target, aux layer ids that the source
    leaves to the default are written explicitly. The result records the names of source and target as the user gave
    them, not their local paths.
    """
    checkpoint = read_drafter(resolve(source))
    if checkpoint.weight_format is not DENSE:
        raise CheckpointError(f"{source}: quantised drafters are not converted; convert the unquantised one")
    target_directory = resolve(target) if target else None
    target_config = sketch_target_config(target_directory)[0] if target_directory else None
    findings = check(checkpoint, target_config, target_directory)
    raise_errors(checkpoint, [finding for finding in findings if not finding.fixed_by_convert])
    config, reference = checkpoint.config, checkpoint.target
    if target_directory is not None and target_config is not None:
        config = config.resolved(target_config)
        known = FAMILIES.get(target_config.family)
        architecture = known.architecture if known else identify_target(target_directory)["architecture"]
        reference = {"name_or_path": str(target), "architectures": [architecture] if architecture else []}
    provenance = {"converted_from": str(source), "source_format": checkpoint.format}
    tensors = {name: checkpoint.read(name) for name in checkpoint.weight_names}
    if config.reduced_vocab:
        tensors[D2T] = tensors[D2T].to(torch.int64)
    fields = write_config(config, to, reference, num_speculative_tokens)
    _write_drafter(destination, config, fields, tensors, {**(checkpoint.provenance or {}), **provenance})
    remaining = check(read_drafter(destination), target_config, target_directory)
    names = {finding.name for finding in remaining}
    return [finding for finding in findings if finding.name not in names], remaining


def _write_drafter(
    directory: Path,
    config: DrafterConfig,
    fields: Mapping[str, Any],
    tensors: dict[str, Tensor],
    provenance: Mapping[str, Any],
) -> None:
    """Write tensors (by our names before stacking), and those that other engines need besides: t2d, a zero bias."""
    if config.reduced_vocab:
        vocabulary = DraftVocabulary(config.draft_vocab_size, config.vocab_size)
        vocabulary.d2t.copy_(tensors[D2T])
        tensors[T2D] = vocabulary.in_draft
    layer = config.layer
    if layer.qkv_bias and not layer.output_bias and not layer.qk_norm:
        # vLLM's Llama class has one flag for all attention biases, and leaves one that is not stored uninitialised.
        for i in range(config.num_layers):
            like = tensors[f"layers.{i}.self_attn.o_proj.weight"]
            tensors[f"layers.{i}.self_attn.o_proj.bias"] = like.new_zeros(layer.hidden_size)
    midlayer = config.architecture is Architecture.EAGLE3 and "speculators_config" not in fields
    files = {"config.json": fields, PROVENANCE_FILE: {**provenance, "fledge_version": __version__}}
    write_model(directory, {their_name(n, midlayer=midlayer): tensor for n, tensor in tensors.items()}, files)
