"""Tensors from mapped files to a GPU: in pieces through pinned memory, from several threads at once.

A copy straight from a mapped file goes through one thread of the driver, and joins are made on the host first. Here
each thread touches its own pages, and the device has each weight once, where it stays.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

THREADS = 8
PIECE_BYTES = 8 * 2**20  # two for each thread: one is filled while the other travels

One = TypeVar("One")
Made = TypeVar("Made")
_local = threading.local()


def in_threads(make: Callable[[One], Made], of: Iterable[One], device: torch.device | str) -> Iterator[Made]:
    """`map` for work that ends in `joined`: from several threads where it goes to a GPU."""
    if torch.device(device).type != "cuda":
        yield from map(make, of)
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads:
        yield from threads.map(make, of)


def joined(parts: Sequence[Tensor], device: torch.device | str, piece_bytes: int = PIECE_BYTES) -> Tensor:
    """Tensors of one dtype on the host, joined by their rows, on the device."""
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
    """The one of this thread's two buffers that was used longest ago, and the event of its last copy, which is done."""
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
