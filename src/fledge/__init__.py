"""Fledge: trains, diagnoses and serves EAGLE 3.1 drafters for lossless speculative decoding."""

import importlib
from typing import TYPE_CHECKING

from fledge.openmp import load_openmp
from fledge.version import __version__

if TYPE_CHECKING:
    from fledge.decoding.params import SamplingParams, StructuredOutputsParams
    from fledge.engine.async_llm import AsyncLLM
    from fledge.engine.llm import LLM


__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

load_openmp()

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
