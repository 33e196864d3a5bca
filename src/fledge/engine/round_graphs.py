"""Rounds as CUDA graphs: one for each batch size in use, each depth and each way of choosing.

A graph replays a whole round with one launch. It reads its rows from a fixed tensor and everything else from the row
state, so between replays only the list of rows changes. Batches are padded to the next captured size with the row
that belongs to nobody.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fledge.engine.choosing import Choosing, DeviceChooser
from fledge.engine.recording import Recorder
from fledge.engine.round import RoundOutcome, run_round
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState

MAX_GRAPHS = 256  # a bound on graph memory; rounds beyond it run without


@dataclass(frozen=True)
class RoundShape:
    """What distinguishes one captured round from another."""

    batch: int
    verify: int
    draft: int
    choosing: Choosing
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class CapturedRound:
    rows: Tensor  # [batch]: written before each replay
    replay: Callable[[], RoundOutcome]


def batch_sizes(max_requests: int) -> list[int]:
    """Return the batch sizes to capture: every one up to 4, then steps of at most a quarter."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32) if size < max_requests]
    sizes += range(40, min(max_requests, 128), 8)
    sizes += range(128, max_requests, 32)
    return [*(size for size in sizes if size < max_requests), max_requests]


class RoundGraphs:
    """Captures rounds when they are first needed, or ahead of time: see `missing`."""

    def __init__(self, models: RoundModels, state: RowState, max_requests: int, recorder: Recorder) -> None:
        self.models = models
        self.state = state
        self.sizes = batch_sizes(max_requests)
        self._recorder = recorder
        self._captured: dict[RoundShape, CapturedRound] = {}

    def replay(
        self, rows: list[int], *, verify: int, draft: int, choosing: Choosing, timed: bool = False
    ) -> RoundOutcome:
        """Run a round for `rows`; return its outcome for those rows only.

        A round is timed if its timed graph is there already: nobody waits for a capture to learn how fast a round is.
        """
        size = next(size for size in self.sizes if size >= len(rows))
        shape = RoundShape(size, verify, draft, choosing, timed)
        if shape not in self._captured:
            shape = replace(shape, timed=False)
        padded = self.state.tensor([*rows, *[self.state.padding_row] * (size - len(rows))])
        captured = self._captured.get(shape)
        if captured is None and len(self._captured) < MAX_GRAPHS:
            captured = self._capture(shape)
        if captured is None:
            outcome = self._play(padded, shape)
        else:
            captured.rows.copy_(padded, non_blocking=True)
            outcome = captured.replay()
        used = len(rows)
        return RoundOutcome(
            tokens=outcome.tokens[:used],
            accepted=outcome.accepted[:used],
            drafted=outcome.drafted[:used],
            health=outcome.health[:used],
            stamps=outcome.stamps,
        )

    def missing(self, depths: Iterable[int], max_batch: int) -> list[Callable[[], object]]:
        """Return what captures the greedy rounds of all batch sizes up to `max_batch`, timed and not.

        The largest come first, which size the memory that all graphs share.
        """
        sizes = [size for size in reversed(self.sizes) if size <= max_batch]
        shapes = [
            RoundShape(size, depth, depth, Choosing.GREEDY, timed)
            for depth in depths
            for size in sizes
            for timed in (False, True)
        ]
        return [partial(self._capture, shape) for shape in shapes if shape not in self._captured]

    def _capture(self, shape: RoundShape) -> CapturedRound:
        rows = torch.full((shape.batch,), self.state.padding_row, dtype=torch.int64, device=self.state.device)
        captured = CapturedRound(rows=rows, replay=self._recorder.record(lambda: self._play(rows, shape)))
        self._captured[shape] = captured
        return captured

    def _play(self, rows: Tensor, shape: RoundShape) -> RoundOutcome:
        chooser = DeviceChooser(self.state, rows, shape.choosing)
        outcome = run_round(
            self.models, self.state, rows, chooser, verify=shape.verify, draft=shape.draft, timed=shape.timed
        )
        self.state.reset_padding()
        return outcome
