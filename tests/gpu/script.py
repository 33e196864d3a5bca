"""How the files of this folder run as scripts: the GPU machine may have no pytest."""

import time
import traceback
from collections.abc import Callable, Mapping

import torch


def run_checks(checks: Mapping[str, Callable[[], None]], parts: list[str]) -> int:
    """Run the checks whose names contain one of `parts`, or all; print a line for each. Return how many failed."""
    failed = 0
    for name, function in checks.items():
        if parts and not any(part in name for part in parts):
            continue
        torch.manual_seed(0)
        begin = time.time()
        try:
            function()
            verdict = "ok"
        except Exception:
            failed += 1
            verdict = "FAILED\n" + traceback.format_exc(limit=-3)
        print(f"{name}: {verdict} ({time.time() - begin:.1f} s)", flush=True)
    return failed
