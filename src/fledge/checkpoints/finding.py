"""Errors and warnings about a drafter's checkpoint. `findings.yaml` defines each of them by name."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

_KNOWN: dict[str, dict[str, Any]] = {
    name: {"severity": severity, **({"advice": texts} if isinstance(texts, str) else texts)}
    for severity, findings in yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text("utf-8")).items()
    for name, texts in findings.items()
}
NAMES = tuple(_KNOWN)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One error or warning: where, what was found, what was expected and what to do."""

    severity: Literal["error", "warning"]  # cannot work; or works, but perhaps not as intended
    name: str
    file: str  # within the checkpoint directory
    field: str  # a config field or a tensor name
    found: str
    expected: str
    advice: str
    fixed_by_convert: bool = False  # `fledge convert` writes what is evidently intended

    def message(self, directory: Path | None = None) -> str:
        """The finding in one line, with the file's full path if its directory is given."""
        file = directory / self.file if directory else self.file
        advice = self.advice + ("; `fledge convert` fixes this" if self.fixed_by_convert else "")
        return f"{file}: {self.field}: found {self.found}, expected {self.expected}; {advice} [{self.name}]"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "message": self.message()}


def finding(name: str, *, file: str = "config.json", fixed_by_convert: bool | None = None, **details: Any) -> Finding:
    """Make a finding from findings.yaml; `details` fill in its placeholders and the parts that it leaves out."""
    known = _KNOWN[name]
    fixed = known.get("convert", False) if fixed_by_convert is None else fixed_by_convert
    parts = {
        part: known[part].format(**details) if part in known else str(details[part])
        for part in ("field", "found", "expected", "advice")
    }
    return Finding(name=name, severity=known["severity"], file=file, fixed_by_convert=fixed, **parts)
