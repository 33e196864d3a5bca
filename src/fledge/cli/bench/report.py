"""`fledge bench report`: results as a page, as Markdown and as pictures."""

from pathlib import Path
from typing import Annotated

import typer

from fledge.errors import ConfigError


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.json...", help="Results of serve, offline or eval.")],
    *,
    out: Annotated[Path, typer.Option(help="The page: one HTML file that needs nothing else.")] = Path(
        "bench-report.html"
    ),
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables as Markdown; - prints them.")] = None,
    png_dir: Annotated[Path | None, typer.Option(help="Also write every picture here.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Contender that ratios are taken against, if not the one of the files.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:C=RATIO,...",
            help="Ratios that others reported by concurrency, such as 'Paper:1=2.03,4=1.71', drawn and labelled so.",
        ),
    ] = None,
    note: Annotated[list[str] | None, typer.Option(help="A paragraph for 'Where it disappoints, and why'.")] = None,
    note_file: Annotated[Path | None, typer.Option(help="The same from a text file; blank lines part.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no verdict.")] = False,
) -> None:
    """Turn results into one HTML page: a verdict in plain words, pictures, tables, warnings and where it disappoints.

    Several files become several parts of the page. Every figure comes with its interval; what is not whole is labelled.
    """
    from rich.console import Console  # noqa: PLC0415 - matplotlib and torch take seconds

    from fledge.bench.report import BenchReport, print_verdicts  # noqa: PLC0415
    from fledge.bench.summary import summaries  # noqa: PLC0415
    from fledge.bench.tables import markdown as to_markdown  # noqa: PLC0415
    from fledge.bench.verdict import Reference  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    several = [read_results(file) for file in files]
    page = BenchReport(
        summaries=tuple(summaries(several, baseline)),
        title=title or "; ".join(dict.fromkeys(one.title for one in several)),
        references=tuple(Reference.parse(text) for text in reference or ()),
        notes=(*(note or ()), *_paragraphs(note_file)),
    )
    is_printed = str(markdown) == "-"
    page.write(out, pictures=png_dir, tables=None if is_printed else markdown)
    if is_printed:
        print(to_markdown(page.summaries, page.notes), end="")
    elif not quiet:
        console = Console(highlight=False)
        print_verdicts(page, console)
        console.print(f"Report: {out}", markup=False, soft_wrap=True)


def _paragraphs(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--note-file {file}: cannot be read: {error}") from None
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
