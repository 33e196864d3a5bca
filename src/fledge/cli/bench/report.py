"""`fledge bench report`: results as a page, as Markdown and as pictures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.errors import ConfigError

if TYPE_CHECKING:
    from fledge.bench.report import Report


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
    from fledge.bench import markdown as as_markdown  # noqa: PLC0415 - matplotlib and torch take seconds
    from fledge.bench.part import Reference, make_parts  # noqa: PLC0415
    from fledge.bench.report import Report, write_report  # noqa: PLC0415
    from fledge.evaluation.results import read_results  # noqa: PLC0415

    references = tuple(Reference.parse(text) for text in reference or ())
    notes = [*(note or ()), *_paragraphs(note_file)]
    several = [read_results(file) for file in files]
    parts = make_parts(several, baseline)
    page = Report(
        parts=tuple(parts),
        title=title or "; ".join(dict.fromkeys(one.title for one in several)),
        references=references,
        notes=tuple(notes),
    )
    write_report(page, out, pictures=png_dir)
    if markdown is not None:
        text = as_markdown.markdown(page)
        if str(markdown) == "-":
            print(text, end="")
        else:
            _write(markdown, text)
    if not quiet and str(markdown) != "-":
        _print(page, out)


def _paragraphs(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--note-file {file}: cannot be read: {error}") from None
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown {path}: cannot be written: {error.strerror or error}") from None


def _print(page: "Report", out: Path) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from fledge.bench.report import verdicts_of  # noqa: PLC0415
    from fledge.bench.verdict import overall  # noqa: PLC0415

    console = Console(highlight=False)
    marks = {"good": ("+ ", "green"), "bad": ("! ", "red"), "neutral": ("· ", "dim")}
    for part in page.parts:
        console.print(Text(part.results.title, style="bold"))
        for line in part.warnings:
            console.print(Text(f"! {line}", style="yellow"))
        sentences = [sentence for one in verdicts_of(part) for sentence in one.sentences]
        for sentence in [*sentences, *overall(part)]:
            mark, style = marks[sentence.tone]
            console.print(Text(mark, style=style) + Text(sentence.text))
    console.print(f"Report: {out}", markup=False, soft_wrap=True)
