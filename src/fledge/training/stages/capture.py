"""capture: the target's hidden states of all examples, on disk (offline) or computed while training (online)."""

from typing import Any

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target_files import weights_digest
from fledge.devices import choose_device
from fledge.training.capture import open_target, target_config
from fledge.training.data.store import TokenStore
from fledge.training.drafter_setup import drafter_config
from fledge.training.hidden_states import plan_states, write_states
from fledge.training.recipe import Recipe
from fledge.training.stages.regenerate import examples_directory
from fledge.training.workspace import Stage, StageContext


def _settings(recipe: Recipe) -> dict[str, Any]:
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


def _run(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    store = TokenStore.open(examples_directory(context.inputs))
    target = target_config(recipe.target)
    aux_layer_ids = drafter_config(recipe.drafter, target).aux_layer_ids or ()
    form = plan_states(
        store, target, weights_digest(resolve(recipe.target.path)), aux_layer_ids, recipe.capture.shard_tokens
    )
    summary = {
        "mode": recipe.capture.mode,
        "tokens": store.total_tokens,
        "aux_layer_ids": list(aux_layer_ids),
        "bytes_per_token": form.bytes_of(1),
    }
    if recipe.capture.mode == "online":
        return {**summary, "bytes": 0}
    capture = open_target(recipe.target, choose_device(recipe.device))
    write_states(
        context.directory,
        store,
        capture,
        form,
        batch_tokens=recipe.capture.batch_tokens,
        progress=context.progress,
    )
    return {**summary, "bytes": form.bytes_of(store.total_tokens)}


STAGE = Stage(name="capture", version=1, depends_on=("prepare", "regenerate"), settings=_settings, run=_run)
