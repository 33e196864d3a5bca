"""One thing that is wrong, or suspicious, about a checkpoint."""

from dataclasses import KW_ONLY, asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any


class Severity(StrEnum):
    ERROR = "error"  # the checkpoint does not mean what its files say, or does not fit its target
    WARNING = "warning"  # it works, but engines disagree about it or acceptance will suffer


@dataclass(frozen=True)
class Finding:
    """What is wrong, where, what was expected and what to do. `name` is stable: documents and tests refer to it."""

    name: str  # kebab-case
    field: str  # a config field or a tensor name
    _: KW_ONLY
    found: object
    expected: str
    advice: str
    file: str = "config.json"  # within the checkpoint directory
    severity: Severity = Severity.ERROR
    fixed_by_convert: bool = False  # `fledge convert` writes what is evidently meant

    def message(self, directory: Path | None = None) -> str:
        """One line, with the file's full path if its directory is given."""
        file = directory / self.file if directory else self.file
        advice = self.advice + ("; `fledge convert` fixes this" if self.fixed_by_convert else "")
        return f"{file}: {self.field}: found {self.found}, expected {self.expected}; {advice} [{self.name}]"

    def as_dict(self) -> dict[str, Any]:
        texts = {"severity": str(self.severity), "found": str(self.found), "message": self.message()}
        return {**asdict(self), **texts}


error = Finding
warning = partial(Finding, severity=Severity.WARNING)
