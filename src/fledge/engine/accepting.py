"""Which drafts of the chains of a batch stand: by the target's choices, or by rejection where drafts were drawn."""

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_block, accept_rejection
from fledge.engine.device_state import DeviceState
from fledge.engine.sampler import Sampler
from fledge.kernels.accept import Accepted, accept_chain, accept_greedy
from fledge.kernels.admit import AdmittedRound
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
    return _accept_sampled(
        state,
        sampler,
        drafts,
        decided,
        opened.drafted,
        choices=sampler.choices(logits, decided).view(batch, width),
        probabilities=sampler.probabilities(logits).view(batch, width, -1) if sample_drafts and width > 1 else None,
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
    """`accept_chains` where logits are those of the rows that were fed. Nobody looks behind the admitted drafts."""
    batch, width = fed.rows.shape
    by_row = sampler.for_rows(sampler.rows[fed.places // width])
    decided = opened.positions.view(batch, width) + 1
    logits = sampler.adjusted(logits, decided, fed.rows)
    choices, probabilities = by_row.choices(logits, fed.positions[:, None] + 1)[fed.rows], None
    if sample_drafts and not sampler.is_greedy:
        probabilities = sampler.filter_probabilities(by_row.probabilities(logits)[fed.rows], logits, fed.rows)
    return _accept_sampled(
        state,
        sampler,
        opened.tokens.view(batch, width)[:, 1:],
        decided,
        fed.drafted,
        choices=sampler.filter_choices(choices, logits, decided, fed.rows),
        probabilities=probabilities,
    )


def _accept_sampled(
    state: DeviceState,
    sampler: Sampler,
    drafts: Tensor,
    decided: Tensor,
    drafted: Tensor,
    *,
    choices: Tensor,
    probabilities: Tensor | None,
) -> Accepted:
    """Accept drafts that are what was chosen at their places; by rejection where they were drawn.

    `choices` [batch, width] and `probabilities` [batch, width, vocab] are the target's; None: no drafts were drawn.
    """
    matching = accept_chain(drafts, choices, draft_lengths=drafted)
    if probabilities is None:
        return matching
    accept = accept_block if state.verify_blocks else accept_rejection
    rejection = accept(
        drafts,
        state.draft_probs[sampler.rows, : drafts.shape[1]],
        probabilities,
        *sampler.rejection_uniforms(decided),
        draft_lengths=drafted,
    )
    # A row without drafts chooses as in a round without drafts: what others do must not change its tokens.
    drawn = state.sample_drafts[sampler.rows] & (drafted > 0)
    tokens = torch.where(drawn[:, None], rejection.tokens, matching.tokens)
    return Accepted(tokens, torch.where(drawn, rejection.accepted, matching.accepted))
