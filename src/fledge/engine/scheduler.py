"""Who runs in the next step: parents take turns in order of priority and arrival, prompts come in chunks.

Knows requests, rows and blocks; knows no tensors and no tokens' meaning. A step has two parts that run one after the
other: chunks of prompts, under a budget of tokens and of measured time so that they cannot hold up decoding for long,
and a round for all requests that are decoding.
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

PREFILL_SECONDS = 0.25  # that the prompts of one step may take: how long a token of somebody else's may be late
FIRST_CHUNK = 256  # tokens, before it is known how long they take
LEAST_CHUNK = 32  # tokens, however long they take
FEW_PROMPTS = 4  # that are read beside a round: they are cut so that it holds up nobody for long
FEW_NEWCOMERS = 0.25  # of those that decode: for fewer, all others would wait longer than drafts of theirs are worth


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of a request's tokens to read: `start` to `end`."""

    request: Request
    start: int
    end: int
    completes: bool  # no tokens are left after it
    chooses: bool  # it completes, and the next token is not known yet

    @property
    def prompt_rows(self) -> int:
        """Its first so many tokens are followed by tokens of the prompt whose log-probabilities were asked for."""
        request = self.request
        return max(0, min(self.end, len(request.prompt) - 1) - self.start) if request.wants_prompt_logprobs else 0


@dataclass(frozen=True, kw_only=True)
class ScheduledBatch:
    """One step. The round verifies `verify` and drafts `draft`; prompts draft `first_draft`."""

    chunks: list[Chunk]
    decoding: list[Request]
    verify: Arm
    draft: Arm
    admit: int | None = None  # drafts that are verified, of all requests together; None: all there are
    is_mixed: bool = False  # round and prompts are one pass, in which all draft `draft`
    first_draft: Arm = PLAIN  # for chunks that complete; nothing: nor has their first round anything to verify

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.decoding

    @cached_property
    def requests(self) -> list[Request]:
        return [*(chunk.request for chunk in self.chunks), *self.decoding]

    @cached_property
    def num_prompt_tokens(self) -> int:
        """How many its chunks have."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @cached_property
    def kind(self) -> RequestKind:
        """Of its round."""
        return kind_of_round(self.decoding)

    @cached_property
    def constrained(self) -> list[Request]:
        """Those of its round with a constraint."""
        return [request for request in self.decoding if request.constraint is not None]

    @cached_property
    def needs_host(self) -> bool:
        """Whether its round does, for one of its requests."""
        return any(request.needs_host for request in self.decoding)

    def is_alike(self, other: "ScheduledBatch") -> bool:
        """Whether the host has the same to do for both: a round and no prompts, and either both draft or neither."""
        are_rounds = self.decoding and other.decoding and not (self.chunks or other.chunks)
        return bool(are_rounds and (self.draft.depth > 0) == (other.draft.depth > 0))


def _priority(request: Request) -> int:
    return request.priority


PromptsAlong = Callable[[int, Arm], tuple[Arm, int] | None]  # see `Scheduler.schedule`


class MustSettle(Exception):  # noqa: N818 - a signal, not an error
    """The next step needs tokens that are still in flight: read them and ask again."""


class Scheduler:
    """Owns the waiting queue, the running requests, their rows and their blocks."""

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
        self._ahead = lookahead - (max_depth + 1)  # the same beyond tokens in flight
        self.max_prefill_tokens = max_prefill_tokens
        self.timely_tokens = FIRST_CHUNK  # of prompts, that are read in `PREFILL_SECONDS`
        self.waiting: deque[Request] = deque()  # by priority, then in order of arrival
        self.running: list[Request] = []  # in order of admission
        self.preemptions = 0
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._last_draft = PLAIN

    def add(self, request: Request) -> None:
        if not self.waiting or self.waiting[-1].priority <= request.priority:
            self.waiting.append(request)
        else:
            bisect.insort_right(self.waiting, request, key=_priority)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands. What the device still computes for it is discarded."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is not Phase.FINISHED:
            self.running.remove(request)
            self._vacate(request, preempted=False)
        request.phase = Phase.FINISHED

    def schedule(self, draft: Arm, along: PromptsAlong = lambda _batch, _arm: None) -> ScheduledBatch:
        """Decide the next step, which drafts so. Raises MustSettle before anything is changed for good.

        `along` says of a round of so many requests what it drafts if prompts are read in the same pass, and how many
        tokens of a few of them may be, of more in proportion; None: no such bound.

        Changes phases, rows and blocks of the requests it moves.
        """
        self._make_room()
        if draft.depth:
            if not self._last_draft.depth and any(request.in_flight for request in self.running):
                raise MustSettle  # the drafter has missed tokens that nobody knows yet
            self._catch_up()
        # Drafts are verified as far as they are drafted now: some are left out if that is less than last time, and
        # places stay empty if it is more. A tree is verified as it was drafted, and so is what comes before one.
        verify = self._last_draft if draft.depth and (draft.is_tree or self._last_draft.is_tree) else draft
        decoding = [
            r for r in self.running if r.phase is Phase.DECODE and not r.ends_in_flight and r.drafts is not None
        ]
        for request in decoding:
            needed = len(request.tokens) + request.in_flight + self._ahead
            if not self.block_manager.has_room(request.table, needed) and request.phase is Phase.DECODE:
                self._grow(request, needed)  # and it was not preempted by an earlier one in this loop
        decoding = [request for request in decoding if request.phase is Phase.DECODE]
        budget = self.max_prefill_tokens - len(decoding) * (verify.depth + 1)
        beside = None
        newcomers = sum(r.phase is Phase.PREFILL for r in self.running) if len(decoding) < len(self.running) else 0
        newcomers += min(len(self.waiting), len(self._free_rows))
        if newcomers and decoding and verify == draft and not any(request.needs_host for request in decoding):
            beside = along(len(decoding), draft)
        if beside is not None:
            budget = min(budget, beside[1] * max(newcomers, FEW_PROMPTS) // FEW_PROMPTS)
        chunks = self._schedule_chunks(budget)
        if chunks and beside is not None:
            verify = draft = beside[0]
        for request in decoding:
            request.in_flight += verify.depth + 1
        self._last_draft = draft
        newcomers = sum(chunk.completes for chunk in chunks)
        drafts = newcomers and (draft.is_tree or newcomers >= FEW_NEWCOMERS * len(decoding))
        return ScheduledBatch(
            chunks=chunks, decoding=decoding, verify=verify, draft=draft, first_draft=draft if drafts else PLAIN
        )

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Learn how long the prompts of a step took. Short ones, which are launched more than read, say little."""
        if tokens >= self.timely_tokens or seconds > PREFILL_SECONDS:
            timely = tokens * PREFILL_SECONDS / max(seconds, 1e-6)
            self.timely_tokens = int(min(max(timely, LEAST_CHUNK), self.max_prefill_tokens))

    def restart(self, alive: Iterable[Request]) -> None:
        """Send everybody back to the queue, in the given order: what a failed step left of rows and blocks is void."""
        self.running.clear()
        self.waiting.clear()
        for request in alive:
            if request.row is not None:
                self._vacate(request, preempted=True)
            self.add(request)

    def read_again(self) -> None:
        """Let everybody that runs read what they have once more, in their own blocks. Nothing may be in flight.

        Of those that decode, the ones that draft go back to it with the next step that drafts (`_catch_up`).
        """
        assert not any(request.in_flight for request in self.running), "what is in flight would be settled"
        self.block_manager.forget_all(request.table for request in self.running)
        for request in self.running:
            request.settled = 0

    @contextmanager
    def stand_ins(self, length: int) -> Iterator[list[Request]]:
        """Requests of nobody's, one for each row, with blocks for `length` tokens and a round: to time rounds with.

        Nothing may run. Where blocks are few, the last of them share theirs.
        """
        assert not self.running, "rows are taken"
        tables = [BlockTable()]
        while len(tables) <= len(self._free_rows) and self.block_manager.grow(tables[-1], length + self.lookahead):
            tables.append(BlockTable())
        owned = tables[:-1] or tables
        try:
            yield [
                Request(
                    id=f"stand-in {row}",
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

    def _schedule_chunks(self, budget: int) -> list[Chunk]:
        """Share the budget out. A prompt that it cannot finish leaves half of the rest to shorter ones behind it."""
        left = max(min(budget, self.timely_tokens), 1)  # however many requests decode, prompts move on
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
        for request, share in shares.items():  # what nobody wanted
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
        """The first whose parent runs nothing, or else the fewest requests; None if none is shorter than that.

        Of those of the first priority that has any.
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

    def _make_room(self) -> None:
        """One request of many answers must not keep all others out: where a parent runs several, its last gives way."""
        newcomer = self._next_waiting()
        while newcomer is not None and newcomer.preemptions == 0 and not self._has_room(newcomer):
            running = Counter(request.parent for request in self.running)
            victim = self._victim()
            if running[newcomer.parent] or running[victim.parent] < 2 or victim.priority < newcomer.priority:
                return
            self._require_settled()
            self._preempt(victim)

    def _has_room(self, request: Request) -> bool:
        needed = self.block_manager.blocks_for(len(request.tokens) + self.lookahead)
        return bool(self._free_rows) and needed <= self.block_manager.available

    def _victim(self) -> Request:
        """Who gives way first: of the last priority the last to come, of the parent that runs most."""
        running = Counter(request.parent for request in self.running)
        return max(reversed(self.running), key=lambda request: (request.priority, running[request.parent]))

    def _admit(self, request: Request) -> bool:
        """Give the request a row and blocks for all it has, what is cached included; False if there is no room.

        A suspect is tried before anybody else comes.
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
        """Allocate ahead for the next round; preempt from the back of the line until there is room."""
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
        """Give up a request's row and blocks. It is read again from the start, or from what stays cached, later."""
        self.running.remove(request)
        self._vacate(request, preempted=True)
        bisect.insort_left(self.waiting, request, key=_priority)  # before others of its priority

    def _catch_up(self) -> None:
        """Send requests whose drafter rows stayed behind (rounds without drafting) back to read what it missed."""
        behind = [
            r for r in self.running if r.phase is Phase.DECODE and r.settled < len(r.tokens) - 1 and r.draft_until
        ]
        if any(request.in_flight for request in behind):
            raise MustSettle
        for request in behind:
            request.phase = Phase.PREFILL

    def _vacate(self, request: Request, *, preempted: bool) -> None:
        self._free_rows.append(request.running_row)
        self.block_manager.release(request.table)
        request.row, request.phase, request.drafts = None, Phase.WAITING, ()
        request.preemptions += preempted
        self.preemptions += preempted
        request.settled = request.placed_blocks = request.in_flight = 0
