"""Results as Markdown: tables ready for a README."""

from fledge.bench.part import Part
from fledge.bench.report import Report
from fledge.bench.tables import DASH, number, times, with_interval
from fledge.report.intervals import Interval
from fledge.report.page import visible


def markdown(report: Report) -> str:
    """Tables for a README: ratios by load where speed was measured, and acceptance lengths."""
    blocks = []
    for part in report.parts:
        if len(report.parts) > 1:
            blocks.append(f"### {_cell(part.results.title)}")
        if part.has_speed:
            blocks += [_speed_markdown(part, workload) for workload in part.workloads]
        table = _acceptance_markdown(part)
        blocks += [table] if table else []
        found = part.results.provenance
        facts = [str(found[key]) for key in ("device", "date") if found.get(key)]
        blocks.append(f"{', '.join(facts)}. In brackets: 95 % intervals.".lstrip(". "))
        blocks += ["\n".join(f"> - {_line(line)}" for line in part.warnings)] if part.warnings else []
    blocks += [_line(note) for note in report.notes]
    return "\n\n".join(blocks) + "\n"


def _speed_markdown(part: Part, workload: str) -> str:
    """Loads as columns; the baseline in tokens per second, the others as times that."""
    loads = [load for load in part.loads if any(row.workload == workload and row.load == load for row in part.rows)]
    lines = [
        f"| {_cell(f'{workload}, per user{_all_inflated(part)}')} | " + " | ".join(str(load) for load in loads) + " |"
    ]
    lines.append("|---" * (len(loads) + 1) + "|")
    for name in part.names:
        cells = []
        for load in loads:
            row, ratio = part.row(name, workload, load), part.ratio(name, workload, load)
            if row is None:
                cells.append("")
            elif ratio is None:
                speed = row.figures.per_user_tokens_per_second
                cells.append(f"{number(speed.value)} tokens/s" if speed is not None else DASH)
            else:
                cells.append(times(ratio.per_user))
        lines.append(f"| {_name(part, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _acceptance_markdown(part: Part) -> str | None:
    lengths: dict[tuple[str, str], Interval] = {}
    for row in part.rows:
        if row.figures.acceptance_length is not None:
            lengths.setdefault((row.contender, row.workload), row.figures.acceptance_length)
    if not lengths:
        return None
    workloads = [workload for workload in part.workloads if any(key[1] == workload for key in lengths)]
    lines = [
        f"| {_cell(f'acceptance length{_all_inflated(part)}')} | "
        + " | ".join(_cell(workload) for workload in workloads)
        + " |"
    ]
    lines.append("|---" * (len(workloads) + 1) + "|")
    for name in [name for name in part.names if any(key[0] == name for key in lengths)]:
        cells = [with_interval(lengths.get((name, workload)), "{:.2f}") for workload in workloads]
        lines.append(f"| {_name(part, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _all_inflated(part: Part) -> str:
    """What a table's heading says where it holds for every row, so that it stays when a table is quoted."""
    shapes = {one.inflated for one in part.results.contenders}
    shape = next(iter(shapes)) if len(shapes) == 1 else None
    return f" (inflated: {shape})" if shape else ""


def _name(part: Part, name: str) -> str:
    shape = part.contender(name).inflated
    return _cell(f"{name} (inflated: {shape})" if shape and not _all_inflated(part) else name)


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(visible(text, flat=True).split()).replace("<", "&lt;")
