"""Prompts that are read in one pass with a round: which steps, of what sizes, and how many tokens at once.

A pass of both reads each weight once instead of twice. On a GPU it is a graph, and is used where that was measured to
take less time than a graph of each; prompts are cut so that those who decode are not held up for long. Without graphs
launching takes the time, and one pass is always better than two. A CPU has none of this: there every row takes time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
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
from fledge.engine.sampler import SamplingMode

BATCHES = (4, 16, 32, 64, 128, 256)
FEW = 16  # requests, whose rounds take about as long as reading the weights does, however deep they draft
MOST_DEPTH = 3  # of more
# Up to so many requests: tokens, of which one at least is padding, and chunks of the prompts that there are graphs for.
# With a row of each request they fill tiles of 64 or 128 rows: from some 150 on, every row takes time.
PROMPTS = {
    FEW: ((64, 4), (128, 4), (192, 4), (256, 4), (512, 16)),
    64: ((64, 4), (128, 4), (192, 4), (320, 16), (448, 16)),
    256: ((256, 16), (512, 16), (768, 16), (1024, 16)),
}
USUAL_TOKENS = 256  # that the prompts of a step have at most, where one or two of a chat come
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
        size = one.batch + one.asked.size + 2 * one.adjusting
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


class Times(NamedTuple):
    """Seconds of a round with prompts in one pass, and of both apart."""

    both: float
    round: float
    prompts: float

    def saved(self, share: float = 1.0) -> float:
        """How many rounds less it takes, for prompts that fill this share of it: apart they take as much at least."""
        return (self.round + share * self.prompts - self.both) / self.round


class Mixing:
    """Which steps are one pass, and runs them: as graphs, if there are any."""

    def __init__(self, state: DeviceState, graphs: GraphRunner | None) -> None:
        self._state, self._graphs = state, graphs
        largest = 0 if graphs is None else graphs.sizes[-1]
        self._batches = sorted({min(size, largest) for size in BATCHES})
        self.wanted: Counter[MixedProgram] = Counter()  # what is to be measured, and how many steps it would have been
        self._times: dict[MixedProgram, Times] = {}  # of those that were
        self._along: dict[tuple[int, Arm], int] = {}  # size and arm of a round -> prompt tokens that may go along

    def along(self, batch: int, arm: Arm) -> tuple[Arm, int] | None:
        """What a round of `batch` requests drafts if prompts go along, and how many tokens of a few may; None: any.

        More would hold up its requests for longer than `MOST_STALL`.
        """
        if self._graphs is None or arm.is_tree:
            return None
        size = self._size(batch)
        arm = self._arm(size, arm)
        tokens = self._along.get((size, arm))
        return None if tokens is None else (arm, tokens)

    def takes(self, program: MixedProgram, than: float = 0.0) -> bool:
        """Whether one pass saves more than two would, by a round that is shorter by the share `than`.

        What is missing to say or to do so is counted as wanted: a measurement, or with filters, say, one more graph.
        """
        if self._graphs is None:
            return True
        smallest = next(self._fitting(program), None)
        if smallest is None:
            return False
        if self.wanted:
            one, prompts = _plain(smallest)
            arm = self._arm(one.batch, one.draft)
            usual = MixedProgram(one._replace(verify=arm), prompts).with_both(draft=arm)
            if usual in self.wanted:
                self.wanted[usual] += 1
        padded = self._best(program, smallest)
        if self._saved(padded, smallest) <= than:
            return False
        if padded not in self._graphs.captured:
            self._graphs.wanted[padded] += 1
        return padded in self._graphs.captured

    def run(self, program: MixedProgram, work: Sequence[Any]) -> MixedOutcome:
        """As `MixedProgram.inputs` has its work; in the outcome, rows of padding come after the others."""
        padded = self.padded(program)
        if self._graphs is not None and padded is not None:
            return cast("MixedOutcome", self._graphs.play(padded, work))
        outcome = program.run(self._state, program.inputs(self._state, work))
        self._state.reset_padding()
        return outcome

    def candidates(self, max_tokens: int) -> list[MixedProgram]:
        """Return what is worth measuring, and was not yet. Greedy requests run as sampled ones do.

        Prompts as they usually are come first: the larger ones of them will do for smaller ones meanwhile.
        """
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
            for tokens, chunks in reversed(_prompt_sizes(size))
            if tokens <= max_tokens
        ]
        found.sort(key=lambda one: round(abs(math.log2(one.prompts.tokens / USUAL_TOKENS))))
        found = [program for program in found if program not in self._times]
        self.wanted = Counter({program: self.wanted[program] for program in found})
        return found

    def learn(self, program: MixedProgram, times: Times) -> bool:
        """Learn how long a candidate takes, and its parts apart; whether it pays."""
        self._times[program] = times
        self.leave(program)
        return times.saved() > 0

    def leave(self, program: MixedProgram) -> None:
        """Measure it no more.

        The prompts beside rounds like its own are bounded by what pays and holds up nobody, or may yet prove to.
        """
        self.wanted.pop(program, None)
        key = program.round.batch, program.round.draft

        def is_like(one: MixedProgram) -> bool:
            return (one.round.batch, one.round.draft) == key

        paying = {one.prompts.tokens: t for one, t in self._times.items() if is_like(one) and t.saved() > 0}
        if paying:
            short = {tokens for tokens, times in paying.items() if times.both <= MOST_STALL * times.round}
            unknown = {one.prompts.tokens for one in self.wanted if is_like(one)}
            self._along[key] = max(short | unknown, default=min(paying)) - 1

    def padded(self, program: MixedProgram) -> MixedProgram | None:
        """The program of a size that there are graphs of, that this one can run as; None: it is too large."""
        smallest = next(self._fitting(program), None)
        return None if smallest is None else self._best(program, smallest)

    def _best(self, program: MixedProgram, smallest: MixedProgram) -> MixedProgram:
        """Of all that fit, the smallest that pays, as far as it is known; or else the smallest."""
        return next((one for one in self._fitting(program) if self._saved(one, smallest) > 0), smallest)

    def _saved(self, padded: MixedProgram, smallest: MixedProgram) -> float:
        """How many rounds a program saves where this smaller one would do; 0 where it is not known."""
        times = self._times.get(_plain(padded))
        return 0.0 if times is None else times.saved(smallest.prompts.tokens / padded.prompts.tokens)

    def _fitting(self, program: MixedProgram) -> Iterator[MixedProgram]:
        """The programs of all sizes that this one can run as, smallest first."""
        one, prompts = program
        batch, asked = self._size(one.batch), prompts.asked
        sizes = [(t, c) for t, c in _prompt_sizes(batch) if t > prompts.tokens and c >= prompts.chunks]
        if not batch or not sizes:
            return
        adjusting = next(count for count in SIZES if count >= one.adjusting)
        sampling = SamplingMode.SAMPLED  # a few rows more or less cost nothing, a second set of graphs does
        one = one._replace(batch=batch, asked=one.asked.of(batch), adjusting=adjusting, sampling=sampling)
        for tokens, chunks in sizes:
            padded = prompts._replace(
                tokens=tokens, chunks=chunks, max_chunk=tokens, asked=asked.of(chunks), sampling=sampling
            )
            yield MixedProgram(one, padded)

    def _arm(self, size: int, arm: Arm) -> Arm:
        """What a round of this size drafts if prompts go along."""
        return self._graphs.prompt_arm(arm) if self._graphs is not None and size <= FEW else arm

    def _size(self, batch: int) -> int:
        """Of the graphs for so many requests; 0: there are none."""
        return next((size for size in self._batches if size >= batch), 0)


def _plain(program: MixedProgram) -> MixedProgram:
    """What is measured in its place: what requests ask for besides changes little."""
    return program.with_both(sample_drafts=False, asked=Asked(), adjusting=0)


def _prompt_sizes(batch: int) -> Sequence[tuple[int, int]]:
    return next((sizes for most, sizes in PROMPTS.items() if batch <= most), ())
