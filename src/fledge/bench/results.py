"""What a benchmark measured, as typed JSON: every request of every cell, so that figures can be derived anew.

A *cell* is one contender under one load on one workload, once. Contenders take turns and each cell is repeated, so a
noisy machine hits all alike. Nothing here is an average: `figures.py` derives those, and says which requests failed.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.errors import ConfigError

SCHEMA = 1
Kind = Literal["fledge", "server", "transformers", "vllm"]  # `server`: any OpenAI-compatible one, over HTTP
Difference = Literal["tie", "clear", "unchecked"]  # of the target's best two tokens where the answers part
Status = Literal["complete", "partial", "failed"]


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

    prompt: str  # the id of the prompt in its workload
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
        return {"fledge_results": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> "Results":
        """Read what `to_json` gave. `where` is the file's name, for errors."""
        found = values.get("fledge_results") if isinstance(values, Mapping) else None
        if found != SCHEMA:
            raise ConfigError(f"{where}: no benchmark results (fledge_results: found {found!r}, expected {SCHEMA})")
        rest = {key: value for key, value in values.items() if key != "fledge_results"}
        try:
            return cls(
                **{
                    **rest,
                    "contenders": tuple(Contender(**c) for c in rest["contenders"]),
                    "cells": tuple(_cell(c) for c in rest["cells"]),
                    "notes": tuple(rest.get("notes", ())),
                }
            )
        except (TypeError, KeyError, ValueError, AssertionError) as error:
            raise ConfigError(f"{where}: damaged benchmark results: {error}") from None


def _cell(values: Mapping[str, Any]) -> Cell:
    requests = tuple(
        RequestRecord(**{**r, "acceptance": _triples(r.get("acceptance", ()))}) for r in values["requests"]
    )
    load, acceptance = Load(**values["load"]), _triples(values.get("acceptance", ()))
    return Cell(**{**values, "load": load, "requests": requests, "acceptance": acceptance})


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


def read_results(path: Path) -> Results:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no readable JSON: {error}") from None
    return Results.from_json(values, str(path))
