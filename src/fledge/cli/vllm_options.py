"""The command line of `vllm serve`, read by `fledge serve`: which options are harmless, and who handles the others."""

import sys
from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

from fledge.engine.vllm_options import ALIASES, FOREIGN, note_on
from fledge.errors import ConfigError, nearest_name_hint

_SEVERAL_VALUES = {"--served-model-name", "--api-key"}


class ServeCommand(TyperCommand):
    """Reads vLLM's options too: those that do no harm are noted, others refused in words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer brings its own click, or uses the other
        options: list[Any] = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        names = [(option.is_flag, name) for option in options for name in (*option.opts, *option.secondary_opts)]
        flags = {name for is_flag, name in names if is_flag} | {"--help"}
        values = {name for is_flag, name in names if not is_flag}
        ours, notes = translate(args, values, flags)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return super().parse_args(ctx, _repeat_lists(ours))


def _repeat_lists(arguments: list[str]) -> list[str]:
    """`--served-model-name a b` is vLLM's way to give several values; ours is to repeat the option."""
    made: list[str] = []
    taking: str | None = None
    for position, word in enumerate(arguments):
        if word.startswith("-"):
            taking = word if word in _SEVERAL_VALUES else None
        elif taking is not None and position and arguments[position - 1] != taking:
            made.append(taking)
        made.append(word)
    return made


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
            elif not equals and rest:
                value = rest.pop(0)
            note = note_on(name, value, f"{name} {value}".strip())
            notes += [] if note is None else [f"{name}: {note}"]
        else:
            hint = nearest_name_hint(name, [*own_values, *own_flags, *FOREIGN])
            raise ConfigError(f"unknown option '{name}'.{hint if 'Did you' in hint else ' See fledge serve --help.'}")
    return ours, notes
