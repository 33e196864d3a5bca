"""A round and prefill in one pass: each weight is read once for both.

Rows are packed: those of the round, request by request, then the prompts' tokens. Linear layers process all of them
together, each part has its own attention (`MixedPass`), and the head processes the round's rows and each chunk's last
one. Drafts are accepted and first tokens chosen as in separate passes; the drafter runs and drafts for all together.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.accepting import accept_chains
from fledge.engine.arms import Arm
from fledge.engine.device_state import DeviceState
from fledge.engine.logprobs import LogprobsTensors
from fledge.engine.passes import (
    PassOutcome,
    PrefillInputs,
    RoundClock,
    choose_first_tokens,
    chunk_storage,
    count_adjusted,
    extend_drafter,
    settle_prefill,
)
from fledge.engine.sampler import Sampler
from fledge.kernels.round_ends import DraftPlaces, OpenedRound, SettledRound, open_round, settle_round
from fledge.layers.paged_cache import MixedPass, PagedCache
from fledge.models.target.decoder import TargetStates


class MixedOutcome(NamedTuple):
    """The outcomes of both parts, as of separate passes; the timestamps of `round` are those of the whole pass."""

    round: PassOutcome
    prompts: PassOutcome


def run_mixed(
    state: DeviceState,
    sampler: Sampler,
    inputs: PrefillInputs,
    prompt_sampler: Sampler,
    *,
    arm: Arm,
    sample_drafts: bool = False,
    asking: Tensor | None = None,
    top: int = 0,
    prompt_top: int = 0,
) -> MixedOutcome:
    """Verify chains of the sampler's rows, prefill the chunks, draft chains for all: `run_round` and `run_prefill`."""
    rows, width, drafter = sampler.rows, arm.depth + 1, state.drafter
    clock = RoundClock(rows.device)
    clock.mark()
    opened = open_round(rows, state, arm.depth)
    num_rows = len(opened.tokens)
    ends = inputs.ends + num_rows
    positions = torch.cat([opened.positions, inputs.positions])
    tokens = torch.cat([opened.tokens, inputs.tokens])
    aux_layer_ids = drafter.aux_layer_ids if drafter is not None else ()
    states = state.target(tokens, positions, _storage(state, opened, inputs, state.target_cache), aux_layer_ids)
    final = torch.cat([states.final[:num_rows], states.final[ends]])
    logits, end_logits = state.target.logits(final).tensor_split([num_rows])
    clock.mark()
    emitted, accepted = accept_chains(state, sampler, opened, logits, sample_drafts=sample_drafts)
    logprobs = None
    if asking is not None:
        asked = logits.view(len(rows), width, -1)[asking].flatten(0, 1)
        logprobs = LogprobsTensors.from_logits(asked, emitted[asking].flatten(), top)
    count_adjusted(state, sampler, emitted)
    settled = settle_round(rows, state, opened, emitted, accepted, arm.depth)
    first_tokens, prompt_logprobs = choose_first_tokens(state, inputs, prompt_sampler, end_logits, prompt_top)
    clock.mark()
    sums = final.sum(-1, dtype=torch.float32)
    health, prompt_health = [sums[:num_rows].view(-1, width)], [sums[num_rows:, None]]
    if drafter is not None and state.drafter_cache is not None:
        settled_prompts = settle_prefill(state, inputs, arm.depth)
        if arm.depth:
            storage = _storage(state, opened, inputs, state.drafter_cache)
            all_rows = torch.cat([rows, inputs.settled_rows])
            both = _joined(settled, settled_prompts, ends)
            norms = extend_drafter(state, all_rows, states, positions, storage, both, arm, sample_drafts=sample_drafts)
            health.append(norms[: len(rows)])
            prompt_health.append(norms[len(rows) :])
        else:  # it reads the prompts only
            aux = None if states.aux is None else states.aux[num_rows:]
            own = TargetStates(final=states.final[num_rows:], aux=aux)
            chunks, prompt_rows = chunk_storage(state, inputs, state.drafter_cache), inputs.settled_rows
            extend_drafter(state, prompt_rows, own, inputs.positions, chunks, settled_prompts, arm, sample_drafts=False)
    clock.mark()
    return MixedOutcome(
        PassOutcome(
            tokens=emitted,
            accepted=accepted,
            drafted=opened.drafted,
            confidence=opened.confidence,
            health=torch.cat(health, dim=1),
            stamps=clock.stamps,
            logprobs=logprobs,
        ),
        PassOutcome(tokens=first_tokens[:, None], health=torch.cat(prompt_health, dim=1), logprobs=prompt_logprobs),
    )


def _storage(state: DeviceState, opened: OpenedRound, inputs: PrefillInputs, cache: PagedCache) -> MixedPass:
    return MixedPass(
        round=state.storage(cache, opened.tables, opened.context, opened.slots),
        chunks=chunk_storage(state, inputs, cache),
    )


def _joined(settled: SettledRound, prompts: SettledRound, ends: Tensor) -> SettledRound:
    """Concatenate the drafter's inputs of both parts; the prompts' last rows are at `ends` of all rows."""
    pairs = zip(settled.places, prompts.places, (1, 1, 0), strict=True)
    return SettledRound(
        tokens=torch.cat([settled.tokens, prompts.tokens]),
        last_rows=torch.cat([settled.last_rows, ends]),
        places=DraftPlaces(*(torch.cat([own, other], dim=dim) for own, other, dim in pairs)),
    )
