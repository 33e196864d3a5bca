"""Where vLLM is, and which version: in this Python's environment or in another's."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.errors import ConfigError

VARIABLE = "FLEDGE_VLLM_PYTHON"
PROBE_SECONDS = 60.0
_DATA = tomllib.loads(Path(__file__).with_name("versions.toml").read_text(encoding="utf-8"))
OLDEST: str = _DATA["oldest"]
VERSIONS: list[dict[str, Any]] = _DATA["version"]  # newest first
# Importing vLLM takes many seconds, and its builds have several names: the files beside the package tell as much.
_PROBE = """
import importlib.metadata, importlib.util, pathlib
found = importlib.util.find_spec("vllm")
if found is None or not found.submodule_search_locations:
    print("none")
else:
    here = str(pathlib.Path(found.submodule_search_locations[0]).parent)
    named = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions(path=[here])}
    print(named.get("vllm") or next((v for n, v in named.items() if n.startswith("vllm")), "unknown"))
"""


@dataclass(frozen=True, kw_only=True)
class VllmInstallation:
    """A Python that has vLLM."""

    python: str
    version: str

    @property
    def series(self) -> str:
        """The version without its last number, which is what the table knows."""
        return ".".join(self.version.split(".")[:2])

    @property
    def known(self) -> dict[str, Any] | None:
        """Its row in the table of versions that were tried."""
        return next((row for row in VERSIONS if row["series"] == self.series), None)

    @property
    def has_request_metrics(self) -> bool:
        """Whether it can tell how the rounds of one request went."""
        newest: dict[str, Any] = VERSIONS[0]
        row = self.known or (newest if _numbers(self.version) > _numbers(newest["series"]) else None)
        return bool(row and row["request_metrics"])

    @property
    def warning(self) -> str | None:
        """What to say of a version that nobody has tried."""
        if self.known is not None:
            return None
        return f"vLLM {self.version} was not tried with Fledge; known to work: {known_versions()}"


def find_vllm(python: str | None = None) -> VllmInstallation:
    """Return the vLLM of `python`, of FLEDGE_VLLM_PYTHON, or of this Python. Raises ConfigError if there is none."""
    source = "--vllm-python" if python else VARIABLE if os.environ.get(VARIABLE) else None
    chosen = str(Path(python or os.environ.get(VARIABLE) or sys.executable).expanduser())
    name = "this Python" if source is None else f"{source} {chosen}"
    try:
        # -P: what lies in the working directory, a folder called vllm perhaps, is not vLLM.
        asked = subprocess.run(
            [chosen, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "it does not answer"
        raise ConfigError(f"{name}: cannot be run: {reason}") from None
    version = asked.stdout.strip()
    if asked.returncode or not version:
        lines = asked.stderr.strip().splitlines()
        raise ConfigError(f"{name}: is no Python 3.11 or later: {lines[-1] if lines else 'it says nothing'}")
    if version == "none":
        advice = f"pip install 'fledge[vllm]', or name a Python that has it with --vllm-python or {VARIABLE}"
        raise ConfigError(f"vLLM is not installed in {name}: {advice}")
    if _numbers(version) < _numbers(OLDEST):
        raise ConfigError(f"vLLM {version} in {name} is too old; known to work: {known_versions()}")
    return VllmInstallation(python=chosen, version=version)


def known_versions() -> str:
    """The versions that were tried, for people."""
    return ", ".join(f"{row['series']}.x" for row in VERSIONS)


def _numbers(version: str) -> tuple[int, ...]:
    """What versions are ordered by. One that cannot be read is newer than all: it is not refused, but warned of."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (sys.maxsize,)
