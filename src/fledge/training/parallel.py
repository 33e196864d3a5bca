"""Training in several processes: who we are, how gradients are shared, how a whole state is gathered.

Every process has its own rows of each step. Losses are divided by what the whole step supervises, so gradients must be
summed over processes; DDP and FSDP2 average them, which `Workers.scale` undoes.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fledge.devices import choose_device
from fledge.errors import ConfigError

Kind = Literal["ddp", "fsdp2"]

# Buffers never change in training. Torch 2.13 has a new name for the option, and warns of the old one.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Describes this process among those that train together. Methods that speak of all must be called by all."""

    device: torch.device
    rank: int = 0
    world: int = 1
    control: Any = None  # a process group of CPU messages, so that agreeing on something does not wait for the device

    @classmethod
    def start(cls, device: str = "auto", *, timeout: timedelta = timedelta(minutes=30)) -> "Workers":
        """Join the other processes of a torchrun; without one this process is alone."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        kind = choose_device(device).type
        if world == 1:
            return cls(device=choose_device(device))
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        place = torch.device("cpu")
        if kind == "cuda":
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"process {local} of this machine has no GPU of its own ({torch.cuda.device_count()} here); "
                    "start torchrun with fewer processes"
                )
            place = torch.device("cuda", local)
            torch.cuda.set_device(place)
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if kind == "cuda" else "gloo",
                timeout=timeout,
                device_id=place if kind == "cuda" else None,
            )
        control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(device=place, rank=dist.get_rank(), world=dist.get_world_size(), control=control)

    def stop(self) -> None:
        """Leave the other processes."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def scale(self) -> int:
        """What a loss is multiplied with, so that averaged gradients are the sum over all processes."""
        return self.world

    def share_of(self, rows: int) -> slice:
        """Which of a step's rows this process has."""
        if rows % self.world:
            raise ConfigError(f"fit.rows: found {rows}, allowed is a multiple of {self.world}, the processes")
        each = rows // self.world
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def any(self, flag: bool) -> bool:
        """Whether any process says so. Does not wait for devices."""
        if self.world == 1:
            return flag
        said = torch.tensor([int(flag)])
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.control)
        return bool(said.item())

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def wrap(self, model: nn.Module, kind: Kind, compute: torch.dtype) -> nn.Module:
        """Return the model so that its backward passes share gradients. FSDP2 also computes in `compute`."""
        if self.world == 1:
            return model
        if kind == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            options: dict[str, Any] = {_KEEP_BUFFERS: False, "gradient_as_bucket_view": True}
            return DistributedDataParallel(model, device_ids=devices, **options)
        # One group: a drafter is a layer or two, and draft steps use every one of them several times in a pass.
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(self.device.type, (self.world,))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    @contextmanager
    def shares_gradients(self, model: nn.Module, now: bool) -> Iterator[None]:
        """Backward passes inside share gradients only if `now`; others add to what is shared later."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        quiet = isinstance(model, DistributedDataParallel) and not now
        with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            yield


_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)


def whole_model_state(model: nn.Module) -> dict[str, Any]:
    """All weights on the CPU, whatever the model is wrapped in; empty in other processes than the first."""
    if not isinstance(model, FSDPModule):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return {name: value.detach().cpu().clone() for name, value in inner.state_dict().items()}
    return get_model_state_dict(model, options=_WHOLE)


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, on the CPU."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, state, options=_SPREAD)
        return
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.load_state_dict(state)


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    set_optimizer_state_dict(model, optimizer, state, options=_SPREAD)
