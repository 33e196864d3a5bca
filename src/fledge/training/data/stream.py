"""The states of a store's examples from vLLM servers (`fledge.vllm_states`).

An example is requested without its last token: no draft step reads the state of that token, and in an answer that vLLM
has just generated, it was not computed. Its row is zeros.
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
        """Yield each example's states [tokens, width] on the CPU, and request the next ones in advance."""
        sequences = (np.asarray(self._store.example(i)[0][:-1], dtype=np.int64) for i in examples)
        for states in self.reader.ahead(sequences, max_bytes=self._max_bytes, in_flight=self._in_flight):
            yield F.pad(states, (0, 0, 0, 1))

    def close(self) -> None:
        """Make threads that wait for a file give up."""
        self.reader.closing.set()
