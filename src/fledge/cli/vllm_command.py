"""Parsing of vLLM's command line: options are translated, noted if they have no effect here, refused, or passed on."""

import itertools
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperCommand

from fledge.engine.vllm_options import ALIASES, FOREIGN, PROXY, SEVERAL_VALUES, note_on
from fledge.errors import ConfigError, NeedsVllmError, nearest_name_hint
from fledge.files import read_yaml

# Options with JSON values, whose keys can be given one by one: --speculative-config.model
_JSON = frozenset(
    f"--{name}"
    for name in (
        "speculative-config",
        "structured-outputs-config",
        "override-generation-config",
        "default-chat-template-kwargs",
    )
)

# Options of vLLM that change its speed.
_SPEED_OPTIONS = frozenset(
    f"--{name}"
    for name in (
        "attention-backend",
        "compilation-config",
        "data-parallel-size",
        "decode-context-parallel-size",
        "dtype",
        "enable-expert-parallel",
        "enforce-eager",
        "kv-cache-dtype",
        "max-num-batched-tokens",
        "pipeline-parallel-size",
        "quantization",
        "tensor-parallel-size",
    )
)
_LEVELS = ("-O0", "-O1", "-O2", "-O3")


class ServeCommand(TyperCommand):
    """`fledge serve`, which takes vLLM's options. For our engine, harmless ones are noted and others refused.

    For `--engine vllm` they are passed on, each argument as a `--vllm-option`.
    """

    _given: Sequence[str] = ()

    def parse_args(
        self, ctx: Any, args: list[str]
    ) -> list[str]:  # types are of typer's own click or of the installed one
        self._given = list(args)
        options: list[Any] = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        names = [(option.is_flag, name) for option in options for name in (*option.opts, *option.secondary_opts)]
        flags = {name for is_flag, name in names if is_flag} | {"--help"}
        values = {name for is_flag, name in names if not is_flag} | {"--model"}
        args, model = _expand_config_file(args, flags)
        given, rest = parse_arguments(args, flags)
        own, theirs = split_options(given, PROXY)
        engine = _last_value(own, "--engine")
        try:
            ours, notes = (own, []) if engine == "vllm" else translate(given, values, flags)
        except NeedsVllmError as error:
            if engine != "auto":
                raise self._advised(error) from None
            ours, notes = [*own, "--engine", "vllm"], [f"{error} (--engine auto: vLLM)"]
        while "--model" in ours:  # the positional argument wins
            at = ours.index("--model")
            model = "".join(ours[at + 1 : at + 2])
            del ours[at : at + 2]
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        left: list[str] = super().parse_args(ctx, [*(f"--vllm-option={word}" for word in theirs), *ours, *rest])
        if model is not None and ctx.params["model"] is None:
            ctx.params["model"] = str(model)
        return left

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NeedsVllmError as error:
            raise self._advised(error) from None

    def _advised(self, error: NeedsVllmError) -> ConfigError:
        """Add the command to use instead: the same with --engine vllm."""
        return ConfigError(f"{error}: {shlex.join(['fledge', 'serve', *self._given, '--engine', 'vllm'])}")


class EngineCommand(TyperCommand):
    """A command that may run vLLM (`--engine`, `--tune`). Options that are not its own are then passed on to vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options: list[Any] = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        names = {name: option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)}
        given, rest = parse_arguments(args, [name for name, is_flag in names.items() if is_flag] + ["--help"])
        ours, theirs = split_options(given, [*names, "--help"])
        if _last_value(ours, "--engine") in ("vllm", "auto") or "--tune" in ours:
            args = [*(f"--vllm-option={word}" for word in theirs), *ours, *rest]
        elif "--engine" in names and theirs and _canonical_name(theirs[0].partition("=")[0]) in FOREIGN:
            group = [] if ctx.parent is None or ctx.parent.parent is None else [ctx.parent.info_name]
            command = shlex.join(["fledge", *group, ctx.info_name, *args, "--engine", "vllm"])
            raise ConfigError(f"{theirs[0]}: is an option of vLLM's: {command}")
        return super().parse_args(ctx, args)


def _expand_config_file(args: Sequence[str], flags: Collection[str]) -> tuple[list[str], Any]:
    """Return the arguments, with those of the --config file before them, and the model in that file."""
    files, rest, left = [], [], list(args)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name == "--config":
            files.append(value if equals else "".join(left[:1]))
            left = left if equals else left[1:]
        else:
            rest.append(name + equals + value)
    if len(files) > 1:
        raise ConfigError("--config: one file can be given")
    settings = {_canonical_name(f"--{key}"): value for file in files for key, value in read_yaml(Path(file)).items()}
    model = settings.pop("--model", None)
    given = [_canonical_name(word.partition("=")[0]) for word in rest]
    return [*_to_arguments(settings, given, flags), *rest], model


class ParsedOption(NamedTuple):
    """An option with its values, or a positional argument."""

    words: Sequence[str]  # as written
    name: str = ""  # canonical; empty: a positional argument
    key: str = ""  # of --name.key
    values: Sequence[str] = ()


def parse_arguments(arguments: Sequence[str], own_flags: Collection[str]) -> tuple[list[ParsedOption], list[str]]:
    """Parse a command line; return its options and positional arguments, and all from `--` on.

    An unknown option is assumed to have one value.
    """
    found: list[ParsedOption] = []
    rest = list(arguments)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            found.append(ParsedOption([word]))
            continue
        written, equals, value = word.partition("=")
        name, dot, key = written.partition(".")
        name = _canonical_name(name)
        if not dot:  # an alias of a key, such as --spec-model
            name, _, key = name.partition(".")
        is_flag = name in own_flags or name.startswith("--no-") or FOREIGN.get(name, {}).get("flag", False)
        values = [value] if equals else []
        most = 0 if equals or is_flag or word in _LEVELS else sys.maxsize if name in SEVERAL_VALUES else 1
        while len(values) < most and rest and not rest[0].startswith("-" if values else "--"):
            values.append(rest.pop(0))  # a missing value is reported later
        found.append(ParsedOption([word] if equals else [word, *values], name, key, values))
    return found, rest


def split_options(given: Sequence[ParsedOption], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that are `own`, with positional ones, and those for vLLM."""
    ours: list[str] = []
    theirs: list[str] = []
    for one in given:
        if one.name and (one.name not in own or one.key):
            theirs += one.words
        elif one.values:
            ours += [part for value in one.values for part in (one.name, value)]
        else:
            ours += [one.name] if one.name else one.words
    return ours, theirs


def _last_value(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an option."""
    return next((words[i + 1] for i in range(len(words) - 2, -1, -1) if words[i] == name), None)


def vllm_values(words: Sequence[str], name: str) -> list[str]:
    """Return the values of an option among vLLM's arguments, under any of its names."""
    found: list[str] = []
    for i, word in enumerate(words):
        spelled, equals, value = word.partition("=")
        if word.startswith("-") and _canonical_name(spelled) == name:
            following = list(itertools.takewhile(lambda one: not one.startswith("-"), words[i + 1 :]))
            found = [value] if equals else following
    return found


def speed_options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the options among vLLM's arguments that change its speed, by canonical name."""
    given = {_canonical_name(word.partition("=")[0]) for word in words if word.startswith("-")}
    return {name: vllm_values(words, name) for name in sorted(_SPEED_OPTIONS & given)}


def remove_option(words: Sequence[str], name: str) -> list[str]:
    """Return the arguments without an option, its keys (`--name.key`), and their values."""
    kept: list[str] = []
    is_value_of = False
    for word in words:
        if word.startswith("-"):
            is_value_of = _canonical_name(word.partition("=")[0]).partition(".")[0] == name
        if not is_value_of:
            kept.append(word)
    return kept


def vllm_speculation(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the speculative config among vLLM's arguments, from JSON and single keys; None if there is none."""
    name = "--speculative-config"
    whole = vllm_values(words, name)
    try:
        values: Any = json.loads(whole[0]) if whole else {}
        for i, word in enumerate(words):
            spelled, equals, value = word.partition("=")
            key = _canonical_name(spelled).partition(".")
            if word.startswith("-") and key[0] == name and key[2]:
                _set_key(values, key[2], value if equals else "".join(words[i + 1 : i + 2]))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: expected a JSON object with vLLM's keys: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a JSON object with vLLM's keys")
    return values or None


def _to_arguments(settings: Mapping[str, Any], given: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the settings of a file as arguments, except for options that are given on the command line."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None or (name in given and name not in _JSON):
            continue
        if isinstance(value, bool):
            off = f"--no-{name[2:]}"
            words += [name] if value else [off] if off in flags else []
            continue
        for one in value if isinstance(value, list) else [value]:
            words.append(f"{name}={one if isinstance(one, str) else json.dumps(one)}")
    return words


def _canonical_name(name: str) -> str:
    """Return the canonical name of an option: vLLM allows `_` for `-`, and has aliases."""
    name = name.replace("_", "-") if name.startswith("--") else name
    return ALIASES.get(name, name)


def _negated(name: str, own_flags: Collection[str]) -> str | None:
    """Return FLAG of `--no-FLAG`, if it is a known flag that is off by default, else None."""
    flag = (
        _canonical_name(f"--{name.removeprefix('--no-')}") if name.startswith("--no-") and name not in own_flags else ""
    )
    return flag if flag in own_flags or FOREIGN.get(flag, {}).get("flag", False) else None


def _set_key(values: dict[str, Any], path: str, text: str) -> None:
    """Set key `a.b` to text, parsed as JSON if possible; `a.b+` appends to a list."""
    *above, key = path.split(".")
    for one in above:
        values = values.setdefault(one, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if key.endswith("+"):
        values.setdefault(key[:-1], []).append(value)
    else:
        values[key] = value


def translate(
    given: Sequence[ParsedOption], own_values: Collection[str], own_flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the arguments for our engine, and notes on options of vLLM that have no effect here.

    `own_values` and `own_flags`: our options with and without a value. Raises NeedsVllmError for options that need
    vLLM, and ConfigError for unknown ones.
    """
    ours: list[str] = []
    notes: list[str] = []
    dotted: dict[str, list[tuple[str, str]]] = {}
    for words, name, key, values in given:
        foreign = FOREIGN.get(name)
        if not name:
            ours += words
        elif (negated := _negated(name, own_flags)) is not None:
            ours = [one for one in ours if one != negated]
            said = FOREIGN.get(negated, {}).get("note")
            notes += [] if said is None else [f"{name}: {said}"]
        elif key and name in _JSON & set(own_values) and values:
            dotted.setdefault(name, []).append((key, values[0]))
        elif key and foreign is None:
            raise ConfigError(f"unknown option '{name}.{key}'. See fledge serve --help.")
        elif name in own_flags:
            ours.append("=".join([name, *values]))
        elif name in own_values:
            ours += [part for value in values for part in (name, value)] or [name]
        elif foreign is not None:
            value = "" if foreign.get("flag", False) or words[0] in _LEVELS else " ".join(values)
            note = note_on(name, value, f"{name} {value}".strip())
            notes += [] if note is None else [f"{name}: {note}"]
        else:
            hint = nearest_name_hint(name, [*own_values, *own_flags, *FOREIGN])
            raise ConfigError(f"unknown option '{name}'.{hint if 'Did you' in hint else ' See fledge serve --help.'}")
    for name, keys in dotted.items():
        whole = _last_value(ours, name) or "{}"
        try:
            config = json.loads(whole)
            for key, value in keys:
                _set_key(config, key, value)
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(f"{name}.{key}: what is above it is no JSON object") from None
        ours += [name, json.dumps(config)]
    return ours, notes
