"""Drafts that are drawn at random: one step of a batch of chains, some of which draw theirs.

What a draft is drawn from is the drafter's distribution at the request's temperature, which is kept for rejection to
judge by. Tolerance: as in `sample.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.filters import RowSettings, scaled_rows
from fledge.kernels.sample import are_weighed, choose, draw_rows, weigh_rows, write_probabilities


class DraftDraws(NamedTuple):
    """Which drafts of a batch of chains are drawn at random, by what, and where their distributions are kept."""

    request: Tensor  # [batch] int64: whose each chain is
    settings: RowSettings  # of the requests; `sampled`: its drafts are drawn. Filters are not for drafts
    uniforms: Tensor  # [depth, batch] float64
    probabilities: Tensor  # [requests, max_depth, vocab] float32, those of others are left alone


def draw_drafts(spread: Tensor, draws: DraftDraws, step: int, tokens: Tensor, likeliest: Tensor) -> None:
    """Write a token into `tokens` [batch] for each row of spread [batch, vocab] whose drafts are drawn.

    Into `likeliest` [batch] the largest probability of what it was drawn from, which says nothing of what was drawn.
    """
    # A drafter gone wrong must still draft from a distribution, or rejection would not be lossless.
    largest = min(1e30, torch.finfo(spread.dtype).max)
    spread = spread.nan_to_num(posinf=largest, neginf=-torch.inf)
    request, settings, out = draws.request, draws.settings, draws.probabilities[:, step]
    if are_weighed(spread):
        weighed = weigh_rows(spread, request, settings)
        write_probabilities(weighed, out)
        draw_rows(weighed, draws.uniforms[step], tokens, likeliest)
        return
    own = settings.sampled[request].nonzero().squeeze(1)
    probs = scaled_rows(spread[own], request[own], settings).softmax(-1)
    out[request[own]] = probs
    tokens[own], likeliest[own] = choose(probs, draws.uniforms[step, own]), probs.amax(-1)
