"""What verbs share: options as help.toml describes them, how they are read, and how a run ends.

Importing this imports no torch: `--help` must be quick.
"""

import inspect
import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_origin

import typer

from fledge.checkpoints.source import DRAFTERS, TARGET
from fledge.cli.options import INTERRUPTED
from fledge.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from fledge.bench.summary import Summary

_Command = TypeVar("_Command", bound=Callable[..., None])
_Number = TypeVar("_Number", int, float)
_HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))


def options(verb: str) -> Callable[[_Command], _Command]:
    """Decorator of a command: help.toml says what its parameters are called, allow, and are for."""
    texts = {**_HELP["shared"], **_HELP[verb]}

    def described(parameter: inspect.Parameter) -> inspect.Parameter:
        if get_origin(parameter.annotation) is Annotated:  # of `engine_options`
            return parameter
        text = texts[parameter.name]
        values = {"help": text} if isinstance(text, str) else dict(text)
        make = typer.Argument if values.pop("argument", False) else typer.Option
        name = values.pop("name", None)
        if parameter.default is False:  # a switch without a `--no-`
            name = name or f"--{parameter.name.replace('_', '-')}"
        info = make(**values) if name is None else make(name, **values)
        return parameter.replace(annotation=Annotated[parameter.annotation, info])

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command)
        parameters = [described(parameter) for parameter in signature.parameters.values()]
        setattr(command, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
        return command

    return decorate


def numbers(
    option: str, text: str, kind: type[_Number], low: float = -math.inf, high: float = math.inf
) -> list[_Number]:
    """Read the value of an option: numbers from `low` to `high`, separated by commas."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ConfigError(f"--{option}: found {text!r}, expected {whole}numbers separated by commas") from None
    for number in found:
        if not low <= number <= high:
            raise ConfigError(f"--{option}: found {number}, allowed is {low} to {high}")
    return found


def one_of(option: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that an option does not know."""
    if value not in (names := list(known)):
        raise ConfigError(f"--{option}: unknown {option} '{value}'.{nearest_name_hint(value, names)}")


def models(target: str | None, drafters: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    """Return the target and its drafters; the bundled ones if none is named."""
    if (target is None) != (not drafters):
        missing = "--target" if target is None else "--drafter"
        raise ConfigError(f"{missing} is missing: name a target and its drafters, or neither for the bundled models")
    return target or TARGET, tuple(drafters or DRAFTERS.values())


def leave(status: int, *lines: str) -> NoReturn:
    """End the command, with these lines on standard error."""
    for line in lines:
        print(line, file=sys.stderr)
    raise typer.Exit(status)


def finish_bench(
    summary: "Summary",
    file: Path,
    *,
    is_interrupted: bool,
    failure: str | None,
    as_json: bool,
    quiet: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print what was measured, with `more` in the JSON object, and exit with 130 or 1 where it is not whole."""
    from rich.console import Console  # noqa: PLC0415 - `fledge --help` must stay quick

    from fledge.bench.report import print_results  # noqa: PLC0415

    results = summary.results
    if as_json:
        print(json.dumps({"results": str(file), **summary.to_dict(), **(more or {})}, allow_nan=False))
    elif results.cells:
        console = Console(highlight=False)
        print_results(summary, console)
        for line in summary.best_modes:
            console.print(str(line), markup=False, soft_wrap=True)
    if results.contenders and not quiet:
        print(f"results: {file}", file=sys.stderr)
    if is_interrupted:
        saved = "what was measured is saved" if results.contenders else "nothing was measured"
        leave(INTERRUPTED, f"interrupted; {saved}")
    if failure is not None:
        leave(1, f"error: {failure}, see the notes above")
