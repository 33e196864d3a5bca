"""Both bundled drafters in one resumable job on one GPU, every stage bounded in seconds.

    python -m recipes.demo.drafters --data DATA --out OUT                 # all stages
    python -m recipes.demo.drafters --data DATA --out OUT --stages prepare   # no GPU needed: beside other work

prepare   the shuffled file of prompts (`drafter_prompts`), and the tokens of all text
teach     the drafters go on from the bundled ones with the target's own distribution after every token of the corpora,
          side by side; beside them the target answers the prompts
fit       both go on with the target's own answers
evaluate  `fledge eval` of the old and the new ones, in one run
publish   the pipeline's own evaluation: cards, plots and baselines

A stage that is done is not done again, one that was interrupted goes on (`fledge train`). After every checkpoint OUT
has an archive of each drafter as it is then.
"""

import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fledge.evaluation import workloads
from fledge.files import atomic_directory
from recipes.demo import jsonlines
from recipes.demo.drafter_prompts import write_prompts, write_text

STAGES = ("prepare", "teach", "fit", "evaluate", "publish")
VARIANTS = ("eagle3", "eagle3.1")
RECIPE = Path(__file__).with_name("drafter.yaml")
# What the card is measured on: 24 prompts of each.
CARD_SETS = ("chat_dialogue", "docs_qa", "gsm8k", "humaneval", "instructions", "math500", "mt_bench")
SHARED = ("prepare", "regenerate", "vocab", "capture")  # stages that both variants use
FLEDGE = (sys.executable, "-m", "fledge")
POLL_SECONDS = 2.0
GRACE_SECONDS = 30.0  # for a run that is ended, to save its state
console = Console(soft_wrap=True, highlight=False)


class Job:
    """What the stages share: where things are, and processes with their logs."""

    def __init__(self, work: Path, out: Path, extra: Sequence[str]) -> None:
        self.work, self.out, self.extra, self.began = work, out, list(extra), time.monotonic()
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)
        self.packed: dict[str, Path] = {}

    def say(self, text: str) -> None:
        console.print(f"[{time.monotonic() - self.began:6.1f} s] {text}", markup=False)

    def train(self, name: str, *overrides: str, until: str | None = None) -> list[str]:
        """The arguments of a `fledge train` with an output of its own."""
        command = ["train", str(RECIPE), f"output={self.work / name}", *overrides, *self.extra, "--quiet"]
        return [*command, *(["--until", until] if until else [])]

    def run(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Run all at once to their ends; fail with the end of their logs where one fails. None outlives this call."""
        running = dict[str, subprocess.Popen[bytes]]()
        with _signals_interrupt():
            try:
                for name, arguments in commands.items():
                    running[name] = self._start(name, arguments)
                self._wait(running)
            finally:
                _end(running.values())

    def _start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        self.say(f"{name}: fledge {shlex.join(arguments)}")
        # Under MPS the target's answers, which all wait for, go before the text that is read beside them.
        priority = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if name.startswith("text-") else {}
        with (self.work / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*FLEDGE, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **priority},
                process_group=0,  # Ctrl-C is for us: a second signal would cut its saving short
            )

    def _wait(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        """Wait for all, packing what they leave. Takes out of `running` what has ended."""
        told = dict[str, str]()
        while running:
            time.sleep(POLL_SECONDS)
            self.pack()
            for name in [*running]:
                if (news := self.progress(name)) and told.get(name) != news:
                    told[name] = news
                    self.say(f"{name}: {news}")
                if (code := running[name].poll()) is not None:
                    del running[name]
                    self.say(f"{name}: {'done' if code == 0 else f'failed with {code}'}")
                    if code:
                        logs = sorted(self.work.glob("*.log"), key=lambda p: p.stat().st_mtime)
                        tails = [f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in logs[-3:]]
                        jsonlines.fail("\n".join([f"{name} failed", *tails]))

    def progress(self, name: str) -> str:
        """How far a run of `fledge train` is: the last line of its training log, or the chunks that are answered."""
        if log := newest(self.work / name, "fit/*/log.jsonl"):
            lines = []
            with suppress(FileNotFoundError):  # of a run that begins anew
                lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
            return short(lines[-1]) if lines and lines[-1].endswith("\n") else ""
        chunks = len(found(self.work / name, "regenerate/*/parts/answers-*"))
        return f"{chunks} chunks answered" if chunks else ""

    def share(self, name: str, other: str) -> None:
        """Give another output what it has not of the stages that both use, as links: all complete versions."""
        for stage in SHARED:
            for manifest in found(self.work / name, f"{stage}/*/manifest.json"):
                source, place = manifest.parent, self.work / other / stage / manifest.parent.name
                if not place.exists():
                    with atomic_directory(place) as links:
                        shutil.copytree(source, links, copy_function=os.link, dirs_exist_ok=True)

    def pack(self) -> None:
        """Archive the newest checkpoint of every drafter."""
        for variant in VARIANTS:
            for step in ("text", "answers"):
                output = self.work / f"{step}-{variant}"
                latest = newest(output, "fit/*/candidates/step-*/config.json")
                whole = output / "drafter" / "README.md"
                source = whole.parent if step == "answers" and whole.is_file() else latest and latest.parent
                name = f"{step}-{variant}.tar"
                if source is None or self.packed.get(name) == source:
                    continue
                try:
                    with tarfile.open(self.out / f"{name}.partial", "w") as archive:
                        archive.add(source.resolve(), arcname=f"{step}-{variant}")
                except OSError:
                    continue  # an old checkpoint that was just removed: the next look finds the new one
                os.replace(self.out / f"{name}.partial", self.out / name)
                self.packed[name] = source

    def drafter(self, step: str, variant: str) -> Path:
        latest = newest(self.work / f"{step}-{variant}", "fit/*/candidates/step-*/config.json")
        if latest is None:
            jsonlines.fail(f"there is no {step}-{variant} in {self.work}: run the stage before")
        return latest.parent


def found(folder: Path, pattern: str) -> list[Path]:
    """The paths below a folder in which others may be removing things; without hidden ones."""
    return [folder / name for name in glob.glob(pattern, root_dir=folder)]


def newest(folder: Path, pattern: str) -> Path | None:
    """The path that was written last; those that are gone by the time of a look are left out."""
    times: list[tuple[float, Path]] = []
    for path in found(folder, pattern):
        with suppress(FileNotFoundError):
            times.append((path.stat().st_mtime, path))
    return max(times)[1] if times else None


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a lost terminal end the job as Ctrl-C does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End what still runs: first as `fledge train` likes it, which then saves its state."""
    ending, deadline = list(processes), time.monotonic() + GRACE_SECONDS
    for process in ending:
        process.terminate()
    for process in ending:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def short(line: str) -> str:
    """What matters of a line of a training log."""
    r = json.loads(line)
    rates = ", ".join(f"{x:.3f}" for x in r["accuracy_by_depth"] if x is not None)
    length = r["simulated_acceptance_length"] or 0.0
    figures = f"loss {r['loss'] or 0.0:.3f} length {length:.3f} right {rates}"
    return f"step {r['step']} epoch {r['epoch']} lr {r['lr']:.1e} {figures} {r['tokens_per_second']:,.0f} tokens/s"


def text_settings(text: Path, seconds: float) -> list[str]:
    """The recipe for the corpora: nothing is answered, every token teaches."""
    return [
        f"data.sources=[{text}]",
        "data.loss_on=all",
        "data.held_out=8",
        "regenerate.enabled=false",
        "vocab.size=null",  # whichever tokens the answers will need, their rows are trained
        "fit.depth=4",
        "fit.loss=soft_ce",
        "fit.min_lr_ratio=0.3",  # what comes after goes on from there
        f"fit.max_minutes={max(seconds, 1.0) / 60}",
        "eval.enabled=false",
    ]


def write_data(job: Job, data: Path, prompts: Path, text: Path | None, **counts: Any) -> None:
    """Make what is not there yet of what the folder holds: the prompts, and where there is to be one the text."""
    talks, documents = (sorted((data / name).glob("*.jsonl*")) for name in ("chat", "pretrain"))
    missing = [path for path in (prompts, text) if path is not None and not path.is_file()]
    if missing and not talks and not documents:
        jsonlines.fail(f"{data}: no chat/*.jsonl.xz and no pretrain/*.jsonl.xz are there")
    if text in missing and text is not None:
        job.say(f"text: {write_text(talks, documents, text):,} lines")
    if prompts in missing:
        asked = [*sorted((data / "prompts").glob("*.jsonl*")), *talks]
        job.say(f"prompts: {write_prompts(asked, documents, prompts, **counts):,}")


def main(
    data: Annotated[Path, typer.Option(help="Folder with pretrain/, chat/ and prompts/.")],
    out: Annotated[Path, typer.Option(help="Folder for what must come back: archives, results.")],
    work: Annotated[Path, typer.Option(help="Folder for everything else.")] = Path("build/drafters"),
    target: Annotated[str, typer.Option(help="The target: a folder, or the bundled one.")] = "fledgling",
    start_from: Annotated[
        str, typer.Option(help="bundled, nothing, or a folder with eagle3 and eagle3.1.")
    ] = "bundled",
    stages: Annotated[str, typer.Option(help="Which, comma-separated.")] = "prepare,teach,fit,evaluate",
    text_seconds: Annotated[float, typer.Option(help="Of steps on the corpora; 0: none.")] = 150.0,
    answer_seconds: Annotated[float, typer.Option(help="Of answering, beside that.")] = 140.0,
    fit_seconds: Annotated[float, typer.Option(help="Of steps on the answers.")] = 100.0,
    long_prompts: Annotated[int, typer.Option(help="Prompts with a long part of a document.")] = 6_000,
    short_prompts: Annotated[int, typer.Option(help="Prompts with a short part of a document.")] = 25_000,
    made_prompts: Annotated[int, typer.Option(help="Prompts made of topics; others in proportion.")] = 60_000,
    evaluation: Annotated[
        Path | None, typer.Option(help="Evaluation prompts to keep out of those that are made.")
    ] = None,
    sample: Annotated[int, typer.Option(help="Prompts of each set in evaluate.")] = 20,
    extra: Annotated[list[str] | None, typer.Option("--set", help="key=value for every recipe.")] = None,
) -> None:
    """Make both drafters."""
    chosen = stages.split(",")
    if unknown := [stage for stage in chosen if stage not in STAGES]:
        jsonlines.fail(f"--stages: {unknown[0]} is none of {', '.join(STAGES)}")
    job = Job(work.absolute(), out.absolute(), extra or [])
    corpus, prompts = job.work / "text.jsonl", job.work / "prompts.jsonl"
    text = [f"target.path={target}", *text_settings(corpus, text_seconds)]
    asked = [f"target.path={target}", f"data.sources=[{prompts}]", f"regenerate.max_minutes={answer_seconds / 60}"]
    asked.append(f"fit.max_minutes={fit_seconds / 60}")

    def before(variant: str) -> str:
        """What a drafter begins with."""
        return {"bundled": f"fledgling-{variant}", "nothing": "null"}.get(start_from, f"{start_from}/{variant}")

    if "prepare" in chosen:
        counts = {"long_count": long_prompts, "short_count": short_prompts, "made_count": made_prompts}
        write_data(job, data, prompts, corpus if text_seconds else None, evaluation=evaluation, **counts)
        commands = {"answers": job.train("answers", *asked, until="prepare")}
        if text_seconds:
            commands["text"] = job.train("text", *text, until="capture")
        job.run(commands)
    if "teach" in chosen:
        commands = {"answers": job.train("answers", *asked, until="capture")}
        for variant in VARIANTS if text_seconds else ():
            job.share("text", f"text-{variant}")
            own = [f"drafter.variant={variant}", f"drafter.init_from={before(variant)}"]
            commands[f"text-{variant}"] = job.train(f"text-{variant}", *text, *own, until="fit")
        job.run(commands)
    sets = [job.work / "sets" / f"{name}.jsonl" for name in CARD_SETS]
    for path in sets:
        packed = Path(workloads.__file__).with_name("data") / f"{path.name}.xz"
        if not path.is_file():
            jsonlines.write(path, jsonlines.read(packed))
    card = [f"eval.sources=[{','.join(map(str, sets))}]", "eval.max_prompts=24", "eval.candidate_prompts=24"]

    def fitted(variant: str, until: str | None) -> list[str]:
        job.share("answers", f"answers-{variant}")
        first = job.drafter("text", variant) if text_seconds else before(variant)
        own = [*card, f"drafter.variant={variant}", f"drafter.init_from={first}"]
        return job.train(f"answers-{variant}", *asked, *own, f"name=fledgling-{variant}", until=until)

    if "fit" in chosen:
        job.run({f"answers-{variant}": fitted(variant, "fit") for variant in VARIANTS})
    if "evaluate" in chosen:
        new = [str(job.drafter("answers", variant)) for variant in VARIANTS]
        for i, variant in enumerate(VARIANTS):  # names that tell them apart
            place = job.work / "new" / f"new-{variant}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(new[i], place)
            new[i] = str(place)
        drafters = [word for one in (*(f"fledgling-{v}" for v in VARIANTS), *new) for word in ("--drafter", one)]
        chosen_sets = [
            "--workload",
            "short",
            "--workload",
            "long_context/2k",
            "--sample",
            str(sample),
            "--max-num-seqs",
            "64",
        ]
        results = ["--out", str(job.out / "eval.json"), "--markdown", str(job.out / "eval.md"), "--quiet"]
        begun = ["eval", "--target", target, *drafters, *chosen_sets, "--depth", "5", "--temperature", "0", *results]
        job.run({"evaluate": begun})
        print((job.out / "eval.md").read_text(encoding="utf-8"))
    if "publish" in chosen:
        job.run({f"answers-{variant}": fitted(variant, None) for variant in VARIANTS})
    job.pack()


if __name__ == "__main__":
    typer.run(main)
