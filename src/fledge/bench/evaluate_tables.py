"""The figures of `fledge eval` for people: tables for a terminal, and Markdown for a model card."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fledge.bench.evaluate_figures import EvalRow, eval_rows, half_width, workloads_of
from fledge.evaluation.results import Results
from fledge.files import atomic_file
from fledge.report.intervals import Interval

NOTHING = "-"
_BORDER = 3  # columns that a cell takes besides its text


def tables(results: Results, width: int) -> list[Table]:
    """The main table, then acceptance by depth, category and input length; each in parts no wider than `width`."""
    rows = eval_rows(results)
    return [
        _rich(title if i == 0 else f"{title} (more)", header, body)
        for title, cells in _tables(results, rows)
        if len(cells[0]) > len(_LABELS)
        for i, (header, body) in enumerate(_parts(*cells, width))
    ]


def markdown(results: Results) -> str:
    """The same for a model card, with what a reader needs to know to compare it."""
    rows = eval_rows(results)
    settings, provenance = results.settings, results.provenance
    prompts = ", ".join(
        f"{name} {facts['prompts'] - len(facts['too_long'])}" for name, facts in settings["workloads"].items()
    )
    parts = [
        "## Acceptance length",
        "",
        f"Target `{_shown_name(results.contenders[0].target)}`, {settings['dtype']}, answers of up to "
        f"{settings['max_tokens']} tokens, chains of K drafts, temperature T. Acceptance length is 1 + accepted drafts "
        "/ rounds, pooled over all rounds; ± is half of the 95 % interval over prompts. `mean` weighs workloads alike.",
        "",
    ]
    for title, (header, body) in _tables(results, rows):
        if len(header) <= len(_LABELS):
            continue
        if title != _MAIN:
            parts += [f"{title}:", ""]
        parts += [_line(header), _line(["---"] * len(_LABELS) + ["---:"] * (len(header) - len(_LABELS)))]
        parts += [_line(line) for line in body] + [""]
    parts += [f"Prompts: {prompts}."]
    parts += [_lossless(rows)]
    parts += [f"Note: {note}." for note in results.notes]
    version, date = provenance.get("fledge_version", "?"), str(provenance.get("date", ""))[:10]
    parts += ["", f"Measured with `fledge eval` {version}, {date}, {settings['device']}."]
    return "\n".join(parts) + "\n"


def write_markdown(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(markdown(results))


def summary(results: Results) -> dict[str, Any]:
    """What `--json` prints."""
    rows = [{**row.to_dict(), "outside_vocabulary": row.outside_vocabulary} for row in eval_rows(results)]
    return {"status": results.status, "notes": list(results.notes), "rows": rows}


def lossless(results: Results) -> str:
    """One sentence on whether drafters changed what the target says."""
    return _lossless(eval_rows(results))


_MAIN = "Acceptance length"
_LABELS = ("drafter", "K", "T")

Cells = tuple[list[str], list[list[str]]]  # header, body


def _tables(results: Results, rows: Sequence[EvalRow]) -> list[tuple[str, Cells]]:
    workloads = workloads_of(results)
    depths = [str(i) for i in range(1, max((len(row.rate_by_depth) for row in rows), default=0) + 1)]
    main: Cells = (
        [*_LABELS, *workloads, "mean"],
        [
            [*_label(row), *(_length(row.by_workload.get(name)) for name in workloads), _length(row.mean)]
            for row in rows
        ],
    )
    rates: Cells = (
        [*_LABELS, *depths, "not in draft vocabulary"],
        [[*_label(row), *_rates(row, len(depths)), _percent(row.outside_vocabulary)] for row in rows],
    )
    return [
        (_MAIN, main),
        ("Drafts accepted at each depth, and the share of misses whose right token cannot be drafted", rates),
        ("By category", _grouped(rows, lambda row: row.by_category)),
        ("By input length, prompts of up to so many tokens", _grouped(rows, lambda row: row.by_length)),
    ]


def _grouped(rows: Sequence[EvalRow], groups: Callable[[EvalRow], Mapping[str, Interval]]) -> Cells:
    names = list(dict.fromkeys(name for row in rows for name in groups(row)))
    if len(names) < 2:  # says nothing new
        return [*_LABELS], []
    return [*_LABELS, *names], [[*_label(row), *(_length(groups(row).get(name)) for name in names)] for row in rows]


def _label(row: EvalRow) -> list[str]:
    return [row.drafter, str(row.depth), f"{row.temperature:g}"]


def _rates(row: EvalRow, depths: int) -> list[str]:
    return [_percent(rate) for rate in row.rate_by_depth] + [""] * (depths - len(row.rate_by_depth))


def _length(interval: Interval | None) -> str:
    if interval is None:
        return NOTHING
    half = half_width(interval)
    return f"{interval.value:.2f}" + ("" if half is None else f" ±{half:.2f}")


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _lossless(rows: Sequence[EvalRow]) -> str:
    greedy = [row for row in rows if row.temperature == 0]
    answers, different = sum(row.answers for row in greedy), sum(row.different for row in greedy)
    if not answers:
        return "Sampled answers follow the target's distribution; they are not compared one by one."
    if not different:
        return f"Lossless: all {answers:,} answers at temperature 0 are the target's own, token for token."
    clear, unchecked = sum(row.clear for row in greedy), sum(row.unchecked for row in greedy)
    ties = different - clear - unchecked
    found = [f"{ties} where its best two tokens were a near tie"] if ties else []
    found += [f"{clear} where its choice was clear, which speculation must not do: please report it"] if clear else []
    found += [f"{unchecked} not looked into"] if unchecked else []
    return f"Of {answers:,} answers at temperature 0, {different} part from the target's own: {', '.join(found)}."


def _parts(header: Sequence[str], body: Sequence[Sequence[str]], width: int) -> Iterator[Cells]:
    """A table as several with the same labels, so many columns in each as there is room for, at least one."""
    widths = [max(map(len, column)) + _BORDER for column in zip(header, *body, strict=True)]
    labels = range(len(_LABELS))
    taken: list[int] = []
    for i in range(len(_LABELS), len(header)):
        if taken and 1 + sum(widths[j] for j in (*labels, *taken, i)) > width:
            yield [header[j] for j in (*labels, *taken)], [[line[j] for j in (*labels, *taken)] for line in body]
            taken = []
        taken.append(i)
    yield [header[j] for j in (*labels, *taken)], [[line[j] for j in (*labels, *taken)] for line in body]


def _rich(title: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i >= len(_LABELS) else "left", no_wrap=i < len(_LABELS))
    for line in body:
        table.add_row(*line)
    return table


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown_name(target: str) -> str:
    """A hub name as it is, of a path only its last part."""
    return target if target.count("/") == 1 and not Path(target).is_dir() else Path(target).name
