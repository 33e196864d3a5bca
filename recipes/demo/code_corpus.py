"""Collects permissively licensed Python source for pretraining, and makes chat examples of it.

Out come documents (`{"text", "source"}`) and conversations (`{"messages", "source"}`): short functions asked for in
words, joined by the hand-written programs of `recipes.demo.small_programs`; and the same worded as completions.
"""

import json
import random
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.demo import code_files, code_functions, jsonlines, small_programs
from recipes.demo.code_files import STANDARD_LIBRARY, Package, SourceFile
from recipes.demo.completions import completions


def sources_table(files: list[SourceFile]) -> str:
    """A Markdown table of what was taken: package, version, licence, files, size."""
    counts, sizes = Counter(f.package for f in files), Counter[Package]()
    for file in files:
        sizes[file.package] += len(file.text)
    rows = [
        f"| {p.name} | {p.version} | {p.licence} | {counts[p]} | {sizes[p] / 1e6:.2f} |"
        for p in sorted(sizes, key=lambda p: (p != STANDARD_LIBRARY, p.name))
    ]
    return "\n".join(["| package | version | licence | files | MB |", "|---|---|---|---:|---:|", *rows, ""])


def requirements(files: list[SourceFile]) -> str:
    """What was taken, as pip reads it, each with its licence."""
    packages = sorted({f.package for f in files} - {STANDARD_LIBRARY}, key=lambda p: p.name)
    return "".join(f"{p.name}=={p.version}  # {p.licence}\n" for p in packages)


def main(
    out: Annotated[Path, typer.Option(help="Pretraining documents, .jsonl.xz.")],
    chat_out: Annotated[Path, typer.Option(help="Chat examples, .jsonl.xz.")],
    completions_out: Annotated[Path, typer.Option(help="The chat examples as completions, .jsonl.xz.")],
    wheels: Annotated[Path | None, typer.Option(help="Folder of wheels to read instead of installed packages.")] = None,
    root: Annotated[list[Path] | None, typer.Option(help="A site-packages folder; may be repeated.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Folder of evaluation files to keep out.")] = None,
    megabytes: Annotated[float, typer.Option(help="Text to keep, in MB.")] = 140.0,
    package_megabytes: Annotated[float, typer.Option(help="Text to keep of one package, in MB.")] = 1.5,
    examples: Annotated[int, typer.Option(help="Chat examples to keep, before the hand-written programs.")] = 40_000,
    program_count: Annotated[int, typer.Option(help="Chat examples to make of the hand-written programs.")] = 6_000,
    completion_share: Annotated[float, typer.Option(help="Of these examples, asked for as completions too.")] = 0.8,
    sources_out: Annotated[Path | None, typer.Option(help="Folder for code_packages.txt and code_sources.md.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that read and parse.")] = 2,
    seed: int = 1,
) -> None:
    """Collect Python source of the standard library and of permissive packages."""
    roots = root or ([] if wheels else [Path(sysconfig.get_path("purelib"))])
    for folder in [*roots, wheels, evaluation, sources_out]:
        if folder and not folder.is_dir():
            jsonlines.fail(f"{folder} is not a folder")
    reserved = code_files.reserved_sequences(evaluation)
    skipped: set[str] = set()
    each = int(package_megabytes * 1e6)
    found = [*code_files.standard_library(each), *code_files.installed(roots, each, skipped)]
    if wheels:
        found += code_files.from_wheels(wheels, each, skipped, workers)
    files = code_files.admitted(found, int(megabytes * 1e6), reserved)
    if not files:
        jsonlines.fail("no permissively licensed source was found")
    chat = code_functions.chat_examples(files, examples, reserved, seed, workers)
    programs = [
        p
        for p in small_programs.chat_examples(seed, program_count)
        if not any(code_files.shares_words(m["content"], reserved) for m in p["messages"])
    ]
    completed = completions([*chat, *programs], completion_share, random.Random(seed))
    jsonlines.write(chat_out, [*chat, *programs])
    jsonlines.write(completions_out, completed)
    random.Random(seed).shuffle(files)
    jsonlines.write(out, ({"text": f.text, "source": f"code/{f.package.name}"} for f in files))
    if sources_out:
        (sources_out / "code_packages.txt").write_text(requirements(files), encoding="utf-8")
        (sources_out / "code_sources.md").write_text(sources_table(files), encoding="utf-8")
    console = Console()
    console.print(f"left out for their licence: {', '.join(sorted(skipped))}")
    console.print(
        json.dumps(
            {
                "packages": len({f.package for f in files}),
                "documents": len(files),
                "text_mb": round(sum(len(f.text) for f in files) / 1e6, 2),
                "chat_examples": len(chat),
                "with_docstring_examples": sum(e["source"].startswith("code-examples/") for e in chat),
                "program_examples": len(programs),
                "completion_examples": len(completed),
                "mib": [round(p.stat().st_size / 2**20, 2) for p in (out, chat_out, completions_out)],
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
