"""`fledge bench serve --tune`: measures vLLM at several depths and concurrencies, and prints the best depths."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from fledge.checkpoints.source import DRAFTERS, TARGET, resolve
from fledge.cli.command import from_options, parse_numbers
from fledge.cli.vllm_command import speed_options
from fledge.engine.config import MAX_DEPTH
from fledge.errors import ConfigError
from fledge.progress import Progress
from fledge.vllm_process.finding import find_vllm


def run_tune(given: Mapping[str, Any]) -> None:
    """Measure, and print `--speculative-config`. `given`: the options of `bench serve`."""
    target, drafter = given["target"], given["drafter"]
    if (target is None) != (drafter is None):
        raise ConfigError("--tune: name a --target and its --drafter, or neither for the bundled ones")
    if given["url"]:
        raise ConfigError("--tune starts vLLM by itself, at each depth; leave out --url")
    target, drafter = target or TARGET, drafter or DRAFTERS["EAGLE-3.1"]

    from fledge.bench.tune import TuneSettings, measure  # noqa: PLC0415
    from fledge.engine.vllm_tuning import VllmTuning, best_depths, speculative_config  # noqa: PLC0415
    from fledge.evaluation.workloads import load_workloads, tokenised  # noqa: PLC0415
    from fledge.report.tables import Table  # noqa: PLC0415

    workloads = load_workloads(given["workload"] or ["mt_bench"], sample=given["sample"], seed=given["seed"] or 0)
    prompts = [
        replace(prompt, token_ids=ids)
        for workload in workloads
        for prompt, ids in zip(workload.prompts, tokenised(workload, target), strict=True)
    ]
    settings = from_options(
        TuneSettings,
        given,
        target=target,
        drafter=drafter,
        depths=tuple(parse_numbers("depth", given["depth"], int, 1, MAX_DEPTH)),
        concurrencies=tuple(sorted(parse_numbers("concurrency", given["concurrency"] or "1,4,16,64", int, 1, 4096))),
        prompts=prompts,
        python=given["vllm_python"],
        words=tuple(given["vllm_option"] or ()),
    )
    kept = VllmTuning.file(
        resolve(target, weights=False),
        resolve(drafter),
        find_vllm(settings.python).version,
        speed_options(settings.words),
    )
    progress = Progress(quiet=given["quiet"])
    points = measure(settings, progress)
    if kept is not None:
        try:
            VllmTuning(points=points).keep(kept)
            progress.say(
                "kept: `fledge serve --engine vllm` of this pair drafts by it, and its page knows the speed-up"
            )
        except OSError as error:
            progress.say(f"{kept}: not kept: {error.strerror}")
    depths = best_depths(points)
    config = speculative_config(drafter, depths)
    if given["as_json"]:
        print(json.dumps({"points": [asdict(point) for point in points], "speculative_config": config}))
        return
    plain = {point.concurrency: point.tokens_per_second for point in points if point.depth == 0}
    rows = [
        (
            str(point.concurrency),
            str(point.depth),
            f"{point.tokens_per_second:.1f}",
            f"{point.tokens_per_second / plain[point.concurrency]:.2f}x",
            "" if point.acceptance_length is None else f"{point.acceptance_length:.2f}",
            "chosen" if depths[point.concurrency] == point.depth else "",
        )
        for point in sorted(points, key=lambda one: (one.concurrency, one.depth))
    ]
    header = ("at once", "depth", "tokens/s", "speed", "acceptance length", "")
    console = Console(highlight=False)
    console.print(*Table.of("vLLM by depth", header, rows, labels=2).to_rich(console.width))
    if config is None:
        print("no depth pays at any of these concurrencies: serve without a drafter", file=sys.stderr)
    else:
        print(f"--speculative-config {shlex.quote(json.dumps(config))}")
