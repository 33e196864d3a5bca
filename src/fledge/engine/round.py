"""One round as one device program: verify, accept, fuse, extend the drafter, draft.

Nothing here reads a tensor on the host, so a whole round can be captured as a CUDA graph and the next one can be
launched before anybody knows what this one accepted. `decoding/reference.py` is the same thing said simply.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_rejection, accept_tree
from fledge.decoding.tree import visibility
from fledge.engine.draft_round import drafter_errors, extend_and_draft
from fledge.engine.protocol import PhaseSeconds
from fledge.engine.round_models import PassOutcome, RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.sampler import Sampler
from fledge.kernels.accept import accept_chain, accept_greedy
from fledge.kernels.round_ends import OpenedRound, SettledRound, open_round, settle_round, slots_of
from fledge.kernels.timestamp import timestamp
from fledge.layers.paged_cache import RoundPass
from fledge.models.target.decoder import TargetStates


@dataclass(frozen=True, kw_only=True)
class _Verified:
    """The first half of a round. Settled rows are those of the last token and of the accepted drafts, in order."""

    tokens: Tensor  # [batch, width]: emitted tokens, then PADDING
    accepted: Tensor  # [batch]
    states: TargetStates  # [batch * width, ...] of the settled rows; rows after them are padding


class RoundClock:
    """The times of one round's parts, by the device's own clock. Nobody waits: stamps travel with the results."""

    def __init__(self, device: torch.device, *, timed: bool) -> None:
        self._on_device: Tensor | None = None
        if timed and device.type != "cpu":
            self._on_device = torch.zeros(4, dtype=torch.int64, device=device)
        self._on_host: list[int] = []  # writing a number into a tensor takes twenty times as long as this
        self._timed = timed
        self._marks = 0

    def mark(self) -> None:
        """Take the time: when the round begins, is verified (logits are there), accepted and drafted, in this order."""
        if self._on_device is not None:
            timestamp(self._on_device, self._marks)
            self._marks += 1
        elif self._timed:
            self._on_host.append(time.perf_counter_ns())

    @property
    def stamps(self) -> Tensor | None:
        """[4] nanoseconds; None if nobody wants to know."""
        return self._on_device if self._on_device is not None or not self._timed else torch.tensor(self._on_host)


def phase_seconds(stamps: Tensor) -> PhaseSeconds:
    """Return how long the parts of a round took, from its stamps, which are on the host by now."""
    begun, verified, accepted, drafted = stamps.tolist()
    return PhaseSeconds((verified - begun) * 1e-9, (accepted - verified) * 1e-9, (drafted - accepted) * 1e-9)


def run_round(
    models: RoundModels,
    state: RowState,
    rows: Tensor,
    sampler: Sampler,
    *,
    verify: int,
    draft: int,
    timed: bool = False,
) -> PassOutcome:
    """Verify `verify` drafts (levels of a tree) of each of `rows` [batch], then draft `draft` more.

    Updates the state of those rows: last token, length, drafts. With `draft` 0 the drafter is left alone.
    """
    clock = RoundClock(rows.device, timed=timed)
    clock.mark()
    opened = open_round(rows, state, verify=verify, block_size=models.block_size)
    aux_layer_ids = models.drafter.aux_layer_ids if models.drafter is not None and draft else ()
    if verify and models.tree is not None:
        verified = _verify_trees(models, state, rows, sampler, opened, verify, aux_layer_ids, clock)
    else:
        verified = _verify_chains(models, state, rows, sampler, opened, verify, aux_layer_ids, clock)
    settled = settle_round(
        rows, state, opened, verified.tokens, verified.accepted, depth=draft, block_size=models.block_size
    )
    clock.mark()
    width = verify + 1
    health = torch.empty(len(rows), width + bool(draft), dtype=torch.float32, device=rows.device)
    final = verified.states.final.view(len(rows), width, -1)
    torch.sum(final, -1, dtype=torch.float32, out=health[:, :width])
    if draft:
        with drafter_errors():
            head = _draft_next(models, state, rows, opened, verified, settled, draft)
            torch.sum(head, -1, dtype=torch.float32, out=health[:, width])
    clock.mark()
    return PassOutcome(
        tokens=verified.tokens,
        accepted=verified.accepted,
        drafted=opened.drafted,
        health=health,
        stamps=clock.stamps,
    )


def _verify_chains(
    models: RoundModels,
    state: RowState,
    rows: Tensor,
    sampler: Sampler,
    opened: OpenedRound,
    verify: int,
    aux_layer_ids: tuple[int, ...],
    clock: RoundClock,
) -> _Verified:
    batch, width = len(rows), verify + 1
    storage = models.storage(models.target_cache, opened.tables, opened.context, opened.slots, rows=width)
    states = models.target(opened.tokens, opened.positions, storage, aux_layer_ids)
    logits = models.target.logits(states.final)  # [batch * width, vocab]
    clock.mark()
    drafts = opened.tokens.view(batch, width)[:, 1:]
    if sampler.is_greedy:
        found = accept_greedy(drafts, logits.view(batch, width, -1), draft_lengths=opened.drafted)
        return _Verified(tokens=found.tokens, accepted=found.accepted, states=states)
    decided = opened.positions.view(batch, width) + 1
    if models.sample_drafts and verify:
        judged = accept_rejection(
            drafts,
            state.draft_probs[rows, :verify],
            sampler.probabilities(logits).view(batch, width, -1),
            *sampler.rejection_uniforms(decided, opened.drafted),
            draft_lengths=opened.drafted,
        )
        sampler.record_logprobs(logits, judged.tokens)
        return _Verified(tokens=judged.tokens, accepted=judged.accepted, states=states)
    choices = sampler.choices(logits, decided).view(batch, width)
    found = accept_chain(drafts, choices, draft_lengths=opened.drafted)
    sampler.record_logprobs(logits, found.tokens)
    return _Verified(tokens=found.tokens, accepted=found.accepted, states=states)


def _verify_trees(
    models: RoundModels,
    state: RowState,
    rows: Tensor,
    sampler: Sampler,
    opened: OpenedRound,
    depth: int,
    aux_layer_ids: tuple[int, ...],
    clock: RoundClock,
) -> _Verified:
    """Verify whole trees. Node n is stored at slot length + 1 + n; the accepted path then moves to its positions."""
    batch, length = len(rows), opened.context
    tree = models.drafted_trees(state, rows, depth)
    width = tree.tokens.shape[1] + 1
    depths = torch.cat([torch.zeros_like(length)[:, None], tree.depths], dim=1)  # [batch, width]
    tokens = torch.cat([state.last_token[rows, None], tree.tokens], dim=1)
    positions, tables = length[:, None] + depths, state.block_tables[rows]
    stored = length[:, None] + torch.arange(width, device=rows.device)
    storage = RoundPass(
        cache=models.target_cache,
        block_tables=tables,
        context_lens=length,
        slots=slots_of(tables, stored, models.block_size).flatten(),
        rows=width,
        max_context=models.max_length,
        tree_mask=visibility(tree.parents),
        depths=depths,
    )
    states = models.target(tokens.flatten(), positions.flatten(), storage, aux_layer_ids)
    logits = models.target.logits(states.final)
    clock.mark()
    choices = sampler.choices(logits, positions + 1).view(batch, width)
    path = accept_tree(tree, choices, depth_limits=opened.drafted)

    # Rows after the path's end stay where they are (source = destination) and are overwritten by the next round.
    places = torch.arange(depth + 1, device=rows.device).expand(batch, -1)
    on_path = places <= path.accepted[:, None]
    source = torch.where(on_path, torch.cat([places[:, :1], path.nodes + 1], dim=1), places)  # verify rows
    moved_from = slots_of(tables, length[:, None] + source, models.block_size)
    moved_to = slots_of(tables, length[:, None] + places, models.block_size)
    models.target_cache.move(moved_from.flatten(), moved_to.flatten())

    flat = (torch.arange(batch, device=rows.device)[:, None] * width + source.clamp(max=width - 1)).flatten()
    if sampler.wants_logprobs:
        sampler.record_logprobs(logits[flat], path.tokens)
    settled = TargetStates(final=states.final[flat], aux=None if states.aux is None else states.aux[flat])
    return _Verified(tokens=path.tokens, accepted=path.accepted, states=settled)


def _draft_next(
    models: RoundModels,
    state: RowState,
    rows: Tensor,
    opened: OpenedRound,
    verified: _Verified,
    settled: SettledRound,
    depth: int,
) -> Tensor:
    """Rows after the last settled one hold padding: leaving them out would take longer than computing them."""
    _, cache = models.require_drafter()
    width = verified.tokens.shape[1]
    storage = models.storage(cache, settled.places.tables, opened.context, opened.slots, rows=width)
    return extend_and_draft(
        models,
        state,
        rows,
        verified.states,
        settled.tokens,
        opened.positions,
        storage,
        settled.last_rows,
        settled.places,
        depth,
    )
