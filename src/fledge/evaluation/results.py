"""Results of `fledge eval` and `fledge bench`, request by request, so that figures can be derived again.

A *cell* is one contender under one load on one workload, once. Contenders take turns and each cell is repeated, so
that noise of the machine affects all of them. Nothing here is an average: `bench/figures.py` and
`evaluation/report.py` compute those.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fledge.decoding.drafter_statistics import Triples
from fledge.decoding.statistics import AcceptanceStatistics, Overlap
from fledge.engine.config import DEFAULT_TREE_BUDGET
from fledge.engine.outputs import RoundRecord
from fledge.errors import ConfigError
from fledge.files import parse_json, read_bytes, write_text
from fledge.records import Record, decode

SCHEMA = 1
Kind = Literal["fledge", "server", "transformers", "vllm"]  # `server`: any OpenAI-compatible one, over HTTP
Difference = Literal["tie", "clear", "unchecked"]  # whether the target's two best tokens tied where answers differ
DraftMode = Mapping[str, Any]  # a --speculative-config without its model
Status = Literal["complete", "partial", "failed"]
Tally = tuple[tuple[int, int, int], ...]  # (drafted, accepted, rounds)
Rounds = Literal["all", "fresh", "novel"]  # fresh: without rounds in repetition; novel: also without those in copies
CountedTokens = Literal["repeated_tokens", "copied_tokens"]
_TURN = " turn "


@dataclass(frozen=True, kw_only=True)
class Contender(Record):
    """One system under test: an engine or server with a target, perhaps a drafter. Its name is unique in a run."""

    name: str
    kind: Kind
    target: str
    drafter: str | None = None
    speculation: Mapping[str, Any] | None = None  # a --speculative-config; None: no speculation, or unknown
    url: str | None = None
    inflated: str | None = None  # the shape that a small model was enlarged to, such as "8b"
    temperature: float | None = None  # if contenders of a run differ in it; else it is in the run's settings
    versions: Mapping[str, str] = field(default_factory=dict)


def mode_name(mode: DraftMode) -> str:
    """Write "K=3", "K=3 tree 4x16", "K=3 sampled", "K=5@1-4,3@5-64" or "adaptive K<=7"."""
    if rows := mode.get("num_speculative_tokens_per_batch_size"):
        return "K=" + ",".join(f"{depth}@{first}-{last}" for first, last, depth in rows)
    if mode.get("adaptive"):
        return f"adaptive K<={mode['num_speculative_tokens']}"
    words = [f"K={mode['num_speculative_tokens']}"]
    if "tree_width" in mode:
        words.append(f"tree {mode['tree_width']}x{mode.get('tree_budget', DEFAULT_TREE_BUDGET)}")
    if mode.get("draft_sample_method") == "probabilistic":
        words.append("sampled")
    if mode.get("rejection_sample_method") == "block":
        words.append("block")
    return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Load(Record):
    """How requests arrive: with constant `concurrency`, or at random with `rate` per second (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load is a concurrency or a rate")

    def __str__(self) -> str:
        return f"C={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"

    @property
    def size(self) -> float:
        """Its value on an axis of its kind."""
        return float(self.concurrency or self.rate or 0)

    @property
    def order(self) -> tuple[bool, float]:
        """Concurrencies first, then rates, from low to high."""
        return self.rate is not None, self.size


@dataclass(frozen=True, kw_only=True)
class RequestRecord(Record):
    """One request. Times are seconds after the cell's start; None if it did not get so far."""

    prompt: str  # the id of the prompt in its workload; for several turns see `turn_name`
    sent: float
    first_token: float | None = None
    done: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None  # one line; such a request is in no mean
    digest: str | None = None  # of the tokens or the text, to compare the answers of contenders
    acceptance: Tally = ()  # if the contender reports it
    fresh_acceptance: Tally = ()  # of the rounds outside repetition, if each round is known
    novel_acceptance: Tally = ()  # of the rounds outside repetition and copies of the prompt
    repeated_tokens: int | None = None  # of its output, see `decoding/statistics.py`; None: not known
    copied_tokens: int | None = None  # of its output, from its prompt; some may be repeated too
    missed: int | None = None  # rejected drafts whose right token is known
    missed_outside: int | None = None  # of these, those whose right token is not in the draft vocabulary
    differs: Difference | None = None  # from the target's greedy answer

    def tally(self, rounds: Rounds) -> Tally:
        """The tally of all rounds, of the fresh ones or of the novel ones."""
        return {"all": self.acceptance, "fresh": self.fresh_acceptance, "novel": self.novel_acceptance}[rounds]

    def to_dict(self) -> dict[str, Any]:
        """JSON values without fields that have their default: there may be ten thousand records."""
        values = super().to_dict()
        return {known.name: values[known.name] for known in fields(self) if getattr(self, known.name) != known.default}


@dataclass(frozen=True, kw_only=True)
class Cell(Record):
    """One contender, one workload, one load, one repeat."""

    contender: str
    workload: str
    load: Load
    repeat: int
    seconds: float  # from the first request sent to the last one done
    requests: tuple[RequestRecord, ...]
    status: Status = "complete"
    note: str | None = None  # why it is not complete
    acceptance: Tally = ()  # of the whole cell, if it is not known by request (a server's metrics)
    state_growth: Triples = ()  # of the drafter, if our engine ran it
    reliability: Triples = ()

    @property
    def good(self) -> tuple[RequestRecord, ...]:
        """The requests that were answered completely."""
        return tuple(r for r in self.requests if r.error is None and r.done is not None)

    @property
    def acceptance_statistics(self) -> AcceptanceStatistics:
        """Acceptance pooled over the requests, or else the cell's own tally."""
        told = statistics_of_requests(self.good)
        return told if told.rounds else statistics_of(self.acceptance)


@dataclass(frozen=True, kw_only=True)
class Results(Record):
    """A whole run. `baseline` names the contender that ratios are taken against."""

    kind: Literal["serve", "offline", "eval"]
    title: str
    baseline: str | None
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    settings: Mapping[str, Any]  # max_tokens, temperature, seed, sample, workloads with their digests, ...
    provenance: Mapping[str, Any]
    status: Status = "complete"
    notes: tuple[str, ...] = ()  # for the reader: interrupted, a server died, inflated models

    def to_dict(self) -> dict[str, Any]:
        return {"fledge_results": SCHEMA, **super().to_dict()}

    @property
    def is_greedy(self) -> bool:
        return self.settings.get("temperature") == 0

    @property
    def workload_facts(self) -> dict[str, Mapping[str, Any]]:
        """Facts about the workloads from the settings, by name: prompts, digest, source, licence."""
        found = self.settings.get("workloads") or ()
        if isinstance(found, Mapping):
            return {str(name): facts for name, facts in found.items() if isinstance(facts, Mapping)}
        return {str(one["name"]): one for one in found if isinstance(one, Mapping) and "name" in one}


def turn_name(prompt: str, turn: int) -> str:
    """Return the id of a request that is one of several turns of a prompt."""
    return f"{prompt}{_TURN}{turn}"


def conversation_of(prompt: str) -> str:
    """Return the prompt that a request belongs to, the inverse of `turn_name`."""
    return prompt.partition(_TURN)[0]


def token_digest(tokens: Iterable[int]) -> str:
    """Return a digest of token ids, to compare the answers of contenders."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def tally_triples(statistics: AcceptanceStatistics) -> Tally:
    """Return a tally in the form that results store."""
    return tuple((drafted, accepted, rounds) for (drafted, accepted), rounds in sorted(statistics.tally.items()))


def answer_facts(
    tokens: Sequence[int], *, prompt: Sequence[int], acceptance: AcceptanceStatistics, rounds: Sequence[RoundRecord]
) -> dict[str, Any]:
    """Return the fields of a `RequestRecord` that follow from the answer `tokens` to the tokens of a prompt."""
    overlap = Overlap.of(prompt, tokens)
    return {
        "prompt_tokens": len(prompt),
        "output_tokens": len(tokens),
        "digest": token_digest(tokens),
        "acceptance": tally_triples(acceptance),
        "fresh_acceptance": tally_triples(overlap.fresh(rounds)),
        "novel_acceptance": tally_triples(overlap.novel(rounds)),
        "repeated_tokens": sum(overlap.repeated),
        "copied_tokens": sum(overlap.copied),
    }


def token_share(requests: Iterable[RequestRecord], tokens: CountedTokens) -> float | None:
    """Return the share of such tokens in the output of requests for which it is known; None if there are none."""
    known = [(count, one.output_tokens) for one in requests if (count := getattr(one, tokens)) is not None]
    total = sum(output for _, output in known)
    return sum(count for count, _ in known) / total if total else None


def statistics_of(tally: Iterable[tuple[int, int, int]]) -> AcceptanceStatistics:
    """Return the statistics of a stored tally, the inverse of `tally_triples`."""
    counts: Counter[tuple[int, int]] = Counter()
    for drafted, accepted, rounds in tally:
        counts[drafted, accepted] += rounds
    return AcceptanceStatistics(tally=counts)


def statistics_of_requests(requests: Iterable[RequestRecord], rounds: Rounds = "all") -> AcceptanceStatistics:
    """Return the acceptance in such rounds, pooled over requests."""
    return statistics_of(triple for request in requests for triple in request.tally(rounds))


def write_results(results: Results, path: Path) -> None:
    """Write atomically. Raises ConfigError if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(results.to_dict(), separators=(",", ":")) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from None


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError if `path` cannot be written, to find out before hours of work. Leaves no file behind."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a directory, expected a file's name")
    what = "its directory cannot be made"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        what = "cannot be written"
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {what}: {error.strerror}") from None


def read_results(path: Path) -> Results:
    """Read results. Raises ConfigError, which for a damaged file names the key."""
    try:
        values = parse_json(read_bytes(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no readable JSON: {error}") from None
    schema = values.get("fledge_results") if isinstance(values, Mapping) else None
    if schema != SCHEMA:
        raise ConfigError(f"{path}: no benchmark results (fledge_results: found {schema!r}, expected {SCHEMA})")
    damaged = f"{path}: damaged benchmark results"
    try:
        results = decode(Results, values, damaged, strict=False)
    except ValueError as error:  # from a __post_init__
        raise ConfigError(f"{damaged}: {error}") from None
    names = {contender.name for contender in results.contenders}
    if unknown := [cell.contender for cell in results.cells if cell.contender not in names]:
        raise ConfigError(f"{damaged}: a cell of '{unknown[0]}', which is no contender")
    return results
