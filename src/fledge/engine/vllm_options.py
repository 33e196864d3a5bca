"""vLLM's options: which are ours too, which do no harm, who handles the others. For the command line and `LLM`."""

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
    """By name: `note` or `refused`, whether it is a `flag`, and the values `accepted` all the same."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        reason = {kind: group[kind] for kind in ("note", "refused") if kind in group}
        found |= {name: {**reason, "flag": True} for name in group.get("flags", ())}
        found |= dict.fromkeys(group.get("values", ()), reason)
        found |= {name: {**reason, "accepted": values} for name, values in group.get("accepted", {}).items()}
    return found


FOREIGN_NOW = _options(_DATA["group"])  # of that version, by their names on the command line
FOREIGN = {**FOREIGN_NOW, **_options(_DATA["older"])}


def note_on(name: str, value: str, spelled: str) -> str | None:
    """Return why a foreign option does no harm, if there is something to say; raise NeedsVllmError where it would."""
    option = FOREIGN[name]
    if "refused" in option and value not in option.get("accepted", ()):
        raise NeedsVllmError(f"{spelled}: {reason_of(option)}")
    note: str | None = option.get("note")
    return note


def reason_of(option: Mapping[str, Any]) -> str:
    """Return why an option is without effect here, or refused."""
    reason: str = option.get("note") or option["refused"]
    return reason.replace("{several_gpus}", _SEVERAL_GPUS).replace("{vllm}", _VLLM)


def without_foreign(options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return keyword options without vLLM's that do no harm. `own` are ours; what is neither stays, to be refused."""
    kept: dict[str, Any] = {}
    for name, value in options.items():
        foreign = f"--{name.replace('_', '-')}"
        if name in own or foreign not in FOREIGN:
            kept[name] = value
        elif value is not None and value is not False:  # which is to leave it out
            note = note_on(foreign, "" if value is True else str(value), f"{name}={value!r}")
            if note is not None:
                warnings.warn(f"{name}: {note}", stacklevel=3)
    return kept
