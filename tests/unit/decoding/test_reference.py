"""What the reference loop feeds, keeps, counts and when it stops, with toys whose every token is known.

The target counts: after token i comes i + 1, round the clock of VOCAB tokens.
"""

from dataclasses import replace

import pytest
import torch

from fledge.decoding import reference
from fledge.decoding.drafting import TreeShape
from fledge.decoding.params import SamplingParams
from fledge.decoding.reference import Round, Speculation, generate
from fledge.models.drafter.base import Drafter
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.toy_models import Prompter, ToyDrafter, ToyTarget

VOCAB = 7
COUNTING = 9.0 * torch.eye(VOCAB).roll(1, dims=1)
ALWAYS = ToyDrafter(COUNTING)
NEVER = ToyDrafter(9.0 * torch.eye(VOCAB).roll(3, dims=1))
TREE = TreeShape(width=2, budget=6)


def greedy(**settings: object) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, **settings})


def counts(rounds: list[Round]) -> list[tuple[int, int]]:
    return [(done.drafted, done.accepted) for done in rounds]


def text_of(rounds: list[Round]) -> list[int]:
    return [token for done in rounds for token in done.tokens]


def test_plain_decoding_feeds_the_prompt_and_then_each_token_once() -> None:
    target = ToyTarget(COUNTING)
    rounds = list(generate(target, [4, 0], greedy(max_tokens=3)))
    assert rounds == [
        Round(tokens=(1,), drafted=0, accepted=0),
        Round(tokens=(2,), drafted=0, accepted=0),
        Round(tokens=(3,), drafted=0, accepted=0, finish_reason="length"),
    ]
    assert target.passes == [([4, 0], [0, 1]), ([1], [2]), ([2], [3])]


def test_drafts_that_always_stand() -> None:
    """Each round emits depth + 1 tokens; `accepted` counts what verification found although the last is trimmed."""
    target = ToyTarget(COUNTING)
    rounds = list(generate(target, [0], greedy(max_tokens=10), speculation=Speculation(drafter=ALWAYS, depth=3)))
    assert rounds == [
        Round(tokens=(1,), drafted=0, accepted=0),
        Round(tokens=(2, 3, 4, 5), drafted=3, accepted=3),
        Round(tokens=(6, 0, 1, 2), drafted=3, accepted=3),
        Round(tokens=(3,), drafted=3, accepted=3, finish_reason="length"),
    ]
    assert target.passes == [
        ([0], [0]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
        ([5, 6, 0, 1], [5, 6, 7, 8]),
        ([2, 3, 4, 5], [9, 10, 11, 12]),
    ]


def test_drafts_that_never_stand() -> None:
    target = ToyTarget(COUNTING)
    rounds = list(generate(target, [0], greedy(max_tokens=3), speculation=Speculation(drafter=NEVER, depth=2)))
    assert rounds == [
        Round(tokens=(1,), drafted=0, accepted=0),
        Round(tokens=(2,), drafted=2, accepted=0),
        Round(tokens=(3,), drafted=2, accepted=0, finish_reason="length"),
    ]
    assert target.passes == [([0], [0]), ([1, 4, 0], [1, 2, 3]), ([2, 5, 1], [2, 3, 4])]


def test_a_tree_round_counts_depth_drafted_and_path_accepted() -> None:
    """The right tokens are second choices at even places: a tree two wide holds them, the best path does not."""
    text = [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    drafter = Prompter(text, ranks=[1, 0], vocab_size=VOCAB)
    tree = TreeShape(width=4, budget=40)
    speculation = Speculation(drafter=drafter, depth=3, tree=tree)
    rounds = list(generate(ToyTarget(COUNTING), [0], greedy(max_tokens=9), speculation=speculation))
    assert [done.tokens for done in rounds] == [(1,), (2, 3, 4, 5), (6, 0, 1, 2)]
    assert counts(rounds) == [(0, 0), (3, 3), (3, 3)]

    chain = replace(speculation, tree=None)
    rounds = list(generate(ToyTarget(COUNTING), [0], greedy(max_tokens=5), speculation=chain))
    assert counts(rounds)[1:3] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("max_tokens", "drafted_rounds"), [(1, 0), (2, 1), (5, 1), (6, 2)])
def test_rounds_that_max_tokens_allows(tree: TreeShape | None, max_tokens: int, drafted_rounds: int) -> None:
    """The first round has no features to draft from, and nothing is drafted after the last."""
    speculation = Speculation(drafter=ALWAYS, depth=3, tree=tree)
    rounds = list(generate(ToyTarget(COUNTING), [0], greedy(max_tokens=max_tokens), speculation=speculation))
    assert counts(rounds) == [(0, 0)] + [(3, 3)] * drafted_rounds
    assert len(text_of(rounds)) == max_tokens


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", [ALWAYS, NEVER], ids=["always", "never"])
@pytest.mark.parametrize("max_length", range(4, 15))
def test_no_draft_reaches_past_the_last_position(max_length: int, drafter: Drafter, tree: TreeShape | None) -> None:
    """A round is drafted as deep as its tokens, bonus included, have room."""
    prompt, depth = [3, 4, 5], 4
    target = ToyTarget(COUNTING, max_positions=max_length)
    speculation = Speculation(drafter=drafter, depth=depth, tree=tree)
    rounds = list(generate(target, prompt, greedy(max_tokens=None), speculation=speculation))

    assert len(prompt) + len(text_of(rounds)) == max_length
    assert rounds[-1].finish_reason == "length"
    assert max(position for _, positions in target.passes for position in positions) < max_length
    length = len(prompt) + 1
    for done in rounds[1:]:
        assert done.drafted == min(depth, max_length - length - 1)
        length += len(done.tokens)

    shorter = ToyTarget(COUNTING)  # the same as a limit of the request
    assert rounds == list(
        generate(shorter, prompt, greedy(max_tokens=None), speculation=speculation, max_length=max_length)
    )


def test_a_drafter_with_fewer_positions_steps_aside() -> None:
    target = ToyTarget(COUNTING)
    short = ToyDrafter(COUNTING, max_positions=9)
    rounds = list(generate(target, [0], greedy(max_tokens=12), speculation=Speculation(drafter=short, depth=4)))
    #                          2 tokens   7: room for 1   9: no room, for good
    assert counts(rounds) == [(0, 0), (4, 4), (1, 1), (0, 0), (0, 0), (0, 0), (0, 0)]
    assert text_of(rounds) == [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]

    rounds = list(generate(target, [0] * 9, greedy(max_tokens=3), speculation=Speculation(drafter=short, depth=4)))
    assert counts(rounds) == [(0, 0)] * 3


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("by", ["eos", "stop id"])
def test_a_stop_among_accepted_drafts_trims_but_counts(by: str, tree: TreeShape | None) -> None:
    stop = {"stop_token_ids": [4]} if by == "stop id" else {}
    rounds = list(
        generate(
            ToyTarget(COUNTING),
            [0],
            greedy(max_tokens=4, **stop),  # the limit is reached by the same token: it is a stop nevertheless
            speculation=Speculation(drafter=ALWAYS, depth=5, tree=tree),
            eos_ids=[4] if by == "eos" else [],
        )
    )
    assert rounds[1:] == [Round(tokens=(2, 3, 4), drafted=5, accepted=5, finish_reason="stop")]


@pytest.mark.parametrize("speculation", [None, Speculation(drafter=ALWAYS, depth=4)], ids=["plain", "speculative"])
def test_what_stops_a_sequence(speculation: Speculation | None) -> None:
    def run(**settings: object) -> tuple[list[int], str | None]:
        target = ToyTarget(COUNTING + 0.1 * torch.eye(VOCAB))  # the second choice is to repeat
        params = greedy(max_tokens=8, **settings)
        rounds = list(generate(target, [0], params, eos_ids=[3], speculation=speculation))
        return text_of(rounds), rounds[-1].finish_reason

    assert run() == ([1, 2, 3], "stop")
    assert run(ignore_eos=True) == ([1, 2, 3, 4, 5, 6, 0, 1], "length")
    assert run(ignore_eos=True, stop_token_ids=[5]) == ([1, 2, 3, 4, 5], "stop")
    assert run(min_tokens=2) == ([1, 2, 3], "stop")
    assert run(min_tokens=5) == ([1, 2, 2, 2, 2, 3], "stop")  # 3 may not come before five tokens are out
    assert run(min_tokens=5, ignore_eos=True, stop_token_ids=[2]) == ([1, 1, 1, 1, 1, 2], "stop")


def test_a_stop_id_outside_the_vocabulary_is_never_met() -> None:
    """Configs name such eos ids (a vocabulary cut or padded): with `min_tokens` there is nothing to forbid."""
    rounds = list(generate(ToyTarget(COUNTING), [0], greedy(max_tokens=3, min_tokens=2), eos_ids=[VOCAB + 3]))
    assert text_of(rounds) == [1, 2, 3]


def test_the_requests_seed_comes_before_the_engines() -> None:
    def run(seed: int, own: int | None) -> list[int]:
        flat = ToyTarget(torch.zeros(VOCAB, VOCAB))
        return text_of(list(generate(flat, [0], SamplingParams(max_tokens=12, seed=own), seed=seed)))

    assert run(1, None) != run(2, None)
    assert run(1, 2) == run(3, 2) == run(2, None)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_the_drafter_keeps_one_row_for_each_settled_token(
    tree: TreeShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After n tokens of text the drafter's cache has n - 1 rows, whatever it drafted: row t needs token t + 1."""
    name = "draft_chain" if tree is None else "draft_tree"
    propose, lengths = getattr(reference, name), []

    def spy(drafter: Drafter, cache: reference.DenseCache, *rest: object) -> object:
        draft = propose(drafter, cache, *rest)
        lengths.append(cache.length)
        return draft

    monkeypatch.setattr(reference, name, spy)
    target = make_target(replace(TINY_TARGET, vocab_size=6))
    drafter = make_drafter(drafter_configs(target.config)["two-layers"], target)
    speculation = Speculation(drafter=drafter, depth=3, tree=tree)
    rounds = list(generate(target, [1, 2, 3], greedy(max_tokens=20), speculation=speculation))
    expected = [3 + len(text_of(rounds[: i + 1])) - 1 for i in range(len(rounds) - 1)]
    assert lengths == expected
    assert any(done.accepted for done in rounds)


def test_rounds_arrive_one_at_a_time_and_leave_the_callers_grad_mode_alone() -> None:
    target = ToyTarget(COUNTING)
    rounds = generate(target, [0], greedy(max_tokens=9))
    next(rounds)
    assert len(target.passes) == 1
    assert torch.is_grad_enabled()
