"""Rounds and prompts as CUDA graphs: a whole device program replayed with one launch.

Launched one by one from Python, the kernels of a round or a short prompt take many times as long as the device needs
for them. A graph reads its inputs from a fixed tensor and everything else from the row state. It has a fixed size:
rounds are padded with the row that belongs to nobody, prompts with tokens that nobody reads. Long prompts keep the
device busy for longer than they take to launch, and run as they are.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fledge.engine.prefill import PrefillInputs, lay_out, run_prefill
from fledge.engine.round import run_round
from fledge.engine.round_models import PassOutcome, RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.sampler import Sampler, SamplingMode
from fledge.engine.scheduler import Chunk

MAX_GRAPHS = 512  # a bound on graph memory; what comes after it runs without
PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)  # of which one at least is padding
PROMPT_CHUNKS = (1, 4, 16)
LEAST_TOKENS_PER_CHUNK = 16  # a graph is not captured ahead of time for shorter ones


@dataclass(frozen=True)
class RoundGraphKey:
    """What distinguishes one captured round from another."""

    batch: int
    verify: int
    draft: int
    sampling: SamplingMode
    timed: bool = False


@dataclass(frozen=True)
class PromptGraphKey:
    """What distinguishes one captured prefill from another."""

    tokens: int
    chunks: int
    depth: int
    has_drafter: bool  # it may have been given up
    sampling: SamplingMode


GraphKey = RoundGraphKey | PromptGraphKey


@dataclass(frozen=True, kw_only=True)
class Graph:
    inputs: Tensor  # written before each replay
    replay: Callable[[], PassOutcome]


class GraphCache:
    """At most `capacity` captured graphs, by what they compute. They share their memory: what one of them computed
    on the way is lost to the next.
    """

    def __init__(self, capacity: int = MAX_GRAPHS) -> None:
        self._capacity = capacity
        self._graphs: dict[GraphKey, Graph] = {}
        self._pool: Any = None  # of graph memory; torch gives its type no public name

    @property
    def keys(self) -> Collection[GraphKey]:
        return self._graphs.keys()

    def get(
        self, key: GraphKey, inputs: Callable[[], Tensor], program: Callable[[Tensor], PassOutcome]
    ) -> Graph | None:
        """Return the graph of `program` on `inputs`, captured now if it was not; None: there is no more room."""
        graph = self._graphs.get(key)
        if graph is None and len(self._graphs) < self._capacity:
            fixed = inputs()
            graph = self._graphs[key] = Graph(inputs=fixed, replay=self.record(lambda: program(fixed)))
        return graph

    def record(self, play: Callable[[], PassOutcome]) -> Callable[[], PassOutcome]:
        """Return what does the same as `play`, with one launch. Results of one call are overwritten by the next.

        Plays once aside first, so that kernels are compiled and libraries set up.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            play()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = play()
        self._pool = graph.pool()

        def replay() -> PassOutcome:
            graph.replay()
            return outcome

        return replay


def batch_sizes(max_requests: int) -> list[int]:
    """Return the batch sizes to capture: every one up to 4, then steps of at most a quarter."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32) if size < max_requests]
    sizes += range(40, min(max_requests, 128), 8)
    sizes += range(128, max_requests, 32)
    return [*(size for size in sizes if size < max_requests), max_requests]


class GraphRunner:
    """Runs rounds and prompts through graphs, captured when they are first needed or ahead of time (`missing`)."""

    def __init__(self, state: RowState, cache: GraphCache, sizes: Sequence[int]) -> None:
        """`sizes`: the batch sizes of rounds, in order; the last is the largest there can be."""
        self.cache = cache
        self.sizes = sizes
        self._state = state

    def round(
        self,
        models: RoundModels,
        rows: list[int],
        *,
        verify: int,
        draft: int,
        sampling: SamplingMode,
        timed: bool = False,
    ) -> PassOutcome:
        """Run a round for `rows`; in its outcome, rows of padding come after theirs.

        A round is timed if its timed graph is there already: nobody waits for a capture to learn how fast a round is.
        """
        size = next(size for size in self.sizes if size >= len(rows))
        key = RoundGraphKey(size, verify, draft, sampling, timed)
        if key not in self.cache.keys:
            key = replace(key, timed=False)
        padded = self._state.tensor([*rows, *[self._state.padding_row] * (size - len(rows))])
        graph = self._capture(models, key)
        return _replay(graph, padded) if graph is not None else self._play_round(models, key, padded)

    def prefill(
        self, models: RoundModels, chunks: Sequence[Chunk], *, depth: int, sampling: SamplingMode
    ) -> PassOutcome | None:
        """Read the chunks; None if there are too many, or they are too long, for a graph."""
        length = sum(chunk.end - chunk.start for chunk in chunks)
        tokens = next((size for size in PROMPT_TOKENS if size > length), 0)
        count = next((size for size in PROMPT_CHUNKS if size >= len(chunks)), 0)
        if not count or not tokens:
            return None
        key = PromptGraphKey(tokens, count, depth, models.drafter is not None, sampling)
        graph = self._capture(models, key)
        if graph is None:
            return None
        return _replay(graph, self._lay_out(models, chunks, key))

    def missing(
        self, models: RoundModels, depths: Collection[int], *, max_batch: int, max_tokens: int
    ) -> list[Callable[[], object]]:
        """Return what captures the greedy rounds and prompts of all sizes that the bounds fit and that are not there.

        The largest come first, which size the memory that all graphs share.
        """
        has_drafter = models.drafter is not None
        keys: list[GraphKey] = []
        for depth in sorted(depths):
            keys += (
                RoundGraphKey(size, depth, depth, SamplingMode.GREEDY, timed)
                for size in reversed(self.sizes)
                if size <= max_batch
                for timed in (False, True)
            )
            keys += (
                PromptGraphKey(tokens, chunks, depth, has_drafter, SamplingMode.GREEDY)
                for tokens, chunks in _prompt_sizes(max_tokens, max_batch)
            )
        return [lambda key=key: self._capture(models, key) for key in keys if key not in self.cache.keys]  # type: ignore[misc]

    def _capture(self, models: RoundModels, key: GraphKey) -> Graph | None:
        if isinstance(key, RoundGraphKey):
            rows = [self._state.padding_row] * key.batch
            return self.cache.get(
                key, lambda: self._state.tensor(rows), lambda inputs: self._play_round(models, key, inputs)
            )
        return self.cache.get(
            key, lambda: self._lay_out(models, [], key), lambda inputs: self._play_prefill(models, key, inputs)
        )

    def _play_round(self, models: RoundModels, key: RoundGraphKey, rows: Tensor) -> PassOutcome:
        sampler = Sampler(self._state, rows, key.sampling)
        outcome = run_round(models, self._state, rows, sampler, verify=key.verify, draft=key.draft, timed=key.timed)
        self._state.reset_padding()
        return outcome

    def _play_prefill(self, models: RoundModels, key: PromptGraphKey, packed: Tensor) -> PassOutcome:
        inputs = PrefillInputs.of(packed, tokens=key.tokens, chunks=key.chunks, max_chunk=key.tokens)
        sampler = Sampler(self._state, inputs.rows, key.sampling)
        return run_prefill(models, self._state, inputs, sampler, depth=key.depth)

    def _lay_out(self, models: RoundModels, chunks: Sequence[Chunk], key: PromptGraphKey) -> Tensor:
        packed = lay_out(
            chunks,
            block_size=models.block_size,
            padding_row=self._state.padding_row,
            padded_tokens=key.tokens,
            padded_chunks=key.chunks,
        )
        return self._state.tensor(packed)


def _replay(graph: Graph, inputs: Tensor) -> PassOutcome:
    graph.inputs.copy_(inputs, non_blocking=True)
    return graph.replay()


def _prompt_sizes(max_tokens: int, max_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (tokens, chunks) of the prompt graphs that are worth having ahead of time, largest first."""
    for tokens, smaller in reversed(list(zip(PROMPT_TOKENS, (0, *PROMPT_TOKENS), strict=False))):
        for chunks, fewer in zip(PROMPT_CHUNKS, (0, *PROMPT_CHUNKS), strict=False):
            if smaller <= max_tokens and fewer < max_chunks and chunks * LEAST_TOKENS_PER_CHUNK <= tokens:
                yield tokens, chunks
