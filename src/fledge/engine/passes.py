"""Forward passes on the device: a round (verify, accept, extend the drafter, draft), and prefill.

No tensor is read on the host here, so a whole pass can be captured as a CUDA graph, and the next one launched before
the results of this one are known. `decoding/reference.py` and `decoding/drafting.py` are the same for one sequence,
without optimisations.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.decoding.random import Stream, in_round, uniform
from fledge.engine.accepting import accept_admitted, accept_chains
from fledge.engine.arms import Arm
from fledge.engine.device_state import DeviceState
from fledge.engine.logprobs import LogprobsTensors, prompt_logprobs
from fledge.engine.sampler import Sampler
from fledge.engine.scheduler import Chunk
from fledge.engine.tree_passes import accept_paths, draft_trees, lay_out_trees
from fledge.errors import describe
from fledge.kernels.accept import PADDING
from fledge.kernels.admit import AdmittedRound, admit_drafts
from fledge.kernels.draw_drafts import DraftDraws
from fledge.kernels.filters import RowSettings
from fledge.kernels.round_ends import OpenedRound, SettledRound, count_drafts, draft_places, open_round, settle_round
from fledge.kernels.timestamp import timestamp
from fledge.kernels.tree_ends import OpenedTrees
from fledge.layers.paged_cache import ChunkPass, MixedPass, PagedCache, PagedPass
from fledge.models.drafter.base import DraftStates
from fledge.models.target.decoder import TargetStates

ALIGNMENT = 16  # elements: Triton compiles a kernel again for tensors at unaligned addresses


class DrafterError(Exception):
    """The drafter raised. Only speculation is lost: the step's target pass is done by then."""


@dataclass(frozen=True, kw_only=True)
class PassOutcome:
    """Results of a round or of prefill that the host reads: a row for each request or chunk.

    Rows of padding, and of chunks that choose no token, are undefined.
    """

    tokens: Tensor  # [rows, width]: emitted tokens, then PADDING; a prompt has one, the first of its answer
    health: Tensor  # [rows, width + norms] sums of the target's states, then `state_norms`: to check that all is finite
    accepted: Tensor | None = None  # [rows]; None for prefill
    drafted: Tensor | None = None  # [rows]: number of drafts verified
    confidence: Tensor | None = None  # [rows, width - 1]: the drafter's, in each draft of a chain
    stamps: Tensor | None = None  # [4] nanoseconds: start, verified, accepted, drafted; None for prefill
    logprobs: LogprobsTensors | None = None  # of the entries that requested them, `width` rows each
    prompt_logprobs: Sequence[LogprobsTensors | None] = ()  # of each chunk, if requested


class RoundClock:
    """Timestamps of one round's phases, taken on the device without synchronising; they are read with the results."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type != "cpu"
        self._on_device = torch.zeros(4, dtype=torch.int64, device=device) if on_gpu else None
        self._on_host: list[int] = []  # on a CPU: writing into a tensor takes twenty times as long

    def mark(self) -> None:
        """Take a timestamp: at the start, after verify (logits), accept and draft, in this order."""
        if self._on_device is not None:
            timestamp(self._on_device, len(self._on_host))
        self._on_host.append(time.perf_counter_ns())

    @property
    def stamps(self) -> Tensor:
        """[4] nanoseconds."""
        return torch.tensor(self._on_host) if self._on_device is None else self._on_device


def run_round(
    state: DeviceState,
    sampler: Sampler,
    *,
    verify: Arm,
    draft: Arm,
    sample_drafts: bool = False,
    admit: int | None = None,
    asking: Tensor | None = None,
    top: int = 0,
) -> PassOutcome:
    """Verify the drafts of the sampler's rows to the depth of `verify`, then draft `draft` (chains or trees).

    `sample_drafts`: the drafts of some chains are sampled. `admit`: verify only so many drafts of the whole batch, the
    likeliest (chains only, no `HostSampler`). Entries `asking` [n] of the batch get log-probabilities, with `top` most
    likely tokens.

    Updates the rows' state: last token, length, drafts. If `draft` is PLAIN the drafter does not run.
    """
    rows, width = sampler.rows, verify.depth + 1
    clock = RoundClock(rows.device)
    clock.mark()
    opened = open_round(rows, state, verify.depth)
    fed: OpenedRound | OpenedTrees | AdmittedRound = opened
    storage: PagedPass
    if admit is not None:
        fed = admit_drafts(opened, state.acceptance_of(rows), admit)
        storage = state.ragged_storage(state.target_cache, opened, fed)
    elif verify.is_tree:
        fed, storage = lay_out_trees(state, rows, opened, verify.depth)
    else:
        storage = state.storage(state.target_cache, opened.tables, opened.context, opened.slots)
    aux_layer_ids = state.drafter.aux_layer_ids if state.drafter is not None and draft.depth else ()
    states = state.target(fed.tokens, fed.positions, storage, aux_layer_ids)
    logits = state.target.logits(states.final)  # [rows fed, vocab]
    clock.mark()
    if isinstance(fed, OpenedTrees):
        tokens, accepted, states, decided_by = accept_paths(state, sampler, opened, fed, logits, states, verify.depth)
    elif isinstance(fed, AdmittedRound):
        tokens, accepted = accept_admitted(state, sampler, opened, fed, logits, sample_drafts=sample_drafts)
        decided_by = fed.rows
    else:
        tokens, accepted = accept_chains(state, sampler, opened, logits, sample_drafts=sample_drafts)
        decided_by = torch.arange(len(logits), device=rows.device)
    logprobs = None
    if asking is not None:
        decided_by = decided_by.view(len(rows), width)[asking].flatten()
        logprobs = LogprobsTensors.from_logits(logits[decided_by], tokens[asking].flatten(), top)
    count_adjusted(state, sampler, tokens)
    settled = settle_round(rows, state, opened, tokens, accepted, draft.depth)
    clock.mark()
    health = torch.empty(
        len(rows), width + (draft.depth + 1 if draft.depth else 0), dtype=torch.float32, device=rows.device
    )
    if isinstance(fed, AdmittedRound):
        health[:, :width] = states.final.sum(-1, dtype=torch.float32)[fed.rows]
    else:
        torch.sum(states.final.view(len(rows), width, -1), -1, dtype=torch.float32, out=health[:, :width])
    if draft.depth:
        # Rows after the last settled one are padding: leaving them out would take longer than computing them.
        assert state.drafter_cache is not None
        positions = opened.positions
        if isinstance(fed, AdmittedRound):
            positions, last_rows = fed.positions, fed.starts[:-1] + accepted
            settled = settled._replace(tokens=settled.tokens[fed.places], last_rows=last_rows)
            storage = state.ragged_storage(state.drafter_cache, opened, fed)
        else:
            storage = state.storage(state.drafter_cache, settled.places.tables, opened.context, opened.slots)
        health[:, width:] = extend_drafter(
            state, rows, states, positions, storage, settled, draft, sample_drafts=sample_drafts
        )
    clock.mark()
    return PassOutcome(
        tokens=tokens,
        accepted=accepted,
        drafted=fed.drafted if isinstance(fed, AdmittedRound) else opened.drafted,
        confidence=None if verify.is_tree else opened.confidence,
        health=health,
        stamps=clock.stamps,
        logprobs=logprobs,
    )


def count_adjusted(state: DeviceState, sampler: Sampler, tokens: Tensor) -> None:
    """Update the token counts of entries with adjusted logits: tokens [batch, width], padded with PADDING."""
    if sampler.adjusting is not None:
        entries, slots = sampler.adjusting
        state.adjustments.count(slots, tokens[entries.clamp(max=len(tokens) - 1)])


def extend_drafter(
    state: DeviceState,
    rows: Tensor,
    states: TargetStates,
    positions: Tensor,
    storage: PagedPass | MixedPass,
    settled: SettledRound,
    arm: Arm,
    *,
    sample_drafts: bool,
) -> Tensor:
    """Run the drafter on settled rows (states, tokens, positions), then draft for `rows` [batch] from the last ones.

    A settled row pairs the feature at its position with the token after it. Writes drafts and confidence; returns
    `state_norms` of the drafts.
    """
    drafter = state.drafter
    assert drafter is not None
    try:
        depth = arm.depth
        if depth and not arm.is_tree:
            draws = _draft_draws(state, rows, depth) if sample_drafts else None
            chains = drafter.draft_chain(
                states, settled.tokens, positions, storage, settled.last_rows, settled.places, depth, draws
            )
            state.drafts[rows, :depth] = chains.tokens
            state.confidence[rows, :depth] = chains.confidence
            return chains.norms
        out = drafter(settled.tokens, drafter.fuse(states), positions, storage)
        if not depth:
            return torch.empty(len(rows), 0, device=rows.device)
        rows_of = settled.last_rows
        last = DraftStates(head=out.head[rows_of], feature=out.feature[rows_of], hidden=out.hidden[rows_of])
        return draft_trees(state, drafter, rows, settled.places.tables, last, depth)
    except Exception as error:
        raise DrafterError(describe(error)) from error


def _draft_draws(state: DeviceState, rows: Tensor, depth: int) -> DraftDraws:
    """Return how to sample the next drafts of the rows whose requests have sampled drafts."""
    settings = RowSettings(sampled=state.sample_drafts, temperature=state.sampling.temperature)
    return DraftDraws(rows, settings, _draft_uniforms(state, rows, depth), state.draft_probs)


def _draft_uniforms(state: DeviceState, rows: Tensor, depth: int) -> Tensor:
    """Return the random numbers for sampled drafts, [depth, batch]."""
    # The settled row is at length - 1 and predicts the token at length + 1.
    steps = torch.arange(depth, device=rows.device)[:, None]
    places = in_round(state.length[rows] + 1 + steps, steps)
    return uniform(state.sampling.seed[rows][None], places, Stream.DRAFT)


@dataclass(frozen=True)
class PrefillInputs:
    """Chunks packed one after another (varlen layout): views of one tensor, which is copied to the device at once."""

    tokens: Tensor  # [tokens]
    following: Tensor  # [tokens] the token after each; 0 if it is not known yet, filled in once it is chosen
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    rows: Tensor  # [chunks] in the device state
    settled_rows: Tensor  # [chunks] the same for chunks that complete, the padding row for others
    context_lens: Tensor  # [chunks] tokens before the chunk
    lengths: Tensor  # [chunks] tokens up to its end
    ends: Tensor  # [chunks] packed index of each chunk's last token
    chooses: Tensor  # [chunks] 1 if the token after the chunk is to be chosen
    query_starts: Tensor  # [chunks + 1] packed index of each chunk's first token, and the end
    asking: Tensor  # [n] chunks whose first tokens get log-probabilities
    adjusting: Tensor  # [2, n] chunks whose logits are adjusted, and their slots
    max_chunk: int  # bound on the length of a chunk

    @classmethod
    def of(cls, packed: Tensor, *, tokens: int, chunks: int, max_chunk: int, asked: int = 0) -> "PrefillInputs":
        """Unpack the result of `pack_prefill`."""
        token_part, chunk_part = (-(-count // ALIGNMENT) * ALIGNMENT for count in (tokens, chunks))
        sizes = (4 * token_part, 6 * chunk_part, chunks + 1, asked)
        by_token, by_chunk, starts, asking, changed = packed.tensor_split(tuple(itertools.accumulate(sizes)))
        columns: list[Any] = [*by_token.view(4, -1)[:, :tokens], *by_chunk.view(6, -1)[:, :chunks]]
        return cls(*[*columns, starts, asking, changed.view(2, -1), max_chunk])


def pack_prefill(
    state: DeviceState, chunks: Sequence[Chunk], *, tokens: int, rows: int, entries: Sequence[int] = ()
) -> Tensor:
    """Return `PrefillInputs` as one tensor, padded to `tokens` tokens and `rows` chunks.

    `entries`: `asking` and `adjusting`. Padding tokens have their slots in block 0. Padding chunks have the padding
    row, and end at the last padding token.
    """
    block_size, padding_row = state.block_size, state.padding_row
    token_part, chunk_part = (-(-count // ALIGNMENT) * ALIGNMENT for count in (tokens, rows))
    packed = np.zeros(4 * token_part + 6 * chunk_part + rows + 1 + len(entries), dtype=np.int64)
    # Rows in the order of the fields of `PrefillInputs`.
    by_token = packed[: 4 * token_part].reshape(4, -1)
    by_chunk = packed[4 * token_part :][: 6 * chunk_part].reshape(6, -1)
    starts = packed[4 * token_part + 6 * chunk_part :][: rows + 1]
    by_chunk[:2, :rows], by_chunk[4, :rows] = padding_row, tokens - 1
    begin = 0
    for i, chunk in enumerate(chunks):
        request, end = chunk.request, begin + chunk.end - chunk.start
        row, positions = request.running_row, np.arange(chunk.start, chunk.end)
        known = request.tokens[chunk.start : chunk.end + 1]
        by_token[0, begin:end] = known[: end - begin]
        by_token[1, begin : begin + len(known) - 1] = known[1:]
        blocks = np.array(request.table.blocks[chunk.start // block_size : -(-chunk.end // block_size)])
        by_token[2, begin:end] = positions
        by_token[3, begin:end] = blocks[positions // block_size - chunk.start // block_size] * block_size
        by_token[3, begin:end] += positions % block_size
        settled = row if chunk.completes else padding_row
        by_chunk[:, i] = row, settled, chunk.start, chunk.end, end - 1, chunk.chooses
        starts[i + 1 :] = begin = end
    assert begin < tokens or len(chunks) == rows, "padding chunks need a padding token"
    by_token[3, begin:tokens] = np.arange(tokens - begin) % block_size
    packed[len(packed) - len(entries) :] = entries
    return state.tensor(packed)


def run_prefill(
    state: DeviceState,
    inputs: PrefillInputs,
    sampler: Sampler,
    *,
    draft: Arm,
    sample_drafts: bool = False,
    top: int = 0,
    chunks: Sequence[Chunk] = (),
) -> PassOutcome:
    """Prefill the chunks; draft for those that complete. Updates the state of their rows.

    `sample_drafts` and `top`: see `run_round`. `chunks`: the packed ones, if prompt log-probabilities are requested.

    Chunks that do not complete write to the padding row, which must be reset afterwards.
    """
    drafter = state.drafter  # runs even if nothing is drafted now: later drafts need its keys and values
    aux_layer_ids = drafter.aux_layer_ids if drafter is not None else ()
    storage = chunk_storage(state, inputs, state.target_cache)
    states = state.target(inputs.tokens, inputs.positions, storage, aux_layer_ids)
    final = states.final[inputs.ends]
    logits = state.target.logits(final)
    first_tokens, logprobs = choose_first_tokens(state, inputs, sampler, logits, top)
    health = [final.sum(-1, dtype=torch.float32)[:, None]]
    if state.drafter_cache is not None and drafter is not None:
        settled = settle_prefill(state, inputs, draft.depth)
        storage = chunk_storage(state, inputs, state.drafter_cache)
        rows, positions = inputs.settled_rows, inputs.positions
        health.append(
            extend_drafter(state, rows, states, positions, storage, settled, draft, sample_drafts=sample_drafts)
        )
    return PassOutcome(
        tokens=first_tokens[:, None],
        health=torch.cat(health, dim=1),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs(state, chunks, states.final) if chunks else (),
    )


def chunk_storage(state: DeviceState, inputs: PrefillInputs, cache: PagedCache) -> ChunkPass:
    return ChunkPass(
        cache=cache,
        block_tables=state.block_tables[inputs.rows],
        context_lens=inputs.context_lens,
        query_starts=inputs.query_starts.to(torch.int32),
        slots=inputs.slots,
        max_chunk=inputs.max_chunk,
        max_context=state.max_length,
    )


def choose_first_tokens(
    state: DeviceState, inputs: PrefillInputs, sampler: Sampler, logits: Tensor, top: int
) -> tuple[Tensor, LogprobsTensors | None]:
    """Choose the token after each chunk, unless it is known, from the `logits` of its last position.

    Updates `inputs.following` and the rows' length, last token and draft count. Returns the tokens [chunks] and the
    requested log-probabilities.
    """
    decided, asking = inputs.lengths[:, None], inputs.asking
    choices = sampler.choices(sampler.adjusted(logits, decided), decided)
    count_adjusted(state, sampler, torch.where(inputs.chooses != 0, choices, PADDING)[:, None])
    first_tokens = torch.where(inputs.chooses != 0, choices, inputs.following[inputs.ends])
    inputs.following[inputs.ends] = first_tokens
    rows = inputs.settled_rows
    state.length[rows] = inputs.lengths
    state.last_token[rows] = first_tokens
    state.draft_count.index_fill_(0, rows, 0)  # assigning a number would copy it from the host, which graphs cannot
    logprobs = LogprobsTensors.from_logits(logits[asking], choices[asking], top) if len(asking) else None
    return first_tokens, logprobs


def settle_prefill(state: DeviceState, inputs: PrefillInputs, depth: int) -> SettledRound:
    """Return the drafter's inputs for the chunks, and the slots for up to `depth` drafts of each."""
    rows = inputs.settled_rows
    length = state.length[rows]
    if depth:
        count_drafts(rows, state, length, depth)
    places = draft_places(length, state.block_tables[rows], depth=depth, block_size=state.block_size)
    return SettledRound(tokens=inputs.following, last_rows=inputs.ends, places=places)
