"""Reading what a drafter's directory holds, whatever layout it has."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats.dense import DENSE_DTYPES, WeightFormat
from fledge.checkpoints.formats.drafter_config import (
    Format,
    TargetReference,
    architecture_names,
    check_class,
    format_of,
    read_config,
    read_target_reference,
)
from fledge.checkpoints.formats.names import D2T, IGNORED, T2D, architecture_of, reading_table
from fledge.checkpoints.tensors import TensorFiles, TensorInfo
from fledge.checkpoints.weights import weight_format
from fledge.errors import CheckpointError
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.hf_config import DTYPES, ConfigFields

PROVENANCE_FILE = "fledge_provenance.json"
_PREFIX = "model."


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """What a directory holds, read from its config and tensor headers; no weights yet."""

    directory: Path
    format: Format
    config: DrafterConfig
    fields: ConfigFields  # config.json as it is
    files: TensorFiles
    stored_names: Mapping[str, str]  # our name before joining -> name in the files; ignored tensors left out
    weight_format: WeightFormat
    findings: tuple[Finding, ...]  # noticed while reading; `contract.check` adds the rest
    target: TargetReference | None
    provenance: Mapping[str, Any] | None  # what Fledge wrote beside the weights

    def info(self, name: str) -> TensorInfo:
        return self.files.infos[self.stored_names[name]]

    def read(self, name: str) -> Tensor:
        return self.files.read(self.stored_names[name])

    @property
    def weight_names(self) -> dict[str, str]:
        """`stored_names` of the tensors that are the model's: no t2d, and no d2t where the vocabulary is whole."""
        left_out = {T2D} if self.config.reduced_vocab else {T2D, D2T}
        return {ours: stored for ours, stored in self.stored_names.items() if ours not in left_out}


def read_drafter(directory: Path) -> DrafterCheckpoint:
    """Read what can be known without the weights. Raises for what is no drafter, or none that can be understood."""
    fields = ConfigFields.from_file(directory / "config.json")
    files = TensorFiles(directory)
    notes: list[Finding] = []
    bare = {stored: stored.removeprefix(_PREFIX) for stored in files.infos}
    check_class(fields, set(bare.values()), notes)
    form = weight_format(fields, files)
    architecture = _architecture(fields, bare.values())
    table = reading_table(architecture)
    stored_names: dict[str, str] = {}
    for stored, name in bare.items():
        if IGNORED.fullmatch(name):
            continue
        ours = table.to_ours(name)
        if ours in stored_names:
            raise CheckpointError(
                f"{directory}: tensors '{stored_names[ours]}' and '{stored}' are two spellings of the same; remove one"
            )
        stored_names[ours] = stored
    if prefixed := sorted(stored for stored in bare if stored.startswith(_PREFIX)):
        found, file = f"{len(prefixed)} tensor names that begin with '{_PREFIX}'", files.infos[prefixed[0]].file.name
        first = prefixed[0]
        notes.append(finding("model-prefix", first, found, bare[first], file=file, fixed_by_convert=True))
    infos = {stored: files.infos[stored] for ours, stored in stored_names.items() if ours not in (D2T, T2D)}
    infos = {stored: info for stored, info in infos.items() if info.dtype in DENSE_DTYPES}
    dtype = _stored_dtype(infos, directory)
    config = read_config(fields, architecture, stored_names, dtype, notes)
    if others := sorted(stored for stored, info in infos.items() if info.dtype != dtype):
        found = infos[others[0]].dtype + (f" (and {len(others) - 1} more tensors)" if len(others) > 1 else "")
        expected, file = f"{dtype}, as the largest tensor", infos[others[0]].file.name
        notes.append(finding("mixed-dtypes", others[0], found, expected, file=file))
    declared = fields.text("dtype", fields.text("torch_dtype", dtype)).removeprefix("torch.")
    if declared != dtype:
        notes.append(finding("dtype-differs", "torch_dtype", declared, f"{dtype}, as the weights are stored"))
    provenance = directory / PROVENANCE_FILE
    return DrafterCheckpoint(
        directory=directory,
        format=format_of(fields),
        config=config,
        fields=fields,
        files=files,
        stored_names=stored_names,
        weight_format=form,
        findings=tuple(notes),
        target=read_target_reference(fields),
        provenance=ConfigFields.from_file(provenance).values if provenance.is_file() else None,
    )


def is_drafter(directory: Path) -> bool:
    """Tell a drafter's directory from a target's."""
    fields = ConfigFields.from_file(directory / "config.json")
    if format_of(fields) == "speculators" or any("Eagle" in name for name in architecture_names(fields)):
        return True
    return architecture_of(name.removeprefix(_PREFIX) for name in TensorFiles(directory).infos) is not None


def _architecture(fields: ConfigFields, names: Iterable[str]) -> Architecture:
    declared = architecture_names(fields)
    if format_of(fields) == "speculators" or any("Eagle3" in name for name in declared):
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


def _stored_dtype(infos: Mapping[str, TensorInfo], where: Path) -> str:
    """The dtype of the weights, going by the largest."""
    if not infos:
        raise CheckpointError(f"{where}: holds no weights")
    dtype = max(infos.values(), key=lambda info: math.prod(info.shape)).dtype
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: its weights are {dtype}, expected one of {', '.join(DTYPES)}")
    return dtype
