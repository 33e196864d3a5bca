"""Capture of optional graphs, one at a time, after warming up: the engine works without them, but slower.

An idle engine captures all that it may need. A busy one captures only what its steps often lacked, between two steps
and in a small share of its time, so an engine that is never idle gets them too.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fledge.engine.config import EngineConfig
from fledge.engine.mixing import SMALL_BATCH, MixedProgram, PassTimes
from fledge.engine.programs import Program
from fledge.engine.runner import Runner
from fledge.engine.sampler import SamplingMode
from fledge.errors import describe

BUSY_SHARE = 0.02  # of the time, while there are requests
OFTEN = 64  # steps that lacked a graph or a measurement, before it is made while there are requests
TIMED_PASSES = 3  # of a program, in one measurement

_log = logging.getLogger("fledge.engine")


class WorkAhead:
    """Works piece by piece: a piece captures one graph, or times three. Nothing may be in flight meanwhile."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        programs: Sequence[Program] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`programs`: those that warming up did not capture. Without any, only what steps lack is captured."""
        self._runner, self._config, self._clock = runner, config, clock
        mixing, tokens = runner.mixing, config.max_num_batched_tokens
        self._candidates = [] if mixing is None or not programs else mixing.candidates(tokens)
        self._pieces = self._run(programs)
        self._due = 0.0  # time of the next piece, while there are requests
        self._seconds: dict[Program, float] = {}  # measured times

    @property
    def is_due(self) -> bool:
        """Whether to do a piece although there are requests."""
        graphs, mixing = self._runner.graphs, self._runner.mixing
        if graphs is None or self._clock() < self._due:
            return False
        measuring = () if mixing is None else mixing.wanted.values()
        return max((*graphs.wanted.values(), *measuring), default=0) >= OFTEN

    def advance(self) -> bool:
        """Do a piece; False if there is none. The next is due when this one took at most `BUSY_SHARE` of the time."""
        began = self._clock()
        done = next(self._pieces, None)
        ended = self._clock()
        self._due = math.inf if done is None else ended + (ended - began) / BUSY_SHARE  # None: a piece failed
        return bool(done)

    @torch.inference_mode()
    def _run(self, programs: Sequence[Program]) -> Iterator[bool]:
        """Yield True after each piece, False while there is none. Ends, with a warning, if one fails."""
        try:
            yield from self._planned(programs)
            while self._runner.graphs is not None:
                yield from self._wanted()
                yield False
        except Exception as error:
            _log.warning("capturing graphs ahead failed, and is given up: %s", describe(error), exc_info=error)

    def _planned(self, programs: Sequence[Program]) -> Iterator[bool]:
        """Compile kernels of long prompts, capture usual rounds, measure mixed passes, then capture all `programs`.

        After each piece, what steps lacked meanwhile comes first.
        """
        graphs = self._runner.graphs
        if graphs is None or not programs:
            return
        largest, tokens = self._config.max_num_seqs, self._config.max_num_batched_tokens
        yield from self._wanted()
        for program in filter(self._can_run, graphs.long_prompts(max_batch=largest, max_tokens=tokens)):
            graphs.run_padding(program)
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
        """Do what steps lacked, the most frequent first; of what is frequent, mixed passes first: they save more."""
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
        return self._runner.state.drafter is not None or not program.uses_drafter  # the drafter may have failed

    def _capture(self, *programs: Program) -> Iterator[bool]:
        graphs = self._runner.graphs
        assert graphs is not None
        for program in filter(self._can_run, programs):
            if program not in graphs.captured and graphs.capture(program):
                yield True

    def _measure(self, program: MixedProgram) -> Iterator[bool]:
        """Time a mixed pass and separate passes; keep its graph if it saves time."""
        graphs, mixing = self._runner.graphs, self._runner.mixing
        assert graphs is not None
        assert mixing is not None
        if program not in mixing.wanted:
            return  # measured already
        one = graphs.padded_round(program.round._replace(sampling=SamplingMode.GREEDY))
        # At least one token of a graph is padding. Graphs of prefill alone have other sizes.
        prompts = graphs.padded_prompts(program.prompts._replace(tokens=program.prompts.tokens - 1))
        assert prompts is not None
        yield from self._capture(one, prompts, program)
        if not {one, prompts, program} <= graphs.captured.keys():
            mixing.drop_candidate(program)  # there is no room, or the drafter failed
            return
        pays = mixing.add_times(program, PassTimes(self._time(program), self._time(one), self._time(prompts)))
        if not pays:
            graphs.release(program)
        yield True
        if pays and program.round.batch <= SMALL_BATCH and graphs.samples_drafts(program.round.draft):
            yield from self._capture(program.with_both(sample_drafts=True))

    def _time(self, program: Program) -> float:
        graphs = self._runner.graphs
        assert graphs is not None
        if program not in self._seconds:
            # Several without synchronising, so that packing the inputs overlaps with the device, as in serving.
            total = self._runner.time(lambda: [graphs.run(program, ()) for _ in range(TIMED_PASSES)])
            self._seconds[program] = total / TIMED_PASSES
        return self._seconds[program]
