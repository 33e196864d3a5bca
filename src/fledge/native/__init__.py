"""The C layers for CPUs: they wrap a loaded target or drafter, which know nothing of them.

A round on a CPU is some hundred small operations, and launching them from Python takes longer than most of them do.
Here the layers of a model are one call, and all of a round's drafting another. `accelerate` makes models ready; the
C sources come compiled in a wheel, or are compiled by the machine's own compiler when they are first needed. Without
either, or with FLEDGE_NATIVE=0, or for layers of a kind that is not here, torch does the same work.
"""

from fledge.kernels._triton import register_cpu_kernels
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel
from fledge.native import library as compiled
from fledge.native.decoder import NativeTarget, lower_layers
from fledge.native.drafter import lower_drafter
from fledge.native.linear import pack_linears
from fledge.native.rows import KERNELS
from fledge.native.trees import KERNELS as TREE_KERNELS


def accelerate(target: TargetModel, drafter: Drafter | None) -> tuple[TargetModel, Drafter | None]:
    """Return the models as they run fastest for inference on their device: on a CPU in float32, in C.

    Their linear layers get another layout, in place: see `pack_linears`. What cannot be lowered is returned as it is.
    Weights must not change afterwards.
    """
    if target.embed_tokens.weight.device.type != "cpu":
        return target, drafter
    pack_linears(*(model for model in (target, drafter) if model is not None))
    register_cpu_kernels({**KERNELS, **TREE_KERNELS} if compiled.library() is not None else {})
    layers = lower_layers(target.layers) if type(target) is TargetModel else None
    if layers is not None:
        target = NativeTarget(target, layers)
    if drafter is not None:
        drafter = lower_drafter(drafter) or drafter
    return target, drafter
