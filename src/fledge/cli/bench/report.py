"""`fledge bench report`: results as a page, as Markdown and as pictures."""

from dataclasses import replace
from pathlib import Path

from fledge.cli.command import options
from fledge.errors import ConfigError
from fledge.files import distinct_names


@options("bench report")
def report(
    files: list[Path],
    *,
    out: Path = Path("bench-report.html"),
    markdown: Path | None = None,
    png_dir: Path | None = None,
    baseline: str | None = None,
    title: str | None = None,
    reference: list[str] | None = None,
    note: list[str] | None = None,
    note_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Turn results into one HTML page with a verdict in words.

    Several files become several parts of the page. Every figure comes with its interval; what is not whole is labelled.
    """
    from rich.console import Console  # noqa: PLC0415 - matplotlib and torch take seconds

    from fledge.bench.report import BenchReport, print_verdicts  # noqa: PLC0415
    from fledge.bench.summary import summaries  # noqa: PLC0415
    from fledge.bench.verdict import Reference  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    several = [read_results(file) for file in files]
    titles = [one.title for one in several]
    for i, name in enumerate(distinct_names(files)):  # two of one title are told apart by their files
        if titles.count(titles[i]) > 1:
            several[i] = replace(several[i], title=f"{titles[i]} ({name})")
    try:
        paragraphs = note_file.read_text(encoding="utf-8").split("\n\n") if note_file else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--note-file {note_file}: cannot be read: {error}") from None
    page = BenchReport(
        summaries=tuple(summaries(several, baseline)),
        title=title or "; ".join(dict.fromkeys(one.title for one in several)),
        references=tuple(Reference.parse(text) for text in reference or ()),
        notes=(*(note or ()), *(" ".join(part.split()) for part in paragraphs if part.strip())),
    )
    is_printed = str(markdown) == "-"
    page.write(out, pictures=png_dir, markdown=None if is_printed else markdown)
    if is_printed:
        print(page.to_markdown(), end="")
    elif not quiet:
        console = Console(highlight=False)
        print_verdicts(page, console)
        console.print(f"Report: {out}", markup=False, soft_wrap=True)
