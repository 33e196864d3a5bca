"""What others may ask of an engine: ours (`engine.py`) is one implementation, and another may stand in its place.

An engine knows token ids only. Requests are added between steps, `step` runs all of them a little further and says
what has become known, request by request. `LLM` (`llm.py`) and the server are built on this and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fledge.decoding.drafter_statistics import StateGrowth
from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.admission import DraftCalibration
from fledge.engine.arms import Acceptance, Arm
from fledge.engine.constraint import TokenConstraint
from fledge.engine.controller import DepthChoice
from fledge.engine.costs import CostTable
from fledge.engine.outputs import RequestUpdate
from fledge.errors import ConfigError, ContextLengthError, FledgeError, PromptError


class DeadEngineError(FledgeError):
    """The device or the engine is in a state that nothing can be computed in any more."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine is and can take, whatever else it does. Can be pickled and asked anywhere.

    Nothing of an engine's changes but the drafter, and that only by `Engine.exchange_drafter`.
    """

    model: str  # what it was loaded from
    drafter: str | None  # None: it does not speculate
    device: str
    dtype: str  # that the target computes in
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_depth: int  # tokens drafted ahead at most
    kv_capacity: int  # tokens of KV cache that one request may have
    scheduling_policy: str = "fcfs"  # or "priority"

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what would otherwise fail in the middle of a step, and take the other requests with it."""
        vocab_size, longest = self.vocab_size, self.max_model_len
        if not prompt:
            raise PromptError("the prompt is empty")
        if len(prompt) >= longest:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {longest}"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise PromptError(f"prompt: token id {outside} is outside the vocabulary (0 to {vocab_size - 1})")
        ids = {"logit_bias token id": params.logit_bias or (), "allowed_token_ids": params.allowed_token_ids or ()}
        for name, tokens in ids.items():
            if (largest := max(tokens, default=0)) >= vocab_size:
                raise ConfigError(f"{name}: found {largest}, allowed is 0 to {vocab_size - 1}", param=name.split()[0])
        wanted = min(len(prompt) + (params.max_tokens or 1), longest)
        if wanted > self.kv_capacity:
            raise ContextLengthError(
                f"the request may need {wanted} tokens of KV cache, which has room for {self.kv_capacity}; "
                "ask for fewer tokens or give the engine more memory"
            )


class PhaseSeconds(NamedTuple):
    """One round's time, by its parts."""

    verify: float
    accept: float
    draft: float


class RoundReport(NamedTuple):
    """One round of a batch, as it was read: how large, how deep, what it gave, and how long it took."""

    batch: int  # requests in it
    verify: Arm  # what was up for acceptance, in each request that had drafts; depth 0: a plain step
    draft: Arm  # what was drafted for the next round
    tokens: int  # chosen in it, in all
    seconds: PhaseSeconds
    admit: int | None = None  # drafts that were verified, of all requests together; None: all there were
    prompt_tokens: int = 0  # that were read in the same pass: its seconds are of both


@dataclass(kw_only=True)
class EngineStats:
    """Totals over an engine's life, and where it stands now. `Engine.stats` hands out a copy that can be pickled.

    Acceptance, state growth and calibration are totals over the life of its present drafter.
    """

    steps: int = 0
    prompt_tokens: int = 0  # read, those found in the prefix cache left out
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    state_growth: StateGrowth = field(default_factory=StateGrowth)
    calibration: DraftCalibration | None = None  # None: no chains are drafted, or nothing is new to whom it is told
    drafter_failure: str | None = None  # why the engine goes on without its drafter
    num_rounds: int = 0  # of batches
    rounds: tuple[RoundReport, ...] = ()  # the latest few
    typical_round: tuple[int, Arm] | None = None  # batch and what is drafted, where rounds are not told one by one
    costs: CostTable = field(default_factory=CostTable)
    choice: DepthChoice | None = None  # of the controller, the latest
    schedule_seconds: float = 0.0  # planning
    launch_seconds: float = 0.0  # queueing work; on a CPU also doing it
    read_seconds: float = 0.0  # waiting for the device and digesting its results

    running: int = 0  # requests, now
    waiting: int = 0
    kv_used: int = 0  # blocks, now
    kv_capacity: int = 0

    def count_end(self, reason: str) -> None:
        """Count a request that has ended."""
        self.aborted += reason == "abort"
        self.failed += reason == "error"
        self.finished += reason not in ("abort", "error")

    def begin_drafter(self) -> None:
        """There is another drafter: what is said of drafts is said of its own."""
        self.acceptance, self.state_growth, self.drafter_failure = AcceptanceStatistics(), StateGrowth(), None


class Engine(Protocol):
    """Continuous batching over one target. Used by one thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended yet, or its end has not been told."""
        ...

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        eos_ids: Sequence[int] = (),
        draft_limit: int | None = None,
        cache_salt: bytes = b"",
        constraint: TokenConstraint | None = None,
        parent: str = "",
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises PromptError or ConfigError if it could never run, whatever else does.

        Its random numbers follow from `seed`, or else from `params.seed`. Only where that is given, by whoever asks, is
        the text of a seed the same with and without speculation: others' drafts may be drawn at random.

        No more than `draft_limit` tokens are drafted for it in a round; 0 is no speculation. Beginnings of prompts are
        shared only among requests with the same `cache_salt`. A `constraint` is this request's alone; if it fails, the
        request ends with finish reason "error". Requests with the same `parent`, the answers to one question, share
        its turn among all others; by default a request is its own. With the scheduling policy "priority", requests of
        a lower `priority` go first, and are the last to be preempted.
        """
        ...

    def abort(self, request_id: str, reason: str = "abort") -> RequestUpdate | None:
        """End a request now and return its last update; None if it has ended already. What is in flight is dropped."""
        ...

    def step(self) -> list[RequestUpdate]:
        """Run one step and return what has become known since the last one.

        What fails inside ends the requests at fault, with finish reason "error"; the others go on. Raises
        DeadEngineError where there is no going on.
        """
        ...

    def warm_up(
        self,
        progress: Callable[[int, int], None] = ...,
        *,
        plain: bool = False,
        acceptance: Acceptance | None = None,
    ) -> None:
        """Do now what would hold up the first requests: capture graphs, time rounds. `progress` is told done and all.

        Requests can come then; what makes them faster still is left to `work_ahead`.

        `plain`: for steps without speculation too, which a request may ask for. `acceptance`: what is known of how
        many drafts stand, before any was tried.
        """
        ...

    def work_ahead(self) -> bool:
        """Do a little of what warming up has left for when there is nothing to do: it holds up a request for some
        tenths of a second at most. False: there is nothing left. What steps miss they do themselves, now and then.
        """
        ...

    def prepare_drafter(self, model: str) -> Any:
        """Load a drafter to exchange for the present one, and check it. May be called on another thread, beside steps.

        Raises FledgeError where it is no good for the target, or where this engine can exchange none.
        """
        ...

    def exchange_drafter(self, new: Any, acceptance: Acceptance | None = None) -> None:
        """Draft with what `prepare_drafter` gave, from the next step on. Running requests go on, with the same tokens.

        `acceptance` as of `warm_up`. Raises FledgeError, and changes nothing, where there is no place for it.
        """
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot. Asks the device nothing."""
        ...
