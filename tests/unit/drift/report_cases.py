"""Suites made up for tests of verdicts, pictures and reports."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fledge.drift.perturb import UNPERTURBED, parse_perturbation
from fledge.drift.result import (
    AnswerExample,
    AttentionMeans,
    Calibration,
    CalibrationBin,
    DriftResult,
    ExampleToken,
    HeadAttention,
    Results,
)
from fledge.drift.suite import SuiteCell, SuiteResult, summarise
from fledge.report.intervals import Bootstrap
from tests.unit.drift.drift_cases import drift_result


def counts(accepted: int, prompts: int = 20, rounds: int = 20) -> dict[str, tuple[int, int]]:
    """Prompts that differ a little around `accepted` of `rounds`."""
    return {f"prompt-{i}": (min(rounds, accepted + i % 3 - 1), rounds) for i in range(prompts)}


def made_up(
    accepted: Mapping[str, Mapping[str, int | str]] | None = None,
    *,
    recent: Mapping[str, Sequence[float]] | None = None,
    prompts: int = 20,
) -> tuple[SuiteResult, Results]:
    """`accepted`: drafter -> perturbation -> accepted of 20 rounds, or why not. `recent`: see drift_result."""
    accepted = accepted or {"drafter": {UNPERTURBED: 16}}
    cells, results = [], {}
    for drafter, runs in accepted.items():
        for name, found in {UNPERTURBED: 16, **runs}.items():
            skip = found if isinstance(found, str) else None
            kinds = parse_perturbation(name).kinds
            cells.append(SuiteCell(drafter=drafter, perturbation=name, kinds=kinds, left_out={}, skip=skip))
            if not isinstance(found, str):
                shares = (recent or {}).get(drafter, (0.0, 0.1, 0.6))
                result = drift_result(counts(found, prompts), recent=shares, perturbation=name, drafter=drafter)
                variant = "EAGLE-3.1" if drafter.endswith("3.1") else "EAGLE-3"
                results[drafter, name] = replace(result, variant=variant)
    return summarise(cells, results, workload="made up", bootstrap=Bootstrap(resamples=200)), results


def with_detail(result: DriftResult, *, heads: int = 4) -> DriftResult:
    """Add what the plain made-up result lacks: heads, bins, cosines, examples with text that wants escaping."""
    bins = tuple(
        CalibrationBin(
            low=i / 10,
            high=(i + 1) / 10,
            count=i * 3,
            confidence=i / 10 + 0.05 if i else None,
            right=i / 10 if i else None,
        )
        for i in range(10)
    )
    several = tuple(
        replace(
            one,
            heads=tuple(HeadAttention(layer=0, head=h, attention=_like(one.attention)) for h in range(heads)),
            feature_cosine=0.9 - 0.1 * one.depth,
            calibration=Calibration(bins=bins, error=0.05),
        )
        for one in result.by_depth
    )
    tokens = (
        ExampleToken(text="<script>alert(1)</script>", status="accepted"),
        ExampleToken(text="right", status="rejected", draft="<b>wrong</b>"),
        ExampleToken(text="rare\n", status="outside", draft="often\n"),
        ExampleToken(text="own\x00\u202e", status="own"),
    )
    example = AnswerExample(
        id="<img src=x>", category="a & b", acceptance_length=1.2, prompt="<i>" + "long " * 1000, tokens=tokens
    )
    return replace(
        result, by_depth=several, calibration=Calibration(bins=bins, error=0.05), examples=(example,), trained_depth=2
    )


def _like(attention: AttentionMeans) -> AttentionMeans:
    return replace(attention, mass=dict(attention.mass))
