"""What `fledge eval` and `fledge bench` measured, request by request, so that figures can be derived anew.

A *cell* is one contender under one load on one workload, once. Contenders take turns and each cell is repeated, so a
noisy machine hits all alike. Nothing here is an average: `bench/figures.py` and `evaluation/report.py` derive those.
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
Difference = Literal["tie", "clear", "unchecked"]  # of the target's best two tokens where the answers part
DraftMode = Mapping[str, Any]  # a --speculative-config without its model
Status = Literal["complete", "partial", "failed"]
Tally = tuple[tuple[int, int, int], ...]  # (drafted, accepted, rounds)
Rounds = Literal["all", "fresh", "novel"]  # fresh: that start on no repeated token; novel: nor on a copied one
CountedTokens = Literal["repeated_tokens", "copied_tokens"]
_TURN = " turn "


@dataclass(frozen=True, kw_only=True)
class Contender(Record):
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
    """How requests arrive: `concurrency` at all times, or `rate` per second at random (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load is a concurrency or a rate")

    def __str__(self) -> str:
        return f"C={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"

    @property
    def size(self) -> float:
        """Where it stands on an axis of its kind."""
        return float(self.concurrency or self.rate or 0)

    @property
    def order(self) -> tuple[bool, float]:
        """Concurrencies first, then rates, from low to high."""
        return self.rate is not None, self.size


@dataclass(frozen=True, kw_only=True)
class RequestRecord(Record):
    """One request. Times are seconds after the cell's start; None where it did not come so far."""

    prompt: str  # the id of the prompt in its workload; of one with several turns, see `turn_name`
    sent: float
    first_token: float | None = None
    done: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None  # one line; such a request is in no mean
    digest: str | None = None  # of the tokens or the text: whether two contenders said the same
    acceptance: Tally = ()  # where the contender tells
    fresh_acceptance: Tally = ()  # of the rounds outside repetition, where it tells of each round
    novel_acceptance: Tally = ()  # of those among them that start on no token copied from the prompt
    repeated_tokens: int | None = None  # of its output, see `decoding/statistics.py`; None: not known
    copied_tokens: int | None = None  # of its output, from its prompt; some may be repeated too
    missed: int | None = None  # drafts refused whose right token is known
    missed_outside: int | None = None  # of these, those whose right token is not in the draft vocabulary
    differs: Difference | None = None  # from the target's own greedy answer

    def tally(self, rounds: Rounds) -> Tally:
        """Of all rounds, of the fresh ones or of the novel ones."""
        return {"all": self.acceptance, "fresh": self.fresh_acceptance, "novel": self.novel_acceptance}[rounds]

    def to_dict(self) -> dict[str, Any]:
        """Without what is as usual: there may be ten thousand."""
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
    acceptance: Tally = ()  # of the whole cell, where only that is known (a server's metrics)
    state_growth: Triples = ()  # of the drafter, where the engine was at hand
    reliability: Triples = ()

    @property
    def good(self) -> tuple[RequestRecord, ...]:
        """The requests that were answered in full."""
        return tuple(r for r in self.requests if r.error is None and r.done is not None)

    @property
    def acceptance_statistics(self) -> AcceptanceStatistics:
        """Pooled over the requests that tell, or the cell's own tally."""
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
    notes: tuple[str, ...] = ()  # what a reader must know: interrupted, a server died, inflated models

    def to_dict(self) -> dict[str, Any]:
        return {"fledge_results": SCHEMA, **super().to_dict()}

    @property
    def is_greedy(self) -> bool:
        return self.settings.get("temperature") == 0

    @property
    def workload_facts(self) -> dict[str, Mapping[str, Any]]:
        """What the settings say about workloads, by name: prompts, digest, source, licence."""
        found = self.settings.get("workloads") or ()
        if isinstance(found, Mapping):
            return {str(name): facts for name, facts in found.items() if isinstance(facts, Mapping)}
        return {str(one["name"]): one for one in found if isinstance(one, Mapping) and "name" in one}


def turn_name(prompt: str, turn: int) -> str:
    """What a request is called that is one of several turns of a prompt."""
    return f"{prompt}{_TURN}{turn}"


def conversation_of(prompt: str) -> str:
    """The prompt that a request belongs to: what `turn_name` was given."""
    return prompt.partition(_TURN)[0]


def token_digest(tokens: Iterable[int]) -> str:
    """Of the token ids: whether two contenders said the same."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def tally_triples(statistics: AcceptanceStatistics) -> Tally:
    """A tally as results store it."""
    return tuple((drafted, accepted, rounds) for (drafted, accepted), rounds in sorted(statistics.tally.items()))


def answer_facts(
    tokens: Sequence[int], *, prompt: Sequence[int], acceptance: AcceptanceStatistics, rounds: Sequence[RoundRecord]
) -> dict[str, Any]:
    """What a `RequestRecord` says of the answer `tokens` to the tokens of a prompt."""
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
    """Of the output of requests that tell; None where none does."""
    known = [(count, one.output_tokens) for one in requests if (count := getattr(one, tokens)) is not None]
    total = sum(output for _, output in known)
    return sum(count for count, _ in known) / total if total else None


def statistics_of(tally: Iterable[tuple[int, int, int]]) -> AcceptanceStatistics:
    """What `tally_triples` was given."""
    counts: Counter[tuple[int, int]] = Counter()
    for drafted, accepted, rounds in tally:
        counts[drafted, accepted] += rounds
    return AcceptanceStatistics(tally=counts)


def statistics_of_requests(requests: Iterable[RequestRecord], rounds: Rounds = "all") -> AcceptanceStatistics:
    """Pooled over the requests that tell of such rounds."""
    return statistics_of(triple for request in requests for triple in request.tally(rounds))


def write_results(results: Results, path: Path) -> None:
    """Write whole or not at all. Raises ConfigError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(results.to_dict(), separators=(",", ":")) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from None


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError if `path` cannot be written: before hours of work, not after. Leaves nothing behind."""
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
    """Read what `write_results` wrote; ConfigError names the key of a damaged file."""
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
    except ValueError as error:  # of a class that checks itself
        raise ConfigError(f"{damaged}: {error}") from None
    names = {contender.name for contender in results.contenders}
    if unknown := [cell.contender for cell in results.cells if cell.contender not in names]:
        raise ConfigError(f"{damaged}: a cell of '{unknown[0]}', which is no contender")
    return results
