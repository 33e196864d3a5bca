"""vLLM among the contenders of `bench offline`: each a process of its own, behind the engine's protocol."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fledge.engine.vllm_engine import VllmEngine
from fledge.evaluation.results import Contender
from fledge.vllm_process.finding import find_vllm

_OURS = ("tree_width", "adaptive")  # keys of ways to draft that vLLM does not have
NOTE = (
    "vLLM {version} is asked over HTTP at a Unix socket, token ids in and out, and its times have that in them; ours "
    "is called in its own process."
)


def vllm_contenders(ours: Sequence[Contender], python: str | None) -> tuple[list[Contender], list[str]]:
    """The same for vLLM, and what a reader must know. What only our engine does is left out."""
    version = find_vllm(python).version
    taken = [one for one in ours if not any((one.speculation or {}).get(key) for key in _OURS)]
    notes = [NOTE.format(version=version)]
    if len(taken) < len(ours):
        notes.append("Trees and the controller are our engine's own: vLLM has no such contenders.")
    return [replace(one, name=f"vLLM {one.name}", kind="vllm", versions={"vllm": version}) for one in taken], notes


def start_vllm(contender: Contender, *, python: str | None, words: Sequence[str], **options: Any) -> VllmEngine:
    """Start it and wait for it. `options` by vLLM's names, `words` of its command line."""
    return VllmEngine(contender.target, python=python, words=words, speculative_config=contender.speculation, **options)
