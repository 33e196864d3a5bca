"""Device programs recorded as CUDA graphs, which one launch replays."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """Makes replays of programs that read and write fixed tensors only."""

    def record(self, play: Callable[[], T]) -> Callable[[], T]:
        """Return what does the same as `play`, with one launch. Results of one call are overwritten by the next."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share their memory: what one of them computed on the way is lost to the next."""

    def __init__(self) -> None:
        self._pool: Any = None  # of graph memory; torch gives its type no public name

    def record(self, play: Callable[[], T]) -> Callable[[], T]:
        """Play once aside, so that kernels are compiled and libraries set up, then record."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            play()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = play()
        self._pool = graph.pool()

        def replay() -> T:
            graph.replay()
            return outcome

        return replay
