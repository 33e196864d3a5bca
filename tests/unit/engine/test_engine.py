"""The engine's tokens and its acceptance are the reference's: alone, in company, over hits, preemptions and catch-ups.

Tokens would be right with any drafts, so drafts are compared themselves, each with what the reference drafts after the
same text (`drafts_after`).
"""

import hashlib
from array import array
from collections import Counter

import pytest

from fledge.decoding.drafting import TreeShape
from fledge.decoding.reference import Round, Speculation
from fledge.engine.block_manager import BlockManager, BlockTable
from fledge.engine.request import Request
from tests.engine_cases import (
    DRAFTERS,
    TREE,
    Ask,
    answer_of,
    answers,
    drafter,
    greedy,
    make_engine,
    rounds_of,
    run,
    run_checking_drafts,
    sampled,
    wrong_drafts,
)

NAME = "eagle3.1"
TEXT = (2, 3, 4, 5, 0, 2, 3, 4, 5, 0, 2, 3, 3, 0, 5, 4, 4, 0, 1, 2)  # five blocks of four
MIX = [
    greedy(TEXT[:9], 16),
    sampled(TEXT[:5], 14, seed=1),
    sampled([5], 12, seed=2, top_k=3, top_p=0.9),
    greedy([1, 1, 1], 10, repetition_penalty=1.2),
    greedy(TEXT[:12], 5, logit_bias={3: 1.0}),
    sampled(TEXT[:9], 12, seed=5, min_tokens=4, stop_token_ids=[4]),
    greedy([4], 1),
]


def tally(rounds: list[Round]) -> Counter[tuple[int, int]]:
    return Counter((done.drafted, done.accepted) for done in rounds if done.drafted)


def check_against_reference(requests: list[Request], asks: list[Ask], speculation: Speculation) -> None:
    for ask, request in zip(asks, requests, strict=True):
        rounds = rounds_of(ask, speculation)
        assert request.output == [token for done in rounds for token in done.tokens]
        assert request.finish_reason == rounds[-1].finish_reason
        assert request.acceptance.tally == tally(rounds)


# Those whose layers, windows, rows or vocabulary a tree or a distribution meets in a way of its own.
BOTH = {"reduced-vocabulary", "two-layers", "windows", "four-aux-states", "latent", NAME}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(DRAFTERS)
        for kind in (("tree", "sampled") if name in BOTH else (("tree", "sampled")[number % 2],))
    ],
)
def test_every_drafter_has_the_references_tokens_drafts_and_acceptance(name: str, kind: str) -> None:
    """Where drafts are sampled, those of the greedy requests are the likeliest: chains of both kinds in one batch."""
    tree = TREE if kind == "tree" else None
    engine = make_engine(drafts=drafter(name), tree=tree, sample_drafts=kind == "sampled", max_num_batched_tokens=7)
    requests = run_checking_drafts(engine, name, MIX[:4])
    speculation = Speculation(drafter=drafter(name), depth=3, tree=tree, sample_drafts=kind == "sampled")
    check_against_reference(requests, MIX[:4], speculation)


def test_the_mix_has_something_to_accept() -> None:
    pooled = sum((tally(rounds_of(ask, Speculation(drafter=drafter(), depth=3))) for ask in MIX), Counter())
    assert sum(count for (_, accepted), count in pooled.items() if accepted == 0) > 5
    assert sum(count for (_, accepted), count in pooled.items() if accepted >= 2) >= 1


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_depths(depth: int) -> None:
    engine = make_engine(drafts=drafter(), depth=depth)
    requests = run_checking_drafts(engine, NAME, MIX)
    check_against_reference(requests, MIX, Speculation(drafter=drafter(), depth=depth))


@pytest.mark.parametrize(
    "shape", [TreeShape(width=1, budget=3), TreeShape(width=3, budget=12), TreeShape(width=6, budget=60)]
)
def test_trees(shape: TreeShape) -> None:
    engine = make_engine(drafts=drafter(), tree=shape)
    requests = run_checking_drafts(engine, NAME, MIX[:4])
    check_against_reference(requests, MIX[:4], Speculation(drafter=drafter(), depth=3, tree=shape))


def test_reading_one_launch_late_changes_nothing() -> None:
    blocks = {"sample_drafts": True, "verify_blocks": True}
    for settings in ({}, {"tree": TREE}, {"sample_drafts": True}, blocks):
        engine = make_engine(drafts=drafter(), read_late=True, **settings)
        requests = [ask.submit(engine, str(i)) for i, ask in enumerate(MIX)]
        run(engine)
        check_against_reference(requests, MIX, Speculation(drafter=drafter(), depth=3, **settings))  # type: ignore[arg-type]


def test_a_batch_of_many_is_as_each_alone() -> None:
    asks = [sampled(TEXT[: 1 + i % 11], 9, seed=i, temperature=0.3 + 0.1 * (i % 7)) for i in range(24)]
    together = make_engine(drafts=drafter(), max_num_seqs=24)
    requests = run_checking_drafts(together, NAME, asks)
    check_against_reference(requests, asks, Speculation(drafter=drafter(), depth=3))


@pytest.mark.parametrize(
    ("shared", "tree"), [*((shared, None) for shared in (3, 4, 5, 7, 8, 9, 12, 13)), (4, TREE), (5, TREE), (9, TREE)]
)
def test_a_prefix_hit_does_not_change_acceptance(shared: int, tree: TreeShape | None) -> None:
    """Prompts that part before, at and after the ends of blocks of four."""
    engine = make_engine(drafts=drafter(), tree=tree)
    first = greedy(TEXT[:14], 8)
    second = greedy((*TEXT[:shared], (TEXT[shared] + 1) % 6, 5, 1), 12)
    (before,) = run_checking_drafts(engine, NAME, [first])
    assert before.cached_tokens == 0
    again, other = run_checking_drafts(engine, NAME, [first, second])
    assert again.cached_tokens == 12
    # A block is shared if the token after it is, too.
    assert other.cached_tokens == 4 * ((shared - 1) // 4)
    assert again.acceptance == before.acceptance
    check_against_reference([again, other], [first, second], Speculation(drafter=drafter(), depth=3, tree=tree))


def test_answers_are_found_again_as_prompts() -> None:
    """The next turn of a conversation: prompt and answer of the last one come back as a prompt."""
    engine = make_engine(drafts=drafter())
    ask = greedy(TEXT[:6], 15)
    (request,) = run_checking_drafts(engine, NAME, [ask])
    turn = greedy((*request.tokens, 2, 3), 10)
    (following,) = run_checking_drafts(engine, NAME, [turn])
    assert following.cached_tokens == 4 * ((len(request.tokens) - 1) // 4)
    check_against_reference([following], [turn], Speculation(drafter=drafter(), depth=3))


def test_without_the_token_after_the_block_in_its_key_a_hit_would_spoil_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with the usual key, of the block's own tokens, the tests above have something to find."""

    def usual_key(self: BlockManager, table: BlockTable, tokens: list[int], index: int) -> bytes:
        start = index * self.block_size
        parent = table.keys[index - 1] if index else b""
        return hashlib.blake2b(parent + array("q", tokens[start : start + self.block_size]).tobytes()).digest()

    monkeypatch.setattr(BlockManager, "_key", usual_key)
    spoilt = 0
    for last in range(6):
        engine = make_engine(drafts=drafter())
        answers(engine, [greedy((*TEXT[:12], 1), 2)])
        ask = greedy((*TEXT[:12], last), 12)
        request = ask.submit(engine, "again")
        while engine.has_unfinished:
            engine.step()
            spoilt += wrong_drafts(engine, NAME, ask, request)
        assert request.cached_tokens == 12
        assert request.output == answer_of(ask)[0]  # lossless all the same, which is why nobody notices
    assert spoilt > 0


@pytest.mark.parametrize(("caching", "tree"), [(True, None), (True, TREE), (False, TREE)])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(caching: bool, tree: TreeShape | None) -> None:
    asks = [greedy(TEXT[:7], 30), sampled(TEXT[2:10], 28, seed=4), greedy(TEXT[5:8], 30)]
    blocks = 24 if tree else 18
    engine = make_engine(drafts=drafter(), num_blocks=blocks, tree=tree, enable_prefix_caching=caching)
    requests = run_checking_drafts(engine, NAME, asks)
    assert sum(request.preemptions for request in requests) == engine.scheduler.preemptions >= 2
    check_against_reference(requests, asks, Speculation(drafter=drafter(), depth=3, tree=tree))


@pytest.mark.parametrize(("budget", "tree"), [(3, None), (3, TREE), (100, TREE)])
def test_after_rounds_without_drafting_drafts_are_as_if_there_had_been_none(
    budget: int, tree: TreeShape | None
) -> None:
    depths = iter([3, 3, 0, 0, 3, 3, 0, 4, 1, 0, 0, 0, 2] * 20)
    engine = make_engine(drafts=drafter(), depth=lambda _: next(depths), tree=tree, max_num_batched_tokens=budget)
    asks = [*MIX[:4], greedy(TEXT[:9], 30)]
    requests = run_checking_drafts(engine, NAME, asks)
    assert [request.output for request in requests] == [answer_of(ask)[0] for ask in asks]
    assert requests[-1].acceptance.rounds >= 5


@pytest.mark.parametrize("read_late", [False, True])
def test_a_request_that_never_speculates_leaves_no_stale_drafter_rows_in_the_cache(read_late: bool) -> None:
    """Its drafter rows stay behind in rounds without drafting, and nobody reads them up: they must not be found."""
    depth = 0
    engine = make_engine(drafts=drafter(), depth=lambda _: depth, read_late=read_late)
    quiet = Ask(prompt=TEXT[:3], params=greedy([1], 30).params, speculate=False, eos_ids=())
    request = quiet.submit(engine, "quiet")
    for step in range(40):
        depth = 3 if step < 3 or step > 12 else 0
        if engine.has_unfinished:
            engine.step()
            engine.check_integrity()
    assert not engine.has_unfinished
    assert request.output == answer_of(quiet)[0]
    assert request.acceptance.rounds == 0
    if read_late:
        return  # drafts can only be compared where the host knows what the device knows
    depth = 3
    run_checking_drafts(engine, NAME, [greedy((*request.tokens[:28], 2), 10)])


def test_sampled_drafts_do_not_change_the_tokens_of_a_request_that_has_none() -> None:
    """A row without drafts draws the numbers of plain decoding, whatever the others in its batch do."""
    engine = make_engine(drafts=drafter(), sample_drafts=True)
    quiet = Ask(prompt=TEXT[:3], params=sampled([1], 20).params, seed=5, speculate=False, eos_ids=())
    loud = sampled(TEXT[:6], 20, seed=6)
    assert answers(engine, [quiet, loud])[0] == answer_of(quiet)[0]


def test_seeded_answers_do_not_depend_on_depth_or_tree() -> None:
    wishes: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"repetition_penalty": 1.3}]
    asks = [sampled(TEXT[:4], 16, seed=seed, **wishes[seed % 3]) for seed in range(6)]
    expected = [answer_of(ask)[0] for ask in asks]
    assert len({tuple(tokens) for tokens in expected}) == 6
    for depth, tree in ((0, None), (1, None), (6, None), (3, TREE)):
        assert answers(make_engine(drafts=drafter(), depth=depth, tree=tree), asks) == expected
