"""The interface of engines: `LLMEngine` (`engine.py`) and `VllmEngine` (`vllm_engine.py`) implement it.

An engine works with token ids only. Requests are added between steps; `step` advances all of them and returns new
tokens. `LLM` (`llm.py`) and the server use only this interface.
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
    """The device or the engine failed and cannot continue."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Properties and limits of an engine. Can be pickled.

    Constant, except for the drafter, which `Engine.exchange_drafter` changes.
    """

    model: str  # directory or hub name
    drafter: str | None  # None: no speculation
    device: str
    dtype: str  # of the target's computation
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_depth: int  # largest number of draft tokens in a round
    kv_capacity: int  # largest number of tokens that one request may have in the KV cache
    scheduling_policy: str = "fcfs"  # or "priority"

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise PromptError or ConfigError for requests that could never run, before they fail in a step."""
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
    """Time of one round, by phase."""

    verify: float
    accept: float
    draft: float


class RoundReport(NamedTuple):
    """One round of a batch."""

    batch: int  # number of requests
    verify: Arm  # drafts that were verified, for each request that had some; depth 0: plain decoding
    draft: Arm  # drafts for the next round
    tokens: int  # emitted tokens of all requests
    seconds: PhaseSeconds
    admit: int | None = None  # number of drafts verified over the whole batch; None: all
    prompt_tokens: int = 0  # of a mixed pass: `seconds` include their prefill


@dataclass(kw_only=True)
class EngineStats:
    """Totals since the start, and the current state. `Engine.stats` returns a copy, which can be pickled.

    Acceptance, state growth and calibration are totals since the present drafter was loaded.
    """

    steps: int = 0
    prompt_tokens: int = 0  # computed, without those found in the prefix cache
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
    calibration: DraftCalibration | None = None  # None: no chains are drafted, or it has not changed since last sent
    drafter_failure: str | None = None  # why the drafter was switched off
    num_rounds: int = 0  # of batches
    rounds: tuple[RoundReport, ...] = ()  # the latest ones
    typical_round: tuple[int, Arm] | None = None  # batch size and arm, if there are no reports of single rounds
    costs: CostTable = field(default_factory=CostTable)
    choice: DepthChoice | None = None  # the controller's latest
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0  # queueing work; on a CPU also doing it
    read_seconds: float = 0.0  # waiting for the device and processing its results

    running: int = 0  # requests
    waiting: int = 0
    kv_used: int = 0  # blocks
    kv_capacity: int = 0

    def count_end(self, reason: str) -> None:
        """Count a finished request."""
        self.aborted += reason == "abort"
        self.failed += reason == "error"
        self.finished += reason not in ("abort", "error")

    def begin_drafter(self) -> None:
        """Reset the totals of the drafter, which has been exchanged."""
        self.acceptance, self.state_growth, self.drafter_failure = AcceptanceStatistics(), StateGrowth(), None


class Engine(Protocol):
    """Continuous batching over one target. Used by one thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or its last update has not been returned."""
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
        """Queue a request. Raises PromptError or ConfigError if it could never run.

        seed: for its random numbers; default: `params.seed`. Only with a `params.seed` is the text of a seed the
            same with and without speculation: drafts of other requests may be sampled.
        draft_limit: draft tokens per round; 0: no speculation
        cache_salt: cached prefixes are shared only between requests with the same salt
        constraint: belongs to this request; if it fails, the request ends with finish reason "error"
        parent: the answers to one prompt have the same parent, and parents take turns; default: its own id
        priority: with the scheduling policy "priority", lower ones are scheduled first and preempted last
        """
        ...

    def abort(self, request_id: str, reason: str = "abort") -> RequestUpdate | None:
        """End a request and return its last update; None if it is not running. Results in flight are dropped."""
        ...

    def step(self) -> list[RequestUpdate]:
        """Run one step and return an update for each request that has new tokens or has ended.

        After a failure the requests at fault end with finish reason "error"; the others continue. Raises
        DeadEngineError if the engine cannot continue.
        """
        ...

    def warm_up(
        self,
        progress: Callable[[int, int], None] = ...,
        *,
        plain: bool = False,
        acceptance: Acceptance | None = None,
    ) -> None:
        """Do what would otherwise delay the first requests: capture graphs, time rounds. `progress(done, total)`.

        Optional graphs are left to `work_ahead`. `plain`: prepare for requests without speculation too. `acceptance`:
        rates to start with, e.g. of an evaluation.
        """
        ...

    def work_ahead(self) -> bool:
        """Do a piece of optional work (a few tenths of a second at most) while idle; False if there is none.

        A busy engine does such work between steps, in a small share of its time.
        """
        ...

    def prepare_drafter(self, model: str) -> Any:
        """Load a drafter for `exchange_drafter`, and check it. May be called on another thread, in parallel to steps.

        Raises FledgeError if it does not fit the target, or if this engine cannot exchange drafters.
        """
        ...

    def exchange_drafter(self, new: Any, acceptance: Acceptance | None = None) -> None:
        """Use a drafter from `prepare_drafter` from the next step on. Running requests continue with the same tokens.

        `acceptance`: see `warm_up`. Raises FledgeError, and changes nothing, if there is no room for it.
        """
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot. Does not synchronise with the device."""
        ...
