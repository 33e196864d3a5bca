"""Benchmark results as they might come from a machine: a simple model of it, with noise, and known true ratios."""

from dataclasses import replace
from typing import Any

import numpy as np

from fledge.evaluation.results import Cell, Contender, Load, RequestRecord, Results

PLAIN, EAGLE_3, EAGLE_3_1 = "no speculation", "EAGLE-3 K=3", "EAGLE-3.1 K=3"
ACCEPTED = {EAGLE_3: 0.55, EAGLE_3_1: 0.75}  # chance that a draft stands if all before it did
DEPTH = 3
PROVENANCE: dict[str, Any] = {
    "fledge_version": "0.1.0",
    "git_commit": "0" * 40,
    "command": "fledge bench offline --concurrency 1,4,16,64",
    "date": "2026-01-02T03:04:05Z",
    "device": "Example GPU",
    "cpu": "Example CPU",
    "cpus": 16,
    "threads": 8,
    "versions": {"python": "3.12.0", "torch": "2.11.0", "transformers": "5.0"},
}


def round_milliseconds(contender: str, concurrency: int) -> float:
    """Reading the weights costs 5 ms, a drafted token 0.3 ms, and every token that is verified at once 0.05 ms."""
    if contender not in ACCEPTED:
        return 5 + 0.05 * concurrency
    return 5 + 0.3 * DEPTH + 0.05 * concurrency * (DEPTH + 1)


def make_request(
    rng: np.random.Generator, contender: str, prompt: str, concurrency: int, *, slow: float, tokens: int, noise: float
) -> RequestRecord:
    chance = ACCEPTED.get(contender)
    if chance is not None:  # an easy prompt is easy for every drafter, in every repeat
        chance = float(np.clip(chance + 0.12 * np.sin(3.0 * int(prompt.split("-")[1])), 0.05, 0.95))
    emitted, rounds = 0, 0
    tally: dict[tuple[int, int, int], int] = {}
    while emitted < tokens - 1:
        accepted = 0
        while chance is not None and accepted < DEPTH and rng.random() < chance:
            accepted += 1
        rounds += 1
        emitted += accepted + 1
        if chance is not None:
            tally[DEPTH, accepted, 0] = tally.get((DEPTH, accepted, 0), 0) + 1
    first = slow * (0.02 + 0.002 * concurrency) * float(rng.lognormal(0, 0.2))
    seconds = slow * rounds * round_milliseconds(contender, concurrency) / 1e3 * float(rng.lognormal(0, noise))
    return RequestRecord(
        prompt=prompt,
        sent=0.0,
        first_token=first,
        done=first + seconds,
        prompt_tokens=50,
        output_tokens=emitted + 1,
        digest=f"answer of {prompt}",
        acceptance=tuple(sorted((drafted, a, n) for (drafted, a, _), n in tally.items())),
    )


def make_cell(
    rng: np.random.Generator,
    contender: str,
    workload: str,
    load: Load,
    repeat: int,
    *,
    slow: float = 1.0,
    prompts: int = 12,
    tokens: int = 96,
    noise: float = 0.03,
) -> Cell:
    """`slow` is what the machine did to this repeat."""
    concurrency = load.concurrency or 1
    requests, ends = [], [0.0] * concurrency
    for number in range(prompts):
        slot = int(np.argmin(ends))
        found = make_request(rng, contender, f"{workload}-{number}", concurrency, slow=slow, tokens=tokens, noise=noise)
        assert found.first_token is not None
        assert found.done is not None
        at = ends[slot]
        requests.append(replace(found, sent=at, first_token=at + found.first_token, done=at + found.done))
        ends[slot] = at + found.done
    return Cell(
        contender=contender, workload=workload, load=load, repeat=repeat, seconds=max(ends), requests=tuple(requests)
    )


def make_results(
    *,
    contenders: tuple[str, ...] = (PLAIN, EAGLE_3, EAGLE_3_1),
    workloads: tuple[str, ...] = ("coding", "chat"),
    concurrencies: tuple[int, ...] = (1, 4, 16, 64),
    repeats: int = 3,
    prompts: int = 12,
    seed: int = 0,
    speed: float = 1.0,
    noise: float = 0.03,
    **changes: Any,
) -> Results:
    """Contenders take turns; every repeat has a slowness of its own. `speed` is the machine's, `changes` of Results."""
    rng = np.random.default_rng(seed)
    cells = []
    for repeat in range(repeats):
        for workload in workloads:
            for concurrency in concurrencies:
                slow = float(rng.lognormal(0, 0.08)) / speed
                for contender in contenders:
                    load = Load(concurrency=concurrency)
                    cell = make_cell(rng, contender, workload, load, repeat, slow=slow, prompts=prompts, noise=noise)
                    cells.append(cell)
    values: dict[str, Any] = {
        "kind": "offline",
        "title": "Synthetic",
        "baseline": PLAIN,
        "contenders": tuple(make_contender(name) for name in contenders),
        "cells": tuple(cells),
        "settings": {
            "max_tokens": 96,
            "temperature": 0.0,
            "seed": seed,
            "workloads": [{"name": name, "digest": f"digest of {name}", "prompts": prompts} for name in workloads],
        },
        "provenance": PROVENANCE,
    }
    return Results(**{**values, **changes})


def make_contender(name: str) -> Contender:
    drafter = None if name == PLAIN else name.split(maxsplit=1)[0].lower()
    speculation = None if drafter is None else {"method": "eagle3", "num_speculative_tokens": DEPTH}
    return Contender(name=name, kind="fledge", target="target", drafter=drafter, speculation=speculation)


def make_eval_results(
    *,
    drafters: tuple[str, ...] = (EAGLE_3, EAGLE_3_1),
    workloads: tuple[str, ...] = ("coding", "chat", "maths"),
    depths: tuple[int, ...] = (3, 5),
    temperatures: tuple[float, ...] = (0.0, 1.0),
    prompts: int = 12,
    seed: int = 0,
) -> Results:
    """As `fledge eval` writes them: a contender for each drafter, depth and temperature, one repeat."""
    rng = np.random.default_rng(seed)
    contenders, cells = [], []
    for drafter in drafters:
        for depth in depths:
            for temperature in temperatures:
                short = drafter.split(maxsplit=1)[0].lower()
                name = f"{short} K={depth} T={temperature:g}"
                speculation = {"model": short, "num_speculative_tokens": depth}
                contenders.append(
                    Contender(
                        name=name,
                        kind="fledge",
                        target="target",
                        drafter=short,
                        speculation=speculation,
                        temperature=temperature,
                    )
                )
                for workload in workloads:
                    cell = make_cell(rng, drafter, workload, Load(concurrency=8), 0, prompts=prompts)
                    cells.append(replace(cell, contender=name))
    facts = {
        name: {
            "digest": f"digest of {name}",
            "prompts": prompts,
            "categories": {name: [f"{name}-{i}" for i in range(prompts)]},
            "too_long": [],
        }
        for name in workloads
    }
    return Results(
        kind="eval",
        title="Acceptance length",
        baseline=None,
        contenders=tuple(contenders),
        cells=tuple(cells),
        settings={"depths": depths, "temperatures": temperatures, "seed": seed, "dtype": "float32", "workloads": facts},
        provenance=PROVENANCE,
    )
