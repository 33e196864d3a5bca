"""Shared parts of the commands: option definitions from help.toml and `EngineConfig`, parsing of values, exits.

Importing this does not import torch: `--help` must be quick.
"""

import functools
import inspect
import json
import math
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast, get_type_hints

import typer
from rich.console import Console

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.errors import CheckpointError, ConfigError, FledgeError, nearest_name_hint
from fledge.files import parse_json

if TYPE_CHECKING:
    from fledge.bench.run import BenchRun

_Settings = TypeVar("_Settings")
_Number = TypeVar("_Number", int, float)
INTERRUPTED = 130  # exit status

_HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))


def options(verb: str, *engine: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: help.toml has names, limits and help texts of its parameters.

    `engine`: options of `EngineConfig` to add. The command gets their values as one mapping, `engine`.
    """
    texts = {**_HELP["shared"], **_HELP[verb]}

    def described(parameter: inspect.Parameter) -> inspect.Parameter:
        text = texts[parameter.name]
        values = {"help": text} if isinstance(text, str) else dict(text)
        make = typer.Argument if values.pop("argument", False) else typer.Option
        name = values.pop("name", None)
        if parameter.default is False:  # a flag without `--no-`
            name = name or f"--{parameter.name.replace('_', '-')}"
        info = make(**values) if name is None else make(name, **values)
        return parameter.replace(annotation=Annotated[parameter.annotation, info])

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_engine(**given: Any) -> None:
            values = {name: given.pop(name) for name in engine}
            command(**given, **({"engine": values} if engine else {}))

        signature = inspect.signature(command)
        own = [described(one) for one in signature.parameters.values() if not engine or one.name != "engine"]
        added = [_engine_option(field) for name in engine for field in fields(EngineConfig) if field.name == name]
        setattr(with_engine, "__signature__", signature.replace(parameters=[*own, *added]))  # noqa: B010
        return with_engine

    return decorate


def _engine_option(field: Field[Any]) -> inspect.Parameter:
    flags = {"kv_cache_bytes": ["--kv-cache-memory-bytes", "--kv-cache-bytes"], "enforce_eager": ["--enforce-eager"]}
    more: dict[str, Any] = {"parser": parse_token_count, "metavar": "TOKENS"} if field.name == "max_model_len" else {}
    option = typer.Option(*flags.get(field.name, ()), help=field.metadata["help"], **more)
    hint, kind = get_type_hints(EngineConfig)[field.name], inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=field.default, annotation=Annotated[hint, option])


def parse_token_count(text: str) -> int | None:
    """Parse a length as vLLM does: 4096, 4k (4000), 4K (4096), auto."""
    if text in ("auto", "-1"):
        return None
    factors = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
    number, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        # Not a ConfigError: click would catch it as a ValueError and print three lines.
        raise FledgeError(f"--max-model-len: found '{text}', expected a number, 4k or auto") from None


def read_speculation(
    drafter: str | None, config: str | None, depth: int | None, tree: tuple[int, int] | None
) -> SpeculativeConfig | None:
    """Return the speculative config from vLLM's JSON (`config`) or from the separate options."""
    width, budget = tree or (None, None)
    values = {"model": drafter, "num_speculative_tokens": depth, "tree_width": width, "tree_budget": budget}
    given = {name: value for name, value in values.items() if value is not None}
    if given and config is not None:
        raise ConfigError("--speculative-config says it all; leave out --drafter, --depth and --tree")
    if given and drafter is None:
        raise ConfigError("--depth and --tree need a --drafter")
    if config is not None:
        return SpeculativeConfig.from_json(config)
    return SpeculativeConfig.from_dict(given) if given else None


def parse_numbers(
    option: str, text: str, kind: type[_Number], low: float = -math.inf, high: float = math.inf
) -> list[_Number]:
    """Parse comma-separated numbers from `low` to `high`."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ConfigError(f"--{option}: found {text!r}, expected {whole}numbers separated by commas") from None
    for number in found:
        if not low <= number <= high:
            raise ConfigError(f"--{option}: found {number}, allowed is {low} to {high}")
    return found


def parse_json_object(option: str, text: str | None) -> dict[str, Any]:
    """Parse a JSON object; None is an empty one."""
    try:
        values = parse_json(text or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f'{option}: expected a JSON object, such as {{"name": 1}}')
    return values


def check_choice(option: str, value: str, known: Iterable[str]) -> None:
    """Raise ConfigError for an unknown value of an option."""
    if value not in (names := list(known)):
        raise ConfigError(f"--{option}: unknown {option} '{value}'.{nearest_name_hint(value, names)}")


def resolve_models(target: str | None, drafters: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    """Return the target and its drafters after a check that they exist; by default the bundled ones."""
    if (target is None) != (not drafters):
        missing = "--target" if target is None else "--drafter"
        raise ConfigError(f"{missing} is missing: name a target and its drafters, or neither for the bundled models")
    found = (target or TARGET, *(drafters or DRAFTERS.values()))
    for name in found:
        if not resolve(name).is_dir():  # a bundled one
            advice = "name your own with --target and --drafter"
            raise CheckpointError(f"{name}: this installation of Fledge has no bundled models; {advice}")
    return found[0], found[1:]


def exit_with(status: int, *lines: str) -> NoReturn:
    """Print these lines on standard error and exit."""
    for line in lines:
        print(line, file=sys.stderr)
    raise typer.Exit(status)


def from_options(kind: type[_Settings], options: Mapping[str, Any], **own: Any) -> _Settings:
    """Create a dataclass from a command's options (its `locals()`) with the same names, and `own` values."""
    names = {field.name for field in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in options.items() if name in names} | own)


def run_bench(run: "BenchRun", *, fail_on_errors: bool = True, as_json: bool) -> None:
    """Run a benchmark and print its results. Exits with 130 if interrupted, 1 if incomplete."""
    from fledge.bench.report import print_results  # noqa: PLC0415 - `fledge --help` must stay quick
    from fledge.bench.summary import Summary  # noqa: PLC0415
    from fledge.evaluation.results import check_writable  # noqa: PLC0415

    run.out = run.out or Path(time.strftime(f"bench-{run.kind}-%Y%m%d-%H%M%S.json"))
    check_writable("--out", run.out)
    results = run.run()
    summary = Summary(results, results.baseline)
    if as_json:
        best = {"best": [one.to_dict() for one in summary.best_modes]} if run.kind == "offline" else {}
        print(json.dumps({"results": str(run.out), **summary.to_dict(), **best}, allow_nan=False))
    elif results.cells:
        console = Console(highlight=False)
        print_results(summary, console)
        for line in summary.best_modes:
            console.print(str(line), markup=False, soft_wrap=True)
    if results.contenders and not run.progress.quiet:
        print(f"results: {run.out}", file=sys.stderr)
    if run.interrupted:
        saved = "what was measured is saved" if results.contenders else "nothing was measured"
        exit_with(INTERRUPTED, f"interrupted; {saved}")
    if fail_on_errors and any(cell.status != "complete" for cell in results.cells):
        exit_with(1, f"error: this run is {results.status}: some requests failed, see the notes above")
