"""What a run will take, before anything runs: tokens, bytes, memory, time. Exact where data is there, else estimated.

Times follow from operations and the speed of a matrix product measured here, times a share of it that is assumed. In
the formulas N is the slots of one pass (its rows times their length), H, Q, KV and I the widths of a layer's states,
queries, keys and MLP, V and D the vocabularies of target and drafter, b the bytes of a number in the dtype that is
computed in. docs/training.md explains every line.
"""

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from torch.utils.benchmark import Timer

from fledge.checkpoints.source import resolve
from fledge.devices import DTYPES, choose_device
from fledge.evaluation.conversations import refuse_if_empty
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import build
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel
from fledge.report.page import page_template
from fledge.training.capture import target_config
from fledge.training.data.examples import TokenStore, packed_rows
from fledge.training.drafter_setup import drafter_config
from fledge.training.pipeline import Pipeline, StageContext, StageState, duration
from fledge.training.recipe import FitSection, Recipe, TargetSection
from fledge.training.stages.fit import compute_dtype
from fledge.training.stages.prepare import EXAMPLES, Preparation, Varied
from fledge.training.stages.vllm import captured_layers, devices_of_a_server, server_command, storage
from fledge.training.ttt import CHUNK_ROWS

FIT_SHARE = 0.4  # of the measured matrix rate: what a fit reaches, about
FORWARD_SHARE = 0.5  # a forward pass over long rows
DECODE_SHARE = 0.1  # generation, a token at a time for many requests: bound by memory, not by arithmetic
SAMPLE = 256  # conversations rendered for an estimate
MEMORY_MARGIN = 0.92  # of what is free: the allocator needs some room
MASTER_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8  # float32 weights, gradients, and Adam's two averages

_SHARDED = ("weights", "gradients", "optimizer")
_REMEDIES = {
    "target": "use capture.mode=offline, or target.dtype=bfloat16",
    **dict.fromkeys(_SHARDED, "use fit.parallel=fsdp2 with more GPUs, or a smaller drafter"),
    "states": "lower fit.micro_rows",
    "activations": "set fit.activation_checkpointing, or lower fit.micro_rows",
    "logits": "lower fit.micro_rows or vocab.size, or set fit.activation_checkpointing",
}


@dataclass(frozen=True, kw_only=True)
class FitShape:
    """One fit, as far as its costs depend on it."""

    target: TargetConfig
    target_parameters: int
    drafter: DrafterConfig
    fit: FitSection
    online: bool  # the target runs along
    document_length: float  # mean tokens of a document, which attention sees half of
    state_bytes: int  # of a number in the captured states
    compute_bytes: int  # of a number in the drafter's passes
    processes: int = 1

    @property
    def pass_slots(self) -> int:
        """N: slots in one pass of one process."""
        mine = self.fit.rows // self.processes
        return min(self.fit.micro_rows or mine, mine) * self.fit.length

    @property
    def state_bytes_per_token(self) -> int:
        """Aux states and the final one: (n + 1) * H numbers."""
        return (len(self.drafter.aux_layer_ids or ()) + 1) * self.target.hidden_size * self.state_bytes

    @cached_property
    def _module(self) -> Drafter:
        with torch.device("meta"):
            return build(self.drafter)

    @property
    def parameters(self) -> int:
        """How many numbers are trained, exactly."""
        return sum(parameter.numel() for parameter in self._module.parameters())

    def memory(self) -> dict[str, int]:
        """Bytes on each device, by part."""
        drafter, target, layer, n = self.drafter, self.target, self.drafter.layer, self.pass_slots
        draft_vocab, b, kv = drafter.draft_vocab_size, self.compute_bytes, layer.kv_cache.numbers_per_token
        split = self.processes if self.fit.parallel == "fsdp2" else 1
        copies = 0 if b == MASTER_BYTES else b
        kept_steps = 1 if self.fit.activation_checkpointing else self.fit.depth
        step_inputs = n * (drafter.hidden_size + drafter.num_layers * kv) * b
        # Numbers that one draft step keeps for the backward pass, for each slot.
        per_layer = 2 * layer.query_size + kv + 3 * layer.intermediate_size + 6 * layer.hidden_size
        kept = drafter.num_layers * per_layer + 4 * layer.hidden_size  # layer 0 reads two states; the final norm
        ends = (1 if target.tied_head else 2) * target.vocab_size * target.hidden_size
        chunk = min(n, CHUNK_ROWS) * target.vocab_size
        return {
            "target": (self.target_parameters if self.online else ends) * self.state_bytes,
            "weights": self.parameters * MASTER_BYTES // split + self.parameters * copies,
            "gradients": self.parameters * GRADIENT_BYTES // split,
            "optimizer": self.parameters * ADAM_BYTES // split,
            "states": n * self.state_bytes_per_token,
            "activations": n * kept * b * kept_steps + step_inputs * self.fit.depth,
            # The teacher's, and each kept step's own; some rows of the full vocabulary at a time.
            "logits": n * draft_vocab * self.state_bytes + kept_steps * n * draft_vocab * b + chunk * self.state_bytes,
        }

    def flops_per_slot(self) -> dict[str, float]:
        """Operations for each slot of a row, by part: 2 for a multiply-add, forward once and backward twice."""
        drafter, target, depth = self.drafter, self.target, self.fit.depth
        again = 4 / 3 if self.fit.activation_checkpointing else 1.0
        seen = self.document_length / 2
        matrices = {name: p.numel() for name, p in self._module.named_parameters() if p.dim() == 2}
        layers = sum(numbers for name, numbers in matrices.items() if name.startswith("layers."))
        fuse = sum(numbers for name, numbers in matrices.items() if name.startswith("fc"))
        fused_steps = depth if drafter.architecture is Architecture.EAGLE1 else 1  # EAGLE-1's fc is run at each step
        head = drafter.hidden_size * drafter.draft_vocab_size
        attention = sum(4.0 * drafter.layer.query_size * (seen + k) * drafter.num_layers for k in range(depth))
        parts = {
            "layers": 6.0 * again * (layers * depth + fuse * fused_steps),
            "attention": 3.0 * again * attention,
            "head": (6.0 if drafter.own_head else 4.0) * again * head * depth,
            "teacher": 2.0 * target.hidden_size * target.vocab_size,
        }
        if self.online:
            parts["target"] = target_flops_per_token(target, self.target_parameters, seen, head=False)
        return parts


def target_flops_per_token(target: TargetConfig, parameters: int, seen: float, *, head: bool) -> float:
    """Operations of one forward pass of the target for one token that attends to `seen` others."""
    ends = target.vocab_size * target.hidden_size
    blocks = parameters - (1 if target.tied_head else 2) * ends
    for i in range(target.num_layers):
        if (experts := target.layer_at(i).experts) is not None:  # a token goes through a few of them
            idle = experts.num_experts - experts.num_experts_per_token
            blocks -= idle * 3 * experts.intermediate_size * target.hidden_size
    return 2.0 * (blocks + (ends if head else 0)) + 4.0 * target.layer.query_size * seen * target.num_layers


def target_parameter_count(section: TargetSection, target: TargetConfig) -> int:
    """Return how many numbers the target has, without loading one."""
    with torch.device("meta"):
        if target.family in FAMILIES:
            return sum(parameter.numel() for parameter in TargetModel(target).parameters())
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - slow to import

        remote = section.trust_remote_code
        config = AutoConfig.from_pretrained(resolve(section.path), trust_remote_code=remote)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
        return sum(parameter.numel() for parameter in model.parameters())


def make_plan(recipe: Recipe, *, probe: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Work out what a run would do, as JSON values. Reads the data and the target's config; writes nothing.

    `probe` is what `measure_speed` returns.
    """
    device, target, states = choose_device(recipe.device), target_config(recipe.target), Pipeline(recipe).states()
    compute = compute_dtype(recipe.fit, device)
    data, lengths = data_size(recipe, states)
    mean_length = data["tokens"] / max(1, data["examples"])
    shape = FitShape(
        target=target,
        target_parameters=target_parameter_count(recipe.target, target),
        drafter=drafter_config(recipe.drafter, target, recipe.vocab.size),
        fit=recipe.fit,
        online=recipe.capture.mode == "online" and recipe.capture.engine == "fledge",
        document_length=min(mean_length, recipe.fit.length),
        state_bytes=DTYPES[target.dtype].itemsize,
        compute_bytes=compute.itemsize,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )
    probe = probe or measure_speed(device, compute)
    rate: float = probe["flops_per_second"]

    def target_seconds(tokens: int, share: float, *, head: bool) -> float:
        flops = target_flops_per_token(target, shape.target_parameters, mean_length / 2, head=head)
        return tokens * flops / (share * rate)

    # Rows as the trainer packs them; those of a sample are scaled.
    packed = len(packed_rows(lengths, length=recipe.fit.length, seed=recipe.fit.seed, epoch=0))
    rows = max(1, round(packed * data["examples"] / max(1, len(lengths))))
    steps, memory = recipe.fit.total_steps(rows), shape.memory()
    slots = steps * recipe.fit.rows * recipe.fit.length
    flops = {part: slots * each for part, each in shape.flops_per_slot().items()}
    new_tokens, section = data["answer_tokens"] if recipe.regenerate.enabled else 0, recipe.eval
    prompts = section.max_prompts * len(section.sources) or min(section.max_prompts, recipe.data.held_out)
    # `eval` generates at most once without a drafter, for each candidate, and at each depth.
    few = recipe.fit.candidates * min(prompts, section.candidate_prompts) if recipe.fit.candidates > 1 else 0
    eval_tokens = section.enabled * section.max_tokens * (prompts * (1 + len(recipe.eval_depths)) + few)
    offline, draft_vocab = recipe.capture.mode == "offline", shape.drafter.draft_vocab_size
    state_tokens = data["tokens"] if offline else 0
    forward = target_seconds(1, FORWARD_SHARE, head=False)  # for a token
    capture_seconds = state_tokens * forward
    regenerate_seconds = target_seconds(new_tokens, DECODE_SHARE, head=True)
    fit_seconds = sum(flops.values()) / (FIT_SHARE * rate * shape.processes)
    vllm = vllm_plan(recipe, data, steps * recipe.fit.rows / rows, forward) if recipe.uses_vllm else None
    if vllm is not None:
        if recipe.regenerate.engine == "vllm":
            regenerate_seconds /= vllm["devices"]
        if recipe.capture.engine == "vllm":
            capture_seconds = vllm["seconds"] if offline else 0.0
            fit_seconds = fit_seconds if offline else max(fit_seconds, vllm["seconds"])
            vllm["bytes_per_second"] = vllm["bytes"] / max(1e-9, capture_seconds if offline else fit_seconds)
    disk = next(path for path in (Path(recipe.output), *Path(recipe.output).parents) if path.exists())
    plan = {
        "device": probe["device"],
        "processes": shape.processes,
        "stages": [
            {
                "stage": name,
                "key": state.directory.name,
                "state": "up to date" if state.manifest else "interrupted" if state.directory.is_dir() else "to run",
            }
            for name, state in states.items()
        ],
        "data": data,
        "regenerate": {
            "enabled": recipe.regenerate.enabled,
            "tokens": new_tokens,
            **_by_the_clock(regenerate_seconds, recipe.regenerate.max_minutes),
        },
        "vocab": {"size": draft_vocab if draft_vocab < target.vocab_size else None, "target": target.vocab_size},
        "capture": {
            "mode": recipe.capture.mode,
            "bytes_per_token": shape.state_bytes_per_token,
            "bytes": state_tokens * shape.state_bytes_per_token,
            "disk_free": shutil.disk_usage(disk).free,
            "seconds": capture_seconds,
        },
        "fit": {
            "parameters": shape.parameters,
            "rows": rows,
            "steps": steps,
            "slots": slots,
            "memory": memory,
            "memory_total": sum(memory.values()),
            "memory_free": free_memory(device),
            "flops": flops,
            "flops_total": sum(flops.values()),
            **_by_the_clock(fit_seconds, recipe.fit.max_minutes),
        },
        **({} if vllm is None else {"vllm": vllm}),
        "eval": {"tokens": eval_tokens, "seconds": target_seconds(eval_tokens, DECODE_SHARE, head=True)},
        "probe": dict(probe),
    }
    return {**plan, "warnings": _warnings(recipe, plan)}


def _by_the_clock(seconds: float, max_minutes: float | None) -> dict[str, Any]:
    """The seconds of a stage, and whether its minutes will end it before its work does."""
    limit = math.inf if max_minutes is None else 60 * max_minutes
    return {"seconds": min(seconds, limit), "cut_short": seconds > limit}


def _warnings(recipe: Recipe, plan: Mapping[str, Any]) -> list[str]:
    fit, states, disk, vocab = plan["fit"], plan["capture"]["bytes"], plan["capture"]["disk_free"], plan["vocab"]
    captured = any(row["stage"] == "capture" and row["state"] == "up to date" for row in plan["stages"])
    needed, free, biggest = fit["memory_total"], fit["memory_free"], max(fit["memory"], key=fit["memory"].__getitem__)
    size, rows, processes = recipe.vocab.size or 0, recipe.fit.rows, plan["processes"]
    most = f"most of it is {biggest}: {_REMEDIES[biggest]}"
    room = f"hidden states need {decimal(states)} of disk, but {decimal(disk)} are free"
    warnings = {
        f"fit needs about {decimal(needed)}, but {decimal(free)} are free; {most}": needed > MEMORY_MARGIN * free,
        f"{room}; use capture.mode=online": states > disk and not captured,
        f"fit.rows is {rows}, no multiple of the {processes} processes": rows % processes,
        f"vocab.size is {size:,}, but the target has {vocab['target']:,} tokens: all are taken": size > vocab["target"],
    }
    return [text for text, holds in warnings.items() if holds]


def vllm_plan(recipe: Recipe, data: Mapping[str, Any], epochs: float, seconds_per_token: float) -> dict[str, Any]:
    """What vLLM servers do: how many, what they hand over, and how long reading takes them; GPUs as the one here.

    States of answers need not be read again, as far as half the storage has room for them. Online, every epoch is read.
    """
    servers = max(1, len(recipe.vllm.urls))
    devices = servers * devices_of_a_server(recipe)
    plan: dict[str, Any] = {"servers": servers, "devices": devices, "command": server_command(recipe)}
    if recipe.capture.engine == "fledge":
        return plan
    per_token, tokens = captured_layers(recipe).file_bytes(1), data["tokens"]
    in_one_pass = recipe.regenerate.enabled and recipe.regenerate.engine == "vllm" and recipe.regenerate.turns == "last"
    from_answers = min(tokens, recipe.vllm.max_bytes // 2 // per_token) if in_one_pass else 0
    handed_over = tokens * (epochs if recipe.capture.mode == "online" else 1)
    return {
        **plan,
        "bytes_per_token": per_token,
        "bytes": round(handed_over * per_token),
        "storage": str(storage(recipe)),
        "storage_bytes": min(recipe.vllm.max_bytes, tokens * per_token),
        "tokens_from_answers": from_answers,
        "seconds": max(0.0, handed_over - from_answers) * seconds_per_token / devices,
    }


def plan_text(recipe: Recipe, plan: Mapping[str, Any]) -> str:
    """The plan as Markdown: what each stage does and takes, and the memory of `fit`."""
    known = {"size": decimal, "duration": duration, "fit_share": FIT_SHARE, "decode_share": DECODE_SHARE}
    return page_template("fledge.training", "plan.md.jinja").render(recipe=recipe, plan=plan, **known)


def data_size(recipe: Recipe, states: Mapping[str, StageState]) -> tuple[dict[str, Any], list[int]]:
    """What there is to learn from, and the lengths of the examples, or of a sample of them.

    Exact where the examples are there; else from a sample of the files as `prepare` renders them.
    """
    answers_follow, longest = recipe.regenerate.enabled, recipe.data.max_length
    stage = "regenerate" if answers_follow else "prepare"
    scale, exact = 1.0, states[stage].manifest is not None
    if exact:
        store = TokenStore(states[stage].directory / EXAMPLES)
        how, lengths, answers = f"the examples that '{stage}' has made", store.lengths.tolist(), store.answer_tokens
    else:
        preparation = Preparation(StageContext(recipe=recipe, directory=Path(recipe.output)))
        conversations = list(preparation.usable(preparation.skipped))
        refuse_if_empty(len(conversations), preparation.skipped, recipe.data.sources)
        sample = conversations[:: max(1, len(conversations) // SAMPLE)][:SAMPLE]
        batch = [(where, Varied(conversation=one)) for where, one in sample]
        sizes = []
        for each in (sequence.cut(longest) for _, several in preparation.sequences(batch) for sequence in several):
            prompt, answer = len(each.tokens) - sum(each.answer), sum(each.answer)
            if answers_follow:
                prompt, answer = len(each.tokens), min(recipe.regenerate.max_tokens, longest - len(each.tokens))
            if answer >= recipe.data.min_answer_tokens:
                sizes.append((prompt + answer, answer))
        lengths, answers = [total for total, _ in sizes], sum(answer for _, answer in sizes)
        held_out = 0 if recipe.eval.sources else min(recipe.data.held_out, len(conversations) // 2)
        count = min(max(1, len(conversations) - held_out), recipe.data.max_examples or len(conversations))
        scale = count * (recipe.regenerate.samples if answers_follow else 1) / len(sample)
        whose = "at most regenerate.max_tokens each" if answers_follow else "those of the data"
        how = f"a sample of {len(sample)} of {len(conversations):,} conversations; answers: {whose}"
    counts = {"examples": len(lengths), "tokens": sum(lengths), "answer_tokens": answers}
    return {"exact": exact, "how": how, **{name: round(count * scale) for name, count in counts.items()}}, lengths


def measure_speed(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> dict[str, Any]:
    """Say how fast this device multiplies matrices."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    rate = 2 * size**3 / timer.blocked_autorange(min_run_time=seconds).mean
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "dtype": str(dtype).removeprefix("torch."), "flops_per_second": rate}


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
