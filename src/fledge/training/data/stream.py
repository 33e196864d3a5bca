"""The states of examples as vLLM servers hand them over (`fledge.vllm_states`): asked for ahead, gone once read.

Nothing runs far ahead: at most `max_bytes` of states are asked for and not yet read. vLLM waits while training does.

An example of T tokens is asked for without its last one: no draft step reads that token's state, and in an answer that
vLLM has just generated nobody computed it. Its row is zeros.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.devices import DTYPES
from fledge.training.data.examples import TokenStore
from fledge.vllm_states.files import StateReader


class StateStream:
    """States of a store's examples, in any order that is known in advance."""

    def __init__(self, reader: StateReader, store: TokenStore, *, max_bytes: int, in_flight: int) -> None:
        """`in_flight`: how many sequences may be asked for at a time."""
        self.reader, self._store = reader, store
        self._max_bytes, self._in_flight = max_bytes, in_flight

    def of(self, examples: Iterable[int]) -> Iterator[Tensor]:
        """Yield each example's numbers [tokens, width] on the CPU. Its file is gone then; those ahead are made."""
        left, pending, ahead = iter(examples), deque[tuple[int, int, Future[None]]](), 0
        following = next(left, None)
        self.reader.closing.clear()
        pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="states")
        try:
            while following is not None or pending:
                while following is not None:
                    size = self.reader.files.layers.file_bytes(int(self._store.lengths[following]))
                    if pending and ahead + size > self._max_bytes:
                        break  # the reader is behind
                    pending.append((following, size, pool.submit(self.reader.have_written, self._sequence(following))))
                    ahead += size
                    following = next(left, None)
                example, size, written = pending.popleft()
                written.result()
                numbers = self._take(example)
                ahead -= size
                yield numbers
        finally:
            self.reader.closing.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let threads that wait for a file give up."""
        self.reader.closing.set()

    def _sequence(self, example: int) -> NDArray[np.int64]:
        tokens, _ = self._store.example(example)
        return np.asarray(tokens[:-1], dtype=np.int64)

    def _take(self, example: int) -> Tensor:
        """The example's numbers [tokens, width]; its file is removed."""
        ids, layers = self._sequence(example), self.reader.files.layers
        numbers = torch.zeros(len(ids) + 1, layers.width, dtype=DTYPES[layers.dtype])
        if len(ids):
            numbers[:-1] = self.reader.take(ids)
        return numbers
