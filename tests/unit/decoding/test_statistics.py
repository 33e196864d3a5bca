import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.decoding.statistics import AcceptanceStatistics, Overlap, copied_tokens, repeated_tokens

ROUNDS = st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=30)


def tallied(rounds) -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for drafted, accepted in rounds:
        statistics.add(drafted=drafted, accepted=accepted)
    return statistics


def test_worked_example():
    # drafts        x x x      x x x      x x x     x          (depth 3 three times, depth 1 once)
    # accepted      3          1          0         1
    statistics = tallied([(3, 3), (3, 1), (3, 0), (1, 1)])
    assert statistics.rounds == 4
    assert statistics.drafted_by_depth == (4, 3, 3)
    assert statistics.accepted_by_depth == (3, 1, 1)
    assert statistics.acceptance_length == 1 + 5 / 4
    assert statistics.rate_by_depth == (3 / 4, 1 / 3, 1 / 3)
    # Depth 2 was up for acceptance in the first two rounds only: the last round did not draft that far.
    assert statistics.conditional_rate_by_depth == (3 / 4, 1 / 2, 1.0)


def test_repetition_is_what_is_inside_an_ngram_seen_before():
    #                    0  1  2  3  4  5  6  7  8  9
    assert repeated_tokens([1, 2, 3, 9, 1, 2, 3, 8, 2, 3], n=3) == [False] * 4 + [True] * 3 + [False] * 3
    assert repeated_tokens([5] * 5, n=3) == [False, True, True, True, True]  # a loop overlaps itself
    assert repeated_tokens(list(range(8)) * 2) == [False] * 8 + [True] * 8
    assert repeated_tokens([*range(8), *range(1, 8)]) == [False] * 15  # seven tokens are not eight
    assert repeated_tokens([]) == []


def places(marked) -> list[int]:
    return [place for place, is_marked in enumerate(marked) if is_marked]


def test_a_copy_is_what_is_inside_an_ngram_that_began_in_the_prompt():
    prompt = [1, 2, 3, 4, 5, 0]
    assert places(copied_tokens(prompt, [9, 2, 3, 4, 9, 4, 5, 9], n=3)) == [1, 2, 3]  # two tokens are not three
    assert places(copied_tokens(prompt, [1, 2, 3, 4, 5, 6], n=3)) == [0, 1, 2, 3, 4]
    assert places(copied_tokens(prompt, [7, 8, 9, 7, 8, 9], n=3)) == []  # it repeats itself, which is no copy
    assert places(copied_tokens(list(range(40)), [*range(10, 18), 50, *range(30, 37)])) == list(range(8))


def test_a_copy_across_the_border_of_prompt_and_answer():
    #     prompt     | answer         An answer that goes on as the prompt did before has to do so for a whole n-gram:
    # 1 2 3 4 5 1 2  | 3 4 9          the tokens of a template at the border would make one of less.
    assert places(copied_tokens([1, 2, 3, 4, 5, 1, 2], [3, 4, 9], n=3)) == []
    assert places(copied_tokens([1, 2, 3, 4, 5, 1, 2], [3, 4, 5], n=3)) == [0, 1, 2]
    # What it copies may itself reach over the border: 1 2 | 3 9 1 2 3.
    assert places(copied_tokens([0, 1, 2], [3, 9, 1, 2, 3], n=3)) == [2, 3, 4]
    assert places(copied_tokens([0, 1, 2], [3, 4, 9, 3, 4, 9], n=3)) == []  # began in the answer
    assert places(copied_tokens([5], [5, 5, 5], n=3)) == [0, 1, 2]  # a loop that began in the prompt


def test_a_prompt_or_an_answer_shorter_than_an_ngram_has_no_copies():
    assert copied_tokens([], [1, 2, 3, 4], n=3) == [False] * 4
    assert copied_tokens([1, 2], [1, 2, 9, 8], n=3) == [False] * 4
    assert copied_tokens([1, 2, 3], [1, 2], n=3) == [False] * 2
    assert copied_tokens([1, 2, 3], [], n=3) == []


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_copies_against_a_plain_search(prompt, answer, n):
    text, expected = prompt + answer, [False] * len(answer)
    for start in range(len(answer) - n + 1):
        if any(text[place : place + n] == answer[start : start + n] for place in range(len(prompt))):
            expected[start : start + n] = [True] * n
    assert copied_tokens(prompt, answer, n) == expected


def test_a_round_is_left_out_if_it_starts_on_a_token_that_was_there_before():
    overlap = Overlap(5, repeated=[False, False, True, True], copied=[False, True, True, False])
    rounds = [(5, 3, 1), (6, 3, 2), (7, 3, 3), (8, 2, 2), (9, 3, 0)]  # the last starts after a trimmed answer's end
    assert overlap.fresh(rounds).tally == {(3, 1): 1, (3, 2): 1, (3, 0): 1}
    assert overlap.novel(rounds).tally == {(3, 1): 1, (3, 0): 1}
    assert overlap.fresh([(7, 3, 3)]).acceptance_length is None
    found = Overlap.of([90, *range(8)], [*range(20, 28), *range(20, 28), *range(8)])
    assert (found.prompt_tokens, places(found.repeated), places(found.copied)) == (9, [*range(8, 16)], [*range(16, 24)])


def test_no_rounds_is_no_figure():
    empty = AcceptanceStatistics()
    empty.add(drafted=0, accepted=0)
    assert empty.rounds == 0
    assert empty.acceptance_length is None
    assert empty.rate_by_depth == ()
    assert empty.conditional_rate_by_depth == ()


def test_depth_nobody_reached_has_no_conditional_rate():
    assert tallied([(2, 0)]).conditional_rate_by_depth == (0.0, None)
    assert tallied([(2, 0)]).rate_by_depth == (0.0, 0.0)


def test_impossible_round_is_refused():
    with pytest.raises(AssertionError):
        AcceptanceStatistics().add(drafted=2, accepted=3)


@given(ROUNDS, ROUNDS)
def test_merging_is_the_same_as_counting_together(left, right):
    assert AcceptanceStatistics.merge([tallied(left), tallied(right)]) == tallied(left + right)


@given(ROUNDS)
def test_figures_against_a_plain_count(rounds):
    statistics = tallied(rounds)
    real = [(drafted, accepted) for drafted, accepted in rounds if drafted > 0]
    assert statistics.rounds == len(real)
    if real:
        emitted = sum(accepted + 1 for _, accepted in real)
        assert statistics.acceptance_length == pytest.approx(emitted / len(real))
    for i, rate in enumerate(statistics.rate_by_depth):
        drafted_here = [accepted for drafted, accepted in real if drafted > i]
        assert rate == sum(accepted > i for accepted in drafted_here) / len(drafted_here)
    for i, rate in enumerate(statistics.conditional_rate_by_depth):
        reached = [accepted for drafted, accepted in real if drafted > i and accepted >= i]
        assert rate == (sum(accepted > i for accepted in reached) / len(reached) if reached else None)
    assert json.loads(json.dumps(statistics.to_dict()))["rounds"] == len(real)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_unconditional_rate_is_the_product_of_conditional_ones_at_fixed_depth(accepted):
    statistics = tallied([(4, a) for a in accepted])
    product = 1.0
    for rate, conditional in zip(statistics.rate_by_depth, statistics.conditional_rate_by_depth, strict=True):
        product *= conditional if conditional is not None else 0.0
        assert rate == pytest.approx(product)
    assert statistics.acceptance_length == pytest.approx(1 + sum(statistics.rate_by_depth))
