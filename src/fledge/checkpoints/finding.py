"""One thing that is wrong, or suspicious, about a checkpoint."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Severity(StrEnum):
    ERROR = "error"  # the checkpoint does not mean what its files say, or does not fit its target
    WARNING = "warning"  # it works, but engines disagree about it or acceptance will suffer


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, where, what was expected and what to do. `name` is stable: documents and tests refer to it."""

    severity: Severity
    name: str  # kebab-case
    file: str  # within the checkpoint directory
    field: str  # a config field or a tensor name
    found: str
    expected: str
    advice: str
    fixed_by_convert: bool = False  # `fledge convert` writes what is evidently meant

    def message(self, directory: Path | None = None) -> str:
        """One line, with the file's full path if its directory is given."""
        file = directory / self.file if directory else self.file
        advice = self.advice + ("; `fledge convert` fixes this" if self.fixed_by_convert else "")
        return f"{file}: {self.field}: found {self.found}, expected {self.expected}; {advice} [{self.name}]"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "severity": str(self.severity), "message": self.message()}


CONFIG_FILE = "config.json"


def config_error(
    name: str, field: str, *, found: object, expected: str, advice: str, fixed_by_convert: bool = False
) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        name=name,
        file=CONFIG_FILE,
        field=field,
        found=str(found),
        expected=expected,
        advice=advice,
        fixed_by_convert=fixed_by_convert,
    )


def config_warning(name: str, field: str, *, found: object, expected: str, advice: str) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        name=name,
        file=CONFIG_FILE,
        field=field,
        found=str(found),
        expected=expected,
        advice=advice,
    )
