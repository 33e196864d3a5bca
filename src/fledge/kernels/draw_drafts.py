"""Sampling of drafts: one step of a batch of chains, for those requests that sample their drafts.

A draft is sampled from the drafter's distribution at the request's temperature, which is stored for rejection sampling.
Tolerance: as in `sample.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.filters import RowSettings, scaled_rows
from fledge.kernels.sample import are_weighed, choose, draw_rows, weigh_rows, write_probabilities


class DraftDraws(NamedTuple):
    """Sampling parameters of the drafts of a batch of chains, and where their distributions are stored."""

    request: Tensor  # [batch] int64: the request of each chain
    settings: RowSettings  # of requests; `sampled`: its drafts are sampled. Filters do not apply to drafts
    uniforms: Tensor  # [depth, batch] float64
    probabilities: Tensor  # [requests, max_depth, vocab] float32: output, for requests that sample


def draw_drafts(spread: Tensor, draws: DraftDraws, step: int, tokens: Tensor, likeliest: Tensor) -> None:
    """For rows of logits `spread` [batch, vocab] whose requests sample: write the sampled token to `tokens` [batch].

    The largest probability of the row, not that of the sampled token, is written to `likeliest` [batch].
    """
    # NaN and inf must still give a distribution, or rejection sampling would not be lossless.
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
