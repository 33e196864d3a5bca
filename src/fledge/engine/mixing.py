"""Prompts that are read in one pass with a round: which steps, of what sizes, and how many tokens at once.

A pass of both reads each weight once instead of twice. On a GPU it is a graph, and is used where that was measured to
take less time than a graph of each; prompts are cut so that those who decode are not held up for long. Without graphs
launching takes the time, and one pass is always better than two. A CPU has none of this: there every row takes time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fledge.engine.adjustments import SIZES
from fledge.engine.arms import Arm
from fledge.engine.device_state import DeviceState
from fledge.engine.graphs import GraphRunner
from fledge.engine.logprobs import Asked
from fledge.engine.mixed_passes import MixedOutcome, run_mixed
from fledge.engine.passes import ALIGNMENT
from fledge.engine.programs import PromptProgram, RoundProgram
from fledge.engine.sampler import SamplingMode, filtering_size

BATCHES = (4, 16, 32, 64, 128, 256)
FEW = 16  # requests, whose rounds take about as long as reading the weights does, however deep they draft
MOST_DEPTH = 3  # of more
# Up to so many requests: tokens, of which one at least is padding, and chunks of the prompts that there are graphs for.
PROMPTS = {FEW: ((64, 4), (128, 4), (256, 4), (512, 16)), 64: ((256, 4), (512, 16)), 256: ((512, 16), (1024, 16))}
MOST_STALL = 2.0  # rounds, that one with a few prompts may take


class MixedProgram(NamedTuple):
    """A round and the reading of prompts in one pass. Both draft the chain that the round verifies."""

    round: RoundProgram
    prompts: PromptProgram

    @property
    def uses_drafter(self) -> bool:
        return self.prompts.uses_drafter

    @property
    def sizes(self) -> tuple[int, ...]:
        return *self.round.sizes, *self.prompts.sizes

    @property
    def kind(self) -> tuple[object, ...]:
        return self.round.kind, self.prompts.kind

    def with_both(self, **settings: Any) -> "MixedProgram":
        """The same with these settings, that rounds and prompts have alike."""
        return MixedProgram(self.round._replace(**settings), self.prompts._replace(**settings))

    def inputs(self, state: DeviceState, work: Sequence[Any]) -> Tensor:
        """Of `work`: the round's requests, and chunks; nothing: nobody's."""
        requests, chunks = work or ((), ())
        rows = self.round.inputs(state, requests)
        return torch.cat([rows, rows.new_zeros(-len(rows) % ALIGNMENT), self.prompts.inputs(state, chunks)])

    def run(self, state: DeviceState, packed: Tensor) -> MixedOutcome:
        one, prompts = self
        size = one.batch + one.asked.size + 2 * one.adjusting + one.filtering
        sampler, asking = one.unpack(state, packed[:size])
        inputs, prompt_sampler = prompts.unpack(state, packed[-(-size // ALIGNMENT) * ALIGNMENT :])
        return run_mixed(
            state,
            sampler,
            inputs,
            prompt_sampler,
            arm=one.draft,
            sample_drafts=one.sample_drafts,
            asking=asking,
            top=one.asked.top,
            prompt_top=prompts.asked.top,
        )


class Mixing:
    """Which steps are one pass, and runs them: as graphs, if there are any."""

    def __init__(self, state: DeviceState, graphs: GraphRunner | None) -> None:
        self._state, self._graphs = state, graphs
        largest = 0 if graphs is None else graphs.sizes[-1]
        self._batches = sorted({min(size, largest) for size in BATCHES})
        self._saves: dict[MixedProgram, float] = {}  # those that take less time than both apart -> how many rounds less
        self._along: dict[tuple[int, Arm], int] = {}  # size and arm of a round -> prompt tokens that may go along

    def along(self, batch: int, arm: Arm) -> tuple[Arm, int] | None:
        """What a round of `batch` requests drafts if prompts go along, and how many tokens of a few may; None: any.

        More would hold up its requests for longer than `MOST_STALL`.
        """
        if self._graphs is None or arm.is_tree:
            return None
        size = self._size(batch)
        arm = self._graphs.prompt_arm(arm) if size <= FEW else arm
        tokens = self._along.get((size, arm))
        return None if tokens is None else (arm, tokens)

    def takes(self, program: MixedProgram, than: float = 0.0) -> bool:
        """Whether one pass saves more than two would, by a round that is shorter by the share `than`.

        Captures it, if it does: with filters, say, one more graph is needed.
        """
        padded = self.padded(program)
        if self._graphs is None or padded is None:
            return self._graphs is None
        measured = padded.with_both(sample_drafts=False, asked=Asked(), adjusting=0, filtering=0)
        return self._saves.get(measured, 0.0) > than and self._graphs.capture(padded)

    def run(self, program: MixedProgram, work: Sequence[Any]) -> MixedOutcome:
        """As `MixedProgram.inputs` has its work; in the outcome, rows of padding come after the others."""
        padded = self.padded(program)
        if self._graphs is not None and padded is not None:
            return cast("MixedOutcome", self._graphs.play(padded, work))
        outcome = program.run(self._state, program.inputs(self._state, work))
        self._state.reset_padding()
        return outcome

    def candidates(self, max_tokens: int) -> list[MixedProgram]:
        """Return what is worth measuring, and was not found to pay yet. Greedy requests run as sampled ones do."""
        graphs, has_drafter = self._graphs, self._state.drafter is not None
        if graphs is None:
            return []
        found = [
            MixedProgram(
                RoundProgram(size, arm, arm, SamplingMode.SAMPLED),
                PromptProgram(tokens, chunks, tokens, arm, has_drafter, SamplingMode.SAMPLED),
            )
            for size in self._batches
            for arm in (graphs.prompt_arms if size <= FEW else graphs.arms)
            if not arm.is_tree and (arm.depth <= MOST_DEPTH or arm in graphs.prompt_arms)
            for tokens, chunks in _prompt_sizes(size)
            if tokens <= max_tokens
        ]
        return [program for program in found if program not in self._saves]

    def learn(self, program: MixedProgram, *, seconds: float, round_seconds: float, prompt_seconds: float) -> bool:
        """Learn how long a candidate takes, and its parts apart; whether it pays."""
        saved = round_seconds + prompt_seconds - seconds
        if saved <= 0:
            return False
        self._saves[program] = saved / round_seconds
        key, tokens = (program.round.batch, program.round.draft), program.prompts.tokens - 1
        if key not in self._along or (seconds <= MOST_STALL * round_seconds and tokens > self._along[key]):
            self._along[key] = tokens
        return True

    def padded(self, program: MixedProgram) -> MixedProgram | None:
        """The program of a size that there are graphs of, that this one can run as; None: it is too large."""
        one, prompts = program
        batch = self._size(one.batch)
        sizes = _prompt_sizes(batch)
        size = next(((t, c) for t, c in sizes if t > prompts.tokens and c >= prompts.chunks), None)
        if not batch or size is None:
            return None
        adjusting = next(count for count in SIZES if count >= one.adjusting)
        (tokens, chunks), asked = size, prompts.asked
        filtering = filtering_size(one.filtering, batch), filtering_size(prompts.filtering, chunks)
        return MixedProgram(
            one._replace(batch=batch, asked=one.asked.of(batch), adjusting=adjusting, filtering=filtering[0]),
            prompts._replace(
                tokens=tokens, chunks=chunks, max_chunk=tokens, asked=asked.of(chunks), filtering=filtering[1]
            ),
        ).with_both(sampling=SamplingMode.SAMPLED)  # a few rows more or less cost nothing, a second set of graphs does

    def _size(self, batch: int) -> int:
        """Of the graphs for so many requests; 0: there are none."""
        return next((size for size in self._batches if size >= batch), 0)


def _prompt_sizes(batch: int) -> Sequence[tuple[int, int]]:
    return next((sizes for most, sizes in PROMPTS.items() if batch <= most), ())
