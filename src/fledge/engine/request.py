"""A request inside the engine: what was asked, what is known of the answer, and where it stands."""

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
MAX_FAILURES = 3  # of steps that a request took part in, before it is held to be at fault


class Phase(StrEnum):
    WAITING = "waiting"  # has no row and no blocks
    PREFILL = "prefill"  # has a row and blocks; its tokens are being read
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Request:
    """Mutable; changed by the scheduler (phase, row, blocks) and the engine (tokens, statistics) only.

    `tokens` is what the host knows. The device may be ahead of it by the rounds that have not been read yet, which
    add at most `in_flight` tokens.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_length: int  # of prompt and answer together
    draft_until: int  # no drafting for positions from here on; 0: no speculation at all
    parent: str = ""  # whose answer it is: parents take turns; not given: its own
    priority: int = 0  # lower is earlier
    draft_limit: int = UNLIMITED  # no more drafts than this in a round
    may_sample_drafts: bool = False  # nothing says whether its drafts are drawn at random: whatever pays
    cache_salt: bytes = b""  # shares cached blocks only with requests that have the same
    constraint: TokenConstraint | None = None  # what the answer may look like; at the state after `tokens`

    # What follows from the above, once: every step asks it of every request.
    kind: RequestKind = field(init=False)  # not of drawn drafts, until whoever adds it decides so
    longest: int = field(init=False)  # tokens that it can have, those of the prompt included
    adjusts: bool = field(init=False)  # its logits are changed before anything is chosen

    tokens: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    row: int | None = None
    slot: int | None = None  # where the device keeps what changes its logits
    # With a constraint: what its next round verifies, as read; None: not yet, and until then it sits rounds out.
    drafts: Sequence[int] | None = ()
    table: BlockTable = field(default_factory=BlockTable)
    placed_blocks: int = 0  # blocks of the table that the device knows
    settled: int = 0  # positions whose target and drafter rows are final
    in_flight: int = 0
    finish_reason: str | None = None
    failure: str | None = None  # why it ends with "error"
    failures: int = 0  # steps with it in them that failed, and nobody knows why
    is_suspect: bool = False  # was in such a step, and has not been through a round since

    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on, as far as read
    rounds: list[RoundRecord] = field(default_factory=list)
    drafts_expected: float = 0.0  # to be accepted of its latest drafts, by what is accepted of others'
    drafts_accepted: float = 0.0  # of those: the controller's business, both of them
    cached_tokens: int = 0  # of the prompt, found in the pool when it was admitted
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None  # for the first time
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
        """Its row in the device's state, of a request that runs."""
        assert self.row is not None
        return self.row

    @property
    def sample_drafts(self) -> bool:
        """Whether its drafts are drawn at random."""
        return self.kind is RequestKind.SAMPLED_DRAFTS

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def ends_in_flight(self) -> bool:
        """Whether what is in flight, which is one token at least, is certain to end it."""
        return self.in_flight > 0 and len(self.tokens) + 1 >= self.longest

    @property
    def chooses_first_token(self) -> bool:
        """Whether prefill ends by mode a token. After a preemption the last token is known already."""
        return self.num_output == 0

    @property
    def prefill_end(self) -> int:
        """How many tokens prefill reads: all of a prompt; of a resumed request all but the last."""
        return len(self.tokens) if self.chooses_first_token else len(self.tokens) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be told: with its first tokens they are."""
        return self.params.prompt_logprobs is not None and self.chooses_first_token

    @property
    def needs_host(self) -> bool:
        """Whether the host chooses its tokens: the device has no room for what changes its logits."""
        return self.adjusts and self.slot is None

    def accept(self, tokens: list[int]) -> list[int]:
        """Take over tokens up to the first that ends the answer; return those taken.

        An answer also ends where its constraint is complete: only an end of text could follow.
        """
        room = self.longest - len(self.tokens)
        if room <= 0:  # nothing was asked for but to read the prompt
            self.finish_reason = "length"
            return []
        if self.constraint is None and len(tokens) < room and self.stop_ids.isdisjoint(tokens):
            self.tokens += tokens
            return tokens
        for count, token in enumerate(tokens, start=1):
            try:
                if self.constraint is not None and self.failure is None:
                    self.constraint.accept([token])
            except Exception as error:  # it concerns this request and no other
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
        """Of its rounds, worked out anew."""
        found = AcceptanceStatistics()
        found.count((done.drafted, done.accepted) for done in self.rounds)
        return found

    def metrics(self) -> RequestMetrics:
        """Return how it went, once it has ended."""
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
        """Draft with a drafter for so many positions, and forget how well the one before it did."""
        self.draft_until = min(self.max_length, max_positions) if self.draft_limit else 0
        self.drafts_expected = self.drafts_accepted = 0.0

    def fail_constraint(self, error: Exception) -> None:
        """Note why the constraint fails. The request then ends with its next tokens."""
        self.failure = f"{CONSTRAINT_FAILURE}{str(error) or type(error).__name__}"


def kind_of_round(requests: Iterable[Request]) -> RequestKind:
    return RequestKind.of_round({request.kind for request in requests})


def requests_at_fault(involved: Iterable[Request]) -> list[Request]:
    """Return the requests that a failed step is blamed on; if that is not clear, all in it become suspects."""
    involved = [request for request in involved if request.phase is not Phase.FINISHED]
    suspects = [request for request in involved if request.is_suspect]
    for clear in (involved, suspects):
        if len(clear) == 1:
            return clear
    for request in involved:
        request.is_suspect = True
        request.failures += 1
    return [request for request in involved if request.failures >= MAX_FAILURES]
