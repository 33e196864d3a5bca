"""Reading prompts: chunks of any length into both caches, and, where one completes, the first token and drafts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.engine.choosing import Logprobs, Watcher
from fledge.engine.draft_round import propose
from fledge.engine.paged_cache import ChunkPass, PagedCache
from fledge.engine.recovery import drafters_fault
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.engine.scheduler import Chunk
from fledge.kernels.round_rows import draft_places
from fledge.models.drafter.base import DraftStates
from fledge.models.target.decoder import TargetStates


@dataclass(frozen=True, kw_only=True)
class FirstTokens:
    """For the chunks that choose a token, in order."""

    first_tokens: Tensor  # [choosing]
    health: Tensor  # [choosing] sums of the target's hidden states: finite where it works
    logprobs: Logprobs | None


@dataclass(frozen=True, kw_only=True)
class PrefillOutcome:
    """What the host reads, one launch late."""

    chosen: FirstTokens | None
    drafts_health: Tensor | None  # [completing] the same for the drafter, where it drafted


def run_prefill(
    models: RoundModels, state: RowState, chunks: list[Chunk], *, depth: int, vocab_size: int
) -> PrefillOutcome:
    """Read `chunks`; draft `depth` tokens for those that complete. Updates the state of their rows."""
    batch = _ChunkBatch(chunks, state, models.block_size)
    drafter = models.drafter  # reads along even if nothing is drafted now: its rows are needed when it is
    aux_layer_ids = drafter.aux_layer_ids if drafter is not None else ()
    states = models.target(batch.tokens, batch.positions, batch.storage(models.target_cache), aux_layer_ids)
    chosen = None
    if any(chunk.chooses for chunk in chunks):
        chosen = _choose(models, state, batch, states, vocab_size)
        batch.fill_in(chosen.first_tokens)
    if any(chunk.completes for chunk in chunks):
        _settle(state, batch)
    drafts_health = None
    if drafter is not None:
        with drafters_fault():
            drafts_health = _extend_drafter(models, state, batch, states, depth)
    return PrefillOutcome(chosen=chosen, drafts_health=drafts_health)


class _ChunkBatch:
    """Chunks laid out flat on the device, one after another."""

    def __init__(self, chunks: list[Chunk], state: RowState, block_size: int) -> None:
        self.chunks = chunks
        self.completing = [i for i, chunk in enumerate(chunks) if chunk.completes]
        self.choosing = [i for i, chunk in enumerate(chunks) if chunk.chooses]
        self._state = state
        lengths = [chunk.end - chunk.start for chunk in chunks]
        self._starts = [0]
        for length in lengths:
            self._starts.append(self._starts[-1] + length)
        self._max_chunk = max(lengths)
        self._rows = state.tensor([chunk.request.row for chunk in chunks])
        self._slots = state.tensor([slot for chunk in chunks for slot in _slots(chunk, block_size)])
        self._context_lens = state.tensor([chunk.start for chunk in chunks])
        self._query_starts = state.tensor(self._starts, torch.int32)
        self._tables = state.block_tables[self._rows]
        self.tokens = state.tensor([t for chunk in chunks for t in chunk.request.tokens[chunk.start : chunk.end]])
        self.following = state.tensor([t for chunk in chunks for t in _following(chunk)])  # the token after each
        self.positions = state.tensor([p for chunk in chunks for p in range(chunk.start, chunk.end)])

    def storage(self, cache: PagedCache) -> ChunkPass:
        return ChunkPass(
            cache=cache,
            block_tables=self._tables,
            context_lens=self._context_lens,
            query_starts=self._query_starts,
            slots=self._slots,
            max_chunk=self._max_chunk,
        )

    def rows(self, which: list[int]) -> Tensor:
        """The rows, in the row state, of some chunks' requests."""
        return self._rows[self._state.tensor(which)]

    def ends(self, which: list[int]) -> Tensor:
        """The places of some chunks' last tokens in the flat layout."""
        return self._state.tensor([self._starts[i + 1] - 1 for i in which])

    def fill_in(self, first_tokens: Tensor) -> None:
        """Put the tokens just chosen after the prompts that they follow."""
        self.following[self.ends(self.choosing)] = first_tokens


def _choose(
    models: RoundModels, state: RowState, batch: _ChunkBatch, states: TargetStates, vocab_size: int
) -> FirstTokens:
    """Choose the token after each prompt that is complete."""
    watcher = Watcher([batch.chunks[i].request for i in batch.choosing], state, vocab_size)
    final = states.final[batch.ends(batch.choosing)]
    logits = models.target.logits(final)
    first_tokens = watcher.choices(logits, state.tensor([batch.chunks[i].end for i in batch.choosing]))
    watcher.note(logits, first_tokens)
    health = final.sum(-1, dtype=torch.float32)
    return FirstTokens(first_tokens=first_tokens, health=health, logprobs=watcher.logprobs)


def _settle(state: RowState, batch: _ChunkBatch) -> None:
    """Make the rows of complete requests ready for rounds. Their last token is the one that follows their chunk."""
    rows = batch.rows(batch.completing)
    state.length[rows] = state.tensor([batch.chunks[i].end for i in batch.completing])
    state.last_token[rows] = batch.following[batch.ends(batch.completing)]
    state.draft_count.index_fill_(0, rows, 0)


def _extend_drafter(
    models: RoundModels, state: RowState, batch: _ChunkBatch, states: TargetStates, depth: int
) -> Tensor | None:
    drafter, cache = models.require_drafter()
    out = drafter(batch.following, drafter.fuse(states), batch.positions, batch.storage(cache))
    if not batch.completing or depth == 0:
        return None
    rows, ends = batch.rows(batch.completing), batch.ends(batch.completing)
    length = state.length[rows]
    places = draft_places(length, state.block_tables[rows], depth=depth, block_size=models.block_size)
    settled = DraftStates(head=out.head[ends], feature=out.feature[ends])
    deepest = propose(models, state, rows, settled, places, depth)
    room = (state.draft_until[rows] - length - 2).clamp(min=0, max=depth)
    state.draft_count[rows] = torch.minimum(room, state.draft_limit[rows])
    return deepest.sum(-1, dtype=torch.float32)


def _slots(chunk: Chunk, block_size: int) -> list[int]:
    blocks = chunk.request.table.blocks
    return [blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.end)]


def _following(chunk: Chunk) -> list[int]:
    """The token after each of the chunk's; 0 stands in for one that is not known yet."""
    tokens = chunk.request.tokens[chunk.start + 1 : chunk.end + 1]
    return tokens + [0] * (chunk.end - chunk.start - len(tokens))
