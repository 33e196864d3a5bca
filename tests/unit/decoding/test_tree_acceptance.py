"""Trees of drafts: the target's distribution, plain decoding's tokens, the longest path that the target takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.decoding.acceptance import Accepted, accept_matching, accept_tree
from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import TokenHistory, distribution
from fledge.decoding.tree import DraftTree, expand, rank, visibility
from fledge.kernels.sample import choose
from tests.toy_target import (
    DEPTH,
    DRAFTERS,
    GREEDY,
    LENGTH,
    PROMPT,
    SHAPED,
    SIGNIFICANCE,
    TARGET,
    VOCAB,
    State,
    matching_round,
    p_value,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def draft_tree(drafter: Tensor, root: int, *, width: int = 3, budget: int = 9) -> DraftTree:
    scores, last, levels = torch.zeros(1), torch.tensor([root]), []
    for _ in range(DEPTH):
        level = expand(scores, drafter[last].log_softmax(-1), width)
        levels.append(level)
        scores, last = level.scores[level.frontier], level.tokens[level.frontier]
    return rank(levels, budget)


def tree_round(state: State, trees: list[DraftTree]) -> Accepted:
    """A tree for each sequence, verified with its nodes' histories and positions: those with one root at once."""
    tokens = torch.full((len(state.seeds), DEPTH + 1), -1)
    accepted = torch.zeros(len(state.seeds), dtype=torch.int64)
    history, last = state.history, state.last
    for root, tree in enumerate(trees):
        busy = ((last == root) & (state.emitted < LENGTH)).nonzero()[:, 0]
        if not len(busy):
            continue
        own = TokenHistory(prompt_mask=history.prompt_mask[busy], output_counts=history.output_counts[busy]).after_tree(
            tree.tokens.expand(len(busy), -1), visibility(tree.parents).expand(len(busy), -1, -1)
        )
        contexts = torch.cat([torch.tensor([root]), tree.tokens]).repeat(len(busy))
        depths = torch.cat([torch.tensor([0]), tree.depths])
        probs = distribution(TARGET[contexts], state.rows(contexts.numel()), history=own)
        positions = len(PROMPT) + state.emitted[busy, None] + depths
        choices = choose(probs, uniform(state.seeds[busy, None], positions, Stream.CHOICE).flatten())
        for b, chosen in zip(busy.tolist(), choices.view(len(busy), -1), strict=True):
            path = accept_tree(tree, chosen)
            tokens[b], accepted[b] = path.tokens, path.accepted
    return Accepted(tokens=tokens, accepted=accepted)


@pytest.mark.parametrize(("params", "sequences"), [(SHAPED, 2000), (GREEDY, 4)], ids=["shaped", "greedy"])
def test_tree_emits_the_targets_distribution_and_the_tokens_of_plain_decoding(params, sequences):
    trees = [draft_tree(DRAFTERS["sometimes"], root) for root in range(VOCAB)]
    state, plain = State.start(params, sequences), State.start(params, sequences)
    tally = run(state, lambda s: tree_round(s, trees))
    run(plain, lambda s: matching_round(s, TARGET, depth=0))
    assert torch.equal(state.tokens[:, :LENGTH], plain.tokens[:, :LENGTH])
    assert p_value(state) > SIGNIFICANCE
    if params is SHAPED:
        assert all(tally[accepted] > 50 for accepted in range(DEPTH + 1))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4), budget=st.integers(1, 20), help_along=st.booleans())
def test_tree_acceptance_against_walking(seed, width, budget, help_along):
    generator = torch.Generator().manual_seed(seed)
    tree = draft_tree(torch.randn(VOCAB, VOCAB, generator=generator), 0, width=width, budget=budget)
    choices = torch.randint(0, VOCAB, (tree.tokens.shape[0] + 1,), generator=generator)
    if help_along:  # make the target choose the last child of every node that has one
        choices[tree.parents + 1] = tree.tokens

    nodes, emitted, at = [], [int(choices[0])], -1
    while True:
        children = [n for n in range(len(tree.tokens)) if tree.parents[n] == at and tree.tokens[n] == choices[at + 1]]
        if not children:
            break
        at = children[0]
        nodes.append(at)
        emitted.append(int(choices[at + 1]))

    path = accept_tree(tree, choices)
    assert path.accepted == len(nodes)
    assert path.nodes.tolist() == nodes + [-1] * (tree.max_depth - len(nodes))
    assert path.tokens.tolist() == emitted + [-1] * (tree.max_depth - len(nodes))


def test_a_chain_is_a_tree():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drafts = torch.randint(0, 2, (1, DEPTH), generator=generator)
        choices = torch.randint(0, 2, (1, DEPTH + 1), generator=generator)
        tree = DraftTree(
            tokens=drafts[0],
            parents=torch.arange(-1, DEPTH - 1),
            depths=torch.arange(1, DEPTH + 1),
            scores=torch.zeros(DEPTH),
            max_depth=DEPTH,
        )
        assert torch.equal(accept_tree(tree, choices[0]).tokens, accept_matching(drafts, choices).tokens[0])


def test_an_empty_tree_emits_one_token():
    none = torch.empty(0, dtype=torch.int64)
    path = accept_tree(
        DraftTree(tokens=none, parents=none, depths=none, scores=torch.empty(0), max_depth=0), torch.tensor([4])
    )
    assert (path.tokens.tolist(), path.nodes.tolist(), int(path.accepted)) == ([4], [], 0)
