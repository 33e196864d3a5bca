"""The report: one HTML file that needs nothing else, and its pictures as files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fledge.bench.explain import disappointments, round_cost
from fledge.bench.figures import RatioRow, Row, is_greedy
from fledge.bench.part import Part, Reference, workload_facts
from fledge.bench.plot_parts import colour_number
from fledge.bench.plots import LENGTHS, MORE, charts
from fledge.bench.tables import DASH, answers_by_contender, number, with_interval
from fledge.bench.verdict import Verdict, leaders, overall, verdicts
from fledge.bench.words import ACCEPTANCE, ANSWERS, CAPACITY, LATENCY, SPEED, WHY, anchor, load_text
from fledge.errors import ConfigError
from fledge.evaluation.report import MORE as MORE_LENGTHS
from fledge.evaluation.report import EvalReport
from fledge.evaluation.results import Contender
from fledge.files import atomic_file
from fledge.report.charts import SERIES, Chart, save_png, to_svg
from fledge.report.intervals import RESAMPLES, Interval
from fledge.report.page import finished, page_style, page_template, ratio_bar, visible

SHOWN_CARDS = 4  # of a part's contenders, the most telling first; the others are folded away
KINDS = {"serve": "Servers under load", "offline": "Engines without a server", "eval": "Acceptance"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What goes onto one page."""

    parts: tuple[Part, ...]
    title: str
    references: tuple[Reference, ...] = ()
    notes: tuple[str, ...] = ()


def write_report(report: Report, page: Path, *, pictures: Path | None = None) -> None:
    """Write the page, and every picture as a PNG where `pictures` is given. Each is there in full or not at all."""
    drawn = [_charts(part, report) for part in report.parts]
    text = render(report, drawn)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(page) as file:
            file.write(text)
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            for part, several in zip(report.parts, drawn, strict=True):
                for chart in several:
                    titles = (part.results.title, chart.title) if len(report.parts) > 1 else (chart.title,)
                    save_png(chart.figure, pictures / f"{chart.name}.png", "\n".join(titles))
    except OSError as error:
        raise ConfigError(f"{error.filename or page}: cannot be written: {error.strerror or error}") from None


def render(report: Report, drawn: Sequence[Sequence[Chart]]) -> str:
    """Return the page. Whatever comes from files or the command line is escaped."""
    page = page_template("fledge.bench", "report.html.jinja").render(
        style=page_style(),
        title=visible(report.title),
        parts=[_part(part, several, report) for part, several in zip(report.parts, drawn, strict=True)],
        references=report.references,
        notes=[visible(note) for note in report.notes],
        resamples=RESAMPLES,
        dash=DASH,
    )
    return finished(page)


def verdicts_of(part: Part) -> list[Verdict]:
    """On each contender where speed was measured, and on each drafter where acceptance alone was."""
    if part.has_speed:
        return verdicts(part)
    return [
        Verdict(contender=card.name, headline=card.headline, tone=card.tone, tiles=card.tiles, sentences=card.sentences)
        for card in EvalReport(part.results).cards(anchor(ACCEPTANCE, part))
    ]


def _charts(part: Part, report: Report) -> list[Chart]:
    return charts(part, report.references) if part.has_speed else EvalReport(part.results).charts(part.number)


def _part(part: Part, drawn: Sequence[Chart], report: Report) -> dict[str, Any]:
    sections: dict[str, list[dict[str, Any]]] = {
        name: [] for name in (SPEED, CAPACITY, LATENCY, MORE, ACCEPTANCE, LENGTHS, MORE_LENGTHS)
    }
    for chart in drawn:
        svg = Markup(to_svg(chart.figure, chart.name, chart.title))
        sections[chart.section].append({"title": chart.title, "svg": svg})
    shown, folded = _cards(part)
    return {
        "number": part.number,
        "title": visible(part.results.title),
        "kind": KINDS[part.results.kind],
        "baseline": part.baseline,
        "has_speed": part.has_speed,
        "verdicts": shown,
        "more_verdicts": folded,
        "overall": overall(part),
        "has_many_depths": bool(part.deep_families),
        "tables": [] if part.has_speed else EvalReport(part.results).tables(),
        "lossless": None if part.has_speed else EvalReport(part.results).lossless,
        "warnings": [visible(line) for line in part.warnings],
        "colours": {name: colour(part, name) for name in part.names},  # what is no contender has none
        "inflated": {one.name: one.inflated for one in part.results.contenders},
        "charts": sections,
        "speed": _speed_groups(part),
        "latency": [_latency_row(row) for row in part.rows if row.figures.ttft_ms or row.figures.tpot_ms],
        "acceptance": _acceptance_rows(part),
        "costs": _cost_rows(part),
        "disappointments": disappointments(part, report.references),
        "answers": part.agreements,
        "answers_in_all": answers_by_contender(part.agreements),
        "is_greedy": is_greedy(part.results),
        "anchors": {name: f"{name}-{part.number}" for name in (SPEED, CAPACITY, LATENCY, ACCEPTANCE, WHY, ANSWERS)},
        "setup": {name: visible(value) for name, value in setup(part).items()},
        "contenders": [(one.name, visible(_described(one))) for one in part.results.contenders],
    }


def _cards(part: Part) -> tuple[list[Verdict], list[Verdict]]:
    """Those shown and those folded away: other depths of a drafter that is shown say little more."""
    found = verdicts_of(part)
    leading = leaders(part) if part.has_speed else [one.contender for one in found]
    shown = [one for one in found if one.contender in leading][:SHOWN_CARDS]
    return shown, found[len(shown) :]


def colour(part: Part, name: str) -> str:
    """The style sheet's name of a contender's colour."""
    return "var(--ink)" if name == part.baseline else f"var(--series-{colour_number(part, name) % len(SERIES)})"


def _speed_groups(part: Part) -> list[dict[str, Any]]:
    """Contenders under each workload and load."""
    ends = [row.per_user.high or row.per_user.value for row in part.ratios if row.per_user is not None]
    end = max([1.2, *(min(value, 6.0) for value in ends)])
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for row in part.rows:
        line = _speed_line(part, row, part.ratio(*row.key), end)
        groups.setdefault((row.workload, row.load), []).append(line)
    return [{"name": f"{workload}, {load_text(load)}", "lines": lines} for (workload, load), lines in groups.items()]


def _speed_line(part: Part, row: Row, ratio: RatioRow | None, end: float) -> dict[str, Any]:
    found = row.figures
    per_user = None if ratio is None else ratio.per_user
    return {
        "name": row.contender,
        "per_user": _figure(found.per_user_tokens_per_second),
        "bar": "" if per_user is None else ratio_bar(per_user, end, f"the speed per user of {part.baseline}"),
        "ratio": _figure(per_user, "{:.2f}"),
        "total": _figure(found.total_tokens_per_second),
        "total_ratio": _figure(None if ratio is None else ratio.total, "{:.2f}"),
        "acceptance": _figure(found.acceptance_length, "{:.2f}"),
        "requests": f"{found.requests:,}",
        "reason": found.reason or (None if ratio is None else ratio.reason),
    }


def _figure(interval: Interval | None, form: str | None = None) -> tuple[str, str] | None:
    """A value and its range, as text."""
    if interval is None:
        return None
    value = Interval(value=interval.value)
    whole = with_interval(interval, form)
    return with_interval(value, form), whole.partition(" ")[2].strip("[]").replace(", ", " to ")


def _latency_row(row: Row) -> dict[str, Any]:
    found = row.figures
    return {
        "name": row.contender,
        "where": f"{row.workload}, {row.load}",
        "values": [
            DASH if spread is None else number(value)
            for spread in (found.ttft_ms, found.tpot_ms)
            for value in ((spread.mean.value, *spread.percentiles) if spread is not None else (0.0,) * 4)
        ],
        "requests": f"{found.requests:,}" + (f" (+{found.errors} failed)" if found.errors else ""),
    }


def _acceptance_rows(part: Part) -> list[dict[str, Any]]:
    """By workload and contender, each at the lowest load that was measured: acceptance hardly depends on it."""
    rows, seen = [], set()
    for row in part.rows:
        if row.figures.acceptance_length is None or (row.contender, row.workload) in seen:
            continue
        seen.add((row.contender, row.workload))
        rows.append(
            {
                "name": row.contender,
                "workload": row.workload,
                "load": str(row.load),
                "length": _figure(row.figures.acceptance_length, "{:.2f}"),
                "rates": [f"{100 * rate.value:.0f}" for rate in row.figures.rate_by_depth],
                "rounds": f"{row.figures.rounds:,}",
                "reason": row.figures.reason,
            }
        )
    return sorted(rows, key=lambda one: part.workloads.index(str(one["workload"])))


def _cost_rows(part: Part) -> list[dict[str, Any]]:
    """Where the ratio comes from: tokens per round over what a round costs."""
    rows = []
    for row in part.ratios if part.has_speed else []:
        cost, measured, depth = round_cost(part, *row.key), part.row(*row.key), part.depth(row.contender)
        if cost is None or measured is None or measured.figures.acceptance_length is None or row.per_user is None:
            continue
        at_once = "" if row.load.concurrency is None or depth is None else f"{row.load.concurrency * (depth + 1):,}"
        rows.append(
            {
                "name": row.contender,
                "where": f"{row.workload}, {row.load}",
                "length": f"{measured.figures.acceptance_length.value:.2f}",
                "cost": f"{cost:.2f}",
                "at_once": at_once,
                "ratio": _figure(row.per_user, "{:.2f}"),
                "pays": row.per_user.value > 1,
            }
        )
    return rows


def setup(part: Part) -> dict[str, str]:
    """How the results came about."""
    results, found = part.results, dict(part.results.provenance)
    versions = found.get("versions")
    shown: dict[str, str | None] = {
        "Command": found.get("command"),
        "Date": found.get("date"),
        "Device": found.get("device"),
        "Processor": " ".join(
            str(text)
            for text in (
                found.get("cpu", ""),
                f"({found['cpus']} usable, {found.get('threads', '?')} threads)" if "cpus" in found else "",
            )
            if text
        ),
        "Fledge": " ".join(str(found[key]) for key in ("fledge_version", "git_commit") if found.get(key)),
        "Versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else None,
        "Settings": ", ".join(
            f"{key} {_short_json(value)}" for key, value in results.settings.items() if key != "workloads"
        ),
        "Workloads": "; ".join(_workload(name, facts) for name, facts in workload_facts(results).items()),
        "Status": results.status,
    }
    known = {"command", "date", "device", "cpu", "cpus", "threads", "fledge_version", "git_commit", "versions"}
    shown |= {key: _short_json(value) for key, value in found.items() if key not in known}
    return {name: value for name, value in shown.items() if value}


def _workload(name: str, facts: Mapping[str, Any]) -> str:
    more = [f"{facts['prompts']} prompts"] if "prompts" in facts else []
    more += [f"digest {str(facts['digest'])[:12]}"] if "digest" in facts else []
    more += [str(facts["licence"])] if facts.get("licence") else []
    return f"{name} ({', '.join(more)})"


def _short_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _described(one: Contender) -> str:
    parts = [f"{one.kind}, target {one.target}"]
    if one.drafter:
        parts.append(f"drafter {one.drafter}")
    if one.speculation:
        parts.append(json.dumps(dict(one.speculation), default=str))
    if one.url:
        parts.append(one.url)
    if one.inflated:
        parts.append(f"inflated to the shape {one.inflated}")
    if one.versions:
        parts.append(", ".join(f"{name} {version}" for name, version in one.versions.items()))
    return "; ".join(parts)
