"""Copies tensors from memory-mapped files to a GPU, in pieces through pinned memory, with several threads.

A direct copy from a mapped file is limited to one thread of the driver, and would need concatenation on the host first.
Here each thread reads its own pages, and each weight is allocated on the device once.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

THREADS = 8
PIECE_BYTES = 8 * 2**20  # each thread has two such buffers: one is filled while the other is copied

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_local = threading.local()


def map_in_threads(make: Callable[[_In], _Out], of: Iterable[_In], device: torch.device | str) -> Iterator[_Out]:
    """`map`, with several threads if `device` is a GPU, for functions that call `joined`."""
    if torch.device(device).type != "cuda":
        yield from map(make, of)
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads:
        yield from threads.map(make, of)


def joined(parts: Sequence[Tensor], device: torch.device | str, piece_bytes: int = PIECE_BYTES) -> Tensor:
    """Concatenate tensors of one dtype in host memory along dimension 0, on the device."""
    shape = parts[0].shape if len(parts) == 1 else (sum(len(part) for part in parts), *parts[0].shape[1:])
    out = torch.empty(shape, dtype=parts[0].dtype, device=device)
    rest, length = out.view(-1), max(1, piece_bytes // out.element_size())
    for flat in (part.reshape(-1) for part in parts):
        for start in range(0, len(flat), length):
            piece = flat[start : start + length]
            pinned, copied = _buffer(piece_bytes, torch.device(device))
            source = pinned.view(out.dtype)[: len(piece)].copy_(piece)
            rest[: len(piece)].copy_(source, non_blocking=True)
            if copied is not None:
                copied.record()
            rest = rest[len(piece) :]
    return out


def _buffer(size: int, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return the least recently used of this thread's two buffers, whose last copy is complete, and its event."""
    on_gpu = device.type == "cuda"
    buffers = getattr(_local, "buffers", None)
    if buffers is None or len(buffers[0][0]) != size:
        events = [torch.cuda.Event() if on_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        buffers = _local.buffers = [(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu), one) for one in events]
    buffers.reverse()
    pinned, copied = buffers[0]
    if copied is not None:
        copied.synchronize()
    return pinned, copied
