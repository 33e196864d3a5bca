"""Options of `vllm serve` that `fledge serve` does not have: which are harmless, and who handles the others."""

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fledge.errors import ConfigError, nearest_name_hint

_VLLM = "which is vLLM's job: run this pair with 'vllm serve', which loads the same checkpoints"
_SEVERAL_GPUS = f"several GPUs or machines are needed for that, {_VLLM}"


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FOREIGN: dict[str, dict[str, Any]] = _DATA["options"]
ALIASES: dict[str, str] = _DATA["aliases"]


def translate(
    arguments: Sequence[str], own_values: Collection[str], own_flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the arguments that are ours, and notes on those that are vLLM's and do no harm.

    `own_values` and `own_flags` are our options with and without a value. Raises ConfigError for an option that needs
    another engine, and for one that nobody has.
    """
    ours: list[str] = []
    notes: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*ours, word, *rest], notes
        if not word.startswith("-") or word == "-":
            ours.append(word)
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        name = ALIASES.get(name, name)
        if name in own_flags:
            ours.append(name + equals + value)
        elif name in own_values:
            ours += [name, value] if equals else [name, *rest[:1]]
            rest = rest if equals else rest[1:]
        elif name in FOREIGN:
            option = FOREIGN[name]
            if option.get("flag") or word in ("-O0", "-O1", "-O2", "-O3"):
                value = ""
            elif not equals:
                value = rest.pop(0) if rest else ""
            if "refused" in option and value not in option.get("accepted", ()):
                reason = option["refused"].format(vllm=_VLLM, several_gpus=_SEVERAL_GPUS)
                raise ConfigError(f"{f'{name} {value}'.strip()}: {reason}")
            if "note" in option:
                notes.append(f"{name}: {option['note']}")
        else:
            hint = nearest_name_hint(name, [*own_values, *own_flags, *FOREIGN])
            raise ConfigError(f"unknown option '{name}'.{hint if 'Did you' in hint else ' See fledge serve --help.'}")
    return ours, notes
