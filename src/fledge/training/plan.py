"""What a run will take, before anything runs: tokens, bytes, memory, time. Exact where data is there, else estimated.

Times follow from operations and the speed of a matrix product measured here, times a share of it that is assumed.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.checkpoints.source import resolve
from fledge.devices import DTYPES, choose_device
from fledge.evaluation.conversations import Conversation, Skipped, read_conversations, refuse_if_empty
from fledge.records import Record
from fledge.training.capture import target_config
from fledge.training.costs import FitShape, target_flops_per_token, target_parameter_count
from fledge.training.data.packing import packed_rows
from fledge.training.data.rendering import Rendered, Renderer, TemplateRefusedError
from fledge.training.data.store import TokenStore
from fledge.training.drafter_setup import drafter_config
from fledge.training.pipeline import StageState, all_stages, stage_states
from fledge.training.recipe import Recipe
from fledge.training.stages.fit import compute_dtype
from fledge.training.stages.prepare import EXAMPLES, open_renderer, prompt_ids
from fledge.training.stages.vocab import read_vocabulary

FIT_SHARE = 0.4  # of the measured matrix rate: what a fit reaches, about
FORWARD_SHARE = 0.5  # a forward pass over long rows
DECODE_SHARE = 0.1  # generation, a token at a time for many requests: bound by memory, not by arithmetic
SAMPLE = 256  # conversations rendered for an estimate
MEMORY_MARGIN = 0.92  # of what is free: the allocator needs some room

_SHARDING = "use fit.parallel=fsdp2 with more GPUs, or a smaller drafter"
_REMEDIES = {
    "target": "use capture.mode=offline, or target.dtype=bfloat16",
    "weights": _SHARDING,
    "gradients": _SHARDING,
    "optimizer": _SHARDING,
    "states": "lower fit.micro_rows",
    "activations": "set fit.activation_checkpointing, or lower fit.micro_rows",
    "logits": "lower fit.micro_rows or vocab.size, or set fit.activation_checkpointing",
}


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """What there is to learn from."""

    exact: bool
    how: str
    answer_tokens: int
    lengths: Sequence[int]  # of the examples, or of a sample of them
    scale: float = 1.0  # examples for each one in `lengths`

    @property
    def examples(self) -> int:
        return round(len(self.lengths) * self.scale)

    @property
    def tokens(self) -> int:
        return round(sum(self.lengths) * self.scale)

    @property
    def mean_length(self) -> float:
        return self.tokens / max(1, self.examples)


@dataclass(frozen=True, kw_only=True)
class SpeedProbe(Record):
    """How fast this device multiplies."""

    device: str
    dtype: str
    flops_per_second: float


def make_plan(recipe: Recipe, *, probe: SpeedProbe | None = None) -> dict[str, Any]:
    """Work out what `run_pipeline` would do, as JSON values. Reads the data and the target's config; writes nothing."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(recipe.device)
    compute = compute_dtype(recipe.fit, device)
    target = target_config(recipe.target)
    states = stage_states(recipe, all_stages())
    data = data_size(recipe, states)
    draft_vocab = draft_vocab_size(recipe, states, target.vocab_size)
    shape = FitShape(
        target=target,
        target_parameters=target_parameter_count(recipe.target, target, str(resolve(recipe.target.path))),
        drafter=drafter_config(recipe.drafter, target, draft_vocab),
        fit=recipe.fit,
        online=recipe.capture.mode == "online",
        document_length=min(data.mean_length, recipe.fit.length),
        state_bytes=DTYPES[target.dtype].itemsize,
        compute_bytes=compute.itemsize,
        processes=processes,
    )
    probe = probe or measure_speed(device, compute)
    fit = _fit(recipe, shape, probe, row_count(recipe, data), device)
    capture = _capture(recipe, shape, data, probe)
    per_token = target_flops_per_token(target, shape.target_parameters, data.mean_length / 2, head=True)
    decode_seconds = per_token / (DECODE_SHARE * probe.flops_per_second)
    new_tokens, eval_tokens = data.answer_tokens if recipe.regenerate.enabled else 0, _eval_tokens(recipe)
    return {
        "device": probe.device,
        "processes": processes,
        "stages": [{"stage": name, "key": state.key, "state": _progress_of(state)} for name, state in states.items()],
        "data": {name: getattr(data, name) for name in ("exact", "how", "examples", "tokens", "answer_tokens")},
        "regenerate": {
            "enabled": recipe.regenerate.enabled,
            "tokens": new_tokens,
            "seconds": new_tokens * decode_seconds,
        },
        "vocab": {"size": draft_vocab, "target": target.vocab_size},
        "capture": capture,
        "fit": fit,
        "eval": {"tokens": eval_tokens, "seconds": eval_tokens * decode_seconds},
        "probe": probe.to_dict(),
        "warnings": _warnings(recipe, shape, fit, capture, states),
    }


def data_size(recipe: Recipe, states: Mapping[str, StageState]) -> DataSize:
    """Exact where the examples are there; else from a sample of the files through the tokenizer."""
    stage = "regenerate" if recipe.regenerate.enabled else "prepare"
    if states[stage].manifest is not None:
        store = TokenStore.open(states[stage].directory / EXAMPLES)
        return DataSize(
            exact=True,
            how=f"the examples that '{stage}' has made",
            answer_tokens=store.answer_tokens,
            lengths=store.lengths.tolist(),
        )
    renderer = open_renderer(recipe, resolve(recipe.target.path))
    skipped = Skipped()
    conversations = [one for _, one in read_conversations(recipe.data.sources, skipped)]
    refuse_if_empty(len(conversations), skipped, recipe.data.sources)
    stride = max(1, len(conversations) // SAMPLE)
    sample = list(islice(conversations[::stride], SAMPLE))
    sizes = [size for one in sample for size in _example_sizes(recipe, renderer, one)]
    held_out = 0 if recipe.eval.sources else min(recipe.data.held_out, len(conversations) // 2)
    count = max(1, len(conversations) - held_out)
    if recipe.data.max_examples is not None:
        count = min(count, recipe.data.max_examples)
    scale = count * (recipe.regenerate.samples if recipe.regenerate.enabled else 1) / max(1, len(sample))
    answers = "at most regenerate.max_tokens each" if recipe.regenerate.enabled else "those of the data"
    return DataSize(
        exact=False,
        how=f"a sample of {len(sample)} of {len(conversations):,} conversations; answers: {answers}",
        answer_tokens=round(sum(answer for _, answer in sizes) * scale),
        lengths=[total for total, _ in sizes],
        scale=scale,
    )


def _example_sizes(recipe: Recipe, renderer: Renderer, conversation: Conversation) -> list[tuple[int, int]]:
    """(tokens, answer tokens) of each example that a conversation becomes; nothing for one that is left out."""
    longest, least = recipe.data.max_length, recipe.data.min_answer_tokens
    try:
        if recipe.regenerate.enabled:
            if conversation.text is None and not conversation.question():
                return []
            prompt = len(prompt_ids(renderer, conversation, longest))
            answer = min(recipe.regenerate.max_tokens, longest - prompt)
            return [(prompt + answer, answer)] if answer >= least else []
        if conversation.text is not None:
            sequences: Sequence[Rendered] = renderer.plain_texts([conversation.text])
        else:
            (sequences,) = renderer.conversations([renderer.turn_texts(conversation.messages)])
    except TemplateRefusedError:
        return []
    cut = [sequence.cut(longest) for sequence in sequences]
    return [(len(c.tokens), sum(c.answer)) for c in cut if sum(c.answer) >= least]


def draft_vocab_size(recipe: Recipe, states: Mapping[str, StageState], full: int) -> int | None:
    """Return the size of the draft vocabulary; None for the whole one."""
    if states["vocab"].manifest is not None:
        vocabulary = read_vocabulary(states["vocab"].directory, full)
        return None if vocabulary is None else len(vocabulary.d2t)
    return recipe.vocab.size if recipe.vocab.size is not None and recipe.vocab.size < full else None


def row_count(recipe: Recipe, data: DataSize) -> int:
    """Packed rows of one epoch, as the trainer packs them; those of a sample are scaled."""
    lengths = np.asarray(data.lengths, dtype=np.int64)
    rows = len(packed_rows(lengths, length=recipe.fit.length, seed=recipe.fit.seed, epoch=0))
    return max(1, round(rows * data.examples / max(1, len(lengths))))


def _fit(recipe: Recipe, shape: FitShape, probe: SpeedProbe, rows: int, device: torch.device) -> dict[str, Any]:
    steps = recipe.fit.total_steps(rows)
    slots = steps * recipe.fit.rows * recipe.fit.length
    flops = {part: slots * each for part, each in shape.flops_per_slot().items()}
    memory = shape.memory()
    return {
        "parameters": shape.parameters,
        "rows": rows,
        "steps": steps,
        "slots": slots,
        "memory": memory,
        "memory_total": sum(memory.values()),
        "memory_free": free_memory(device),
        "flops": flops,
        "flops_total": sum(flops.values()),
        "seconds": sum(flops.values()) / (FIT_SHARE * probe.flops_per_second * shape.processes),
    }


def _capture(recipe: Recipe, shape: FitShape, data: DataSize, probe: SpeedProbe) -> dict[str, Any]:
    disk = next(path for path in (Path(recipe.output), *Path(recipe.output).parents) if path.exists())
    tokens = data.tokens if recipe.capture.mode == "offline" else 0
    flops = target_flops_per_token(shape.target, shape.target_parameters, data.mean_length / 2, head=False)
    return {
        "mode": recipe.capture.mode,
        "bytes_per_token": shape.state_bytes_per_token,
        "bytes": tokens * shape.state_bytes_per_token,
        "disk_free": shutil.disk_usage(disk).free,
        "seconds": tokens * flops / (FORWARD_SHARE * probe.flops_per_second),
    }


def _eval_tokens(recipe: Recipe) -> int:
    """Tokens that `eval` generates at most: once without a drafter, for each candidate, and at each depth."""
    section = recipe.eval
    if not section.enabled:
        return 0
    prompts = section.max_prompts * len(section.sources) or min(section.max_prompts, recipe.data.held_out)
    candidates = recipe.fit.candidates * min(prompts, section.candidate_prompts) if recipe.fit.candidates > 1 else 0
    return section.max_tokens * (prompts * (1 + len(recipe.eval_depths)) + candidates)


def _warnings(
    recipe: Recipe,
    shape: FitShape,
    fit: Mapping[str, Any],
    capture: Mapping[str, Any],
    states: Mapping[str, StageState],
) -> list[str]:
    warnings = []
    if fit["memory_total"] > MEMORY_MARGIN * fit["memory_free"]:
        biggest = max(fit["memory"], key=lambda part: fit["memory"][part])
        warnings.append(
            f"fit needs about {gigabytes(fit['memory_total'])}, but {gigabytes(fit['memory_free'])} are free; most of "
            f"it is {biggest}: {_REMEDIES[biggest]}"
        )
    if states["capture"].manifest is None and capture["bytes"] > capture["disk_free"]:
        warnings.append(
            f"hidden states need {gigabytes(capture['bytes'])} of disk, but {gigabytes(capture['disk_free'])} are "
            "free; use capture.mode=online"
        )
    if recipe.fit.rows % shape.processes:
        warnings.append(f"fit.rows is {recipe.fit.rows}, no multiple of the {shape.processes} processes")
    if recipe.vocab.size is not None and recipe.vocab.size > shape.target.vocab_size:
        warnings.append(
            f"vocab.size is {recipe.vocab.size:,}, but the target has {shape.target.vocab_size:,} tokens: all are taken"
        )
    return warnings


def _progress_of(state: StageState) -> str:
    if state.manifest is not None:
        return "up to date"
    return "interrupted" if state.directory.is_dir() else "to run"


def measure_speed(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> SpeedProbe:
    """Multiply matrices for about a second."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    multiply(3)
    products, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        multiply(10)
        products += 10
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rate = 2 * size**3 * products / elapsed
    return SpeedProbe(device=name, dtype=str(dtype).removeprefix("torch."), flops_per_second=rate)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gigabytes(count: float) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
