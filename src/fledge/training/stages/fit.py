"""capture: the target's hidden states of all examples, on disk (offline) or computed while training (online).

fit: train the drafter on them. Leaves candidates/step-000500/ ..., log.jsonl and training.png.
"""

import warnings
from dataclasses import asdict
from typing import Any

import torch

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import weights_digest
from fledge.devices import DTYPES, choose_device
from fledge.errors import CheckpointWarning, ConfigError
from fledge.files import digest
from fledge.models.drafter.variants import name_of
from fledge.training.capture import CaptureModel, open_target, target_config
from fledge.training.card import TRAINING_PLOT, plot_training, shown_recipe
from fledge.training.data.loader import StepLoader
from fledge.training.data.store import TokenStore
from fledge.training.drafter_setup import drafter_config, make_drafter
from fledge.training.hidden_states import HiddenStateStore, plan_states, write_states
from fledge.training.metrics import LOG_FILE, check_available, read_log
from fledge.training.parallel import Workers
from fledge.training.pipeline import Stage, StageContext
from fledge.training.recipe import FitSection, Recipe
from fledge.training.stages.regenerate import examples_directory
from fledge.training.stages.vocab import read_vocabulary
from fledge.training.trainer import Trainer
from fledge.training.ttt import Teacher

# Not part of the result beyond rounding: these may be changed between an interruption and the next start.
_FREE = ("tensorboard", "wandb_project", "parallel", "compile", "activation_checkpointing", "micro_rows")


def _capture_settings(recipe: Recipe) -> dict[str, Any]:
    if recipe.capture.mode == "online":
        return {"mode": "online"}
    return {
        "mode": "offline",
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
    store = TokenStore.open(examples_directory(context.inputs))
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
    if recipe.capture.mode == "online":
        return {**summary, "bytes": 0}
    capture = open_target(recipe.target, choose_device(recipe.device))
    batch_tokens = recipe.capture.batch_tokens
    write_states(context.directory, store, capture, form, batch_tokens=batch_tokens, progress=context.progress)
    return {**summary, "bytes": form.bytes_of(store.total_tokens)}


CAPTURE = Stage(
    name="capture", version=1, depends_on=("prepare", "regenerate"), settings=_capture_settings, run=_capture
)


def _settings(recipe: Recipe) -> dict[str, Any]:
    # Refuse what cannot be trained: settings are read before any stage runs, and answering prompts may take hours.
    target, size = target_config(recipe.target), recipe.vocab.size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # training says it
        drafter_config(recipe.drafter, target, size if size is not None and size < target.vocab_size else None)
    if recipe.fit.length > target.max_positions:
        raise ConfigError(
            f"fit.length: found {recipe.fit.length}, allowed is up to the target's {target.max_positions}"
        )
    fit = {name: value for name, value in asdict(recipe.fit).items() if name not in _FREE}
    drafter = asdict(recipe.drafter)
    if recipe.drafter.init_from is not None:
        drafter["init_from"] = weights_digest(resolve(recipe.drafter.init_from))
    return {"target": target_identity(recipe), "drafter": drafter, "fit": fit}


def _run(context: StageContext) -> dict[str, Any]:
    check_available(context.recipe.fit)
    workers = Workers.start(context.recipe.device)
    try:
        return _train(context, workers)
    finally:
        workers.stop()


def _train(context: StageContext, workers: Workers) -> dict[str, Any]:
    recipe, fit = context.recipe, context.recipe.fit
    share = workers.share_of(fit.rows)
    compute = compute_dtype(fit, workers.device)
    target = target_config(recipe.target)
    store = TokenStore.open(examples_directory(context.inputs))
    vocabulary = read_vocabulary(context.inputs["vocab"], target.vocab_size, store.digest)
    config = drafter_config(recipe.drafter, target, None if vocabulary is None else len(vocabulary.d2t))
    variant = name_of(config)
    run_name = recipe.name or variant

    capture: CaptureModel | None = None
    states: HiddenStateStore | None = None
    if recipe.capture.mode == "offline":
        weights, ids = weights_digest(resolve(recipe.target.path)), config.aux_layer_ids
        states = HiddenStateStore(context.inputs["capture"], store, target=weights, aux_layer_ids=ids)
        ends = states.ends(workers.device)
    else:
        capture = open_target(recipe.target, workers.device)
        ends = capture.ends
    drafter = make_drafter(
        recipe.drafter, config, target, ends, vocabulary, device=workers.device, seed=fit.seed, compute=compute
    )
    loader = StepLoader(store, fit, share=share, states=states, pinned=workers.device.type == "cuda")
    parameters = sum(p.numel() for p in drafter.parameters())
    drafted = None if vocabulary is None else vocabulary.target_ids.tolist()
    trainer = Trainer(
        drafter=drafter,
        fit=fit,
        loader=loader,
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
    context.progress.say(
        f"fit: {variant}, {parameters:,} parameters, {trainer.total_steps:,} steps of {fit.rows} rows of "
        f"{fit.length} tokens, {str(compute).removeprefix('torch.')} on {workers.world} x {workers.device.type}"
    )
    trainer.run()
    if not workers.is_first:
        return {}
    records = read_log(context.directory / LOG_FILE)
    plot_training(records, context.directory / TRAINING_PLOT, title=f"{run_name}: training of {variant}")
    last = records[-1]
    on_gpu = workers.device.type == "cuda"
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


def compute_dtype(fit: FitSection, device: torch.device) -> torch.dtype:
    """The dtype that the drafter's layers are run in."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[auto if fit.compute_dtype == "auto" else fit.compute_dtype]


STAGE = Stage(
    name="fit",
    version=2,  # 2: resume.pt holds other fields
    depends_on=("prepare", "regenerate", "vocab", "capture"),
    settings=_settings,
    run=_run,
    collective=True,
)
