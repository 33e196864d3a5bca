"""fit: train the drafter. Leaves candidates/step-000500/ ..., log.jsonl and training.png."""

import warnings
from dataclasses import asdict
from typing import Any

import torch

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import weights_digest
from fledge.errors import CheckpointWarning, ConfigError
from fledge.files import digest
from fledge.models.drafter.variants import name_of
from fledge.training.capture import CaptureModel, open_target, target_config
from fledge.training.card import TRAINING_PLOT, shown_recipe
from fledge.training.data.loader import StepLoader
from fledge.training.data.store import TokenStore
from fledge.training.drafter_setup import drafter_config, make_drafter
from fledge.training.hidden_states import HiddenStateStore
from fledge.training.metrics import LOG_FILE, check_available, read_log
from fledge.training.parallel import Workers
from fledge.training.plots import plot_training
from fledge.training.recipe import FitSection, Recipe
from fledge.training.stages.capture import target_identity
from fledge.training.stages.regenerate import examples_directory
from fledge.training.stages.vocab import read_vocabulary
from fledge.training.trainer import Trainer
from fledge.training.ttt import Teacher
from fledge.training.workspace import Stage, StageContext

# Not part of the result beyond rounding: these may be changed between an interruption and the next start.
_FREE = ("tensorboard", "wandb_project", "parallel", "compile", "activation_checkpointing", "micro_rows")


def _settings(recipe: Recipe) -> dict[str, Any]:
    _check(recipe)
    fit = {name: value for name, value in asdict(recipe.fit).items() if name not in _FREE}
    drafter = asdict(recipe.drafter)
    if recipe.drafter.init_from is not None:
        drafter["init_from"] = weights_digest(resolve(recipe.drafter.init_from))
    return {"target": target_identity(recipe), "drafter": drafter, "fit": fit}


def _check(recipe: Recipe) -> None:
    """Refuse what cannot be trained. Settings are read before any stage runs, and answering prompts may take hours."""
    target, size = target_config(recipe.target), recipe.vocab.size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # training says it
        drafter_config(recipe.drafter, target, size if size is not None and size < target.vocab_size else None)
    if recipe.fit.length > target.max_positions:
        raise ConfigError(
            f"fit.length: found {recipe.fit.length}, allowed is up to the target's {target.max_positions}"
        )


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

    capture: CaptureModel | None = None
    states: HiddenStateStore | None = None
    if recipe.capture.mode == "offline":
        states = HiddenStateStore(
            context.inputs["capture"],
            store,
            target=weights_digest(resolve(recipe.target.path)),
            aux_layer_ids=config.aux_layer_ids,
        )
        ends = states.ends(workers.device)
    else:
        capture = open_target(recipe.target, workers.device)
        ends = capture.ends
    drafter = make_drafter(
        recipe.drafter, config, target, ends, vocabulary, device=workers.device, seed=fit.seed, compute=compute
    )
    loader = StepLoader(store, fit, share=share, states=states, pinned=workers.device.type == "cuda")
    parameters = sum(p.numel() for p in drafter.parameters())
    ids = None if vocabulary is None else vocabulary.target_ids.tolist()
    trainer = Trainer(
        drafter=drafter,
        fit=fit,
        loader=loader,
        teacher=Teacher(ends.head_weight, vocabulary, head_bias=ends.head_bias),
        capture=capture,
        compute=compute,
        workers=workers,
        directory=context.directory,
        key=digest([_settings(recipe), store.digest, ids]),
        progress=context.progress,
        run_name=recipe.name or name_of(config),
        provenance={"recipe": shown_recipe(recipe), "examples": store.digest},
    )
    context.progress.say(
        f"fit: {name_of(config)}, {parameters:,} parameters, {trainer.total_steps:,} steps of {fit.rows} rows of "
        f"{fit.length} tokens, {str(compute).removeprefix('torch.')} on {workers.world} x {workers.device.type}"
    )
    trainer.run()
    if not workers.is_first:
        return {}
    records = read_log(context.directory / LOG_FILE)
    title = f"{recipe.name or name_of(config)}: training of {name_of(config)}"
    plot_training(records, context.directory / TRAINING_PLOT, title=title)
    last = records[-1]
    summary: dict[str, Any] = {
        "steps": trainer.done,
        "tokens": trainer.tokens,
        "parameters": parameters,
        "loss": last["loss"],
        "simulated_acceptance_length": last["simulated_acceptance_length"],
        "tokens_per_second": last["tokens_per_second"],
        "skipped_steps": last["skipped"],
        "accuracy_by_depth": last["accuracy_by_depth"],
        "candidates": sorted(path.name for path in (context.directory / "candidates").iterdir()),
    }
    if workers.device.type == "cuda":
        summary["peak_memory_bytes"] = torch.cuda.max_memory_allocated(workers.device)
    return summary


def compute_dtype(fit: FitSection, device: torch.device) -> torch.dtype:
    """The dtype that the drafter's layers are run in."""
    if fit.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if fit.compute_dtype == "bfloat16" else torch.float32


STAGE = Stage(
    name="fit",
    version=1,
    depends_on=("prepare", "regenerate", "vocab", "capture"),
    settings=_settings,
    run=_run,
    collective=True,
)
