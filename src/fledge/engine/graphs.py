"""CUDA graphs of rounds and prefill: which programs to capture, and running them.

Launching the kernels of a round or a short prefill one by one from Python takes many times as long as the device needs
to run them; a graph replays a whole program with one launch. It reads its inputs from a fixed tensor and everything
else from the device state. It has a fixed size: rounds are padded with the padding row, prefill with padding tokens.
Long prefill takes longer on the device than to launch, and runs eagerly.
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

MAX_GRAPHS = 1024  # bounds graph memory; other programs run eagerly
PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)  # at least one is padding
PROMPT_CHUNKS = {1: 16, 4: 64, 16: 256, 64: 512, 256: 1024}  # number of chunks -> the least number of tokens
PROMPT_DEPTH = 3  # of the chains that prefill drafts, if there are chains of several depths
COARSE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
LONG_TOKENS, LONG_CHUNKS = 64, 16  # eager prefill is padded to multiples of these
FIRST_TOKENS, FIRST_CHUNKS = (64, 256, 1024, 2048), 16  # prefill sizes that are captured before the engine is ready


def batch_sizes(max_requests: int) -> list[int]:
    """Return the batch sizes to capture: all up to 4, then at most a quarter apart."""
    sizes = [1, 2, 3, 4, 6, *range(8, 32, 4), *range(32, 128, 8), *range(128, max_requests, 32)]
    return [*(size for size in sizes if size < max_requests), max_requests]


class GraphRunner:
    """At most `capacity` graphs, captured ahead of time (`missing`) or when no captured one can be used.

    A captured graph of a larger size is used until there is time to capture one of the right size (`work_ahead.py`).
    All graphs share one memory pool: results are overwritten by the next graph.
    """

    def __init__(
        self, state: DeviceState, sizes: Sequence[int], capacity: int = MAX_GRAPHS, budgets: Budgets = NO_BUDGETS
    ) -> None:
        """`sizes`: the batch sizes of rounds, ascending; the last is the largest batch."""
        self.sizes = sizes
        self.budgets = budgets  # numbers of drafts that rounds may verify
        self.coarse = False  # use fewer batch sizes for rounds that draft
        self.arms: Sequence[Arm] = ()
        self.prompt_arms: Sequence[Arm] = ()  # arms that prefill is captured for
        self.captured: dict[Program, tuple[Tensor, Callable[[], Any]]] = {}  # inputs; replay, which returns the outcome
        self.wanted: Counter[Program] = Counter()  # how often a program ran without a graph of its own size
        self._substitutes: dict[Program, Program | None] = {}  # the larger one that is used; None: there is none
        self._sparse_sizes = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
        self._first_prompts: Collection[tuple[int, int]] = ()
        self._state = state
        self._capacity = capacity
        self._pool: Any = None  # of graph memory; its type has no public name in torch
        self._stream: torch.cuda.Stream | None = None  # for capturing

    def round(self, program: RoundProgram, requests: Sequence[Request]) -> PassOutcome:
        """Run a round; in its outcome, padding rows come last."""
        return cast("PassOutcome", self.run(self.padded_round(program), requests))

    def padded_round(self, program: RoundProgram) -> RoundProgram:
        """Return the program padded to a size that graphs are captured for."""
        sizes = self._round_sizes(program.draft)
        batch = next(size for size in sizes if size >= program.batch)
        adjusting = next(size for size in SIZES if size >= program.adjusting)
        admit = program.admit
        if admit is not None:
            admit = next((size for size in self.budgets.sizes(batch, program.verify.depth) if size >= admit), None)
        # A graph that can sample drafts costs little more for argmax drafts; a second set of graphs would cost much.
        sample_drafts = program.sampling is SamplingMode.SAMPLED and self.samples_drafts(program.draft)
        return program._replace(
            batch=batch,
            sample_drafts=program.sample_drafts or sample_drafts,
            asked=program.asked.of(batch),
            adjusting=adjusting,
            admit=admit,
        )

    def prefill(self, program: PromptProgram, chunks: Sequence[Chunk]) -> PassOutcome:
        """Prefill the chunks, as a graph or, if there are too many tokens or chunks, eagerly.

        Eager prefill is padded too: Triton compiles kernels again for some sizes, and all requests would wait for it.
        """
        program = self._as_captured(program)
        padded = self.padded_prompts(program)
        if padded is not None and (captured := self._find_or_capture(padded)) is not None:
            return cast("PassOutcome", self._replay(captured, chunks))
        tokens = -(-(program.tokens + 1) // LONG_TOKENS) * LONG_TOKENS
        padded = program._replace(tokens=tokens, chunks=-(-program.chunks // LONG_CHUNKS) * LONG_CHUNKS)
        return cast("PassOutcome", self._run_eager(padded, padded.inputs(self._state, chunks)))

    def padded_prompts(self, program: PromptProgram) -> PromptProgram | None:
        """Return the program padded to a size that graphs are captured for; None if it is too large."""
        count = next((size for size in PROMPT_CHUNKS if size >= program.chunks), 0)
        least = max(program.tokens + 1, PROMPT_CHUNKS.get(count, 0))
        tokens = next((size for size in PROMPT_TOKENS if size >= least), 0)
        if not tokens or not count:
            return None
        return self._as_captured(program)._replace(
            tokens=tokens, chunks=count, max_chunk=tokens, asked=program.asked.of(count)
        )

    def _as_captured(self, program: PromptProgram) -> PromptProgram:
        """Return the program with the options that prefill is captured with."""
        draft = self.prompt_arm(program.draft)
        adjusting = next(size for size in SIZES if size >= program.adjusting)
        sampling = SamplingMode.SAMPLED  # sampling a few rows costs nothing, a second set of graphs does
        sample_drafts = self.samples_drafts(draft)
        return program._replace(draft=draft, sampling=sampling, sample_drafts=sample_drafts, adjusting=adjusting)

    def long_prompts(self, *, max_batch: int, max_tokens: int) -> list[Program]:
        """Return prefill programs that are too large for a graph. To compile their kernels, run them with padding."""
        sizes = {min(size, -(-max_batch // LONG_CHUNKS) * LONG_CHUNKS) for size in (16, 32, 48, 64, 128, 256, 512)}
        tokens = min(PROMPT_TOKENS[-1], -(-max_tokens // LONG_TOKENS) * LONG_TOKENS) + LONG_TOKENS
        return [self._prompt_program(tokens, chunks, arm) for arm in self.prompt_arms for chunks in sorted(sizes)]

    def missing(self, arms: Collection[Arm], *, max_batch: int, max_tokens: int) -> list[Program]:
        """Return the programs to capture for `arms`: rounds, greedy and sampled, and prefill, of all sizes.

        Without those captured already. The largest come first: they determine the size of the memory pool.
        """
        self.coarse = len(arms) > 2
        programs: list[Program] = [
            RoundProgram(
                size,
                arm,
                arm,
                sampling,
                sample_drafts=sampling is SamplingMode.SAMPLED and self.samples_drafts(arm),
                admit=admit,
            )
            for sampling in (SamplingMode.GREEDY, SamplingMode.SAMPLED)
            for arm in sorted(arms)
            for size in reversed(self._round_sizes(arm))
            if size <= max_batch
            for admit in (None, *(() if arm.is_tree else self.budgets.sizes(size, arm.depth)))
        ]
        self.arms, self.prompt_arms = sorted(arms), self._prompt_arms(arms)
        sizes = list(_prompt_sizes(max_tokens, max_batch))
        self._first_prompts = _first_prompts(sizes)
        programs += (self._prompt_program(*size, arm) for arm in self.prompt_arms for size in sizes)
        programs += [_with_adjusted_logits(program) for program in programs if self.is_first(program)]
        return [program for program in programs if program not in self.captured]

    def is_first(self, program: Program) -> bool:
        """Whether to capture it before the engine is ready: enough programs for one of each usual kind to fit."""
        if isinstance(program, PromptProgram):
            return (program.tokens, program.chunks) in self._first_prompts and not program.adjusting
        return self.is_second(program) and program.sizes[0] in {*self._sparse_sizes[::2], self._sparse_sizes[-1]}

    def is_second(self, program: Program) -> bool:
        """Whether to capture it first once the engine is ready: usual rounds, whose sizes halve the padding."""
        if not isinstance(program, RoundProgram) or program.admit is not None or program.adjusting:
            return False
        return program.batch in self._sparse_sizes

    def _prompt_program(self, tokens: int, chunks: int, arm: Arm) -> PromptProgram:
        has_drafter = self._state.drafter is not None
        return PromptProgram(
            tokens, chunks, tokens, arm, has_drafter, SamplingMode.SAMPLED, sample_drafts=self.samples_drafts(arm)
        )

    def samples_drafts(self, arm: Arm) -> bool:
        """Whether drafts of this arm can be sampled ones."""
        return self._state.can_sample_drafts and arm.depth > 0 and not arm.is_tree

    def _prompt_arms(self, arms: Collection[Arm]) -> list[Arm]:
        """Return the arms for prefill. One depth is enough: the next round verifies any number of drafts."""
        chains = sorted(arm for arm in arms if not arm.is_tree)
        if len(chains) > 2:
            chains = [PLAIN, Arm(min(PROMPT_DEPTH, chains[-1].depth))]
        return [*chains, *(arm for arm in sorted(arms) if arm.is_tree)]

    def prompt_arm(self, draft: Arm) -> Arm:
        """Return the arm that prefill drafts if a round drafts `draft`."""
        if not draft.depth or draft.is_tree or draft in self.prompt_arms:
            return draft
        return next((arm for arm in self.prompt_arms if arm.depth and not arm.is_tree), draft)

    def _round_sizes(self, draft: Arm) -> Sequence[int]:
        """Return the batch sizes of rounds that draft so: fewer if many arms are captured."""
        if not draft.depth or not self.coarse:
            return self.sizes
        return [size for size in self.sizes if size in COARSE_SIZES or size == self.sizes[-1]]

    def drop_drafter_graphs(self) -> None:
        """Drop the graphs that use the drafter: it will be replaced by one at other addresses."""
        self.captured = {program: one for program, one in self.captured.items() if not program.uses_drafter}
        self._substitutes.clear()
        if not self.captured:
            self._pool = None  # it was freed with the last graph

    def capture(self, program: Program) -> bool:
        """Capture a program, unless it is captured; False if there is no room."""
        if program not in self.captured and len(self.captured) < self._capacity:
            inputs = program.inputs(self._state, [])
            self.captured[program] = inputs, self.record(lambda: self._run_eager(program, inputs))
            self.wanted.pop(program, None)
            self._substitutes.clear()
        return program in self.captured

    def release(self, program: Program) -> None:
        """Drop a captured program."""
        self.captured.pop(program, None)
        self._substitutes.clear()

    def will_do(self, program: Program) -> Program | None:
        """Return the captured program for a padded one: itself, or the smallest larger one of its kind; None if there
        is none.
        """
        if program in self.captured:
            return program
        self.wanted[program] += 1
        if program not in self._substitutes:
            kind, sizes = program.kind, program.sizes
            larger = [
                one
                for one in self.captured
                if one.kind == kind and all(a >= b for a, b in zip(one.sizes, sizes, strict=True))
            ]
            self._substitutes[program] = min(larger, key=lambda one: one.sizes, default=None)
        return self._substitutes[program]

    def _find_or_capture(self, program: Program) -> Program | None:
        """Like `will_do`, but capture one if there is none, of a size that serves smaller ones too. None: no room."""
        found = self.will_do(program)
        if found is not None:
            return found
        if isinstance(program, RoundProgram):
            batch = next(size for size in self._sparse_sizes if size >= program.batch)
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

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture `run` as a graph; return its replay. Each replay overwrites the results of the last.

        `run` is called once before, to compile kernels and initialise libraries.
        """
        graph = torch.cuda.CUDAGraph()
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            with timed(_log, "graph played aside"):
                run()
                stream.synchronize()
            # Not `torch.cuda.graph`, which returns all free memory to the device before each of hundreds of graphs.
            with timed(_log, "graph captured"), _without_collecting():
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    outcome = run()
                finally:
                    graph.capture_end()
        self._pool = graph.pool()

        def replay() -> Any:
            graph.replay()
            return outcome

        return replay

    def run(self, program: Program, work: Sequence[Any]) -> Any:
        """Run a padded program on `work`, as a graph if there is room for one; return its outcome."""
        captured = self._find_or_capture(program)
        if captured is None:
            return self._run_eager(program, program.inputs(self._state, work))
        return self._replay(captured, work)

    def run_padding(self, program: Program) -> None:
        """Run a program eagerly with padding only, to compile its kernels."""
        self._run_eager(program, program.inputs(self._state, []))

    def _replay(self, program: Program, work: Sequence[Any]) -> Any:
        inputs, replay = self.captured[program]
        inputs.copy_(program.inputs(self._state, work), non_blocking=True)
        return replay()

    def _run_eager(self, program: Program, inputs: Tensor) -> Any:
        outcome = program.run(self._state, inputs)
        self._state.reset_padding()
        return outcome


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable garbage collection: freeing another engine's graphs during a capture would make it fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_graphs(state: DeviceState, config: EngineConfig, budgets: Budgets) -> GraphRunner | None:
    """Return the graph runner for a config; None if the config or the target's experts do not allow graphs."""
    if config.enforce_eager:
        return None
    if host_runs_experts(state.target):
        _log.warning("no CUDA graphs: experts that are not all stored alike, or in act-order, run one after the other")
        return None
    sizes = config.cudagraph_capture_sizes or batch_sizes(config.max_num_seqs)
    return GraphRunner(state, sorted({*sizes, config.max_num_seqs}), budgets=budgets)


def _prompt_sizes(max_tokens: int, max_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (tokens, chunks) of the prefill graphs to capture ahead of time, largest first."""
    for tokens, smaller in reversed(list(zip(PROMPT_TOKENS, (0, *PROMPT_TOKENS), strict=False))):
        for (chunks, least), fewer in zip(PROMPT_CHUNKS.items(), (0, *PROMPT_CHUNKS), strict=False):
            if smaller <= max_tokens and fewer < max_chunks and least <= tokens:
                yield tokens, chunks


def _first_prompts(sizes: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the (tokens, chunks) to capture before the engine is ready, the largest one included."""
    few = {tokens: chunks for tokens, chunks in sorted(sizes) if tokens in FIRST_TOKENS and chunks <= FIRST_CHUNKS}
    return {*few.items(), max(sizes)}


def _with_adjusted_logits(program: Program) -> Program:
    """Return the program for a batch in which one request has adjusted logits."""
    assert isinstance(program, RoundProgram | PromptProgram)
    return program._replace(adjusting=1)
