"""Short prompts read as CUDA graphs.

Launched one by one from Python, the kernels of a short prompt take many times as long as the device needs for them. A
graph has a fixed number of tokens and chunks, and the rest is padded: with tokens that nobody reads. Long prompts keep
the device busy for longer than they take to launch, and are read as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fledge.engine.choosing import Choosing, DeviceChooser
from fledge.engine.prefill import PrefillInputs, PrefillOutcome, lay_out, run_prefill
from fledge.engine.recording import Recorder
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.scheduler import Chunk

TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)  # of which one at least is padding
CHUNKS = (1, 4, 16)
LEAST_TOKENS_PER_CHUNK = 16  # a graph is not captured ahead of time for shorter ones


@dataclass(frozen=True)
class PrefillShape:
    """What distinguishes one captured prefill from another."""

    tokens: int
    chunks: int
    depth: int
    has_drafter: bool  # it may have been given up
    choosing: Choosing


@dataclass(frozen=True, kw_only=True)
class CapturedPrefill:
    packed: Tensor  # written before each replay
    replay: Callable[[], PrefillOutcome]


class PrefillGraphs:
    """Captures prefills when they are first needed, or ahead of time: see `missing`."""

    def __init__(self, models: RoundModels, state: RowState, recorder: Recorder) -> None:
        self.state = state
        self._block_size = models.block_size
        self._recorder = recorder
        self._captured: dict[PrefillShape, CapturedPrefill] = {}

    def replay(
        self, models: RoundModels, chunks: Sequence[Chunk], *, depth: int, choosing: Choosing
    ) -> PrefillOutcome | None:
        """Read the chunks; None if there are too many, or they are too long, for a graph."""
        length = sum(chunk.end - chunk.start for chunk in chunks)
        tokens = next((size for size in TOKENS if size > length), 0)
        count = next((size for size in CHUNKS if size >= len(chunks)), 0)
        if not count or not tokens:
            return None
        shape = PrefillShape(tokens, count, depth, models.drafter is not None, choosing)
        captured = self._captured.get(shape) or self._capture(models, shape)
        packed = lay_out(
            chunks,
            block_size=self._block_size,
            padding_row=self.state.padding_row,
            padded_tokens=tokens,
            padded_chunks=count,
        )
        captured.packed.copy_(self.state.tensor(packed), non_blocking=True)
        outcome, used = captured.replay(), len(chunks)
        health = outcome.drafts_health
        return PrefillOutcome(
            first_tokens=outcome.first_tokens[:used],
            health=outcome.health[:used],
            drafts_health=None if health is None else health[:used],
        )

    def missing(
        self, models: RoundModels, depths: Iterable[int], *, max_tokens: int, max_chunks: int
    ) -> list[Callable[[], object]]:
        """Return what captures greedy prefills of all sizes that `max_tokens` and `max_chunks` fit, largest first."""
        shapes = [
            PrefillShape(tokens, chunks, depth, models.drafter is not None, Choosing.GREEDY)
            for depth in depths
            for tokens, smaller in reversed(list(zip(TOKENS, (0, *TOKENS), strict=False)))
            for chunks, fewer in zip(CHUNKS, (0, *CHUNKS), strict=False)
            if smaller <= max_tokens and fewer < max_chunks and chunks * LEAST_TOKENS_PER_CHUNK <= tokens
        ]
        return [partial(self._capture, models, shape) for shape in shapes if shape not in self._captured]

    def _capture(self, models: RoundModels, shape: PrefillShape) -> CapturedPrefill:
        nothing = lay_out(
            [],
            block_size=self._block_size,
            padding_row=self.state.padding_row,
            padded_tokens=shape.tokens,
            padded_chunks=shape.chunks,
        )
        packed = self.state.tensor(nothing)
        inputs = PrefillInputs.of(packed, tokens=shape.tokens, chunks=shape.chunks, max_chunk=shape.tokens)
        chooser = DeviceChooser(self.state, inputs.rows, shape.choosing)
        captured = CapturedPrefill(
            packed=packed,
            replay=self._recorder.record(lambda: run_prefill(models, self.state, inputs, chooser, depth=shape.depth)),
        )
        self._captured[shape] = captured
        return captured
