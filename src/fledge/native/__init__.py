"""The C layers for CPUs: they wrap a loaded target or drafter, which know nothing of them.

A round on a CPU is some hundred small operations, and launching them from Python takes longer than most of them do.
Here the layers of a model are one call, and all of a round's drafting another. `accelerate` makes models ready; the
C sources come compiled in a wheel, or are compiled by the machine's own compiler when they are first needed. Without
either, or with FLEDGE_NATIVE=0, or for layers of a kind that is not here, torch does the same work.
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
    """Return the models as they run fastest for inference on their device: on a CPU in float32, in C.

    Their linear layers get another layout, in place: see `pack_linears`, and on a GPU `join_weights`. What cannot be
    lowered is returned as it is. Weights must not change afterwards.
    """
    models = [model for model in (target, drafter) if model is not None]
    if target.embed_tokens.weight.device.type != "cpu":
        for model in models:
            join_weights(model)
            fuse_input_quantization(model)
        torch.cuda.empty_cache()  # where the weights were there is room for keys and values
        return target, drafter
    pack_linears(*models)
    loaded = compiled.library()
    register_cpu_kernels({} if loaded is None else kernels_of(loaded))
    is_uniform = type(target) is TargetModel and target.local_rope is None and target.config.embedding_scale == 1
    layers = lower_layers(target.layers) if is_uniform else None
    if layers is not None:
        target = NativeTarget(target, layers)
    return target, None if drafter is None else lower_drafter(drafter) or drafter


def is_in_library(target: TargetModel, drafter: Drafter | None) -> bool:
    """Whether all layers of both models are run by the library, and so little is left to torch."""
    return isinstance(target, NativeTarget) and (drafter is None or isinstance(drafter, NativeDrafter))


def accelerate_drafter(drafter: Drafter) -> Drafter:
    """The same for a drafter that comes later, to a target that `accelerate` has made ready."""
    if compute_weight(drafter).device.type != "cpu":
        join_weights(drafter)
        fuse_input_quantization(drafter)
        return drafter
    pack_linears(drafter)
    return lower_drafter(drafter) or drafter


def kernels_of(library: ctypes.CDLL) -> dict[str, Any]:
    """Return the library's versions of kernels, by their names."""
    kernels = {name: getattr(library, f"fledge_{name}") for name in KERNELS + TREE_KERNELS}
    by_team = {name: functools.partial(team.call, getattr(library, f"fledge_{name}")) for name in TEAM_KERNELS}
    return kernels | by_team
