"""Reading prompts: chunks of any length into both caches, and, where one completes, the first token and drafts.

Like a round it is one device program that reads nothing on the host, so it too can be captured as a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.engine.draft_round import drafter_errors, extend_and_draft
from fledge.engine.round_models import PassOutcome, RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.sampler import Sampler
from fledge.engine.scheduler import Chunk
from fledge.kernels.round_ends import draft_places
from fledge.layers.paged_cache import ChunkPass, PagedCache
from fledge.models.target.decoder import TargetStates

ALIGNMENT = 16  # numbers: kernels are compiled anew for tensors that begin at odd addresses


@dataclass(frozen=True, kw_only=True)
class PrefillInputs:
    """Chunks laid out flat on the device, one after another: views of one tensor, which travels there at once."""

    tokens: Tensor  # [tokens]
    following: Tensor  # [tokens] the token after each; 0 where it is not known yet, and filled in when it is
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    rows: Tensor  # [chunks] in the row state
    settled_rows: Tensor  # [chunks] the same for those that complete, the padding row for others
    context_lens: Tensor  # [chunks] tokens read before
    lengths: Tensor  # [chunks] tokens read afterwards
    ends: Tensor  # [chunks] the place of each one's last token in the flat layout
    chooses: Tensor  # [chunks] 1 where the token after the last is to be chosen
    query_starts: Tensor  # [chunks + 1] the place of each one's first token, and the end
    max_chunk: int  # no chunk is longer

    @classmethod
    def of(cls, packed: Tensor, *, tokens: int, chunks: int, max_chunk: int) -> "PrefillInputs":
        """Take apart what `lay_out` put together."""
        token_part, chunk_part = 4 * _aligned(tokens), 6 * _aligned(chunks)
        by_token = packed[:token_part].view(4, -1)[:, :tokens]
        by_chunk = packed[token_part : token_part + chunk_part].view(6, -1)[:, :chunks]
        return cls(
            tokens=by_token[0],
            following=by_token[1],
            positions=by_token[2],
            slots=by_token[3],
            rows=by_chunk[0],
            settled_rows=by_chunk[1],
            context_lens=by_chunk[2],
            lengths=by_chunk[3],
            ends=by_chunk[4],
            chooses=by_chunk[5],
            query_starts=packed[token_part + chunk_part :],
            max_chunk=max_chunk,
        )


def run_prefill(
    models: RoundModels, state: RowState, inputs: PrefillInputs, sampler: Sampler, *, depth: int
) -> PassOutcome:
    """Read the chunks; draft `depth` tokens for those that complete. Updates the state of their rows."""
    drafter = models.drafter  # reads along even if nothing is drafted now: its rows are needed when it is
    aux_layer_ids = drafter.aux_layer_ids if drafter is not None else ()
    tables = state.block_tables[inputs.rows]
    storage = _storage(models, models.target_cache, inputs, tables)
    states = models.target(inputs.tokens, inputs.positions, storage, aux_layer_ids)
    final = states.final[inputs.ends]
    logits = models.target.logits(final)
    choices = sampler.choices(logits, inputs.lengths[:, None])
    sampler.record_logprobs(logits, choices)
    first_tokens = torch.where(inputs.chooses != 0, choices, inputs.following[inputs.ends])
    inputs.following[inputs.ends] = first_tokens
    settled = inputs.settled_rows
    state.length[settled] = inputs.lengths
    state.last_token[settled] = first_tokens
    state.draft_count.index_fill_(0, settled, 0)  # assigning a number would copy it from the host, which graphs cannot
    health = [final.sum(-1, dtype=torch.float32)]
    if drafter is not None:
        with drafter_errors():
            health += _extend_drafter(models, state, inputs, tables, states, depth)
    state.reset_padding()
    return PassOutcome(tokens=first_tokens[:, None], health=torch.stack(health, dim=1))


def _extend_drafter(
    models: RoundModels, state: RowState, inputs: PrefillInputs, tables: Tensor, states: TargetStates, depth: int
) -> list[Tensor]:
    """Let the drafter read along and draft; return the health of its drafts, [chunks], if there are any."""
    drafter, cache = models.require_drafter()
    storage = _storage(models, cache, inputs, tables)
    if depth == 0:
        drafter(inputs.following, drafter.fuse(states), inputs.positions, storage)
        return []
    rows = inputs.settled_rows
    length = state.length[rows]
    places = draft_places(length, state.block_tables[rows], depth=depth, block_size=models.block_size)
    deepest = extend_and_draft(
        models, state, rows, states, inputs.following, inputs.positions, storage, inputs.ends, places, depth
    )
    room = (state.draft_until[rows] - length - 2).clamp(min=0, max=depth)
    state.draft_count[rows] = torch.minimum(room, state.draft_limit[rows])
    return [deepest.sum(-1, dtype=torch.float32)]


def _storage(models: RoundModels, cache: PagedCache, inputs: PrefillInputs, tables: Tensor) -> ChunkPass:
    return ChunkPass(
        cache=cache,
        block_tables=tables,
        context_lens=inputs.context_lens,
        query_starts=inputs.query_starts.to(torch.int32),
        slots=inputs.slots,
        max_chunk=inputs.max_chunk,
        max_context=models.max_length,
    )


def lay_out(
    chunks: Sequence[Chunk], *, block_size: int, padding_row: int, padded_tokens: int = 0, padded_chunks: int = 0
) -> list[int]:
    """Return `PrefillInputs` as one list.

    `padded_tokens`, more than there are, adds tokens of no chunk, whose keys and values go to block 0. `padded_chunks`
    adds empty chunks of the padding row, which end at the last of those tokens.
    """
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.end - chunk.start)
    spare = max(padded_tokens - starts[-1], 0)
    extra = max(padded_chunks - len(chunks), 0)
    assert spare > 0 or not extra, "an empty chunk has to end somewhere"
    rows = [chunk.request.running_row for chunk in chunks]
    by_token = (
        ([token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.end]], [0] * spare),
        ([token for chunk in chunks for token in _following(chunk)], [0] * spare),
        ([position for chunk in chunks for position in range(chunk.start, chunk.end)], [0] * spare),
        ([slot for chunk in chunks for slot in _slots(chunk, block_size)], [p % block_size for p in range(spare)]),
    )
    by_chunk = (
        (rows, [padding_row] * extra),
        (
            [row if chunk.completes else padding_row for row, chunk in zip(rows, chunks, strict=True)],
            [padding_row] * extra,
        ),
        ([chunk.start for chunk in chunks], [0] * extra),
        ([chunk.end for chunk in chunks], [0] * extra),
        ([start - 1 for start in starts[1:]], [starts[-1] + spare - 1] * extra),
        ([int(chunk.chooses) for chunk in chunks], [0] * extra),
    )
    packed: list[int] = []
    for values, padding in (*by_token, *by_chunk):
        packed += values
        packed += padding
        packed += [0] * (-len(packed) % ALIGNMENT)
    return packed + starts + starts[-1:] * extra


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _slots(chunk: Chunk, block_size: int) -> list[int]:
    blocks = chunk.request.table.blocks
    return [blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.end)]


def _following(chunk: Chunk) -> list[int]:
    """The token after each of the chunk's; 0 stands in for one that is not known yet."""
    tokens = chunk.request.tokens[chunk.start + 1 : chunk.end + 1]
    return tokens + [0] * (chunk.end - chunk.start - len(tokens))
