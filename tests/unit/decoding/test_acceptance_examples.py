"""The rules of acceptance, example by example: short rows, impossible tokens, empty residuals, no drafts at all."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fledge.decoding.acceptance import accept_matching, accept_rejection
from fledge.decoding.random import Stream, uniform
from tests.toy_target import SIGNIFICANCE, VOCAB


def test_matching_worked_examples():
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 9, 3]])
    choices = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    result = accept_matching(drafts, choices)
    assert result.accepted.tolist() == [3, 2, 0, 1]
    assert result.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 5, -1], [1, -1, -1, -1], [1, 2, -1, -1]]


def test_drafts_beyond_a_rows_length_are_never_accepted():
    drafts = torch.tensor([[1, 2, 3]] * 3)
    lengths = torch.tensor([0, 2, 3])
    result = accept_matching(drafts, torch.tensor([[1, 2, 3, 4]] * 3), draft_lengths=lengths)
    assert result.accepted.tolist() == [0, 2, 3]
    assert result.tokens.tolist() == [[1, -1, -1, -1], [1, 2, 3, -1], [1, 2, 3, 4]]


def one_hot(tokens: list[list[int]]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def test_rejection_with_short_rows_ignores_what_lies_beyond():
    """Row 0 drafted nothing, row 1 one token; their padding may hold anything, NaN included."""
    drafts = torch.tensor([[-1, -1], [1, -1], [1, 2]])
    draft_probs = one_hot([[0, 0], [1, 0], [1, 2]])
    draft_probs[0] = torch.nan
    draft_probs[1, 1] = torch.nan
    target_probs = one_hot([[4, 0, 0], [1, 5, 0], [1, 2, 3]])
    uniforms = torch.full((3, 3), 0.5, dtype=torch.float64)
    result = accept_rejection(
        drafts, draft_probs, target_probs, uniforms[:, :2], uniforms, draft_lengths=torch.tensor([0, 1, 2])
    )
    assert result.tokens.tolist() == [[4, -1, -1], [1, 5, -1], [1, 2, 3]]
    assert result.accepted.tolist() == [0, 1, 2]


def test_bonus_of_a_short_row_comes_from_the_target():
    """A row whose drafts all stood has no q to subtract at the place after them, though the batch is deeper."""
    sequences = 20_000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.0]).expand(sequences, 2, VOCAB)
    q = torch.tensor([0.9, 0.1, 0.0, 0.0, 0.0, 0.0]).expand(sequences, 1, VOCAB)
    seeds = torch.arange(sequences)
    result = accept_rejection(
        torch.zeros(sequences, 1, dtype=torch.int64),
        q,
        p,
        uniform(seeds, torch.tensor([0]), Stream.ACCEPT)[:, None],
        uniform(seeds[:, None], torch.arange(2), Stream.RESIDUAL),
        draft_lengths=torch.zeros(sequences, dtype=torch.int64),
    )
    observed = torch.bincount(result.tokens[:, 0], minlength=VOCAB)[:4].numpy()
    assert stats.chisquare(observed, np.array([0.1, 0.2, 0.3, 0.4]) * sequences).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_impossible_tokens_are_never_emitted(u):
    uniforms = torch.full((1, 2), u, dtype=torch.float64)
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0, 0.0]] * 2])
    result = accept_rejection(torch.tensor([[0]]), one_hot([[0]]), p, uniforms[:, :1], uniforms)
    assert result.accepted.tolist() == [0]
    assert result.tokens[0, 0].item() in {1, 2}


def test_a_draft_that_claims_probability_zero_stands_if_the_target_allows_it():
    uniforms = torch.full((2, 2), 0.99, dtype=torch.float64)
    p = one_hot([[3, 1], [4, 1]])
    result = accept_rejection(torch.tensor([[3], [3]]), one_hot([[0], [0]]), p, uniforms[:, :1], uniforms)
    assert result.tokens.tolist() == [[3, 1], [4, -1]]


def test_an_empty_residual_falls_back_to_the_target():
    """q exceeds p by rounding everywhere: a draft can fall though nothing is left above q."""
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]] * 2])
    q = p[:, :1] * (1 + 1e-6)
    uniforms = torch.tensor([[1 - 2**-53, 0.7]], dtype=torch.float64)
    result = accept_rejection(torch.tensor([[0]]), q, p, uniforms[:, :1], uniforms)
    assert result.accepted.tolist() == [0]
    assert result.tokens[0, 0].item() in {0, 1}


def test_depth_zero_is_plain_decoding():
    no_drafts = torch.empty(2, 0, dtype=torch.int64)
    assert accept_matching(no_drafts, torch.tensor([[3], [4]])).tokens.tolist() == [[3], [4]]
    result = accept_rejection(
        no_drafts, torch.empty(2, 0, VOCAB), one_hot([[3], [4]]), torch.empty(2, 0), torch.full((2, 1), 0.3)
    )
    assert result.tokens.tolist() == [[3], [4]]
