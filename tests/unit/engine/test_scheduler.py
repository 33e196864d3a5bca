"""Who runs when: order, budgets, preemption, and what must be read before what."""

import pytest

from fledge.decoding.params import SamplingParams
from fledge.engine.arms import PLAIN, Arm
from fledge.engine.block_manager import BlockManager
from fledge.engine.request import Phase, Request
from fledge.engine.scheduler import INITIAL_PREFILL_TOKENS, MIN_PREFILL_TOKENS, MustSettle, ScheduledBatch, Scheduler

DEPTH = 1  # lookahead is 6 tokens
CHAIN, TREE = Arm(DEPTH), Arm(DEPTH, is_tree=True)


def make(*, blocks: int = 100, size: int = 2, requests: int = 4, budget: int = 100) -> Scheduler:
    pool = BlockManager(blocks + 1, size)
    return Scheduler(pool, max_requests=requests, max_prefill_tokens=budget, max_depth=DEPTH, lookahead=6)


def ask(
    scheduler: Scheduler, name: str, length: int, draft_until: int = 64, parent: str = "", priority: int = 0
) -> Request:
    request = Request(
        id=name,
        parent=parent,
        prompt=[ord(name) % 50] * length,
        params=SamplingParams(max_tokens=50),
        seed=0,
        stop_ids=frozenset(),
        max_length=64,
        draft_until=draft_until,
        priority=priority,
    )
    scheduler.add(request)
    return request


def read(plan: ScheduledBatch, tokens: int = 1) -> None:
    """Do what the engine does with the results: every request that ran got `tokens` tokens."""
    for chunk in plan.chunks:
        if chunk.chooses:
            chunk.request.in_flight -= 1
            chunk.request.accept([7])
    for request in plan.decoding:
        request.in_flight -= plan.verify.depth + 1
        request.accept([8] * tokens)
        if plan.draft.depth:
            request.settled = len(request.tokens) - 1


def spans(plan: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.id, chunk.start, chunk.end, chunk.completes) for chunk in plan.chunks]


def test_requests_are_admitted_in_order_of_arrival_while_there_are_rows() -> None:
    scheduler = make(requests=2)
    a, b, c = (ask(scheduler, name, 3) for name in "abc")
    assert spans(scheduler.schedule(CHAIN)) == [("a", 0, 3, True), ("b", 0, 3, True)]
    assert (a.phase, b.phase, c.phase) == (Phase.DECODE, Phase.DECODE, Phase.WAITING)
    scheduler.finish(a)
    assert spans(scheduler.schedule(CHAIN)) == [("c", 0, 3, True)]
    assert c.row == 0
    scheduler.check_integrity()


def test_a_lower_priority_goes_first_and_is_the_last_to_be_preempted() -> None:
    scheduler = make(requests=2)
    ask(scheduler, "a", 3, priority=5)
    ask(scheduler, "b", 3, priority=5)
    ask(scheduler, "c", 3, priority=-1)
    ask(scheduler, "d", 3, priority=5, parent="a")
    assert [request.id for request in scheduler.waiting] == ["c", "a", "b", "d"]
    plan = scheduler.schedule(Arm(0))
    assert spans(plan) == [("c", 0, 3, True), ("a", 0, 3, True)]
    read(plan)
    scheduler.check_integrity()
    ask(scheduler, "e", 3, priority=5)
    victim = scheduler._victim()
    assert victim.id == "a"  # though c was admitted earlier, and so would be the last by that
    scheduler._preempt(victim)
    assert [request.id for request in scheduler.waiting] == ["a", "b", "d", "e"]  # the first of its priority again
    scheduler.check_integrity()
    ask(scheduler, "f", 3, priority=0)
    assert [chunk.request.id for chunk in scheduler.schedule(Arm(0)).chunks] == ["f"]
    assert scheduler._victim().id == "f"


def test_a_long_prompt_is_read_in_chunks_and_leaves_half_of_each_step_to_shorter_ones() -> None:
    scheduler = make(budget=4)
    for name, length in (("a", 9), ("b", 9), ("c", 1)):
        ask(scheduler, name, length)
    assert spans(scheduler.schedule(PLAIN)) == [("a", 0, 3, False), ("c", 0, 1, True)]  # what c leaves is a's
    steps = [spans(scheduler.schedule(PLAIN)) for _ in range(3)]
    assert steps[0] == [("a", 3, 6, False)]  # one token of the budget is the round's
    assert steps[1] == [("a", 6, 9, True)]
    assert steps[2] == [("b", 0, 2, False)]


def test_chunks_are_as_long_as_the_time_that_they_may_take() -> None:
    scheduler = make(blocks=2000, budget=1000, size=16)
    ask(scheduler, "a", 5000)
    sizes = []
    for seconds_per_token in (1e-3, 1e-3, 4e-3, 4e-3, 1.0, 1e-6, 1e-6):
        (chunk,) = scheduler.schedule(PLAIN).chunks
        sizes.append(chunk.end - chunk.start)
        scheduler.observe_prefill(sizes[-1], sizes[-1] * seconds_per_token)
    assert sizes == [INITIAL_PREFILL_TOKENS, 250, 250, 62, 62, MIN_PREFILL_TOKENS, 1000]
    scheduler.observe_prefill(3, 0.02)  # launched more than read
    assert scheduler.timely_prefill_tokens == 1000


def test_a_short_request_does_not_wait_for_all_answers_to_another() -> None:
    scheduler = make(requests=4)
    crowd = [ask(scheduler, name, 3, parent="crowd") for name in "abcdefgh"]
    unread = scheduler.schedule(CHAIN)
    late = ask(scheduler, "z", 3)
    with pytest.raises(MustSettle):  # somebody's tokens would be lost
        scheduler.schedule(CHAIN)
    read(unread)
    plan = scheduler.schedule(CHAIN)
    assert [chunk.request for chunk in plan.chunks] == [late]
    assert [request.id for request in plan.decoding] == ["a", "b", "c"]
    assert crowd[3].preemptions == 1
    read(plan)
    other = ask(scheduler, "y", 3)  # whose turn it is before those of the crowd that have waited for longer
    read(scheduler.schedule(CHAIN))
    assert other.phase is Phase.DECODE
    more = [ask(scheduler, name, 3, parent="y") for name in "wx"]
    for finished in (late, crowd[0]):
        scheduler.finish(finished)
        read(scheduler.schedule(CHAIN))
    assert sorted(request.parent for request in scheduler.running) == ["crowd", "crowd", "y", "y"]
    assert more[1].phase is Phase.WAITING
    scheduler.check_integrity()


def test_a_newcomer_gets_blocks_too_and_those_of_its_own_kind_are_left_alone() -> None:
    scheduler = make(blocks=12, requests=8)  # of two tokens each; a prompt of 3 takes 5
    a, b = (ask(scheduler, name, 3, parent="crowd") for name in "ab")
    read(scheduler.schedule(PLAIN))
    assert (a.phase, b.phase) == (Phase.DECODE, Phase.DECODE)
    late = ask(scheduler, "c", 3)
    read(scheduler.schedule(PLAIN))
    assert (late.phase, b.phase) == (Phase.DECODE, Phase.WAITING)
    alone = ask(scheduler, "d", 3)
    read(scheduler.schedule(PLAIN))
    assert (alone.phase, a.preemptions, late.preemptions) == (Phase.WAITING, 0, 0)  # nobody runs more than one


def test_decoding_requests_take_from_the_budget_but_never_all_of_it() -> None:
    scheduler = make(budget=4)
    for name in "ab":
        ask(scheduler, name, 1)
    read(scheduler.schedule(CHAIN))
    ask(scheduler, "c", 5)
    second = scheduler.schedule(CHAIN)
    assert ([request.id for request in second.decoding], second.verify, second.draft) == (["a", "b"], CHAIN, CHAIN)
    assert spans(second) == [("c", 0, 1, False)]  # 4 - 2 * (1 + 1) leaves nothing; one token moves on all the same


@pytest.mark.parametrize(
    ("drafted", "verified"),
    [
        ([CHAIN, PLAIN, PLAIN, CHAIN, CHAIN], [CHAIN, PLAIN, PLAIN, CHAIN, CHAIN]),
        ([TREE, PLAIN, PLAIN, TREE, TREE], [PLAIN, PLAIN, PLAIN, PLAIN, TREE]),
        ([CHAIN, TREE, TREE, CHAIN, CHAIN, TREE], [CHAIN, CHAIN, TREE, TREE, CHAIN, CHAIN]),
    ],
    ids=["chains as far as they are drafted now", "trees as they were drafted", "and so is a chain before a tree"],
)
def test_what_is_verified(drafted: list[Arm], verified: list[Arm]) -> None:
    scheduler = make()
    ask(scheduler, "a", 2)
    seen = []
    for arm in drafted:
        plan = scheduler.schedule(arm)
        read(plan)
        assert plan.draft == arm
        seen.append(plan.verify)
    assert seen == verified


def test_blocks_are_there_ahead_of_need() -> None:
    """Whatever an unread round and the one being planned may add has a slot already."""
    scheduler = make(size=1)
    request = ask(scheduler, "a", 3)
    plans = [scheduler.schedule(CHAIN)]
    for _ in range(6):
        plans.append(scheduler.schedule(CHAIN))  # launched before the one before it is read
        read(plans.pop(0), tokens=2)
        assert len(request.table.blocks) >= len(request.tokens) + request.in_flight + DEPTH + 1


def test_the_last_to_come_is_preempted_and_the_first_to_return() -> None:
    scheduler = make(blocks=15)  # of two tokens each
    a, b, c = (ask(scheduler, name, 3) for name in "abc")
    read(scheduler.schedule(CHAIN))
    assert [request.phase for request in (a, b, c)] == [Phase.DECODE] * 3
    for _ in range(20):
        plan = scheduler.schedule(CHAIN)
        scheduler.check_integrity()
        read(plan, tokens=2)
        if b.phase is Phase.WAITING:
            break
    assert c.phase is Phase.WAITING
    assert (c.preemptions, b.preemptions, a.preemptions, scheduler.preemptions) == (1, 1, 0, 2)
    assert list(scheduler.waiting) == [b, c]
    scheduler.finish(a)
    plan = scheduler.schedule(CHAIN)
    assert plan.chunks[0].request is b
    assert not plan.chunks[0].chooses  # its last token is known already
    assert plan.chunks[0].end == len(b.tokens) - 1


def test_nothing_is_preempted_while_tokens_are_in_flight() -> None:
    scheduler = make(blocks=13)
    a, b = ask(scheduler, "a", 3), ask(scheduler, "b", 3)
    unread = scheduler.schedule(CHAIN)
    settled = 0
    while b.phase is not Phase.WAITING:
        try:
            plan = scheduler.schedule(CHAIN)
        except MustSettle:
            assert (a.phase, b.phase, b.preemptions) == (Phase.DECODE, Phase.DECODE, 0)
            read(unread, tokens=2)
            settled += 1
            plan = unread = scheduler.schedule(CHAIN)
            continue
        scheduler.check_integrity()
        read(unread, tokens=2)
        unread = plan
    assert settled >= 1
    assert a.phase is Phase.DECODE
    scheduler.check_integrity()


def test_what_the_drafter_missed_is_read_when_drafting_begins_again() -> None:
    scheduler = make()
    a, b = ask(scheduler, "a", 3), ask(scheduler, "b", 3, draft_until=0)
    read(scheduler.schedule(CHAIN))
    read(scheduler.schedule(PLAIN), tokens=2)
    unread = scheduler.schedule(PLAIN)
    with pytest.raises(MustSettle):  # tokens that nobody knows cannot be read to the drafter
        scheduler.schedule(CHAIN)
    read(unread)
    plan = scheduler.schedule(CHAIN)
    assert spans(plan) == [("a", 3, len(a.tokens) - 1, True)]
    assert not plan.chunks[0].chooses
    assert plan.decoding == [b]  # which never drafts and need not wait
    assert scheduler.schedule(CHAIN).decoding == [a, b]


@pytest.mark.parametrize("phase", Phase)
def test_a_request_can_leave_in_any_phase(phase: Phase) -> None:
    scheduler = make(budget=4)
    request, other = ask(scheduler, "a", 6), ask(scheduler, "b", 6)
    for _ in range([Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.FINISHED].index(phase)):
        if request.phase is Phase.DECODE:
            scheduler.finish(request)
        else:
            scheduler.schedule(PLAIN)
    assert request.phase is phase
    scheduler.finish(request)
    assert request.phase is Phase.FINISHED
    scheduler.check_integrity()
    scheduler.finish(other)
    scheduler.check_integrity()
    assert scheduler.block_manager.used == 0


def test_an_admission_that_fails_leaves_no_trace() -> None:
    scheduler = make(blocks=8)
    ask(scheduler, "a", 4)
    scheduler.schedule(PLAIN)
    before = (
        scheduler.block_manager.available,
        scheduler.block_manager.asked_tokens,
        scheduler.block_manager.hit_tokens,
    )
    waiting = ask(scheduler, "b", 9)
    for _ in range(3):
        assert not scheduler.schedule(PLAIN).chunks
    assert waiting.phase is Phase.WAITING
    assert before[1:] == (scheduler.block_manager.asked_tokens, scheduler.block_manager.hit_tokens)
    scheduler.check_integrity()


def test_prompts_beside_a_round_are_cut_and_the_round_drafts_what_is_captured_with_them() -> None:
    scheduler = make(budget=100)
    ask(scheduler, "a", 3)
    read(scheduler.schedule(CHAIN))
    plan = scheduler.schedule(CHAIN, mixed_limit=lambda _batch, _arm: (PLAIN, 4))
    assert (plan.verify, plan.draft, plan.chunks) == (CHAIN, CHAIN, []), "there are none"
    read(plan)
    ask(scheduler, "b", 9)
    told: list[tuple[int, Arm]] = []
    plan = scheduler.schedule(CHAIN, mixed_limit=lambda batch, arm: told.append((batch, arm)) or (PLAIN, 4))
    assert told == [(1, CHAIN)]
    assert spans(plan) == [("b", 0, 4, False)]
    assert (plan.verify, plan.draft) == (PLAIN, PLAIN)
    assert [request.in_flight for request in plan.decoding] == [1]


def test_more_prompts_beside_a_round_may_be_longer_together() -> None:
    scheduler = make(requests=9)
    ask(scheduler, "a", 3)
    read(scheduler.schedule(CHAIN))
    for name in "bcdefgh":
        ask(scheduler, name, 2)
    plan = scheduler.schedule(CHAIN, mixed_limit=lambda _batch, arm: (arm, 4))
    assert sum(chunk.end - chunk.start for chunk in plan.chunks) == 7
