"""Graphs that an engine can do without and is faster with, captured one at a time after it has warmed up.

While it has nothing to do it captures all that it may need. While it has, only what its steps have often done without,
between two of them and for a small share of its time: an engine that is never idle comes to them too.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fledge.engine.config import EngineConfig
from fledge.engine.mixing import FEW, MixedProgram, Times
from fledge.engine.programs import Program
from fledge.engine.runner import Runner
from fledge.engine.sampler import SamplingMode
from fledge.errors import describe

BUSY_SHARE = 0.02  # of an engine's time, that it may take while there are requests
OFTEN = 64  # steps that did without something, before it is done then
MEASURED_TOGETHER = 3  # passes of each kind

_log = logging.getLogger("fledge.engine")


class WorkAhead:
    """Does it piece by piece. A piece is one graph, or timing three; nothing may be in flight meanwhile."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        programs: Sequence[Program] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`programs`: that warming up has left. Without any, there is only what steps turn out to want."""
        self._runner, self._config, self._clock = runner, config, clock
        mixing, tokens = runner.mixing, config.max_num_batched_tokens
        self._candidates = [] if mixing is None or not programs else mixing.candidates(tokens)
        self._pieces = self._all(programs)
        self._due = 0.0
        self._seconds: dict[Program, float] = {}  # of a graph

    @property
    def is_due(self) -> bool:
        """Whether an engine should do a piece although there are requests."""
        graphs, mixing = self._runner.graphs, self._runner.mixing
        if graphs is None or self._clock() < self._due:
            return False
        measuring = () if mixing is None else mixing.wanted.values()
        return max((*graphs.wanted.values(), *measuring), default=0) >= OFTEN

    def advance(self) -> bool:
        """Do a piece; False: there is none. The next is due when this one's share of the time has passed."""
        began = self._clock()
        found = next(self._pieces, None)
        ended = self._clock()
        self._due = math.inf if found is None else ended + (ended - began) / BUSY_SHARE  # None: it is given up
        return bool(found)

    @torch.inference_mode()
    def _all(self, programs: Sequence[Program]) -> Iterator[bool]:
        """Yield after each piece, and where there is none just now. Nobody waits for it, if it fails."""
        try:
            yield from self._planned(programs)
            while self._runner.graphs is not None:
                yield from self._wanted()
                yield False
        except Exception as error:
            _log.warning("capturing graphs ahead failed, and is given up: %s", describe(error), exc_info=error)

    def _planned(self, programs: Sequence[Program]) -> Iterator[bool]:
        """Compile kernels of long prompts, capture usual rounds, rounds with prompts, then all of `programs`.

        Before each, what is wanted.
        """
        graphs = self._runner.graphs
        if graphs is None or not programs:
            return
        largest, tokens = self._config.max_num_seqs, self._config.max_num_batched_tokens
        yield from self._wanted()
        for program in filter(self._can_run, graphs.long_prompts(max_batch=largest, max_tokens=tokens)):
            graphs.run_once(program)
            yield True
            yield from self._wanted()
        for program in filter(graphs.is_second, programs):
            yield from self._capture(program)
            yield from self._wanted()
        for candidate in self._candidates:
            yield from self._measure(candidate)
            yield from self._wanted()
        for program in programs:
            yield from self._capture(program)
            yield from self._wanted()

    def _wanted(self) -> Iterator[bool]:
        """Do what steps did without, the most frequent first; of what is frequent, passes of both, which save more."""
        graphs, mixing = self._runner.graphs, self._runner.mixing
        assert graphs is not None
        while True:
            measuring = [] if mixing is None else mixing.wanted.most_common(1)
            capturing = graphs.wanted.most_common(1)
            often = capturing[0][1] if capturing else 0
            if measuring and measuring[0][1] >= max(min(often, OFTEN), 1):
                yield from self._measure(measuring[0][0])
            elif capturing:
                del graphs.wanted[capturing[0][0]]
                yield from self._capture(capturing[0][0])
            else:
                return

    def _can_run(self, program: Program) -> bool:
        return self._runner.state.drafter is not None or not program.uses_drafter  # it may have been given up

    def _capture(self, *programs: Program) -> Iterator[bool]:
        graphs = self._runner.graphs
        assert graphs is not None
        for program in filter(self._can_run, programs):
            if program not in graphs.captured and graphs.capture(program):
                yield True

    def _measure(self, program: MixedProgram) -> Iterator[bool]:
        """Time a round with prompts and both apart: one pass is taken where it takes less time."""
        graphs, mixing = self._runner.graphs, self._runner.mixing
        assert graphs is not None
        assert mixing is not None
        if program not in mixing.wanted:
            return  # it has been measured
        one = graphs.padded_round(program.round._replace(sampling=SamplingMode.GREEDY))
        # Of the tokens of a graph one at least is padding; those that there are of prompts alone have other sizes.
        prompts = graphs.padded_prompts(program.prompts._replace(tokens=program.prompts.tokens - 1))
        assert prompts is not None
        yield from self._capture(one, prompts, program)
        if not {one, prompts, program} <= graphs.captured.keys():
            mixing.leave(program)  # there is no room, or no drafter any more
            return
        pays = mixing.learn(program, Times(self._time(program), self._time(one), self._time(prompts)))
        if not pays:
            graphs.release(program)
        yield True
        if pays and program.round.batch <= FEW and graphs.samples(program.round.draft):
            yield from self._capture(program.with_both(sample_drafts=True))

    def _time(self, program: Program) -> float:
        graphs = self._runner.graphs
        assert graphs is not None
        if program not in self._seconds:
            # Behind one another, so that laying out the next overlaps with the device's work, as it does while serving.
            together = self._runner.time(lambda: [graphs.play(program, ()) for _ in range(MEASURED_TOGETHER)])
            self._seconds[program] = together / MEASURED_TOGETHER
        return self._seconds[program]
