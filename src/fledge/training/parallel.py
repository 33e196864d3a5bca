"""Training in several processes: who we are, what the first one tells the others, how gradients and states are shared.

Every process has its own rows of each step. Losses are divided by what the whole step supervises, so gradients must be
summed over processes; DDP and FSDP2 average them, so losses are multiplied by the number of processes.
"""

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from fledge.devices import choose_device
from fledge.errors import ConfigError

_T = TypeVar("_T")
_POLL_SECONDS = 0.1
_PARTING_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Describes this process among those of a torchrun, before and between collective work.

    No process group: the others may wait for hours while the first one prepares data, which no collective outlasts.
    """

    rank: int = 0
    world: int = 1
    store: Any = None  # of torch.distributed; none where there is one process

    @classmethod
    def from_environment(cls) -> "Processes":
        """Read what torchrun set; without it this process is alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world = next(rendezvous("env://"))
        return cls(rank=rank, world=world, store=PrefixStore("fledge-train", store))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, name: str, value: Callable[[], _T]) -> _T:
        """Return the first process's `value()`, JSON values, in every process. The others wait for it."""
        if self.rank == 0:
            result = value()
            if self.world > 1:
                self.store.set(name, json.dumps(result))
            return result
        while not self.store.check([name]):  # not `wait`, in which Ctrl-C would not be heard
            time.sleep(_POLL_SECONDS)
        shared: _T = json.loads(self.store.get(name))
        return shared

    def part(self) -> None:
        """Wait, in the first process, until the others have read all that it shared: its store ends with it."""
        if self.world == 1:
            return
        if self.rank > 0:
            self.store.set(f"parted-{self.rank}", "")
            return
        others = [f"parted-{rank}" for rank in range(1, self.world)]
        deadline = time.monotonic() + _PARTING_SECONDS  # one that has failed never tells
        while not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Workers(Processes):
    """Describes this process among those that train together. Methods that speak of all must be called by all."""

    device: torch.device
    control: Any = None  # a process group of CPU messages, so that agreeing on something does not wait for the device

    @classmethod
    @contextmanager
    def start(cls, device: str = "auto") -> Iterator["Workers"]:
        """Join the other processes of a torchrun until the block ends; without one this process is alone."""
        place = choose_device(device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls(device=place)
            return
        local, timeout = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))), timedelta(minutes=30)
        on_gpu, gpus = place.type == "cuda", torch.cuda.device_count()
        if on_gpu:
            if local >= gpus:
                advice = f"({gpus} here); start torchrun with fewer processes"
                raise ConfigError(f"process {local} of this machine has no GPU of its own {advice}")
            place = torch.device("cuda", local)
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, device_id=place if on_gpu else None)
        try:
            control = dist.new_group(backend="gloo", timeout=timeout)
            yield cls(device=place, rank=dist.get_rank(), world=dist.get_world_size(), control=control)
        finally:
            dist.destroy_process_group()

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
        said = torch.tensor(int(flag))
        if self.world > 1:
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.control)
        return bool(said)

    def tell(self, value: _T) -> _T:
        """Return the first process's `value` in every process."""
        said = [value]
        if self.world > 1:
            dist.broadcast_object_list(said, group=self.control)
        return said[0]

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def wrap(self, model: nn.Module, kind: Literal["ddp", "fsdp2"], compute: torch.dtype) -> nn.Module:
        """Return the model so that its backward passes share gradients. FSDP2 also computes in `compute`."""
        if self.world == 1:
            return model
        if kind == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            # Buffers never change in training. Torch 2.13 has a new name for the option, and warns of the old one.
            known = inspect.signature(DistributedDataParallel.__init__).parameters
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
            return DistributedDataParallel(model, device_ids=devices, **options)
        # One group: a drafter is a layer or two, and draft steps use every one of them several times in a pass.
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=init_device_mesh(self.device.type, (self.world,)), mp_policy=policy)
        return model

    @contextmanager
    def shares_gradients(self, model: nn.Module, now: bool) -> Iterator[None]:
        """Backward passes inside share gradients only if `now`; others add to what is shared later."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        quiet = isinstance(model, DistributedDataParallel) and not now
        with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            yield
