"""Acceptance of a batch of chains: by the target's choices, or for sampled drafts by rejection sampling."""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_block, accept_rejection
from fledge.engine.device_state import DeviceState
from fledge.engine.sampler import Sampler
from fledge.kernels.accept import Accepted, accept_chain, accept_greedy
from fledge.kernels.admit import AdmittedRound
from fledge.kernels.reject import DrawnDrafts, reject_drafts
from fledge.kernels.round_ends import OpenedRound


def accept_chains(
    state: DeviceState, sampler: Sampler, opened: OpenedRound, logits: Tensor, *, sample_drafts: bool
) -> Accepted:
    batch, width = len(sampler.rows), len(opened.tokens) // len(sampler.rows)
    drafts = opened.tokens.view(batch, width)[:, 1:]
    decided = opened.positions.view(batch, width) + 1
    logits = sampler.adjusted(logits, decided)
    if sampler.is_greedy:
        return accept_greedy(drafts, logits.view(batch, width, -1), draft_lengths=opened.drafted)
    at = torch.arange(len(logits), device=logits.device).view(batch, width)
    return _accept_sampled(
        state, sampler, _Chains(drafts, opened.drafted, decided, at), sampler, decided, logits, sample_drafts
    )


def accept_admitted(
    state: DeviceState,
    sampler: Sampler,
    opened: OpenedRound,
    fed: AdmittedRound,
    logits: Tensor,
    *,
    sample_drafts: bool,
) -> Accepted:
    """Like `accept_chains`, with logits of the admitted rows only. Results after the admitted drafts are not used."""
    batch, width = fed.rows.shape
    by_row = sampler.for_rows(sampler.rows[fed.places // width])
    drafts, decided = opened.tokens.view(batch, width)[:, 1:], opened.positions.view(batch, width) + 1
    logits = sampler.adjusted(logits, decided, fed.rows)
    if sampler.is_greedy:
        choices = by_row.choices(logits, fed.positions[:, None] + 1)[fed.rows]
        return accept_chain(drafts, choices, draft_lengths=fed.drafted)
    chains = _Chains(drafts, fed.drafted, decided, fed.rows)
    return _accept_sampled(state, sampler, chains, by_row, fed.positions[:, None] + 1, logits, sample_drafts)


class _Chains(NamedTuple):
    """The drafts of a batch to verify."""

    tokens: Tensor  # [batch, depth]
    counts: Tensor  # [batch]: number of drafts
    decided: Tensor  # [batch, depth + 1]: positions of the tokens to choose
    at: Tensor  # [batch, depth + 1]: the row of the logits for each position


def _accept_sampled(
    state: DeviceState,
    sampler: Sampler,
    chains: _Chains,
    by_row: Sampler,
    positions: Tensor,
    logits: Tensor,
    sample_drafts: bool,
) -> Accepted:
    """Accept drafts that match the target's choices, or for requests with sampled drafts by rejection sampling.

    `by_row`: a sampler for the rows of the logits, which are for `positions`. `sample_drafts`: whether any request of
    the batch may have sampled drafts.
    """
    is_judged = sample_drafts and chains.tokens.shape[1] > 0
    weighed = by_row.weigh(logits) if is_judged else None
    choices = by_row.choices(logits, positions, weighed)[chains.at]
    matching = accept_chain(chains.tokens, choices, draft_lengths=chains.counts)
    if not is_judged:
        return matching
    uniforms = sampler.rejection_uniforms(chains.decided)
    if weighed is not None:
        drawn = DrawnDrafts(chains.tokens, sampler.rows, state.sample_drafts, chains.counts, state.draft_probs)
        reject_drafts(matching, drawn, weighed, chains.at, uniforms)
        return matching
    accept = accept_block if state.verify_blocks else accept_rejection
    rejection = accept(
        chains.tokens,
        state.draft_probs[sampler.rows, : chains.tokens.shape[1]],
        by_row.probabilities(logits)[chains.at],
        *uniforms,
        draft_lengths=chains.counts,
    )
    # A row without drafts takes the target's choice: its tokens must not depend on the batch.
    is_drawn = state.sample_drafts[sampler.rows] & (chains.counts > 0)
    tokens = torch.where(is_drawn[:, None], rejection.tokens, matching.tokens)
    return Accepted(tokens, torch.where(is_drawn, rejection.accepted, matching.accepted))
