"""Device programs: a round (verify, accept, extend the drafter, draft), and the reading of prompts.

Nothing here reads a tensor on the host, so a whole program can be captured as a CUDA graph and the next one can be
launched before anybody knows what this one gave. `decoding/reference.py` and `decoding/drafting.py` are the same thing
said simply, for one sequence.
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

ALIGNMENT = 16  # numbers: kernels are compiled anew for tensors that begin at odd addresses


class DrafterError(Exception):
    """The drafter raised. Nobody loses anything but speed: the target's work of the step is done by then."""


@dataclass(frozen=True, kw_only=True)
class PassOutcome:
    """What the host reads of a round or of prompts, one launch late: a row for each request or chunk.

    Rows of padding, and of chunks that choose no token, mean nothing.
    """

    tokens: Tensor  # [rows, width]: emitted tokens, then PADDING; a prompt has one, the first of its answer
    health: Tensor  # [rows, width + norms] finite where the models work: sums of the target's states, and `state_norms`
    accepted: Tensor | None = None  # [rows]; None where there are no drafts to accept: prompts
    drafted: Tensor | None = None  # [rows]: how many drafts there were to accept
    confidence: Tensor | None = None  # [rows, width - 1]: the drafter's in each draft of a chain
    stamps: Tensor | None = None  # [4] nanoseconds: begun, verified, accepted, drafted; None of prompts
    logprobs: LogprobsTensors | None = None  # of the entries that asked, `width` rows each
    prompt_logprobs: Sequence[LogprobsTensors | None] = ()  # of each chunk, if somebody asked


class RoundClock:
    """The times of one round's parts, by the device's own clock. Nobody waits: stamps travel with the results."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type != "cpu"
        self._on_device = torch.zeros(4, dtype=torch.int64, device=device) if on_gpu else None
        self._on_host: list[int] = []  # writing a number into a tensor takes twenty times as long as this

    def mark(self) -> None:
        """Take the time: when the round begins, is verified (logits are there), accepted and drafted, in this order."""
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
    """Verify what the sampler's rows have drafted, `verify` of it, then draft `draft`: chains or trees, each.

    `sample_drafts`: the drafts of some chains are drawn at random. With `admit`, only so many of the drafts of all rows
    are verified: chains of rows that the host need not see to. Entries `asking` [n] of the batch get log-probabilities,
    of `top` tokens besides.

    Updates the state of those rows: last token, length, drafts. Where nothing is drafted the drafter is left alone.
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
        # Rows after the last settled one hold padding: leaving them out would take longer than computing them.
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
    """Take down what was emitted for those whose logits were adjusted: tokens [batch, width], then PADDING."""
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
    """Let the drafter read settled rows (states, tokens, positions), then draft for `rows` [batch] from the last ones.

    Row i pairs the feature at its position with the token emitted after it. Returns `state_norms` of the drafts.
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
    """How the next drafts of those rows are drawn whose requests have them drawn."""
    settings = RowSettings(sampled=state.sample_drafts, temperature=state.sampling.temperature)
    return DraftDraws(rows, settings, _draft_uniforms(state, rows, depth), state.draft_probs)


def _draft_uniforms(state: DeviceState, rows: Tensor, depth: int) -> Tensor:
    """The random numbers that drafts are drawn by, [depth, batch]."""
    # The settled row is at length - 1 and predicts the token at length + 1.
    steps = torch.arange(depth, device=rows.device)[:, None]
    places = in_round(state.length[rows] + 1 + steps, steps)
    return uniform(state.sampling.seed[rows][None], places, Stream.DRAFT)


@dataclass(frozen=True)
class PrefillInputs:
    """Chunks laid out flat on the device, one after another: views of one tensor, which travels there at once."""

    tokens: Tensor  # [tokens]
    following: Tensor  # [tokens] the token after each; 0 where it is not known yet, and filled in when it is
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    rows: Tensor  # [chunks] in the device state
    settled_rows: Tensor  # [chunks] the same for those that complete, the padding row for others
    context_lens: Tensor  # [chunks] tokens read before
    lengths: Tensor  # [chunks] tokens read afterwards
    ends: Tensor  # [chunks] the place of each one's last token in the flat layout
    chooses: Tensor  # [chunks] 1 where the token after the last is to be chosen
    query_starts: Tensor  # [chunks + 1] the place of each one's first token, and the end
    asking: Tensor  # [n] chunks whose first tokens get log-probabilities
    adjusting: Tensor  # [2, n] chunks whose logits are adjusted, and their slots
    max_chunk: int  # no chunk is longer

    @classmethod
    def of(cls, packed: Tensor, *, tokens: int, chunks: int, max_chunk: int, asked: int = 0) -> "PrefillInputs":
        """Take apart what `lay_out` put together."""
        token_part, chunk_part = (-(-count // ALIGNMENT) * ALIGNMENT for count in (tokens, chunks))
        sizes = (4 * token_part, 6 * chunk_part, chunks + 1, asked)
        by_token, by_chunk, starts, asking, changed = packed.tensor_split(tuple(itertools.accumulate(sizes)))
        columns: list[Any] = [*by_token.view(4, -1)[:, :tokens], *by_chunk.view(6, -1)[:, :chunks]]
        return cls(*[*columns, starts, asking, changed.view(2, -1), max_chunk])


def lay_out(state: DeviceState, chunks: Sequence[Chunk], *, tokens: int, rows: int, more: Sequence[int] = ()) -> Tensor:
    """Return `PrefillInputs` as one tensor, padded to that many tokens and chunks; `more`: those with wishes.

    Tokens of no chunk have their keys and values in block 0. Empty chunks are of the padding row, and end at the last
    of those tokens.
    """
    block_size, nobody = state.block_size, state.padding_row
    token_part, chunk_part = (-(-count // ALIGNMENT) * ALIGNMENT for count in (tokens, rows))
    packed = np.zeros(4 * token_part + 6 * chunk_part + rows + 1 + len(more), dtype=np.int64)
    by_token = packed[: 4 * token_part].reshape(4, -1)  # as `PrefillInputs` has them
    by_chunk = packed[4 * token_part :][: 6 * chunk_part].reshape(
        6, -1
    )  # rows, settled, context, lengths, ends, chooses
    starts = packed[4 * token_part + 6 * chunk_part :][: rows + 1]
    by_chunk[:2, :rows], by_chunk[4, :rows] = nobody, tokens - 1
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
        settled = row if chunk.completes else nobody
        by_chunk[:, i] = row, settled, chunk.start, chunk.end, end - 1, chunk.chooses
        starts[i + 1 :] = begin = end
    assert begin < tokens or len(chunks) == rows, "an empty chunk has to end somewhere"
    by_token[3, begin:tokens] = np.arange(tokens - begin) % block_size
    packed[len(packed) - len(more) :] = more
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
    """Read the chunks; draft for those that complete. Updates the state of their rows.

    `sample_drafts` and `top` as in `run_round`. `chunks`: what was laid out, if prompts' log-probabilities are wanted.

    Chunks that do not complete write to the padding row, which is to be reset afterwards.
    """
    drafter = state.drafter  # reads along even if nothing is drafted now: its rows are needed when it is
    aux_layer_ids = drafter.aux_layer_ids if drafter is not None else ()
    storage = chunk_storage(state, inputs, state.target_cache)
    states = state.target(inputs.tokens, inputs.positions, storage, aux_layer_ids)
    final = states.final[inputs.ends]
    logits = state.target.logits(final)
    first_tokens, logprobs = choose_first(state, inputs, sampler, logits, top)
    health = [final.sum(-1, dtype=torch.float32)[:, None]]
    if state.drafter_cache is not None and drafter is not None:
        settled = settle_prompts(state, inputs, draft.depth)
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


def choose_first(
    state: DeviceState, inputs: PrefillInputs, sampler: Sampler, logits: Tensor, top: int
) -> tuple[Tensor, LogprobsTensors | None]:
    """Choose the tokens after the chunks by `logits` of their last ones, where they are not known. Writes them down.

    Returns them [chunks], and the log-probabilities that were asked for.
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
    told = LogprobsTensors.from_logits(logits[asking], choices[asking], top) if len(asking) else None
    return first_tokens, told


def settle_prompts(state: DeviceState, inputs: PrefillInputs, depth: int) -> SettledRound:
    """Lay out what the drafter reads of chunks after which all tokens are known, and up to `depth` drafts of each."""
    rows = inputs.settled_rows
    length = state.length[rows]
    if depth:
        count_drafts(rows, state, length, depth)
    places = draft_places(length, state.block_tables[rows], depth=depth, block_size=state.block_size)
    return SettledRound(tokens=inputs.following, last_rows=inputs.ends, places=places)
