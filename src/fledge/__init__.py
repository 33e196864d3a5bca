"""Fledge: trains, diagnoses and serves EAGLE 3.1 drafters for lossless speculative decoding."""

import importlib
import os
from typing import TYPE_CHECKING

from fledge.version import __version__

if TYPE_CHECKING:
    from fledge.decoding.params import SamplingParams, StructuredOutputsParams
    from fledge.engine.async_llm import AsyncLLM
    from fledge.engine.llm import LLM


__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

# OpenMP's threads, torch's and those of the C layers, spin for milliseconds when they wait. If other processes keep the
# cores busy, the system may put two of them on one core, where one spins while the other should run: thirty times
# slower. libgomp reads this once, when torch is imported: it has no effect if that was before Fledge.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # some 50 microseconds: about what lies between two calls

# Imported on first access, so that `fledge --help` and `import fledge` do not import torch and transformers.
_MODULE_OF = {
    "LLM": "fledge.engine.llm",
    "AsyncLLM": "fledge.engine.async_llm",
    "SamplingParams": "fledge.decoding.params",
    "StructuredOutputsParams": "fledge.decoding.params",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fledge' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
