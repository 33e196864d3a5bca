"""Drafters: loaded under a contract with their target, and written for vLLM, SGLang and speculators."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.contract import check
from fledge.checkpoints.finding import Finding, Severity
from fledge.checkpoints.formats import speculators, vllm
from fledge.checkpoints.formats.names import T2D
from fledge.checkpoints.formats.shared import Format, TargetReference
from fledge.checkpoints.loading import load_tensors
from fledge.checkpoints.reading import D2T, PROVENANCE_FILE, DrafterCheckpoint, read_drafter, read_weights
from fledge.checkpoints.stacking import stack, unstack
from fledge.checkpoints.tensors import new_directory, write_json, write_tensors
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.models.drafter.vocab import DraftVocabulary
from fledge.models.target.decoder import TargetModel
from fledge.version import __version__

__all__ = ["DrafterCheckpoint", "Format", "TargetReference", "load_drafter", "read_drafter", "save_drafter"]


def load_drafter(
    directory: Path,
    target: TargetModel | TargetConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Drafter:
    """Build the drafter for `target`, in `dtype` on `device`.

    By default both are those of a target model, or as stored on the CPU if only the target's config is known; in the
    latter case the caller must `share_with` the model later. Errors of the contract raise; warnings are issued as
    `CheckpointWarning`.
    """
    model = target if isinstance(target, TargetModel) else None
    target_config = target.config if isinstance(target, TargetModel) else target
    checkpoint = read_drafter(directory)
    raise_errors(checkpoint, findings := check(checkpoint, target_config))
    for finding in findings:
        warnings.warn(finding.message(directory), CheckpointWarning, stacklevel=2)

    config = checkpoint.config.resolved(target_config)
    with torch.device("meta"):
        drafter = build(config)
    # Copies: tensors mapped from a file are badly aligned, and would change with the file.
    weights = {name: tensor.clone() for name, tensor in read_weights(checkpoint).items()}
    load_tensors(drafter, stack(weights), directory)
    if model is not None:
        weight = model.embed_tokens.weight
        dtype, device = dtype or weight.dtype, device or weight.device
    drafter = drafter.to(device=device or "cpu", dtype=dtype or getattr(torch, config.dtype))
    if model is not None:
        drafter.share_with(model)
    return drafter.eval()


def raise_errors(checkpoint: DrafterCheckpoint, findings: list[Finding]) -> None:
    """Raise the first error among `findings`, in one line that says how many more there are."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        more = f" (and {len(errors) - 1} more; run `fledge inspect`)" if len(errors) > 1 else ""
        raise CheckpointError(errors[0].message(checkpoint.directory) + more)


def save_drafter(
    drafter: Drafter,
    directory: Path,
    *,
    to: Format = "vllm",
    target: TargetReference | None = None,
    num_speculative_tokens: int = 3,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a directory that vLLM (and for "vllm" SGLang too) loads as it is. Refuses an existing destination.

    What the drafter shares with its target is not written. `target` and `num_speculative_tokens` go into the
    speculators format, which names the target and a default draft length; `provenance` goes beside the weights.
    """
    state = drafter.state_dict()
    dtype = str(state["layers.0.self_attn.qkv_proj.weight"].dtype).removeprefix("torch.")
    config = replace(drafter.config, dtype=dtype)
    shared = ([] if config.own_embedding else ["embed_tokens."]) + ([] if config.own_head else ["lm_head."])
    state = {n: t for n, t in state.items() if not n.startswith(tuple(shared))}
    write_drafter(
        config,
        unstack(state, config.layer),
        directory,
        to=to,
        target=target,
        num_speculative_tokens=num_speculative_tokens,
        provenance=provenance,
    )


def write_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    to: Format,
    target: TargetReference | None,
    num_speculative_tokens: int,
    provenance: Mapping[str, Any] | None,
) -> None:
    """`save_drafter` for tensors under our unstacked names. Weights are written bit for bit."""
    tensors = {**tensors, **_implied_tensors(config, tensors)}
    if to == "vllm":
        table, fields = vllm.name_table(config), vllm.write(config)
    else:
        table = speculators.name_table(config)
        fields = speculators.write(config, target, num_speculative_tokens)
    with new_directory(directory) as temporary:
        write_tensors(temporary, {table.to_theirs(name): tensor for name, tensor in tensors.items()})
        write_json(temporary / "config.json", fields)
        write_json(temporary / PROVENANCE_FILE, {**(provenance or {}), "fledge_version": __version__})


def _implied_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that follow from others, for readers that want them spelt out."""
    implied: dict[str, Tensor] = {}
    if config.reduced_vocab:
        vocabulary = DraftVocabulary(config.draft_vocab_size, config.vocab_size)
        vocabulary.d2t.copy_(tensors[D2T])
        implied[T2D] = vocabulary.in_draft
    layer = config.layer
    if layer.qkv_bias and not layer.output_bias and not layer.qk_norm:
        # vLLM's Llama class has one flag for all attention biases, and leaves one that is not stored uninitialised.
        for i in range(config.num_layers):
            like = tensors[f"layers.{i}.self_attn.o_proj.weight"]
            implied[f"layers.{i}.self_attn.o_proj.bias"] = like.new_zeros(layer.hidden_size)
    return implied
