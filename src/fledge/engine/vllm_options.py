"""vLLM's options that are not ours: which do no harm, who handles the others. For the command line and `LLM`."""

import tomllib
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fledge.errors import ConfigError

_VLLM = "which is vLLM's job: run this pair with 'vllm serve', which loads the same checkpoints"
_SEVERAL_GPUS = f"several GPUs or machines are needed for that, {_VLLM}"
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FOREIGN: dict[str, dict[str, Any]] = _DATA["options"]  # by their names on the command line
ALIASES: dict[str, str] = _DATA["aliases"]


def note_on(name: str, value: str, spelled: str) -> str | None:
    """Return why a foreign option does no harm, if there is something to say; raise ConfigError where it would."""
    option = FOREIGN[name]
    if "refused" in option and value not in option.get("accepted", ()):
        raise ConfigError(f"{spelled}: {option['refused'].format(vllm=_VLLM, several_gpus=_SEVERAL_GPUS)}")
    note: str | None = option.get("note")
    return note


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
