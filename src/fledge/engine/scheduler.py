"""Which requests run in the next step: continuous batching with chunked prefill, preemption and fairness of parents.

Knows requests, rows of the device state and blocks; no tensors. A step has two parts: chunks of prompts, limited in
tokens and in measured time so that they do not delay decoding for long, and one round for all decoding requests.
"""

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from fledge.decoding.params import SamplingParams
from fledge.engine.arms import PLAIN, Arm, RequestKind
from fledge.engine.block_manager import BlockManager, BlockTable
from fledge.engine.request import Phase, Request, kind_of_round

PREFILL_SECONDS = 0.25  # time for the prompts of one step: the delay that other requests' tokens may have
INITIAL_PREFILL_TOKENS = 256  # per step, until their time has been measured
MIN_PREFILL_TOKENS = 32  # per step, however long they take
FEW_PROMPTS = 4  # the token limit of a mixed pass is for up to so many prompts, and grows in proportion with more
MIN_NEW_SHARE = 0.25  # new requests per decoding one, from which their prefill also drafts: the others wait for that


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Part of a request's prefill: tokens `start` to `end`."""

    request: Request
    start: int
    end: int
    completes: bool  # it is the last chunk
    chooses: bool  # it is the last chunk, and the next token has to be sampled

    @property
    def prompt_rows(self) -> int:
        """How many of its first positions give a prompt log-probability that was requested."""
        request = self.request
        return max(0, min(self.end, len(request.prompt) - 1) - self.start) if request.wants_prompt_logprobs else 0


@dataclass(frozen=True, kw_only=True)
class ScheduledBatch:
    """One step. The round verifies `verify` and drafts `draft`; completed prompts draft `first_draft`."""

    chunks: list[Chunk]
    decoding: list[Request]
    verify: Arm
    draft: Arm
    admit: int | None = None  # number of drafts to verify over the whole batch; None: all
    is_mixed: bool = False  # round and prompts are one pass, in which all draft `draft`
    first_draft: Arm = PLAIN  # PLAIN: the first round of these requests has nothing to verify

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.decoding

    @cached_property
    def requests(self) -> list[Request]:
        return [*(chunk.request for chunk in self.chunks), *self.decoding]

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @cached_property
    def kind(self) -> RequestKind:
        """Kind of the round."""
        return kind_of_round(self.decoding)

    @cached_property
    def constrained(self) -> list[Request]:
        """Decoding requests with a constraint."""
        return [request for request in self.decoding if request.constraint is not None]

    @cached_property
    def needs_host(self) -> bool:
        """Whether a decoding request has its tokens chosen on the host."""
        return any(request.needs_host for request in self.decoding)

    def is_alike(self, other: "ScheduledBatch") -> bool:
        """Whether the host's work is the same: both are rounds without prompts, and both or neither draft."""
        are_rounds = self.decoding and other.decoding and not (self.chunks or other.chunks)
        return bool(are_rounds and (self.draft.depth > 0) == (other.draft.depth > 0))


def _priority(request: Request) -> int:
    return request.priority


MixedLimit = Callable[[int, Arm], tuple[Arm, int] | None]  # see `Scheduler.schedule`


class MustSettle(Exception):  # noqa: N818 - a signal, not an error
    """The next step depends on tokens that are still in flight: read them and schedule again."""


class Scheduler:
    """Owns the waiting queue, the running requests, their rows in the device state and their blocks."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_requests: int,
        max_prefill_tokens: int,
        max_depth: int,
        lookahead: int,
    ) -> None:
        """`lookahead`: slots that a request needs beyond its known tokens (`DeviceState`)."""
        self.block_manager = block_manager
        self.lookahead = lookahead
        self._lookahead_in_flight = lookahead - (max_depth + 1)  # the same beyond tokens in flight
        self.max_prefill_tokens = max_prefill_tokens
        self.timely_prefill_tokens = INITIAL_PREFILL_TOKENS  # number of tokens that takes `PREFILL_SECONDS`
        self.waiting: deque[Request] = deque()  # by priority, then by arrival
        self.running: list[Request] = []  # by admission
        self.preemptions = 0
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._last_draft = PLAIN

    def add(self, request: Request) -> None:
        if not self.waiting or self.waiting[-1].priority <= request.priority:
            self.waiting.append(request)
        else:
            bisect.insort_right(self.waiting, request, key=_priority)

    def finish(self, request: Request) -> None:
        """Remove a request in any phase. Its results that are still in flight will be discarded."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is not Phase.FINISHED:
            self.running.remove(request)
            self._release(request, preempted=False)
        request.phase = Phase.FINISHED

    def schedule(self, draft: Arm, mixed_limit: MixedLimit = lambda _batch, _arm: None) -> ScheduledBatch:
        """Schedule the next step, which drafts `draft`. Raises MustSettle; calling again after settling is safe.

        `mixed_limit(batch, draft)`: what a round of so many requests drafts if prompts are read in the same pass, and
        how many tokens of up to `FEW_PROMPTS` prompts that pass may have; None: no limit.

        Changes phases, rows and blocks of the requests it moves.
        """
        self._preempt_for_fairness()
        if draft.depth:
            self._catch_up()
        # A chain is verified to the depth drafted now: some drafts are left out if that is less than last time, and
        # entries stay empty if it is more. Trees, and what is verified before the first tree, keep their own depth.
        verify = self._last_draft if draft.depth and (draft.is_tree or self._last_draft.is_tree) else draft
        decoding = self._schedule_decoding()
        prompts = sum(r.phase is Phase.PREFILL for r in self.running) if len(decoding) < len(self.running) else 0
        prompts += min(len(self.waiting), len(self._free_rows))
        limit = None
        if prompts and decoding and verify == draft and not any(request.needs_host for request in decoding):
            limit = mixed_limit(len(decoding), draft)
        budget = self.max_prefill_tokens - len(decoding) * (verify.depth + 1)
        if limit is not None:
            budget = min(budget, limit[1] * max(prompts, FEW_PROMPTS) // FEW_PROMPTS)
        chunks = self._schedule_chunks(budget)
        if chunks and limit is not None:
            verify = draft = limit[0]
        for request in decoding:
            request.in_flight += verify.depth + 1
        self._last_draft = draft
        completed = sum(chunk.completes for chunk in chunks)
        drafts = completed and (draft.is_tree or completed >= MIN_NEW_SHARE * len(decoding))
        return ScheduledBatch(
            chunks=chunks, decoding=decoding, verify=verify, draft=draft, first_draft=draft if drafts else PLAIN
        )

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Adapt the token limit to a measured prefill. Short ones are ignored: launching dominates their time."""
        if tokens >= self.timely_prefill_tokens or seconds > PREFILL_SECONDS:
            timely = tokens * PREFILL_SECONDS / max(seconds, 1e-6)
            self.timely_prefill_tokens = int(min(max(timely, MIN_PREFILL_TOKENS), self.max_prefill_tokens))

    def restart(self, alive: Iterable[Request]) -> None:
        """Preempt all requests and queue them in the given order, after a failed step."""
        self.running.clear()
        self.waiting.clear()
        for request in alive:
            if request.row is not None:
                self._release(request, preempted=True)
            self.add(request)

    def recompute_running(self) -> None:
        """Mark the keys and values of all running requests as invalid; they keep rows and blocks. Nothing may be in
        flight.

        Decoding requests that draft go back to prefill with the next step that drafts (`_catch_up`).
        """
        assert not any(request.in_flight for request in self.running), "what is in flight would be settled"
        self.block_manager.reset_prefix_cache(request.table for request in self.running)
        for request in self.running:
            request.settled = 0

    @contextmanager
    def dummy_requests(self, length: int) -> Iterator[list[Request]]:
        """Yield dummy requests, one for each row, with blocks for `length` tokens and a round: to time rounds with.

        No request may be running. If there are not enough blocks, the last dummies share theirs.
        """
        assert not self.running, "rows are taken"
        tables = [BlockTable()]
        while len(tables) <= len(self._free_rows) and self.block_manager.grow(tables[-1], length + self.lookahead):
            tables.append(BlockTable())
        owned = tables[:-1] or tables
        try:
            yield [
                Request(
                    id=f"dummy {row}",
                    prompt=[0],
                    params=SamplingParams(temperature=1.0),
                    seed=row,
                    stop_ids=frozenset(),
                    max_length=length,
                    draft_until=length + self.lookahead,
                    row=row,
                    table=owned[min(row, len(owned) - 1)],
                )
                for row in sorted(self._free_rows)
            ]
        finally:
            for table in owned:
                self.block_manager.release(table)

    def check_integrity(self) -> None:
        self.block_manager.check_integrity(request.table for request in self.running)
        rows = [request.row for request in self.running]
        assert None not in rows
        assert len(set(rows) | set(self._free_rows)) == len(rows) + len(self._free_rows), "a row is owned twice"
        assert all(request.phase in (Phase.PREFILL, Phase.DECODE) for request in self.running)
        assert all(request.phase is Phase.WAITING for request in self.waiting)
        assert list(self.waiting) == sorted(self.waiting, key=_priority)
        assert all(not request.table.blocks and request.row is None for request in self.waiting)
        assert all(0 <= request.settled < len(request.tokens) + 1 for request in self.running)
        assert all(request.in_flight >= 0 for request in self.running)

    def _schedule_decoding(self) -> list[Request]:
        """Return the requests of the next round, with blocks for it; preempts others if there are too few."""
        decoding = [
            r for r in self.running if r.phase is Phase.DECODE and not r.ends_in_flight and r.drafts is not None
        ]
        for request in decoding:
            needed = len(request.tokens) + request.in_flight + self._lookahead_in_flight
            if not self.block_manager.has_room(request.table, needed) and request.phase is Phase.DECODE:
                self._grow(request, needed)  # unless it was preempted for an earlier one in this loop
        return [request for request in decoding if request.phase is Phase.DECODE]

    def _schedule_chunks(self, budget: int) -> list[Chunk]:
        """Distribute the token budget. A prompt that does not fit leaves half of the rest to shorter ones after it."""
        left = max(min(budget, self.timely_prefill_tokens), 1)  # prefill progresses however many requests decode
        started = deque(request for request in self.running if request.phase is Phase.PREFILL)
        shares: dict[Request, int] = {}
        shorter_than = math.inf
        while left > 0:
            request = started.popleft() if started else self._admit_next(shorter_than)
            if request is None:
                break
            missing = request.prefill_end - request.settled
            shares[request] = missing if missing <= left else left - left // 2
            left -= shares[request]
            if shares[request] < missing:
                shorter_than = min(shorter_than, missing)
        for request, share in shares.items():  # the unused rest
            shares[request] = min(share + left, request.prefill_end - request.settled)
            left -= shares[request] - share
        return [self._chunk(request, share) for request, share in shares.items()]

    def _chunk(self, request: Request, share: int) -> Chunk:
        start, end = request.settled, request.settled + share
        completes = end == request.prefill_end
        chooses = completes and request.chooses_first_token
        request.settled = end
        if completes:
            request.in_flight += int(chooses)
            request.phase = Phase.DECODE
        return Chunk(request=request, start=start, end=end, completes=completes, chooses=chooses)

    def _next_waiting(self, shorter_than: float = math.inf) -> Request | None:
        """Return the first waiting request whose parent has the fewest running ones; None if there is none.

        Candidates have less to prefill than `shorter_than`, and of these the best priority.
        """
        if not self.waiting:
            return None
        running = Counter(request.parent for request in self.running)
        found: Request | None = None
        for request in self.waiting:
            if found is not None and found.priority < request.priority:
                break
            if request.prefill_end < shorter_than and (
                found is None or running[request.parent] < running[found.parent]
            ):
                found = request
                if not running[request.parent]:
                    break
        return found

    def _admit_next(self, shorter_than: float) -> Request | None:
        request = self._next_waiting(shorter_than)
        if request is None or not self._admit(request):
            return None
        self.waiting.remove(request)
        return request

    def _preempt_for_fairness(self) -> None:
        """If the next request's parent runs nothing and there is no room, preempt a parent that runs several.

        So one request for many answers cannot block all others.
        """
        request = self._next_waiting()
        while request is not None and request.preemptions == 0 and not self._has_room(request):
            running = Counter(one.parent for one in self.running)
            victim = self._victim()
            if running[request.parent] or running[victim.parent] < 2 or victim.priority < request.priority:
                return
            self._require_settled()
            self._preempt(victim)

    def _has_room(self, request: Request) -> bool:
        needed = self.block_manager.blocks_for(len(request.tokens) + self.lookahead)
        return bool(self._free_rows) and needed <= self.block_manager.available

    def _victim(self) -> Request:
        """Return the request to preempt: of the last priority, of the parent that runs most, the latest admitted."""
        running = Counter(request.parent for request in self.running)
        return max(reversed(self.running), key=lambda request: (request.priority, running[request.parent]))

    def _admit(self, request: Request) -> bool:
        """Give the request a row and blocks for all its tokens, cached ones included; False if there is no room.

        While a suspect runs, no other request is admitted.
        """
        if not self._free_rows or any(request.is_suspect for request in self.running):
            return False
        known = () if request.wants_prompt_logprobs else request.tokens[: request.prefill_end]
        table = self.block_manager.match(known, request.cache_salt)
        cached = len(table.blocks) * self.block_manager.block_size
        if not self.block_manager.grow(table, len(request.tokens) + self.lookahead):
            self.block_manager.release(table)
            self.block_manager.asked_tokens -= len(known)
            self.block_manager.hit_tokens -= cached
            return False
        request.table, request.row = table, self._free_rows.pop()
        request.settled, request.placed_blocks = cached, 0
        if request.preemptions == 0:
            request.cached_tokens = cached
            request.admitted_at = time.perf_counter()
        request.phase = Phase.PREFILL
        self.running.append(request)
        return True

    def _grow(self, request: Request, needed: int) -> None:
        """Allocate blocks for the next round; preempt requests until there are enough."""
        while not self.block_manager.grow(request.table, needed):
            self._require_settled()
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return

    def _require_settled(self) -> None:
        if any(request.in_flight or request.drafts is None for request in self.running):
            raise MustSettle

    def _preempt(self, request: Request) -> None:
        """Release a request's row and blocks. Later it is recomputed, except for what stays in the prefix cache."""
        self.running.remove(request)
        self._release(request, preempted=True)
        bisect.insort_left(self.waiting, request, key=_priority)  # before others of its priority

    def _catch_up(self) -> None:
        """Send requests whose drafter missed tokens (rounds without drafts) back to prefill for these tokens."""
        if not self._last_draft.depth and any(request.in_flight for request in self.running):
            raise MustSettle  # missed tokens may be in flight
        behind = [
            r for r in self.running if r.phase is Phase.DECODE and r.settled < len(r.tokens) - 1 and r.draft_until
        ]
        if any(request.in_flight for request in behind):
            raise MustSettle
        for request in behind:
            request.phase = Phase.PREFILL

    def _release(self, request: Request, *, preempted: bool) -> None:
        self._free_rows.append(request.running_row)
        self.block_manager.release(request.table)
        request.row, request.phase, request.drafts = None, Phase.WAITING, ()
        request.preemptions += preempted
        self.preemptions += preempted
        request.settled = request.placed_blocks = request.in_flight = 0
