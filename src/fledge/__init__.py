"""Fledge: trains, diagnoses and serves EAGLE 3.1 drafters for lossless speculative decoding."""

from typing import TYPE_CHECKING

from fledge.version import __version__

if TYPE_CHECKING:
    from fledge.decoding.params import SamplingParams
    from fledge.engine.llm import LLM


__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # Lazy, so that `fledge --help` and `import fledge` do not wait for torch and transformers.
    if name == "LLM":
        from fledge.engine.llm import LLM  # noqa: PLC0415

        return LLM
    if name == "SamplingParams":
        from fledge.decoding.params import SamplingParams  # noqa: PLC0415

        return SamplingParams
    raise AttributeError(f"module 'fledge' has no attribute '{name}'")
