"""vLLM's options: which ones we have too, which are ignored, which are refused. For the command line and `LLM`."""

import tomllib
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fledge.errors import NeedsVllmError

_VLLM = "which is vLLM's job"
_SEVERAL_GPUS = f"several GPUs or machines are needed for that, {_VLLM}"
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VLLM_VERSION: str = _DATA["version"]
HONOURED: list[str] = _DATA["honoured"]
SEVERAL_VALUES = frozenset[str](_DATA["several"])
PROXY = frozenset[str](_DATA["proxy"])
ALIASES: dict[str, str] = _DATA["aliases"]


def _options(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by name: a `note` or the reason it is `refused`, whether it is a `flag`, and values `accepted` anyway."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        reason = {kind: group[kind] for kind in ("note", "refused") if kind in group}
        found |= {name: {**reason, "flag": True} for name in group.get("flags", ())}
        found |= dict.fromkeys(group.get("values", ()), reason)
        found |= {name: {**reason, "accepted": values} for name, values in group.get("accepted", {}).items()}
    return found


FOREIGN_NOW = _options(_DATA["group"])  # options of `VLLM_VERSION` that we lack, by their command line names
FOREIGN = {**FOREIGN_NOW, **_options(_DATA["older"])}


def note_on(name: str, value: str, spelled: str) -> str | None:
    """Return a note on why a foreign option is ignored, if any; raise NeedsVllmError if it is refused."""
    option = FOREIGN[name]
    if "refused" in option and value not in option.get("accepted", ()):
        raise NeedsVllmError(f"{spelled}: {reason_of(option)}")
    note: str | None = option.get("note")
    return note


def reason_of(option: Mapping[str, Any]) -> str:
    """Return why an option is ignored or refused."""
    reason: str = option.get("note") or option["refused"]
    return reason.replace("{several_gpus}", _SEVERAL_GPUS).replace("{vllm}", _VLLM)


def without_foreign(options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Remove vLLM's options that are ignored here from keyword options. `own`: names of ours. Unknown ones are kept.

    Raises NeedsVllmError for options that are refused.
    """
    kept: dict[str, Any] = {}
    for name, value in options.items():
        foreign = f"--{name.replace('_', '-')}"
        if name in own or foreign not in FOREIGN:
            kept[name] = value
        elif value is not None and value is not False:  # these mean that it is not set
            note = note_on(foreign, "" if value is True else str(value), f"{name}={value!r}")
            if note is not None:
                warnings.warn(f"{name}: {note}", stacklevel=3)
    return kept
