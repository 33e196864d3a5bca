"""Rounds and prompts as CUDA graphs: which programs there are, and the captured ones.

Launched one by one from Python, the kernels of a round or a short prompt take many times as long as the device needs
for them; a graph replays a whole program with one launch. It reads its inputs from a fixed tensor and everything else
from the device state. It has a fixed size: rounds are padded with the row that belongs to nobody, prompts with tokens
that nobody reads. Long prompts keep the device busy for longer than they take to launch, and run as they are.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from fledge.engine.adjustments import SIZES
from fledge.engine.admission import NO_BUDGETS, Budgets
from fledge.engine.arms import PLAIN, Arm
from fledge.engine.config import EngineConfig
from fledge.engine.device_state import DeviceState
from fledge.engine.passes import PassOutcome
from fledge.engine.programs import Program, PromptProgram, RoundProgram
from fledge.engine.request import Request
from fledge.engine.sampler import SamplingMode
from fledge.engine.scheduler import Chunk
from fledge.layers.mlp import host_runs_experts
from fledge.progress import timed

_log = logging.getLogger("fledge.engine")

MAX_GRAPHS = 1024  # a bound on graph memory; what comes after it runs without
PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)  # one at least is padding
PROMPT_CHUNKS = {1: 16, 4: 64, 16: 256, 64: 512, 256: 1024}  # and for how many tokens at least
USUAL_DEPTH = 3
COARSE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
LONG_TOKENS, LONG_CHUNKS = 64, 16  # what longer prompts, and more of them, are padded to a multiple of
FIRST_TOKENS, FIRST_CHUNKS = (64, 256, 1024, 2048), 16  # of prompts, that an engine is ready with


def batch_sizes(max_requests: int) -> list[int]:
    """Return the batch sizes to capture: every one up to 4, then steps of at most a quarter."""
    sizes = [1, 2, 3, 4, 6, *range(8, 32, 4), *range(32, 128, 8), *range(128, max_requests, 32)]
    return [*(size for size in sizes if size < max_requests), max_requests]


class GraphRunner:
    """At most `capacity` captured graphs, captured ahead of time (`missing`) or when there is none that will do.

    Where one of a larger size will do it does, until there is time to capture its own (`work_ahead.py`).
    They share their memory: what one of them computed on the way is lost to the next.
    """

    def __init__(
        self, state: DeviceState, sizes: Sequence[int], capacity: int = MAX_GRAPHS, budgets: Budgets = NO_BUDGETS
    ) -> None:
        """`sizes`: the batch sizes of rounds, in order; the last is the largest there can be."""
        self.sizes = sizes
        self.budgets = budgets  # of drafts
        self.coarse = False
        self.arms: Sequence[Arm] = ()  # that there are
        self.prompt_arms: Sequence[Arm] = ()  # what is captured of prompts; others are captured when they come
        self.captured: dict[Program, tuple[Tensor, Callable[[], Any]]] = {}  # inputs, and replay, with what `run` gives
        self.wanted: Counter[Program] = Counter()  # how often others ran instead, or two apart
        self._instead: dict[Program, Program | None] = {}  # which ones; None: there is none
        self._rungs = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
        self._first_prompts: Collection[tuple[int, int]] = ()
        self._state = state
        self._capacity = capacity
        self._pool: Any = None  # of graph memory; torch gives its type no public name
        self._stream: torch.cuda.Stream | None = None  # that graphs are captured on

    def round(self, program: RoundProgram, requests: Sequence[Request]) -> PassOutcome:
        """Run a round; in its outcome, rows of padding come after the others."""
        return cast("PassOutcome", self.play(self.padded_round(program), requests))

    def padded_round(self, program: RoundProgram) -> RoundProgram:
        """The program of a size that there are graphs of, that this one runs as."""
        sizes = self._round_sizes(program.draft)
        batch = next(size for size in sizes if size >= program.batch)
        adjusting = next(size for size in SIZES if size >= program.adjusting)
        admit = program.admit
        if admit is not None:
            admit = next((size for size in self.budgets.sizes(batch, program.verify.depth) if size >= admit), None)
        # Drawing drafts that nobody wants drawn costs little, a second set of graphs does not.
        sample_drafts = program.sampling is SamplingMode.SAMPLED and self.samples(program.draft)
        return program._replace(
            batch=batch,
            sample_drafts=program.sample_drafts or sample_drafts,
            asked=program.asked.of(batch),
            adjusting=adjusting,
            admit=admit,
        )

    def prefill(self, program: PromptProgram, chunks: Sequence[Chunk]) -> PassOutcome:
        """Read the chunks: as a graph, or if there are too many or they are too long for one, as they are.

        Those are padded too: kernels are compiled anew for odd sizes, and everybody would wait for it.
        """
        program = self._prompts_as_captured(program)
        padded = self.padded_prompts(program)
        if padded is not None and (ready := self._ready(padded)) is not None:
            return cast("PassOutcome", self._replay(ready, chunks))
        tokens = -(-(program.tokens + 1) // LONG_TOKENS) * LONG_TOKENS
        padded = program._replace(tokens=tokens, chunks=-(-program.chunks // LONG_CHUNKS) * LONG_CHUNKS)
        return cast("PassOutcome", self._play(padded, padded.inputs(self._state, chunks)))

    def padded_prompts(self, program: PromptProgram) -> PromptProgram | None:
        """The program of a size that there are graphs of, that this one runs as; None: it is too large."""
        count = next((size for size in PROMPT_CHUNKS if size >= program.chunks), 0)
        least = max(program.tokens + 1, PROMPT_CHUNKS.get(count, 0))
        tokens = next((size for size in PROMPT_TOKENS if size >= least), 0)
        if not tokens or not count:
            return None
        return self._prompts_as_captured(program)._replace(
            tokens=tokens, chunks=count, max_chunk=tokens, asked=program.asked.of(count)
        )

    def _prompts_as_captured(self, program: PromptProgram) -> PromptProgram:
        draft = self.prompt_arm(program.draft)
        adjusting = next(size for size in SIZES if size >= program.adjusting)
        sampling = SamplingMode.SAMPLED  # a few rows more or less cost nothing, a second set of graphs does
        return program._replace(draft=draft, sampling=sampling, sample_drafts=self.samples(draft), adjusting=adjusting)

    def long_prompts(self, *, max_batch: int, max_tokens: int) -> list[Program]:
        """Prompts that are too many for a graph: run once, with nothing in them, their kernels are compiled."""
        sizes = {min(size, -(-max_batch // LONG_CHUNKS) * LONG_CHUNKS) for size in (16, 32, 48, 64, 128, 256, 512)}
        tokens = min(PROMPT_TOKENS[-1], -(-max_tokens // LONG_TOKENS) * LONG_TOKENS) + LONG_TOKENS
        return [self._prompts(tokens, chunks, arm) for arm in self.prompt_arms for chunks in sorted(sizes)]

    def missing(self, arms: Collection[Arm], *, max_batch: int, max_tokens: int) -> list[Program]:
        """Return the rounds, greedy and sampled, and prompts of all sizes that the bounds fit, but for those captured.

        The largest come first, which size the memory that all graphs share.
        """
        self.coarse = len(arms) > 2
        programs: list[Program] = [
            RoundProgram(size, arm, arm, sampling, sampling is SamplingMode.SAMPLED and self.samples(arm), admit=admit)
            for sampling in (SamplingMode.GREEDY, SamplingMode.SAMPLED)
            for arm in sorted(arms)
            for size in reversed(self._round_sizes(arm))
            if size <= max_batch
            for admit in (None, *(() if arm.is_tree else self.budgets.sizes(size, arm.depth)))
        ]
        self.arms, self.prompt_arms = sorted(arms), self._prompt_arms(arms)
        sizes = list(_prompt_sizes(max_tokens, max_batch))
        self._first_prompts = _first_prompts(sizes)
        programs += (self._prompts(*size, arm) for arm in self.prompt_arms for size in sizes)
        programs += self._unusual([program for program in programs if self.is_first(program)])
        return [program for program in programs if program not in self.captured]

    def is_first(self, program: Program) -> bool:
        """Whether an engine is not ready without it: for all of the usual kinds there is one that will do then."""
        if isinstance(program, PromptProgram):
            return (program.tokens, program.chunks) in self._first_prompts and not program.adjusting
        return self.is_second(program) and program.sizes[0] in {*self._rungs[::2], self._rungs[-1]}

    def is_second(self, program: Program) -> bool:
        """Whether it comes first of what an engine captures when it is ready: usual rounds, that halve the padding."""
        if not isinstance(program, RoundProgram) or program.admit is not None or program.adjusting:
            return False
        return program.batch in self._rungs

    def _unusual(self, programs: Sequence[Program]) -> Iterator[Program]:
        """Those of these where one request's logits are adjusted."""
        return (one._replace(adjusting=1) for one in programs if isinstance(one, RoundProgram | PromptProgram))

    def _prompts(self, tokens: int, chunks: int, arm: Arm) -> PromptProgram:
        has_drafter = self._state.drafter is not None
        return PromptProgram(
            tokens, chunks, tokens, arm, has_drafter, SamplingMode.SAMPLED, sample_drafts=self.samples(arm)
        )

    def samples(self, arm: Arm) -> bool:
        """Whether drafts of this arm may have to be drawn at random."""
        return self._state.can_sample_drafts and arm.depth > 0 and not arm.is_tree

    def _prompt_arms(self, arms: Collection[Arm]) -> list[Arm]:
        """What prompts draft: the round after it verifies what there is of a chain, so one will do."""
        chains = sorted(arm for arm in arms if not arm.is_tree)
        if len(chains) > 2:
            chains = [PLAIN, Arm(min(USUAL_DEPTH, chains[-1].depth))]
        return [*chains, *(arm for arm in sorted(arms) if arm.is_tree)]

    def prompt_arm(self, draft: Arm) -> Arm:
        """What is captured of prompts in place of a chain that is not."""
        if not draft.depth or draft.is_tree or draft in self.prompt_arms:
            return draft
        return next((arm for arm in self.prompt_arms if arm.depth and not arm.is_tree), draft)

    def _round_sizes(self, draft: Arm) -> Sequence[int]:
        """The batch sizes of rounds: where many arms are captured, fewer of those that draft."""
        if not draft.depth or not self.coarse:
            return self.sizes
        return [size for size in self.sizes if size in COARSE_SIZES or size == self.sizes[-1]]

    def drop_drafting(self) -> None:
        """Forget the graphs in which the drafter has a part: there will be another one, elsewhere in memory."""
        self.captured = {program: one for program, one in self.captured.items() if not program.uses_drafter}
        self._instead.clear()
        if not self.captured:
            self._pool = None  # it went with the last of them

    def capture(self, program: Program) -> bool:
        """Capture a program if it is not yet; False: there is no more room."""
        if program not in self.captured and len(self.captured) < self._capacity:
            inputs = program.inputs(self._state, [])
            self.captured[program] = inputs, self.record(lambda: self._play(program, inputs))
            self.wanted.pop(program, None)
            self._instead.clear()
        return program in self.captured

    def release(self, program: Program) -> None:
        """Forget a captured program."""
        self.captured.pop(program, None)
        self._instead.clear()

    def will_do(self, program: Program) -> Program | None:
        """The captured program that a padded one runs as: itself, or else the smallest that does the same.

        None: there is none.
        """
        if program in self.captured:
            return program
        self.wanted[program] += 1
        if program not in self._instead:
            kind, sizes = program.kind, program.sizes
            larger = [
                one
                for one in self.captured
                if one.kind == kind and all(a >= b for a, b in zip(one.sizes, sizes, strict=True))
            ]
            self._instead[program] = min(larger, key=lambda one: one.sizes, default=None)
        return self._instead[program]

    def _ready(self, program: Program) -> Program | None:
        """As `will_do`; where there is none, one that will do for smaller ones too is captured. None: no room."""
        found = self.will_do(program)
        if found is not None:
            return found
        if isinstance(program, RoundProgram):
            batch = next(size for size in self._rungs if size >= program.batch)
            program = self.padded_round(program._replace(batch=batch))
        elif isinstance(program, PromptProgram):
            sizes = sorted(self._first_prompts)
            tokens, chunks = next(
                ((t, c) for t, c in sizes if t >= program.tokens and c >= program.chunks),
                (program.tokens, program.chunks),
            )
            asked = program.asked.of(chunks)
            program = program._replace(tokens=tokens, chunks=chunks, max_chunk=tokens, asked=asked)
        return program if self.capture(program) else None

    def record(self, play: Callable[[], Any]) -> Callable[[], Any]:
        """Return what does the same as `play`, with one launch. Results of one call are overwritten by the next.

        Plays once aside first, so that kernels are compiled and libraries set up.
        """
        graph = torch.cuda.CUDAGraph()
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            with timed(_log, "graph played aside"):
                play()
                stream.synchronize()
            # Not `torch.cuda.graph`: that gives all free memory back to the device before each of hundreds of graphs.
            with timed(_log, "graph captured"), _without_collecting():
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    outcome = play()
                finally:
                    graph.capture_end()
        self._pool = graph.pool()

        def replay() -> Any:
            graph.replay()
            return outcome

        return replay

    def play(self, program: Program, work: Sequence[Any]) -> Any:
        """Run a padded program on `work`, as a graph if there is room for one; return what it does."""
        ready = self._ready(program)
        if ready is None:
            return self._play(program, program.inputs(self._state, work))
        return self._replay(ready, work)

    def run_once(self, program: Program) -> None:
        """Run it for nobody, not as a graph."""
        self._play(program, program.inputs(self._state, []))

    def _replay(self, program: Program, work: Sequence[Any]) -> Any:
        inputs, replay = self.captured[program]
        inputs.copy_(program.inputs(self._state, work), non_blocking=True)
        return replay()

    def _play(self, program: Program, inputs: Tensor) -> Any:
        outcome = program.run(self._state, inputs)
        self._state.reset_padding()
        return outcome


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Graphs of an engine that is gone, if they were collected while another is captured, would make that fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_graphs(state: DeviceState, config: EngineConfig, budgets: Budgets) -> GraphRunner | None:
    """What captures the graphs that a config asks for; None: it wants none, or the target's experts allow none."""
    if config.enforce_eager:
        return None
    if host_runs_experts(state.target):
        _log.warning("no CUDA graphs: experts that are not all stored alike, or in act-order, run one after the other")
        return None
    sizes = config.cudagraph_capture_sizes or batch_sizes(config.max_num_seqs)
    return GraphRunner(state, sorted({*sizes, config.max_num_seqs}), budgets=budgets)


def _prompt_sizes(max_tokens: int, max_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (tokens, chunks) of the prompt graphs that are worth having ahead of time, largest first."""
    for tokens, smaller in reversed(list(zip(PROMPT_TOKENS, (0, *PROMPT_TOKENS), strict=False))):
        for (chunks, least), fewer in zip(PROMPT_CHUNKS.items(), (0, *PROMPT_CHUNKS), strict=False):
            if smaller <= max_tokens and fewer < max_chunks and least <= tokens:
                yield tokens, chunks


def _first_prompts(sizes: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Of the (tokens, chunks) that there are, those that an engine is ready with: the largest is among them."""
    few = {tokens: chunks for tokens, chunks in sorted(sizes) if tokens in FIRST_TOKENS and chunks <= FIRST_CHUNKS}
    return {*few.items(), max(sizes)}
