"""Training in several processes: their ranks, what they send each other, and how they share gradients.

Every process has its own rows of each step. Losses are divided by the supervised slots of the whole step, so gradients
must be summed over processes. DDP and FSDP2 average them, so losses are multiplied by the number of processes.
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
_FINISH_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The process and the others of its torchrun, before there is a process group.

    The others may wait for hours while the first one prepares data. A collective would time out, so values are shared
    through torchrun's key-value store.
    """

    rank: int = 0
    world_size: int = 1
    store: Any = None  # a torch.distributed store; None: this is the only process

    @classmethod
    def from_environment(cls) -> "Processes":
        """Read the environment that torchrun sets. Without it, this is the only process."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world_size = next(rendezvous("env://"))
        return cls(rank=rank, world_size=world_size, store=PrefixStore("fledge-train", store))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, name: str, value: Callable[[], _T]) -> _T:
        """Return the first process's `value()` (JSON values) in every process. The others wait for it."""
        if self.rank == 0:
            result = value()
            if self.world_size > 1:
                self.store.set(name, json.dumps(result))
            return result
        while not self.store.check([name]):  # `store.wait` would not react to Ctrl-C
            time.sleep(_POLL_SECONDS)
        shared: _T = json.loads(self.store.get(name))
        return shared

    def finish(self) -> None:
        """In the first process: wait until the others have read all that it shared, since the store ends with it."""
        if self.world_size == 1:
            return
        if self.rank > 0:
            self.store.set(f"finished-{self.rank}", "")
            return
        others = [f"finished-{rank}" for rank in range(1, self.world_size)]
        deadline = time.monotonic() + _FINISH_SECONDS  # a process that has failed never says so
        while not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Workers(Processes):
    """The process and the others of its process group. Methods that communicate must be called by all of them."""

    device: torch.device
    control: Any = None  # a gloo group for messages between hosts, which does not wait for the devices

    @classmethod
    @contextmanager
    def start(cls, device: str = "auto") -> Iterator["Workers"]:
        """Join the process group of a torchrun until the block ends. Without torchrun, this is the only process."""
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
            yield cls(device=place, rank=dist.get_rank(), world_size=dist.get_world_size(), control=control)
        finally:
            dist.destroy_process_group()

    def share_of(self, rows: int) -> slice:
        """Which of a step's rows this process has."""
        if rows % self.world_size:
            raise ConfigError(f"fit.rows: found {rows}, allowed is a multiple of {self.world_size}, the processes")
        each = rows // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process. Does not wait for devices."""
        highest = torch.tensor(int(flag))
        if self.world_size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.control)
        return bool(highest)

    def broadcast(self, value: _T) -> _T:
        """Return the first process's `value` in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def wrap(self, model: nn.Module, kind: Literal["ddp", "fsdp2"], compute: torch.dtype) -> nn.Module:
        """Wrap the model so that backward passes share gradients. With FSDP2 it also computes in `compute`."""
        if self.world_size == 1:
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
        fully_shard(model, mesh=init_device_mesh(self.device.type, (self.world_size,)), mp_policy=policy)
        return model

    @contextmanager
    def shares_gradients(self, model: nn.Module, now: bool) -> Iterator[None]:
        """Share gradients after the backward passes in this block only if `now`; else they are accumulated."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        quiet = isinstance(model, DistributedDataParallel) and not now
        with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            yield
