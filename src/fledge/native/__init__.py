"""Decoder layers and drafting in C for CPUs, as wrappers of a loaded target and drafter.

A round on a CPU is some hundred small operations, most of which take less time than launching them from Python. Here
all layers of a model are one call, and all draft steps of a round another. The C sources are compiled in the wheel, or
on first use by the machine's own compiler. Without either, with FLEDGE_NATIVE=0, and for layers that the library does
not support, models run in torch.
"""

import ctypes
import functools
from typing import Any

import torch

from fledge.kernels._triton import register_cpu_kernels
from fledge.layers.block import fuse_input_quantization, join_weights
from fledge.layers.linear import compute_weight
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.native import library as compiled
from fledge.native import team
from fledge.native.decoder import NativeTarget, lower_layers
from fledge.native.drafter import NativeDrafter, lower_drafter
from fledge.native.linear import pack_linears

KERNELS = ("first_largest", "accept_chain", "open_round", "settle_round", "philox_uniforms")
TEAM_KERNELS = ("argmax_rows", "weigh_rows", "draw_rows", "write_probabilities", "reject_drafts")
TREE_KERNELS = ("grow_trees", "rank_trees", "open_trees", "accept_trees")


def accelerate(target: TargetModel, drafter: Drafter | None) -> tuple[TargetModel, Drafter | None]:
    """Prepare the models for inference on their device; on a CPU in float32, wrap those that the library can run.

    Weights get another layout, in place (on a CPU `pack_linears`, on a GPU `join_weights`), and must not change
    afterwards. A model that the library cannot run is returned as it is.
    """
    models = [model for model in (target, drafter) if model is not None]
    if target.embed_tokens.weight.device.type != "cpu":
        for model in models:
            join_weights(model)
            fuse_input_quantization(model)
        torch.cuda.empty_cache()  # frees the old copies of the weights for the KV cache
        return target, drafter
    pack_linears(*models)
    loaded = compiled.library()
    register_cpu_kernels({} if loaded is None else kernels_of(loaded))
    layers = lower_layers(target.layers) if type(target) is TargetModel and _rotates_in_one_way(target) else None
    if layers is not None:
        target = NativeTarget(target, layers)
    return target, None if drafter is None else lower_drafter(drafter) or drafter


def _rotates_in_one_way(target: TargetModel) -> bool:
    config = target.config
    ropes = [config.layer_at(i).rope for i in range(config.num_layers)]
    return all(rope == config.layer.rope or rope.partial_factor == 0 for rope in ropes)


def is_in_library(target: TargetModel, drafter: Drafter | None) -> bool:
    """Whether the library runs the layers of both models, so that torch has little to do."""
    return isinstance(target, NativeTarget) and (drafter is None or isinstance(drafter, NativeDrafter))


def accelerate_drafter(drafter: Drafter) -> Drafter:
    """`accelerate` for a drafter that is loaded later, for a target that is prepared already."""
    if compute_weight(drafter).device.type != "cpu":
        join_weights(drafter)
        fuse_input_quantization(drafter)
        return drafter
    pack_linears(drafter)
    return lower_drafter(drafter) or drafter


def kernels_of(library: ctypes.CDLL) -> dict[str, Any]:
    """Return the library's functions for `register_cpu_kernels`, by kernel name."""
    kernels = {name: getattr(library, f"fledge_{name}") for name in KERNELS + TREE_KERNELS}
    by_team = {name: functools.partial(team.call, getattr(library, f"fledge_{name}")) for name in TEAM_KERNELS}
    return kernels | by_team
