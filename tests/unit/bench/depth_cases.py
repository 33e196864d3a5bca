"""Results of drafters at many depths whose speeds are given, so that the fastest depth is known."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fledge.evaluation.results import Cell, Contender, Load, RequestRecord, Results
from tests.bench_results import PLAIN, PROVENANCE

# Times the speed of no speculation, by drafter, depth and concurrency. The fastest: EAGLE-3 K=3 at 1 and K=2 at 16,
# EAGLE-3.1 K=5 at 1 and K=3 at 16. Of EAGLE-3.1 at 1, K=3 is within noise of K=5.
SPEEDS: Mapping[str, Mapping[int, Mapping[int, float]]] = {
    "EAGLE-3": {2: {1: 1.4, 16: 1.3}, 3: {1: 1.6, 16: 1.0}, 5: {1: 1.5, 16: 0.8}},
    "EAGLE-3.1": {2: {1: 1.5, 16: 1.2}, 3: {1: 1.799, 16: 1.4}, 5: {1: 1.8, 16: 0.9}},
}


def make_contender(drafter: str, depth: int, **changes: Any) -> Contender:
    speculation = {"model": drafter.lower(), "num_speculative_tokens": depth}
    values = {"name": f"{drafter} K={depth}", "drafter": drafter.lower(), "speculation": speculation, **changes}
    return Contender(kind="fledge", target="target", **values)


def many_depths(
    speeds: Mapping[str, Mapping[int, Mapping[int, float]]] = SPEEDS,
    *,
    different: Mapping[str, int] | None = None,
    **changes: Any,
) -> Results:
    """Two repeats of four prompts. `different` has, by contender, how many answers of each cell are others."""
    rng = np.random.default_rng(0)
    loads = sorted({load for depths in speeds.values() for by_load in depths.values() for load in by_load})
    times = {
        (f"{name} K={k}", load): by_load[load]
        for name, d in speeds.items()
        for k, by_load in d.items()
        for load in by_load
    }
    contenders = (
        Contender(name=PLAIN, kind="fledge", target="target"),
        *(make_contender(name, depth) for name, depths in speeds.items() for depth in depths),
    )
    cells = []
    for repeat in range(2):
        for load in loads:
            for one in contenders:
                depth = (one.speculation or {}).get("num_speculative_tokens", 0)
                requests = []
                for prompt in range(4):
                    seconds = (1 + 0.1 * prompt) / times.get((one.name, load), 1.0) * float(rng.lognormal(0, 0.005))
                    is_other = prompt < (different or {}).get(one.name, 0)
                    requests.append(
                        RequestRecord(
                            prompt=str(prompt),
                            sent=0.0,
                            first_token=0.1,
                            done=0.1 + seconds,
                            prompt_tokens=9,
                            output_tokens=101,
                            digest=f"{one.name} {prompt}" if is_other else str(prompt),
                            acceptance=((depth, 1, 40), (depth, 0, 20 - depth)) if depth else (),
                        )
                    )
                cells.append(
                    Cell(
                        contender=one.name,
                        workload="chat",
                        load=Load(concurrency=load),
                        repeat=repeat,
                        seconds=2.0,
                        requests=tuple(requests),
                    )
                )
    values: dict[str, Any] = {
        "kind": "offline",
        "title": "Many depths",
        "baseline": PLAIN,
        "contenders": contenders,
        "cells": tuple(cells),
        "settings": {"temperature": 0.0, "dtype": "bfloat16", "repeats": 2},
        "provenance": PROVENANCE,
    }
    return Results(**{**values, **changes})
