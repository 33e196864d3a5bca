"""From one checkpoint format to another."""

from dataclasses import dataclass
from pathlib import Path

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import raise_errors, write_drafter
from fledge.checkpoints.finding import Finding
from fledge.checkpoints.formats.shared import Format, TargetReference
from fledge.checkpoints.reading import read_drafter, read_weights
from fledge.checkpoints.target import read_target_config
from fledge.models.target import FAMILIES


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What became of the source's findings."""

    fixed: list[Finding]
    remaining: list[Finding]


def convert_drafter(
    source: Path,
    destination: Path,
    *,
    to: Format,
    target: Path | None = None,
    source_name: str | None = None,
    target_name: str | None = None,
    num_speculative_tokens: int = 3,
) -> Conversion:
    """Write `source` in the format `to`, weights bit for bit. Raises for contract errors it cannot repair.

    With a target, layers that the source leaves to the default are written down. The names are what the result
    records: where the user found source and target, as opposed to where they lie on this machine.
    """
    checkpoint = read_drafter(source)
    target_config = read_target_config(target) if target else None
    findings = check(checkpoint, target_config)
    raise_errors(checkpoint, [finding for finding in findings if not finding.fixed_by_convert])
    config, reference = checkpoint.config, checkpoint.target
    if target_config is not None:
        config = config.resolved(target_config)
        architecture = FAMILIES[target_config.family].architecture
        reference = TargetReference(name_or_path=target_name or str(target), architectures=(architecture,))
    provenance = {"converted_from": source_name or str(source), "source_format": checkpoint.format}
    write_drafter(
        config,
        read_weights(checkpoint),
        destination,
        to=to,
        target=reference,
        num_speculative_tokens=num_speculative_tokens,
        provenance={**(checkpoint.provenance or {}), **provenance},
    )
    remaining = check(read_drafter(destination), target_config)
    names = {finding.name for finding in remaining}
    return Conversion(fixed=[finding for finding in findings if finding.name not in names], remaining=remaining)
