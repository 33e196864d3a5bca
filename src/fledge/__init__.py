"""Fledge: trains, diagnoses and serves EAGLE 3.1 drafters for lossless speculative decoding."""

import importlib
from typing import TYPE_CHECKING

from fledge.version import __version__

if TYPE_CHECKING:
    from fledge.decoding.params import SamplingParams, StructuredOutputsParams
    from fledge.engine.async_llm import AsyncLLM
    from fledge.engine.llm import LLM


__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

# Lazy, so that `fledge --help` and `import fledge` do not wait for torch and transformers.
_HOMES = {
    "LLM": "fledge.engine.llm",
    "AsyncLLM": "fledge.engine.async_llm",
    "SamplingParams": "fledge.decoding.params",
    "StructuredOutputsParams": "fledge.decoding.params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fledge' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
