"""Reads the config and tensor headers of a drafter's directory, in any of the supported formats."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats import drafter_classes, drafter_config
from fledge.checkpoints.formats.dense import DENSE, DENSE_DTYPES, WeightFormat
from fledge.checkpoints.formats.drafter_classes import Format
from fledge.checkpoints.formats.drafter_config import D2T, T2D
from fledge.checkpoints.tensors import TensorFiles, TensorInfo
from fledge.checkpoints.weights import weight_format
from fledge.errors import CheckpointError
from fledge.models.config import DrafterConfig
from fledge.models.hf_config import DTYPES, ConfigFields

PROVENANCE_FILE = "fledge_provenance.json"
_PREFIX = "model."


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter's directory: its config and tensor headers, without the weights."""

    directory: Path
    format: Format
    config: DrafterConfig
    fields: ConfigFields  # config.json
    files: TensorFiles
    stored_names: Mapping[str, str]  # our name before stacking -> name in the files; without ignored tensors
    weight_format: WeightFormat
    findings: tuple[Finding, ...]  # found while reading; `contract.check` adds the others
    target: Mapping[str, Any] | None  # the target that it was made for, see `read_target_reference`
    provenance: Mapping[str, Any] | None  # content of `PROVENANCE_FILE`

    def info(self, name: str) -> TensorInfo:
        return self.files.infos[self.stored_names[name]]

    def read(self, name: str) -> Tensor:
        return self.files.read(self.stored_names[name])

    @property
    def weight_names(self) -> dict[str, str]:
        """`stored_names` of the model's tensors: without t2d, and without d2t if the vocabulary is not reduced."""
        left_out = {T2D} if self.config.reduced_vocab else {T2D, D2T}
        return {ours: stored for ours, stored in self.stored_names.items() if ours not in left_out}


def read_drafter(directory: Path) -> DrafterCheckpoint:
    """Read config and tensor headers. Raises CheckpointError for other models and for unsupported drafters."""
    fields = ConfigFields.from_file(directory / "config.json")
    drafter_classes.refuse_other_methods(fields, ())  # before the files, which other methods may name differently
    files = TensorFiles(directory)
    notes: list[Finding] = []
    bare = {stored: stored.removeprefix(_PREFIX) for stored in files.infos}
    drafter_classes.check_class(fields, set(bare.values()), notes)
    form = weight_format(fields, files)
    architecture = drafter_classes.architecture_of(fields, bare.values())
    if architecture is None:
        family = fields.values.get("model_type", "unknown")
        raise CheckpointError(
            f"{fields.where}: not an EAGLE drafter (model_type '{family}', no fc, midlayer or d2t tensor); "
            "if this is a target model, give it as --target"
        )
    stored_names: dict[str, str] = {}
    for stored, name in bare.items():
        if drafter_config.IGNORED.fullmatch(name):
            continue
        ours = drafter_config.our_name(name, architecture)
        if ours in stored_names:
            raise CheckpointError(
                f"{directory}: tensors '{stored_names[ours]}' and '{stored}' are two spellings of the same; remove one"
            )
        stored_names[ours] = stored
    if prefixed := sorted(stored for stored in bare if stored.startswith(_PREFIX)):
        first, found = prefixed[0], f"{len(prefixed)} tensor names that begin with '{_PREFIX}'"
        file = files.infos[first].file.name
        notes.append(finding("model-prefix", field=first, found=found, expected=bare[first], file=file))
    infos = {stored: files.infos[stored] for ours, stored in stored_names.items() if ours not in (D2T, T2D)}
    infos = {
        stored: info
        for stored, info in infos.items()
        if info.dtype in DENSE_DTYPES and (form is DENSE or stored.endswith((".weight", ".bias")))
    }
    if not infos:
        raise CheckpointError(f"{directory}: holds no weights")
    dtype = max(infos.values(), key=lambda info: math.prod(info.shape)).dtype  # of the largest tensor
    if dtype not in DTYPES:
        raise CheckpointError(f"{directory}: its weights are {dtype}, expected one of {', '.join(DTYPES)}")
    config = drafter_config.read_config(fields, architecture, stored_names, dtype, notes)
    if others := sorted(stored for stored, info in infos.items() if info.dtype != dtype):
        other, more = infos[others[0]], f" (and {len(others) - 1} more tensors)" if len(others) > 1 else ""
        found, file = other.dtype + more, other.file.name
        notes.append(finding("mixed-dtypes", field=others[0], found=found, file=file, dtype=dtype))
    declared = fields.text("dtype", fields.text("torch_dtype", dtype)).removeprefix("torch.")
    if declared != dtype:
        notes.append(finding("dtype-differs", found=declared, dtype=dtype))
    provenance = directory / PROVENANCE_FILE
    return DrafterCheckpoint(
        directory=directory,
        format=drafter_classes.format_of(fields),
        config=config,
        fields=fields,
        files=files,
        stored_names=stored_names,
        weight_format=form,
        findings=tuple(notes),
        target=drafter_config.read_target_reference(fields),
        provenance=ConfigFields.from_file(provenance).values if provenance.is_file() else None,
    )


def is_drafter(directory: Path) -> bool:
    """Whether a directory is a drafter's and not a target's. Raises CheckpointError for drafters of other methods."""
    fields = ConfigFields.from_file(directory / "config.json")
    drafter_classes.refuse_other_methods(fields, ())
    names = {name.removeprefix(_PREFIX) for name in TensorFiles(directory).infos}
    drafter_classes.refuse_other_methods(fields, names)
    return drafter_classes.architecture_of(fields, names) is not None
