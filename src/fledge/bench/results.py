"""What a benchmark measured, as typed JSON: every request of every cell, so that figures can be derived anew.

A *cell* is one contender under one load on one workload, once. Contenders take turns and each cell is repeated, so a
noisy machine hits all alike. Nothing here is an average: `figures.py` derives those, and says which requests failed.
"""

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError
from fledge.files import read_bytes

SCHEMA = 1
Kind = Literal["fledge", "server", "transformers", "vllm"]  # `server`: any OpenAI-compatible one, over HTTP
Difference = Literal["tie", "clear", "unchecked"]  # of the target's best two tokens where the answers part
Status = Literal["complete", "partial", "failed"]
_TURN = " turn "
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to answer, under a name that is unique in a run."""

    name: str
    kind: Kind
    target: str
    drafter: str | None = None
    speculation: Mapping[str, Any] | None = None  # as given in a --speculative-config; None: no speculation, or unknown
    url: str | None = None
    inflated: str | None = None  # the shape whose cost it has, e.g. "8b", while it says what a small model says
    temperature: float | None = None  # where contenders of one run differ in it; else it is in the run's settings
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests arrive: `concurrency` at all times, or `rate` per second at random (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None), "a load is a concurrency or a rate"

    def __str__(self) -> str:
        return f"C={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds after the cell's start; None where it did not come so far."""

    prompt: str  # the id of the prompt in its workload; of one with several turns, see `turn_name`
    sent: float
    first_token: float | None = None
    done: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None  # one line; such a request is in no mean
    digest: str | None = None  # of the tokens or the text: whether two contenders said the same
    acceptance: tuple[tuple[int, int, int], ...] = ()  # (drafted, accepted, rounds), where the contender tells
    missed: int | None = None  # drafts refused whose right token is known
    missed_outside: int | None = None  # of these, those whose right token is not in the draft vocabulary
    differs: Difference | None = None  # from the target's own greedy answer


_USUAL = {known.name: known.default for known in fields(RequestRecord) if known.default is not MISSING}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender, one workload, one load, one repeat."""

    contender: str
    workload: str
    load: Load
    repeat: int
    seconds: float  # from the first request sent to the last one done
    requests: tuple[RequestRecord, ...]
    status: Status = "complete"
    note: str | None = None  # why it is not complete
    acceptance: tuple[
        tuple[int, int, int], ...
    ] = ()  # of the whole cell, where only that is known (a server's metrics)

    @property
    def good(self) -> tuple[RequestRecord, ...]:
        """The requests that were answered in full."""
        return tuple(r for r in self.requests if r.error is None and r.done is not None)

    @property
    def acceptance_statistics(self) -> AcceptanceStatistics:
        """Pooled over the requests that tell, or the cell's own tally."""
        tally: Counter[tuple[int, int]] = Counter()
        parts = [part for request in self.good for part in request.acceptance] or list(self.acceptance)
        for drafted, accepted, rounds in parts:
            tally[drafted, accepted] += rounds
        return AcceptanceStatistics(tally=tally)


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole run. `baseline` names the contender that ratios are taken against."""

    kind: Literal["serve", "offline", "eval"]
    title: str
    baseline: str | None
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    settings: Mapping[str, Any]  # max_tokens, temperature, seed, sample, workloads with their digests, ...
    provenance: Mapping[str, Any]
    status: Status = "complete"
    notes: tuple[str, ...] = ()  # what a reader must know: interrupted, a server died, inflated models

    def to_json(self) -> dict[str, Any]:
        """Requests are told without what is as usual: there may be ten thousand."""
        told = {"fledge_results": SCHEMA, **asdict(self)}
        for cell in told["cells"]:
            cell["requests"] = [
                {key: value for key, value in request.items() if key not in _USUAL or value != _USUAL[key]}
                for request in cell["requests"]
            ]
        return told

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> "Results":
        """Read what `to_json` gave. `where` is the file's name, for errors."""
        found = values.get("fledge_results") if isinstance(values, Mapping) else None
        if found != SCHEMA:
            raise ConfigError(f"{where}: no benchmark results (fledge_results: found {found!r}, expected {SCHEMA})")
        rest = {key: value for key, value in values.items() if key != "fledge_results"}
        try:
            found = _checked(
                cls(
                    **{
                        **rest,
                        "contenders": tuple(_checked(Contender(**c)) for c in rest["contenders"]),
                        "cells": tuple(_cell(c) for c in rest["cells"]),
                        "notes": tuple(map(str, rest.get("notes", ()))),
                    }
                )
            )
            names = {contender.name for contender in found.contenders}
            if unknown := [cell.contender for cell in found.cells if cell.contender not in names]:
                raise ValueError(f"a cell of '{unknown[0]}', which is no contender")
        except (TypeError, KeyError, ValueError, AssertionError) as error:
            raise ConfigError(f"{where}: damaged benchmark results: {error}") from None
        return found


def _cell(values: Mapping[str, Any]) -> Cell:
    requests = tuple(
        _checked(RequestRecord(**{**r, "acceptance": _triples(r.get("acceptance", ()))})) for r in values["requests"]
    )
    load, acceptance = _checked(Load(**values["load"])), _triples(values.get("acceptance", ()))
    return _checked(Cell(**{**values, "load": load, "requests": requests, "acceptance": acceptance}))


def _checked(found: _T) -> _T:
    """Return it if each field holds what it is declared to, else raise ValueError."""
    kind: type = type(found)
    for name, allowed in _allowed(kind).items():
        value = getattr(found, name)
        wrong = value not in allowed if isinstance(allowed, frozenset) else not isinstance(value, allowed)
        if wrong or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name}: found {value!r:.60}")
    return found


@cache
def _allowed(kind: type) -> dict[str, tuple[type, ...] | frozenset[Any]]:
    """By field: its types, or the values of a Literal. Items of tuples and of mappings are not looked at."""
    found: dict[str, tuple[type, ...] | frozenset[Any]] = {}
    for name, hint in get_type_hints(kind).items():
        parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        literals = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        types = tuple(get_origin(part) or part for part in parts if get_origin(part) is not Literal)
        if literals:
            found[name] = frozenset([*literals, *([None] if NoneType in types else [])])
        else:
            found[name] = (*types, int) if float in types else types  # JSON may spell 2.0 as 2
    return found


def turn_name(prompt: str, turn: int) -> str:
    """What a request is called that is one of several turns of a prompt."""
    return f"{prompt}{_TURN}{turn}"


def conversation_of(prompt: str) -> str:
    """The prompt that a request belongs to: what `turn_name` was given."""
    return prompt.partition(_TURN)[0]


def _triples(values: Sequence[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((int(a), int(b), int(c)) for a, b, c in values)


def tally_triples(statistics: AcceptanceStatistics) -> tuple[tuple[int, int, int], ...]:
    """A tally as results store it."""
    return tuple((drafted, accepted, rounds) for (drafted, accepted), rounds in sorted(statistics.tally.items()))


def write_results(results: Results, path: Path) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")
    os.replace(partial, path)


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError if `path` cannot be written: before hours of work, not after. Leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a directory, expected a file's name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: its directory cannot be made: {error.strerror}") from None
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


def read_results(path: Path) -> Results:
    try:
        values = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no readable JSON: {error}") from None
    return Results.from_json(values, str(path))
