import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.decoding.tree import DraftTree, Expansion, expand, rank, visibility
from tests.toy_models import check_tree


def grow(tables: list[torch.Tensor], width: int) -> list[Expansion]:
    """Expand level by level; level d continues frontier row r with logprobs tables[d][r % rows]."""
    scores = torch.zeros(1)
    levels = []
    for table in tables:
        logprobs = table[torch.arange(scores.shape[0]) % table.shape[0]]
        level = expand(scores, logprobs, width)
        levels.append(level)
        scores = level.scores[level.frontier]
    return levels


def random_tables(seed: int, levels: int, vocab: int, *, coarse: bool) -> list[torch.Tensor]:
    """Coarse tables have few different values, zero among them, so that scores tie across depths."""
    generator = torch.Generator().manual_seed(seed)
    if coarse:
        return [-torch.randint(0, 3, (4, vocab), generator=generator).float() for _ in range(levels)]
    return [torch.randn(4, vocab, generator=generator).log_softmax(-1) for _ in range(levels)]


def test_expand_worked_example():
    logprobs = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]]).log()
    level = expand(torch.tensor([0.8, 0.1]).log(), logprobs, width=2)
    assert level.tokens.tolist() == [0, 1, 2, 1]
    assert level.origins.tolist() == [0, 0, 1, 1]
    assert level.scores.exp().tolist() == pytest.approx([0.48, 0.24, 0.07, 0.02])
    assert level.frontier.tolist() == [0, 1]  # both continue the first node


def test_rank_worked_example():
    # root -> 0 (.6) -> 1 (.54)      root -> 2 (.4) -> 0 (.12)
    #            \-> 0 (.06)                   \-> 1 (.28)
    first = expand(torch.zeros(1), torch.tensor([[0.6, 0.0, 0.4]]).log(), width=2)
    second = expand(first.scores[first.frontier], torch.tensor([[0.1, 0.9, 0.0], [0.3, 0.7, 0.0]]).log(), width=2)
    tree = rank([first, second], budget=4)
    assert tree.tokens.tolist() == [0, 2, 1, 1]
    assert tree.parents.tolist() == [-1, -1, 0, 1]
    assert tree.depths.tolist() == [1, 1, 2, 2]
    assert tree.scores.exp().tolist() == pytest.approx([0.6, 0.4, 0.54, 0.28])
    assert visibility(tree.parents).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    levels=st.integers(1, 5),
    vocab=st.integers(2, 8),
    width=st.integers(1, 6),
    budget=st.integers(1, 40),
    coarse=st.booleans(),
)
def test_ranked_nodes_are_a_tree_and_the_best_ones(*, seed, levels, vocab, width, budget, coarse):
    expansions = grow(random_tables(seed, levels, vocab, coarse=coarse), width)
    tree = rank(expansions, budget)
    check_tree(tree)
    candidates = torch.cat([level.scores for level in expansions]).sort(descending=True).values
    assert torch.equal(tree.scores.sort(descending=True).values, candidates[:budget])
    assert tree.max_depth == levels


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4), budget=st.integers(1, 30))
def test_scores_are_the_log_probabilities_of_the_paths(seed, width, budget):
    """With a drafter that is a table of the last token, a node's score can be summed up along its path."""
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    scores, last, levels = torch.zeros(1), torch.tensor([0]), []
    for _ in range(3):
        level = expand(scores, table[last], width)
        levels.append(level)
        scores, last = level.scores[level.frontier], level.tokens[level.frontier]
    tree = rank(levels, budget)
    for node in range(tree.tokens.shape[0]):
        total, at = 0.0, node
        while at >= 0:
            parent = int(tree.parents[at])
            before = int(tree.tokens[parent]) if parent >= 0 else 0
            total += float(table[before, tree.tokens[at]])
            at = parent
        assert float(tree.scores[node]) == pytest.approx(total, abs=1e-5)


def test_width_one_is_the_greedy_chain():
    tables = random_tables(3, 4, 7, coarse=False)
    tree = rank(grow(tables, width=1), budget=10)
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.tokens.tolist() == [int(table[0].argmax()) for table in tables]


def test_rounded_up_certainty_does_not_outscore_its_parent():
    level = expand(torch.tensor([-1.0]), torch.tensor([[1e-7, -20.0]]), width=2)
    assert level.scores.max() <= -1.0


def test_impossible_tokens_rank_last():
    tables = [torch.tensor([[0.0, -math.inf, -math.inf]]), torch.tensor([[math.log(0.5), math.log(0.5), -math.inf]])]
    tree = rank(grow(tables, width=3), budget=3)
    check_tree(tree)
    assert torch.isfinite(tree.scores).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40).flatmap(lambda n: st.tuples(*[st.integers(-1, i - 1) for i in range(n)])))
def test_visibility_against_climbing(parents):
    visible = visibility(torch.tensor(parents, dtype=torch.int64))
    assert visible.dtype == torch.bool
    assert visible.shape == (len(parents) + 1, len(parents) + 1)
    for row in range(len(parents) + 1):
        seen, at = {0}, row - 1
        while at >= 0:
            seen.add(at + 1)
            at = parents[at]
        assert set(visible[row].nonzero().flatten().tolist()) == seen


def test_visibility_of_a_deep_chain():
    assert torch.equal(visibility(torch.arange(-1, 63)), torch.ones(65, 65).tril().bool())


@pytest.mark.parametrize(
    ("tokens", "parents", "depths"),
    [([1, 1], [-1, -1], [1, 1]), ([1, 2], [1, -1], [2, 1]), ([1, 2], [-1, 0], [1, 1]), ([1, 2], [-1, 0], [1, 3])],
)
def test_broken_trees_are_noticed(tokens, parents, depths):
    tree = DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        scores=torch.zeros(2),
        max_depth=2,
    )
    with pytest.raises(AssertionError):
        check_tree(tree)
