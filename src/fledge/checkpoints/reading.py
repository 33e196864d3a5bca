"""Reading what a drafter's directory holds, whatever layout it has."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.finding import Finding, Severity, config_warning
from fledge.checkpoints.formats import speculators, vllm
from fledge.checkpoints.formats.names import T2D, architecture_of, is_ignored, reading_table
from fledge.checkpoints.formats.shared import Format, TargetReference, architecture_names, refuse_unsupported
from fledge.checkpoints.tensors import TensorFiles, TensorInfo
from fledge.errors import CheckpointError
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import ConfigFields

PROVENANCE_FILE = "fledge_provenance.json"
D2T = "vocabulary.d2t"
_PREFIX = "model."
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors spells them


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """What a directory holds, read from its config and tensor headers; no weights yet."""

    directory: Path
    format: Format
    config: DrafterConfig
    fields: ConfigFields  # config.json as it is
    files: TensorFiles
    stored_names: Mapping[str, str]  # our unstacked name -> name in the files; ignored tensors left out
    findings: tuple[Finding, ...]  # noticed while reading; `contract.check` adds the rest
    target: TargetReference | None
    provenance: Mapping[str, Any] | None  # what Fledge wrote beside the weights

    def info(self, name: str) -> TensorInfo:
        return self.files.infos[self.stored_names[name]]

    def read(self, name: str) -> Tensor:
        return self.files.read(self.stored_names[name])


def read_drafter(directory: Path) -> DrafterCheckpoint:
    """Read what can be known without the weights. Raises for what is no drafter, or none that can be understood."""
    fields = ConfigFields.from_file(directory / "config.json")
    files = TensorFiles(directory)
    bare = {stored: _bare(stored) for stored in files.infos}
    refuse_unsupported(fields, set(bare.values()))
    architecture = _architecture(fields, set(bare.values()))
    table = reading_table(architecture)
    stored_names: dict[str, str] = {}
    for stored, name in bare.items():
        if is_ignored(name):
            continue
        ours = table.to_ours(name)
        if ours in stored_names:
            raise CheckpointError(
                f"{directory}: tensors '{stored_names[ours]}' and '{stored}' are two spellings of the same; remove one"
            )
        stored_names[ours] = stored
    dtype, dtype_findings = _stored_dtype(files, stored_names)
    if speculators.recognises(fields):
        form: Format = "speculators"
        parsed = speculators.parse(fields, stored_names, dtype)
    else:
        form = "vllm"
        parsed = vllm.parse(fields, architecture, stored_names, dtype)
    return DrafterCheckpoint(
        directory=directory,
        format=form,
        config=parsed.config,
        fields=fields,
        files=files,
        stored_names=stored_names,
        findings=_prefix_findings(files) + parsed.findings + dtype_findings + _declared_dtype_findings(fields, dtype),
        target=parsed.target,
        provenance=_read_provenance(directory),
    )


def is_drafter(directory: Path) -> bool:
    """Tell a drafter's directory from a target's."""
    fields = ConfigFields.from_file(directory / "config.json")
    if speculators.recognises(fields) or any("Eagle" in name for name in architecture_names(fields)):
        return True
    return architecture_of(map(_bare, TensorFiles(directory).infos)) is not None


def read_weights(checkpoint: DrafterCheckpoint) -> dict[str, Tensor]:
    """Every tensor of the model under our unstacked name, as stored."""
    stored = checkpoint.files.read_all()
    tensors = {ours: stored[theirs] for ours, theirs in checkpoint.stored_names.items() if ours != T2D}
    if not checkpoint.config.reduced_vocab:
        tensors.pop(D2T, None)
    elif D2T in tensors:
        tensors[D2T] = tensors[D2T].to(torch.int64)
    return tensors


def _architecture(fields: ConfigFields, names: Collection[str]) -> Architecture:
    declared = architecture_names(fields)
    if speculators.recognises(fields) or any("Eagle3" in name for name in declared):
        return Architecture.EAGLE3
    if any(name.startswith("Eagle") for name in declared):
        return Architecture.EAGLE1
    found = architecture_of(names)
    if found is None:
        family = fields.values.get("model_type", "unknown")
        raise CheckpointError(
            f"{fields.where}: not an EAGLE drafter (model_type '{family}', no fc, midlayer or d2t tensor); "
            "if this is a target model, give it as --target"
        )
    return found


def _bare(name: str) -> str:
    """Without the `model.` that training frameworks leave in front of names."""
    return name.removeprefix(_PREFIX)


def _prefix_findings(files: TensorFiles) -> tuple[Finding, ...]:
    prefixed = sorted(name for name in files.infos if name.startswith(_PREFIX))
    if not prefixed:
        return ()
    return (
        Finding(
            severity=Severity.ERROR,
            name="model-prefix",
            file=files.infos[prefixed[0]].file.name,
            field=prefixed[0],
            found=f"{len(prefixed)} tensor names that begin with '{_PREFIX}'",
            expected=_bare(prefixed[0]),
            advice="vLLM refuses them",
            fixed_by_convert=True,
        ),
    )


def _stored_dtype(files: TensorFiles, stored_names: Mapping[str, str]) -> tuple[str, tuple[Finding, ...]]:
    """The dtype of the weights, going by the largest; what differs from it is reported."""
    spelt = {
        name: _FLOATS.get(files.infos[stored].dtype, files.infos[stored].dtype)
        for name, stored in stored_names.items()
        if name not in (D2T, T2D)
    }
    if not spelt:
        raise CheckpointError(f"{files.directory}: holds no weights")
    largest = max(spelt, key=lambda name: math.prod(files.infos[stored_names[name]].shape))
    dtype = spelt[largest]
    if dtype not in _FLOATS.values():
        raise CheckpointError(
            f"{files.infos[stored_names[largest]].file}: tensor '{stored_names[largest]}' is {dtype}; "
            "only unquantised float32, float16 and bfloat16 drafters are supported"
        )
    others = {name: found for name, found in spelt.items() if found != dtype}
    if not others:
        return dtype, ()
    example = min(others)
    mixed = Finding(
        severity=Severity.WARNING,
        name="mixed-dtypes",
        file=files.infos[stored_names[example]].file.name,
        field=stored_names[example],
        found=others[example] + (f" (and {len(others) - 1} more tensors)" if len(others) > 1 else ""),
        expected=f"{dtype}, as the largest tensor",
        advice="all weights are cast to one dtype when loaded",
    )
    return dtype, (mixed,)


def _declared_dtype_findings(fields: ConfigFields, dtype: str) -> tuple[Finding, ...]:
    declared = fields.text("dtype", fields.text("torch_dtype", dtype)).removeprefix("torch.")
    if declared == dtype:
        return ()
    return (
        config_warning(
            "dtype-differs",
            "torch_dtype",
            found=declared,
            expected=f"{dtype}, as the weights are stored",
            advice="engines that go by the config cast the weights",
        ),
    )


def _read_provenance(directory: Path) -> Mapping[str, Any] | None:
    path = directory / PROVENANCE_FILE
    return ConfigFields.from_file(path).values if path.is_file() else None
