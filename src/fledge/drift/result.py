"""Results of a probe as plain values, which are written as JSON and read back. `docs/drift.md` has the formulas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.drift.prompts import PROMPT_LABELS
from fledge.evaluation.results import Tally, statistics_of
from fledge.records import Record

Curve = tuple[float | None, ...]  # one value for each depth; None where no round got there


@dataclass(frozen=True, kw_only=True)
class AttentionMeans(Record):
    """Where attention goes, mean over rounds (and over layers and heads, or of one head)."""

    mass: dict[str, float]  # by segment label; sums to 1
    recent: float  # mass on the recent window: the last rows, as many at every depth, of any segment
    entropy: float  # nats
    normalised_entropy: float  # entropy divided by the logarithm of the number of visible rows: 1 is uniform
    distance: float  # tokens from query to key, weighted by attention


@dataclass(frozen=True, kw_only=True)
class HeadAttention(Record):
    layer: int
    head: int
    attention: AttentionMeans


@dataclass(frozen=True, kw_only=True)
class CalibrationBin(Record):
    """Drafts of about the same confidence."""

    low: float
    high: float
    count: int
    confidence: float | None  # mean; None in an empty bin
    right: float | None  # share


@dataclass(frozen=True, kw_only=True)
class Calibration(Record):
    """Whether a draft of 80 % confidence is right in 80 % of cases. Over drafts whose predecessors were accepted."""

    bins: tuple[CalibrationBin, ...]
    error: float | None  # expected calibration error: mean distance of confidence and share right, by count


@dataclass(frozen=True, kw_only=True)
class DepthMetrics(Record):
    """One draft depth. Means are over all rounds that drafted this deep, whether drafts were accepted or not."""

    depth: int  # from 1
    rounds: int
    attention: AttentionMeans
    heads: tuple[HeadAttention, ...]
    uniform_mass: dict[str, float]  # mass of uniform attention: share of the visible rows
    hidden_rms: float  # before the final norm
    head_rms: float  # after it
    feature_rms: float  # of the state that is fed to the next depth
    hidden_growth: float  # relative to depth 1 of the same rounds; the next two alike
    head_growth: float
    feature_growth: float
    confidence: float  # the drafter's probability of its draft
    acceptance: float | None  # share of rounds whose draft here was accepted, without rounds that begin in repetition
    conditional_acceptance: float | None  # the same of rounds in which all earlier drafts were accepted
    reached: int  # rounds in which all earlier drafts are right, and the text has a token for this one
    missed: int  # of these, rounds whose draft here is wrong
    missed_outside_vocabulary: int  # of these, rounds whose right token is not in the draft vocabulary
    head_cosine: float | None  # of the state the head reads with the target's final state, if earlier drafts are right
    feature_cosine: float | None  # of the state fed to the next depth with the feature made of the target's states
    calibration: Calibration

    @property
    def recent_attention(self) -> float:
        return self.attention.recent

    @property
    def sink_attention(self) -> float:
        return self.attention.mass["sink"]

    @property
    def prompt_attention(self) -> float:
        """Attention on all segments of the prompt without the sink."""
        return sum(self.attention.mass[label] for label in PROMPT_LABELS)


@dataclass(frozen=True, kw_only=True)
class FusionShare(Record):
    """How much one input of fc contributes to its output."""

    part: str  # "layer 2", ...
    share: float  # norm of its contribution over the sum of all norms, mean over rounds
    norm: float


@dataclass(frozen=True, kw_only=True)
class PromptRow(Record):
    """One prompt, the unit of resampling. Curves are means over its rounds."""

    id: str
    category: str
    prompt_tokens: int
    output_tokens: int
    repeated_tokens: int  # of the output
    copied_tokens: int | None = None  # of the output, from the prompt; None: written by an earlier version
    tally: Tally
    fresh_tally: Tally  # of the rounds that do not begin in repetition
    novel_tally: Tally = ()  # of these, those that do not begin in a copy of the prompt either
    rounds_by_depth: tuple[int, ...]  # rounds that drafted to each depth, over which the curves are means
    recent_attention: Curve
    sink_attention: Curve

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return statistics_of(self.tally)

    @property
    def fresh_acceptance(self) -> AcceptanceStatistics:
        return statistics_of(self.fresh_tally)

    def to_dict(self) -> dict[str, Any]:
        found = self.acceptance
        counts = {"accepted": sum(found.accepted_by_depth), "drafted": sum(found.drafted_by_depth)}
        return super().to_dict() | {"rounds": found.rounds, **counts}


@dataclass(frozen=True, kw_only=True)
class ExampleToken(Record):
    """A token of an answer. `own`: there was no draft for it; `outside`: it is not in the draft vocabulary."""

    text: str
    status: Literal["accepted", "rejected", "outside", "own"]
    draft: str | None = None  # the wrong draft in its place


@dataclass(frozen=True, kw_only=True)
class AnswerExample(Record):
    """An answer of low acceptance, token by token."""

    id: str
    category: str
    acceptance_length: float
    prompt: str
    tokens: tuple[ExampleToken, ...]


@dataclass(frozen=True, kw_only=True)
class DriftResult(Record):
    """One drafter on one workload, perturbed or not."""

    schema: int = 2
    drafter: str
    variant: str  # "EAGLE-3.1", ...
    norm_output: bool  # the state fed to the next depth is normed, so its RMS is constant by construction
    target: str
    workload: str
    perturbation: str | None
    temperature: float
    trained_depth: int | None  # draft steps it was trained on, where its provenance says so
    depth: int  # to which the probe drafted
    engine_depth: int  # to which the engine drafts, which decides where rounds begin
    prompts: int
    prompt_tokens: int
    output_tokens: int
    recent_tokens: int  # rows of the recent window
    tally: Tally  # of acceptance to `depth`: the engine's rounds, drafted deeper by the probe
    fresh_tally: Tally  # of the rounds among them that do not begin in repetition
    engine_tally: Tally  # to `engine_depth`
    by_depth: tuple[DepthMetrics, ...]
    fused_rms: float | None  # of the fused target feature, which is fed to depth 1
    fusion_shares: tuple[FusionShare, ...]
    calibration: Calibration  # all depths together
    prompt_rows: tuple[PromptRow, ...]
    examples: tuple[AnswerExample, ...]  # lowest acceptance first

    @property
    def acceptance(self) -> AcceptanceStatistics:
        return statistics_of(self.tally)

    @property
    def fresh_acceptance(self) -> AcceptanceStatistics:
        return statistics_of(self.fresh_tally)

    @property
    def repeated_share(self) -> float:
        """Share of the output tokens inside an 8-gram that occurred earlier in the same answer."""
        return sum(row.repeated_tokens for row in self.prompt_rows) / max(1, self.output_tokens)

    @property
    def copied_share(self) -> float | None:
        """Share of the output tokens inside an 8-gram of the prompt; None if it is unknown for some prompt."""
        counts = [row.copied_tokens for row in self.prompt_rows]
        known = [count for count in counts if count is not None]
        return sum(known) / max(1, self.output_tokens) if len(known) == len(counts) else None

    @property
    def novel_acceptance(self) -> AcceptanceStatistics:
        """Acceptance without the rounds that begin in repetition or in a copy of the prompt."""
        return statistics_of(triple for row in self.prompt_rows for triple in row.novel_tally)

    @property
    def outside_vocabulary(self) -> float | None:
        """Share of all misses whose right token is not in the draft vocabulary."""
        missed = sum(depth.missed for depth in self.by_depth)
        return sum(depth.missed_outside_vocabulary for depth in self.by_depth) / missed if missed else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the fields, and derived figures, which `from_dict` ignores."""
        return super().to_dict() | {
            "rounds": self.acceptance.rounds,
            "outside_vocabulary": self.outside_vocabulary,
            "repeated_share": self.repeated_share,
            "copied_share": self.copied_share,
            "acceptance": self.acceptance.to_dict(),
            "fresh_acceptance": self.fresh_acceptance.to_dict(),
            "novel_acceptance": self.novel_acceptance.to_dict(),
            "engine_acceptance": statistics_of(self.engine_tally).to_dict(),
        }


Results = Mapping[tuple[str, str], DriftResult]  # (drafter, perturbation) -> what the probe found
