"""The states of a store's examples as vLLM servers hand them over (`fledge.vllm_states`).

An example of T tokens is asked for without its last one: no draft step reads that token's state, and in an answer that
vLLM has just generated nobody computed it. Its row is zeros.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from fledge.training.data.examples import TokenStore
from fledge.vllm_states.files import StateReader


class StateStream:
    """States of a store's examples, in any order that is known in advance."""

    def __init__(self, reader: StateReader, store: TokenStore, *, max_bytes: int, in_flight: int) -> None:
        """`max_bytes` and `in_flight`: as of `StateReader.ahead`."""
        self.reader, self._store = reader, store
        self._max_bytes, self._in_flight = max_bytes, in_flight

    def of(self, examples: Iterable[int]) -> Iterator[Tensor]:
        """Yield each example's numbers [tokens, width] on the CPU. Its file is gone then; those ahead are made."""
        sequences = (np.asarray(self._store.example(i)[0][:-1], dtype=np.int64) for i in examples)
        for numbers in self.reader.ahead(sequences, max_bytes=self._max_bytes, in_flight=self._in_flight):
            yield F.pad(numbers, (0, 0, 0, 1))

    def close(self) -> None:
        """Let threads that wait for a file give up."""
        self.reader.closing.set()
