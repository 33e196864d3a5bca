"""vocab: the draft vocabulary, the tokens that the training answers use most. Writes vocab.json:

    target_ids     ascending; null for the target's whole vocabulary
    vocab_size     of the target
    data_digest    of the examples it was counted on: it is refused for others
    coverage       share of the answer tokens that are in it, and the same for other sizes

capture: the target's hidden states of all examples, on disk (offline) or computed while training (online).

fit: train the drafter on them. Leaves candidates/step-000500/ ..., log.jsonl and training.png.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from fledge.checkpoints.contract import identity_findings
from fledge.checkpoints.drafter import raise_errors
from fledge.checkpoints.reading import read_drafter
from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import stop_ids, vocab_size, weights_digest
from fledge.devices import DTYPES, choose_device
from fledge.engine.tokenizer import load_tokenizer
from fledge.errors import CheckpointWarning, ConfigError, DataError
from fledge.files import atomic_path, digest, read_json, read_json_lines, write_text
from fledge.models.drafter.base import DraftVocabulary
from fledge.models.drafter.variants import name_of
from fledge.report.charts import MUTED, SERIES, frame
from fledge.training.capture import CaptureModel, TargetEnds, open_target, target_config
from fledge.training.data.examples import TokenStore
from fledge.training.data.loader import (
    HiddenStateStore,
    StepLoader,
    StreamedStates,
    captured_states,
    plan_states,
    streamed_states,
    write_states,
)
from fledge.training.drafter_setup import drafter_config, make_drafter
from fledge.training.log import LOG_FILE, check_available
from fledge.training.parallel import Workers
from fledge.training.pipeline import Stage, StageContext, shown_recipe
from fledge.training.recipe import FitSection, Recipe
from fledge.training.stages.prepare import text_identity
from fledge.training.stages.regenerate import examples_directory
from fledge.training.stages.vllm import captured_layers, check_target, open_hosts, open_stream, storage
from fledge.training.trainer import Trainer
from fledge.training.ttt import Teacher
from fledge.vllm_states.files import StateFiles

_COUNTED_TOGETHER = 1 << 24  # tokens
_REPORTED_SIZES = tuple(1 << bits for bits in range(10, 18))  # of vocabularies, with their coverage
# Not part of the result beyond rounding: these may be changed between an interruption and the next start.
_FREE = ("tensorboard", "wandb_project", "parallel", "compile", "activation_checkpointing", "micro_rows")
_PANELS = (  # in two rows: name in the log, title, unit
    ("loss", "Loss", "weighted sum over depths"),
    ("accuracy_by_depth", "Accuracy", "drafts equal to the target's choice"),
    ("simulated_acceptance_length", "Simulated acceptance length", "tokens per round"),
    ("hidden_rms_by_depth", "Size of the state fed forward", "root mean square"),
    ("own_attention_by_depth", "Attention on own drafts", "share of attention"),
    ("sink_attention_by_depth", "Attention on the first token", "share of attention"),
)


def _vocab_settings(recipe: Recipe) -> dict[str, Any]:
    target = resolve(recipe.target.path)
    return {**asdict(recipe.vocab), "vocab_size": vocab_size(target), **text_identity(target)}


def _choose_vocabulary(context: StageContext) -> dict[str, Any]:
    recipe, target = context.recipe, resolve(context.recipe.target.path)
    full, tokenizer = vocab_size(target), load_tokenizer(target)
    store = TokenStore(examples_directory(context.inputs))
    answers, everything = np.zeros(full, dtype=np.int64), np.zeros(full, dtype=np.int64)
    for start in range(0, store.total_tokens, _COUNTED_TOGETHER):
        tokens = store.tokens[start : start + _COUNTED_TOGETHER]
        everything += np.bincount(tokens, minlength=full)
        answers += np.bincount(tokens[store.answer[start : start + _COUNTED_TOGETHER]], minlength=full)
    counts = everything if recipe.vocab.count_prompts else answers
    stops = [token for token in stop_ids(target, tokenizer) if token < full]
    specials = [] if tokenizer is None else [int(i) for i in tokenizer.all_special_ids if int(i) < full]
    required = sorted({*stops, *(token for token in specials if answers[token])})
    size = min(recipe.vocab.size or full, full)
    chosen = choose(counts, size, required) if size < full else None
    sizes = [size for size in _REPORTED_SIZES if len(required) < size < full]
    table = {str(size): covered(answers, choose(counts, size, required)) for size in sizes}
    facts = {
        "vocab_size": full,
        "data_digest": store.digest,
        "coverage": 1.0 if chosen is None else covered(answers, chosen),
        "coverage_by_size": {**table, str(full): 1.0},
        "distinct_answer_tokens": int((answers > 0).sum()),
    }
    target_ids = None if chosen is None else chosen.tolist()
    write_text(context.directory / "vocab.json", json.dumps({"target_ids": target_ids, **facts}))
    context.progress.say(f"vocab: {size:,} of {full:,} tokens cover {facts['coverage']:.2%} of the answers")
    return {"size": size, **facts}


VOCAB = Stage(
    name="vocab", version=1, depends_on=("prepare", "regenerate"), settings=_vocab_settings, run=_choose_vocabulary
)


def choose(counts: NDArray[np.int64], size: int, required: list[int]) -> NDArray[np.int64]:
    """Return `size` ids, ascending: those required, then the most frequent, of equals those with the lower id."""
    if size < len(required):
        raise ConfigError(f"vocab.size: found {size}, but {len(required)} special tokens must be in it")
    ranked = counts.copy()
    ranked[required] = np.iinfo(np.int64).max
    chosen: NDArray[np.int64] = np.sort(np.argsort(-ranked, kind="stable")[:size])
    return chosen


def covered(answers: NDArray[np.int64], chosen: NDArray[np.int64]) -> float:
    """Return the share of answer tokens that are among the chosen."""
    return float(answers[chosen].sum() / max(1, answers.sum()))


def read_vocabulary(directory: Path, vocab_size: int, data_digest: str | None = None) -> DraftVocabulary | None:
    """Return the draft vocabulary that the stage left, None where it is the whole vocabulary.

    With `data_digest` (`TokenStore.digest`) a vocabulary counted on other data is refused.
    """
    path = directory / "vocab.json"
    values = read_json(path) or {}
    if not {"target_ids", "vocab_size", "data_digest"} <= values.keys():
        raise DataError(f"{path}: missing or damaged; run the vocab stage again")
    ids, size, digest = values["target_ids"], values["vocab_size"], values["data_digest"]
    if size != vocab_size:
        raise DataError(f"{path}: made for a vocabulary of {size}, but the target has {vocab_size}; run vocab again")
    if data_digest is not None and digest != data_digest:
        raise DataError(f"{path}: counted on data {digest}, but the examples are {data_digest}; run vocab again")
    if ids is None:
        return None
    if not ids or any(a >= b for a, b in pairwise(ids)) or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise DataError(f"{path}: target_ids must be ascending, from 0 to {vocab_size - 1}; run vocab again")
    return DraftVocabulary.from_target_ids(torch.tensor(ids, dtype=torch.int64), vocab_size)


def _capture_settings(recipe: Recipe) -> dict[str, Any]:
    engine = {} if recipe.capture.engine == "fledge" else {"engine": recipe.capture.engine}
    if engine:
        check_target(recipe)
    if recipe.capture.mode == "online":
        return {"mode": "online", **engine}
    return {
        "mode": "offline",
        **engine,
        "shard_tokens": recipe.capture.shard_tokens,
        "target": target_identity(recipe),
        "variant": recipe.drafter.variant,
        "aux_layer_ids": recipe.drafter.aux_layer_ids,
    }


def target_identity(recipe: Recipe) -> dict[str, Any]:
    """JSON values that change with the target's weights and how they are run, wherever they are kept."""
    target = recipe.target
    return {"weights": weights_digest(resolve(target.path)), "dtype": target.dtype, "backend": target.backend}


def _capture(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    store = TokenStore(examples_directory(context.inputs))
    target = target_config(recipe.target)
    aux_layer_ids = drafter_config(recipe.drafter, target).aux_layer_ids or ()
    weights = weights_digest(resolve(recipe.target.path))
    form = plan_states(store, target, weights, aux_layer_ids, recipe.capture.shard_tokens)
    summary = {
        "mode": recipe.capture.mode,
        "tokens": store.total_tokens,
        "aux_layer_ids": list(aux_layer_ids),
        "bytes_per_token": form.bytes_of(1),
    }
    if recipe.capture.engine == "vllm":
        storage(recipe).mkdir(parents=True, exist_ok=True)
        files = StateFiles(storage(recipe), captured_layers(recipe))
        summary["bytes_from_answers"] = files.clean(store.example(i)[0][:-1] for i in range(len(store)))
    if recipe.capture.mode == "online":
        return {**summary, "bytes": 0}
    if recipe.capture.engine == "vllm":
        with open_hosts(recipe, context.progress) as hosts, open_stream(recipe, store, hosts, "cpu") as (ends, stream):
            write_states(context.directory, store, ends, form, streamed_states(stream), progress=context.progress)
    else:
        capture = open_target(recipe.target, choose_device(recipe.device))
        source = captured_states(store, capture, form, recipe.capture.batch_tokens)
        write_states(context.directory, store, capture.ends, form, source, progress=context.progress)
    return {**summary, "bytes": form.bytes_of(store.total_tokens)}


CAPTURE = Stage(
    name="capture", version=2, depends_on=("prepare", "regenerate"), settings=_capture_settings, run=_capture
)


def _settings(recipe: Recipe) -> dict[str, Any]:
    # Refuse what cannot be trained: settings are read before any stage runs, and answering prompts may take hours.
    target = target_config(recipe.target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # training says it
        drafter_config(recipe.drafter, target, recipe.vocab.size)
    length, longest = recipe.fit.length, target.max_positions
    if length > longest:
        raise ConfigError(f"fit.length: found {length}, allowed is up to the target's {longest}")
    fit = {name: value for name, value in asdict(recipe.fit).items() if name not in _FREE}
    for name, before in (("max_minutes", None), ("optimizer", "adamw")):
        if fit[name] == before:
            del fit[name]  # as before there was a choice
    drafter = asdict(recipe.drafter)
    if recipe.drafter.init_from is not None:
        earlier = read_drafter(resolve(recipe.drafter.init_from))
        raise_errors(earlier, list(identity_findings(earlier, resolve(recipe.target.path))))
        drafter["init_from"] = weights_digest(earlier.directory)
    return {"target": target_identity(recipe), "drafter": drafter, "fit": fit}


def _run(context: StageContext) -> dict[str, Any]:
    check_available(context.recipe.fit)
    with Workers.start(context.recipe.device) as workers, ExitStack() as stack:
        return _train(context, workers, stack)


def _states(
    context: StageContext, workers: Workers, store: TokenStore, aux_layer_ids: tuple[int, ...] | None, stack: ExitStack
) -> tuple[TargetEnds, CaptureModel | None, HiddenStateStore | StreamedStates | None]:
    """The target's ends; and the target itself, or the states that are read in its place."""
    recipe = context.recipe
    if recipe.capture.mode == "offline":
        weights, mine = weights_digest(resolve(recipe.target.path)), slice(workers.rank, None, workers.world_size)
        stored = HiddenStateStore(
            context.inputs["capture"], store, target=weights, aux_layer_ids=aux_layer_ids, verified=mine
        )
        return stored.ends(workers.device), None, stored
    if recipe.capture.engine == "vllm":
        # The first process starts vLLM, if anybody must; the others ask it too.
        opened = stack.enter_context(open_hosts(recipe, context.progress)) if workers.is_first else None
        addresses = workers.broadcast([] if opened is None else opened.addresses)
        hosts = opened or stack.enter_context(open_hosts(recipe, context.progress, addresses))
        stream = open_stream(recipe, store, hosts, workers.device, workers.world_size)
        ends, states = stack.enter_context(stream)
        return ends, None, StreamedStates(states)
    capture = open_target(recipe.target, workers.device)
    return capture.ends, capture, None


def _train(context: StageContext, workers: Workers, stack: ExitStack) -> dict[str, Any]:
    recipe, fit = context.recipe, context.recipe.fit
    compute, target = compute_dtype(fit, workers.device), target_config(recipe.target)
    on_gpu = workers.device.type == "cuda"
    store = TokenStore(examples_directory(context.inputs))
    vocabulary = read_vocabulary(context.inputs["vocab"], target.vocab_size, store.digest)
    config = drafter_config(recipe.drafter, target, None if vocabulary is None else len(vocabulary.d2t))
    variant, run_name = name_of(config), recipe.name or name_of(config)
    ends, capture, states = _states(context, workers, store, config.aux_layer_ids, stack)
    drafter = make_drafter(
        recipe.drafter,
        config,
        target,
        ends,
        vocabulary,
        device=workers.device,
        seed=fit.seed,
        compute=compute,
        target_directory=resolve(recipe.target.path),
    )
    parameters = sum(p.numel() for p in drafter.parameters())
    drafted = None if vocabulary is None else vocabulary.target_ids.tolist()
    trainer = Trainer(
        drafter=drafter,
        fit=fit,
        loader=StepLoader(store, fit, share=workers.share_of(fit.rows), states=states, pinned=on_gpu),
        teacher=Teacher(ends.head_weight, vocabulary, head_bias=ends.head_bias),
        capture=capture,
        compute=compute,
        workers=workers,
        directory=context.directory,
        key=digest([_settings(recipe), store.digest, drafted]),
        progress=context.progress,
        run_name=run_name,
        provenance={"recipe": shown_recipe(recipe), "examples": store.digest},
    )
    steps = f"{trainer.total_steps:,} steps of {fit.rows} rows of {fit.length} tokens"
    where = f"{str(compute).removeprefix('torch.')} on {workers.world_size} x {workers.device.type}"
    context.progress.say(f"fit: {variant}, {parameters:,} parameters, {steps}, {where}")
    trainer.run()
    if not workers.is_first:
        return {}
    if isinstance(states, StreamedStates):
        states.clear()
    records = [record for _, record in read_json_lines(context.directory / LOG_FILE)]
    plot_training(records, context.directory / "training.png", title=f"{run_name}: training of {variant}")
    last = records[-1]
    return {
        "steps": trainer.done,
        "tokens": trainer.tokens,
        "parameters": parameters,
        **{name: last[name] for name in ("loss", "simulated_acceptance_length", "tokens_per_second")},
        "skipped_steps": last["skipped"],
        "accuracy_by_depth": last["accuracy_by_depth"],
        "candidates": sorted(path.name for path in (context.directory / "candidates").iterdir()),
        **({"peak_memory_bytes": torch.cuda.max_memory_allocated(workers.device)} if on_gpu else {}),
    }


def plot_training(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG of the records of a log. Where drift was not recorded, those panels say so."""
    depth = max((len(record["accuracy_by_depth"]) for record in records), default=1)
    last = max((record["step"] for record in records), default=1)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, depth))  # from dark (the first draft) to light
    figure = Figure(figsize=(14, 7.6), layout="constrained")  # without pyplot, which wants a display or a global choice
    figure.suptitle(title, fontsize=14, fontweight="bold")
    for panel, (name, heading, unit) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        found = [(record["step"], record[name]) for record in records if name in record]
        values = np.array([value for _, value in found], dtype=np.float64)  # [records], or [records, depth]
        frame(panel, None, percent=name.startswith("accuracy") or "attention" in name)
        if np.isfinite(values).any():
            panel.set_prop_cycle(color=[SERIES[1]] if values.ndim == 1 else colours)
            panel.plot([step for step, _ in found], values, marker="o" if len(found) < 20 else None, markersize=3.5)
        else:
            panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", va="center", color=MUTED)
            panel.set_yticks([])
        panel.set_title(heading, fontsize=11, loc="left", fontweight="bold")
        panel.set(xlabel="optimizer step", ylabel=unit, xlim=(0, last * 1.02))
        panel.set_ylim(bottom=0, top=1 if name == "accuracy_by_depth" else None)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if name == "simulated_acceptance_length":
            panel.axhline(depth + 1, color=MUTED, linewidth=1, linestyle=":")
            panel.text(0.02 * last, depth + 0.95, f"every draft right: {depth + 1}", va="top", fontsize=9, color=MUTED)
            panel.set_ylim(1, depth + 1.15)
        elif name == "accuracy_by_depth":
            steps = [str(k + 1) for k in range(depth)]
            figure.legend(panel.get_lines(), steps, loc="outside right center", title="draft step", frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def compute_dtype(fit: FitSection, device: torch.device) -> torch.dtype:
    """The dtype that the drafter's layers are run in."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[auto if fit.compute_dtype == "auto" else fit.compute_dtype]


STAGE = Stage(
    name="fit",
    version=3,  # 3: resume.pt is sealed
    depends_on=("prepare", "regenerate", "vocab", "capture"),
    settings=_settings,
    run=_run,
    collective=True,
)
