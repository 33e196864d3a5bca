"""Mixed passes: a round and prefill in one pass. Which steps use one, of which sizes, with how many prompt tokens.

A mixed pass reads each weight once instead of twice. On a GPU it is a graph, and used if it was measured to take less
time than separate graphs; prompts are cut into chunks so that decoding requests are not delayed for long. Without
graphs on a GPU launching dominates, and a mixed pass is always used. On a CPU it never is: there every row takes time.
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
SMALL_BATCH = 16  # rounds of up to so many requests are bound by reading the weights, at any depth
LARGE_BATCH_DEPTH = 3  # the deepest rounds of larger batches that graphs are captured for
# Batch size -> (tokens, at least one of which is padding, and chunks) of the prompts that graphs are captured for.
# With one row per request they fill tiles of 64 or 128 rows: from about 150 on, every row takes time.
PROMPT_SIZES = {
    SMALL_BATCH: ((64, 4), (128, 4), (192, 4), (256, 4), (512, 16)),
    64: ((64, 4), (128, 4), (192, 4), (320, 16), (448, 16)),
    256: ((256, 16), (512, 16), (768, 16), (1024, 16)),
}
TYPICAL_TOKENS = 256  # bound on the prompt tokens of a step with one or two new chat messages
MAX_STALL = 2.0  # time of a mixed pass with few prompts, in rounds


class MixedProgram(NamedTuple):
    """A round and prefill in one pass. Both draft a chain of the depth that the round verifies."""

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
        """Return the program with these fields replaced in both parts."""
        return MixedProgram(self.round._replace(**settings), self.prompts._replace(**settings))

    def inputs(self, state: DeviceState, work: Sequence[Any]) -> Tensor:
        """Pack `work`, (requests, chunks); empty `work` means padding only."""
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


class PassTimes(NamedTuple):
    """Seconds of a mixed pass, and of its round and its prefill as separate passes."""

    mixed: float
    round: float
    prompts: float

    def saved(self, share: float = 1.0) -> float:
        """Return the time saved, in rounds, if the prompts fill only this share of the pass.

        Such prompts are taken to need that share of the time of a separate prefill, which is the least they need.
        """
        return (self.round + share * self.prompts - self.mixed) / self.round


class Mixing:
    """Decides which steps are mixed passes, and runs them, as graphs if there are any."""

    def __init__(self, state: DeviceState, graphs: GraphRunner | None) -> None:
        self._state, self._graphs = state, graphs
        largest = 0 if graphs is None else graphs.sizes[-1]
        self._batches = sorted({min(size, largest) for size in BATCHES})
        self.wanted: Counter[MixedProgram] = Counter()  # programs to be measured -> steps that could have used them
        self._times: dict[MixedProgram, PassTimes] = {}  # of measured programs
        self._max_tokens: dict[tuple[int, Arm], int] = {}  # size and arm of a round -> limit of prompt tokens

    def along(self, batch: int, arm: Arm) -> tuple[Arm, int] | None:
        """Return what a round of `batch` requests drafts in a mixed pass, and how many tokens a few prompts may have.

        More would delay its requests by more than `MAX_STALL`. None: no limit.
        """
        if self._graphs is None or arm.is_tree:
            return None
        size = self._size(batch)
        arm = self._arm(size, arm)
        tokens = self._max_tokens.get((size, arm))
        return None if tokens is None else (arm, tokens)

    def takes(self, program: MixedProgram, than: float = 0.0) -> bool:
        """Whether a mixed pass saves more than `than` rounds, which separate passes save by verifying fewer drafts.

        A missing measurement, or a missing graph, is counted in `wanted`.
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
        """Run it on `work` (requests, chunks); in the outcome, padding rows come last."""
        padded = self.padded(program)
        if self._graphs is not None and padded is not None:
            return cast("MixedOutcome", self._graphs.run(padded, work))
        outcome = program.run(self._state, program.inputs(self._state, work))
        self._state.reset_padding()
        return outcome

    def candidates(self, max_tokens: int) -> list[MixedProgram]:
        """Return the programs to measure, and count them as wanted. Greedy requests use sampled programs too.

        Typical sizes come first, of these the larger ones: they serve smaller prompts meanwhile.
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
            for arm in (graphs.prompt_arms if size <= SMALL_BATCH else graphs.arms)
            if not arm.is_tree and (arm.depth <= LARGE_BATCH_DEPTH or arm in graphs.prompt_arms)
            for tokens, chunks in reversed(_prompt_sizes(size))
            if tokens <= max_tokens
        ]
        found.sort(key=lambda one: round(abs(math.log2(one.prompts.tokens / TYPICAL_TOKENS))))
        found = [program for program in found if program not in self._times]
        self.wanted = Counter({program: self.wanted[program] for program in found})
        return found

    def add_times(self, program: MixedProgram, times: PassTimes) -> bool:
        """Record the measurement of a candidate; return whether it saves time."""
        self._times[program] = times
        self.drop_candidate(program)
        return times.saved() > 0

    def drop_candidate(self, program: MixedProgram) -> None:
        """Do not measure it (any more), and update the token limit for rounds of its size and arm.

        The limit is the largest size that saves time within `MAX_STALL`, or is not measured yet; if there is none, the
        smallest that saves time.
        """
        self.wanted.pop(program, None)
        key = program.round.batch, program.round.draft

        def is_like(one: MixedProgram) -> bool:
            return (one.round.batch, one.round.draft) == key

        paying = {one.prompts.tokens: t for one, t in self._times.items() if is_like(one) and t.saved() > 0}
        if paying:
            short = {tokens for tokens, times in paying.items() if times.mixed <= MAX_STALL * times.round}
            unknown = {one.prompts.tokens for one in self.wanted if is_like(one)}
            self._max_tokens[key] = max(short | unknown, default=min(paying)) - 1

    def padded(self, program: MixedProgram) -> MixedProgram | None:
        """Return the program padded to a size that graphs are captured for; None if it is too large."""
        smallest = next(self._fitting(program), None)
        return None if smallest is None else self._best(program, smallest)

    def _best(self, program: MixedProgram, smallest: MixedProgram) -> MixedProgram:
        """Return the smallest size that fits and is known to save time; if there is none, the smallest that fits."""
        return next((one for one in self._fitting(program) if self._saved(one, smallest) > 0), smallest)

    def _saved(self, padded: MixedProgram, smallest: MixedProgram) -> float:
        """Return the time saved, in rounds, by `padded` for prompts of the size of `smallest`; 0 if not measured."""
        times = self._times.get(_plain(padded))
        return 0.0 if times is None else times.saved(smallest.prompts.tokens / padded.prompts.tokens)

    def _fitting(self, program: MixedProgram) -> Iterator[MixedProgram]:
        """Yield the program padded to each size that fits, smallest first."""
        one, prompts = program
        batch, asked = self._size(one.batch), prompts.asked
        sizes = [(t, c) for t, c in _prompt_sizes(batch) if t > prompts.tokens and c >= prompts.chunks]
        if not batch or not sizes:
            return
        adjusting = next(count for count in SIZES if count >= one.adjusting)
        sampling = SamplingMode.SAMPLED  # sampling a few rows costs nothing, a second set of graphs does
        one = one._replace(batch=batch, asked=one.asked.of(batch), adjusting=adjusting, sampling=sampling)
        for tokens, chunks in sizes:
            padded = prompts._replace(
                tokens=tokens, chunks=chunks, max_chunk=tokens, asked=asked.of(chunks), sampling=sampling
            )
            yield MixedProgram(one, padded)

    def _arm(self, size: int, arm: Arm) -> Arm:
        """Return what a round of this size drafts in a mixed pass."""
        return self._graphs.prompt_arm(arm) if self._graphs is not None and size <= SMALL_BATCH else arm

    def _size(self, batch: int) -> int:
        """Return the batch size of the graphs for so many requests; 0 if there are none."""
        return next((size for size in self._batches if size >= batch), 0)


def _plain(program: MixedProgram) -> MixedProgram:
    """Return the program without options, which is measured in its place: they change its time little."""
    return program.with_both(sample_drafts=False, asked=Asked(), adjusting=0)


def _prompt_sizes(batch: int) -> Sequence[tuple[int, int]]:
    return next((sizes for largest, sizes in PROMPT_SIZES.items() if batch <= largest), ())
