"""`fledge eval` and `fledge drift`: acceptance of drafters on workloads, and drift with draft depth.

Imports of torch are in the functions: `--help` must be quick.
"""

import json
import sys
import time
from pathlib import Path

import typer
from rich.console import Console

from fledge.cli.command import (
    INTERRUPTED,
    check_choice,
    exit_with,
    from_options,
    options,
    parse_json_object,
    parse_numbers,
    resolve_models,
)
from fledge.errors import ConfigError
from fledge.files import write_text
from fledge.progress import Progress

_WIDE = 160  # columns, without a terminal


@options("eval")
def evaluate(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    workload: list[str] | None = None,
    depth: str = "3,5,7",
    speculative_config: str | None = None,
    temperature: str = "0,1",
    sample: int = 32,
    seed: int = 0,
    max_tokens: int = 128,
    max_num_seqs: int = 32,
    max_model_len: int | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    batch_invariant: bool = False,
    device: str = "auto",
    from_hub: bool = False,
    out: Path | None = None,
    markdown: Path | None = None,
    save_baseline: bool = False,
    quiet: bool = False,
    as_json: bool = False,
    backend: str = "fledge",
    vllm_python: str | None = None,
    vllm_option: list[str] | None = None,
) -> None:
    """Measure the acceptance length of drafters.

    The target answers all prompts first. Later turns continue these answers, and at temperature 0 every drafter must
    reproduce them. Ctrl-C saves the results so far.
    """
    target, drafters = resolve_models(target, drafter)
    depths, temperatures = (
        tuple(parse_numbers("depth", depth, int)),
        tuple(parse_numbers("temperature", temperature, float)),
    )

    from fledge.checkpoints.source import resolve  # noqa: PLC0415
    from fledge.evaluation.baseline import BASELINE_FILE, baselines  # noqa: PLC0415
    from fledge.evaluation.evaluate import EvalSettings, run_eval  # noqa: PLC0415
    from fledge.evaluation.report import EvalReport, plus_minus  # noqa: PLC0415
    from fledge.evaluation.results import check_writable  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads  # noqa: PLC0415

    if save_baseline and speculative_config:
        raise ConfigError("--save-baseline is of chains of greedy drafts; leave out --speculative-config")
    for option, path in (("--out", out), ("--markdown", markdown)):
        if path is not None:
            check_writable(option, path)
    for name in drafters if save_baseline else ():
        check_writable("--save-baseline", resolve(name) / BASELINE_FILE)
    more = {"engine": backend, "vllm_options": tuple(vllm_option or ()), "sample": sample or None}
    drafting = parse_json_object("--speculative-config", speculative_config)
    settings = from_options(EvalSettings, locals(), speculative_config=drafting, **more)
    workloads = load_workloads(workload or ["short"], sample=sample or None, seed=seed, from_hub=from_hub)
    results = run_eval(settings, workloads, Progress(quiet=quiet), out)
    if not results.cells:
        exit_with(INTERRUPTED, "interrupted before anything was measured")
    report = EvalReport(results)
    if markdown is not None:
        write_text(markdown, report.markdown())
    for name, baseline in baselines(results).items() if save_baseline and results.status == "complete" else ():
        baseline.write(resolve(name))
    if as_json:
        print(json.dumps({"results": None if out is None else str(out), **report.summary()}, allow_nan=False))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _WIDE
        for table in report.tables(plus_minus):
            console.print(*table.to_rich(console.width))
        console.print(report.lossless, markup=False)
        for path in filter(None, (out, markdown)):
            console.print(f"Written: {path}", markup=False, soft_wrap=True)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    if any(note.startswith("interrupted") for note in results.notes):
        raise typer.Exit(INTERRUPTED)
    if results.status != "complete":
        raise typer.Exit(1)


@options("drift")
def drift(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    workload: str = "mixed",
    sample: int | None = None,
    depth: int = 12,
    max_tokens: int = 128,
    perturb: list[str] | None = None,
    suite: str | None = None,
    out: Path = Path("drift-report"),
    fail_if: list[str] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    sink_tokens: int = 1,
    recent_tokens: int = 4,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    quiet: bool = False,
    as_json: bool = False,
    backend: str = "fledge",
    vllm_python: str | None = None,
    vllm_option: list[str] | None = None,
    vllm_url: list[str] | None = None,
    vllm_storage: Path | None = None,
    print_vllm_command: bool = False,
) -> None:
    """Show whether drafters drift: a verdict and a report.

    Measures attention, growth of hidden states and acceptance by draft depth, then repeats that with perturbed prompts.
    After Ctrl-C the same command resumes.
    """
    target, drafters = resolve_models(target, drafter)
    check_choice("engine", backend, ("fledge", "vllm"))
    if backend == "fledge" and (vllm_url or vllm_storage or print_vllm_command):
        raise ConfigError("--vllm-url, --vllm-storage and --print-vllm-command are for --engine vllm; add it")

    from fledge.drift.answers import AnswerCache  # noqa: PLC0415
    from fledge.drift.perturb import default_suite, parse_perturbation  # noqa: PLC0415
    from fledge.drift.probe import Prober, ProbeSettings  # noqa: PLC0415
    from fledge.drift.prompts import load_probe_workload  # noqa: PLC0415
    from fledge.drift.report import REPORT_FILE, make_report, print_report, setup_of, write_report  # noqa: PLC0415
    from fledge.drift.sources import VllmServers  # noqa: PLC0415
    from fledge.drift.suite import check, figures, parse_conditions, run_suite  # noqa: PLC0415
    from fledge.provenance import run_provenance  # noqa: PLC0415

    conditions = fail_if or []
    perturbations = [*default_suite(suite or ("none" if perturb else "quick")), *(perturb or ())]
    for name in perturbations:
        parse_perturbation(name)
    for text, figure, *_ in parse_conditions(conditions):
        if not perturbations and figure.startswith(("al_drop", "recent_attention_rise")):
            raise ConfigError(f"condition '{text}': needs perturbations; leave out --suite none")
    prompts = load_probe_workload(workload, sample=sample, seed=seed)
    settings = from_options(ProbeSettings, locals())
    chosen = {"dtype": dtype, "device": device, "seed": seed, "max_model_len": max_model_len}
    progress = Progress(quiet=quiet)
    options = {name: one for name, one in chosen.items() if one is not None}
    prober = Prober(target, prompts.name, settings, options, answers=AnswerCache(out / "answers"))
    if backend == "vllm":
        prober.say, prober.vllm = (
            progress.say,
            VllmServers(
                drafters=drafters,
                storage=(vllm_storage or out / "states").absolute(),
                urls=tuple(vllm_url or ()),
                python=vllm_python,
                options=tuple(vllm_option or ()),
                dtype=dtype,
                max_model_len=max_model_len,
            ),
        )
        if print_vllm_command:
            print(prober.vllm.command(target))
            return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}; name another directory") from None
    started, provenance = time.perf_counter(), run_provenance()
    try:
        result, results = run_suite(drafters, prompts, perturbations, prober, out, progress=progress)
        progress.say("writing the report")
        about = {"prompts": len(prompts.prompts), "settings": settings, "options": prober.options, "run": provenance}
        setup = setup_of(result, **about, seconds=time.perf_counter() - started)
        report = make_report(result, results, setup)
        write_report(out, report, results)
    except KeyboardInterrupt:
        exit_with(INTERRUPTED, "interrupted; the same command goes on from here")
    finally:
        prober.close()
    violations = {name: check(conditions, figures(result, name)) for name in result.names}
    if as_json:
        values = {"report": str(out / REPORT_FILE), "violations": violations, **report.to_dict()}
        print(json.dumps(values, allow_nan=False))
    else:
        print_report(report, out / REPORT_FILE)
    if any(violations.values()):
        said = [(result.titles[name], line) for name, lines in violations.items() for line in lines]
        exit_with(1, *(f"violated by {title}: {line}" for title, line in said))
