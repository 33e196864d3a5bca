"""A request inside the engine: its parameters, its tokens so far and its scheduling state."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fledge.decoding.params import SamplingParams
from fledge.decoding.statistics import AcceptanceStatistics
from fledge.engine.arms import RequestKind
from fledge.engine.block_manager import BlockTable
from fledge.engine.constraint import CONSTRAINT_FAILURE, TokenConstraint
from fledge.engine.outputs import RequestMetrics, RoundRecord, TokenLogprobs

UNLIMITED = 2**31 - 1
MAX_FAILURES = 3  # failed steps that a request took part in, after which it is ended


class Phase(StrEnum):
    WAITING = "waiting"  # has no row and no blocks
    PREFILL = "prefill"  # has a row and blocks; its tokens are being computed
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Request:
    """Mutable; changed by the scheduler (phase, row, blocks) and the engine (tokens, statistics) only.

    `tokens` are the tokens known to the host. The device may be ahead by launches that have not been read yet, which
    add at most `in_flight` tokens.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_length: int  # prompt and answer together
    draft_until: int  # no drafts for positions from here on; 0: no speculation
    parent: str = ""  # parents take turns (the answers to one prompt have the same); default: its own id
    priority: int = 0  # lower is earlier
    draft_limit: int = UNLIMITED  # drafts per round
    may_sample_drafts: bool = False  # whether the controller decides if its drafts are sampled
    cache_salt: bytes = b""  # cached blocks are shared only between requests with the same salt
    constraint: TokenConstraint | None = None  # grammar, in the state after `tokens`

    # Derived once: every step reads these of every request.
    kind: RequestKind = field(init=False)  # not SAMPLED_DRAFTS, unless the engine sets it
    longest: int = field(init=False)  # maximum number of tokens, prompt included
    adjusts: bool = field(init=False)  # its logits are adjusted before sampling: bias, penalties, min_tokens, grammar

    tokens: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    row: int | None = None
    slot: int | None = None  # in `Adjustments`, if it has one
    # With a constraint: the drafts of its next round. None: not read yet; it is left out of rounds until then.
    drafts: Sequence[int] | None = ()
    table: BlockTable = field(default_factory=BlockTable)
    placed_blocks: int = 0  # blocks of the table that were copied to the device
    settled: int = 0  # positions whose keys and values, the target's and the drafter's, are final
    in_flight: int = 0
    finish_reason: str | None = None
    failure: str | None = None  # why it ends with "error"
    failures: int = 0  # failed steps that it took part in, of unknown cause
    is_suspect: bool = False  # took part in such a step, and has not completed a round since

    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on, as far as computed
    rounds: list[RoundRecord] = field(default_factory=list)
    drafts_expected: float = 0.0  # acceptances of its latest drafts that the controller expected
    drafts_accepted: float = 0.0  # the actual ones; both are written by the controller
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at its first admission
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None  # first admission
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.parent = self.parent or self.id
        p = self.params
        self.kind = RequestKind.GREEDY if p.is_greedy else RequestKind.SAMPLED
        self.longest = self.max_length
        if p.max_tokens is not None:
            self.longest = min(self.max_length, len(self.prompt) + p.max_tokens)
        penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
        self.adjusts = penalised or p.logit_bias is not None or p.min_tokens > 0 or self.constraint is not None

    @property
    def running_row(self) -> int:
        """The row in the device state of a running request."""
        assert self.row is not None
        return self.row

    @property
    def sample_drafts(self) -> bool:
        """Whether its drafts are sampled (rather than argmax)."""
        return self.kind is RequestKind.SAMPLED_DRAFTS

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def ends_in_flight(self) -> bool:
        """Whether the launch in flight, of at least one token, certainly ends it."""
        return self.in_flight > 0 and len(self.tokens) + 1 >= self.longest

    @property
    def chooses_first_token(self) -> bool:
        """Whether prefill ends by choosing a token. After a preemption the last token is already known."""
        return self.num_output == 0

    @property
    def prefill_end(self) -> int:
        """Number of tokens to prefill: the whole prompt; after a preemption all tokens but the last."""
        return len(self.tokens) if self.chooses_first_token else len(self.tokens) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are still to be returned, which happens with its first token."""
        return self.params.prompt_logprobs is not None and self.chooses_first_token

    @property
    def needs_host(self) -> bool:
        """Whether its tokens are chosen on the host: its logits are adjusted, and it has no slot on the device."""
        return self.adjusts and self.slot is None

    def accept(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first that ends the answer; return those appended.

        An answer also ends where its constraint is complete.
        """
        room = self.longest - len(self.tokens)
        if room <= 0:  # max_tokens is 0: only prompt log-probabilities were requested
            self.finish_reason = "length"
            return []
        if self.constraint is None and len(tokens) < room and self.stop_ids.isdisjoint(tokens):
            self.tokens += tokens
            return tokens
        for count, token in enumerate(tokens, start=1):
            try:
                if self.constraint is not None and self.failure is None:
                    self.constraint.accept([token])
            except Exception as error:  # ends this request only
                self.fail_constraint(error)
            if self.failure is not None:
                self.finish_reason = "error"
                return tokens[: count - 1]
            self.tokens.append(token)
            if token in self.stop_ids or (self.constraint is not None and self.constraint.is_complete):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.longest:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tokens[:count]
        return tokens

    @property
    def acceptance(self) -> AcceptanceStatistics:
        """Statistics of its rounds."""
        found = AcceptanceStatistics()
        found.count((done.drafted, done.accepted) for done in self.rounds)
        return found

    def metrics(self) -> RequestMetrics:
        """Return the metrics of a finished request."""
        assert self.finished_at is not None, f"request {self.id} has not ended"
        return RequestMetrics(
            acceptance=self.acceptance,
            rounds=tuple(self.rounds),
            prompt_tokens=len(self.prompt),
            output_tokens=self.num_output,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            arrived=self.arrived,
            queue_seconds=None if self.admitted_at is None else self.admitted_at - self.arrived,
            time_to_first_token=None if self.first_token_at is None else self.first_token_at - self.arrived,
            seconds=self.finished_at - self.arrived,
        )

    def set_drafter(self, max_positions: int) -> None:
        """Use another drafter, which has so many positions; reset the acceptance of the previous one."""
        self.draft_until = min(self.max_length, max_positions) if self.draft_limit else 0
        self.drafts_expected = self.drafts_accepted = 0.0

    def fail_constraint(self, error: Exception) -> None:
        """Record why the constraint failed. The request ends when its next tokens are read."""
        self.failure = f"{CONSTRAINT_FAILURE}{str(error) or type(error).__name__}"


def kind_of_round(requests: Iterable[Request]) -> RequestKind:
    return RequestKind.of_round({request.kind for request in requests})


def requests_at_fault(involved: Iterable[Request]) -> list[Request]:
    """Return the requests to end after a failed step: the only one in it, or the only suspect.

    Otherwise all unfinished requests in it become suspects, and those with too many failures are returned.
    """
    involved = [request for request in involved if request.phase is not Phase.FINISHED]
    suspects = [request for request in involved if request.is_suspect]
    for group in (involved, suspects):
        if len(group) == 1:
            return group
    for request in involved:
        request.is_suspect = True
        request.failures += 1
    return [request for request in involved if request.failures >= MAX_FAILURES]
