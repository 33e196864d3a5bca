"""Device programs: a round (verify, accept, extend the drafter, draft), and the reading of prompts.

Nothing here reads a tensor on the host, so a whole program can be captured as a CUDA graph and the next one can be
launched before anybody knows what this one gave. `decoding/reference.py` and `decoding/drafting.py` are the same thing
said simply, for one sequence.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_rejection, accept_tree
from fledge.decoding.drafting import TreeShape
from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import choose
from fledge.decoding.tree import DraftTree, Expansion, expand, rank, visibility
from fledge.engine.device_state import DeviceState
from fledge.engine.sampler import LogprobsTensors, Sampler
from fledge.engine.scheduler import Chunk
from fledge.errors import describe
from fledge.kernels.accept import accept_chain, accept_greedy
from fledge.kernels.round_ends import (
    OpenedRound,
    SettledRound,
    draft_places,
    open_round,
    settle_round,
    slots_of,
)
from fledge.kernels.timestamp import timestamp
from fledge.layers.paged_cache import ChunkPass, PagedCache, PagedPass, RoundPass
from fledge.models.drafter.base import Drafter
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
    health: Tensor  # [rows, width (+ 1 if it drafted)] sums of hidden states: finite where the models work
    accepted: Tensor | None = None  # [rows]; None where there are no drafts to accept: prompts
    drafted: Tensor | None = None  # [rows]: how many drafts there were to accept
    stamps: Tensor | None = None  # [4] nanoseconds: begun, verified, accepted, drafted; None of prompts
    logprobs: LogprobsTensors | None = None  # if somebody asked for them


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


def run_round(state: DeviceState, sampler: Sampler, *, verify: int, draft: int) -> PassOutcome:
    """Verify `verify` drafts (levels of a tree) of each of the sampler's rows, then draft `draft` more.

    Updates the state of those rows: last token, length, drafts. With `draft` 0 the drafter is left alone.
    """
    rows, width = sampler.rows, verify + 1
    clock = RoundClock(rows.device)
    clock.mark()
    opened = open_round(rows, state, verify=verify, block_size=state.block_size)
    tree = state.drafted(rows, verify) if verify and state.tree is not None else None
    if isinstance(tree, DraftTree):
        fed, storage = _lay_out_trees(state, rows, opened, tree)
    else:
        fed, storage = opened, state.storage(state.target_cache, opened.tables, opened.context, opened.slots)
    aux_layer_ids = state.drafter.aux_layer_ids if state.drafter is not None and draft else ()
    states = state.target(fed.tokens, fed.positions, storage, aux_layer_ids)
    logits = state.target.logits(states.final)  # [batch * rows fed, vocab]
    clock.mark()
    if isinstance(tree, DraftTree):
        tokens, accepted, states = _accept_trees(state, sampler, fed, tree, logits, states)
    else:
        tokens, accepted = _accept_chains(state, sampler, opened, logits)
    settled = settle_round(rows, state, opened, tokens, accepted, depth=draft, block_size=state.block_size)
    clock.mark()
    health = torch.empty(len(rows), width + bool(draft), dtype=torch.float32, device=rows.device)
    torch.sum(states.final.view(len(rows), width, -1), -1, dtype=torch.float32, out=health[:, :width])
    if draft:
        # Rows after the last settled one hold padding: leaving them out would take longer than computing them.
        assert state.drafter_cache is not None
        storage = state.storage(state.drafter_cache, settled.places.tables, opened.context, opened.slots)
        deepest = _extend_drafter(state, rows, states, opened.positions, storage, settled, draft)
        torch.sum(deepest, -1, dtype=torch.float32, out=health[:, width])
    clock.mark()
    return PassOutcome(
        tokens=tokens,
        accepted=accepted,
        drafted=opened.drafted,
        health=health,
        stamps=clock.stamps,
        logprobs=sampler.logprobs,
    )


def _accept_chains(state: DeviceState, sampler: Sampler, opened: OpenedRound, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the emitted tokens [batch, width], then PADDING, and how many drafts were accepted [batch]."""
    batch, width = len(sampler.rows), len(opened.tokens) // len(sampler.rows)
    drafts = opened.tokens.view(batch, width)[:, 1:]
    if sampler.is_greedy:
        greedy = accept_greedy(drafts, logits.view(batch, width, -1), draft_lengths=opened.drafted)
        return greedy.tokens, greedy.accepted
    decided = opened.positions.view(batch, width) + 1
    if state.sample_drafts and width > 1:
        judged = accept_rejection(
            drafts,
            state.draft_probs[sampler.rows, : width - 1],
            sampler.probabilities(logits).view(batch, width, -1),
            *sampler.rejection_uniforms(decided, opened.drafted),
            draft_lengths=opened.drafted,
        )
        tokens, accepted = judged.tokens, judged.accepted
    else:
        choices = sampler.choices(logits, decided).view(batch, width)
        matched = accept_chain(drafts, choices, draft_lengths=opened.drafted)
        tokens, accepted = matched.tokens, matched.accepted
    sampler.record_logprobs(logits, tokens)
    return tokens, accepted


def _lay_out_trees(
    state: DeviceState, rows: Tensor, opened: OpenedRound, tree: DraftTree
) -> tuple[OpenedRound, RoundPass]:
    """Return what the target reads of whole trees, and where: node n is stored at slot length + 1 + n."""
    length, tables = opened.context, state.block_tables[rows]
    depths = torch.cat([torch.zeros_like(length)[:, None], tree.depths], dim=1)  # [batch, nodes + 1]
    stored = length[:, None] + torch.arange(depths.shape[1], device=rows.device)
    fed = replace(
        opened,
        tokens=torch.cat([state.last_token[rows, None], tree.tokens], dim=1).flatten(),
        positions=(length[:, None] + depths).flatten(),
        slots=slots_of(tables, stored, state.block_size).flatten(),
        tables=tables,
    )
    mask = visibility(tree.parents)
    return fed, state.storage(state.target_cache, tables, length, fed.slots, tree_mask=mask, depths=depths)


def _accept_trees(
    state: DeviceState, sampler: Sampler, fed: OpenedRound, tree: DraftTree, logits: Tensor, states: TargetStates
) -> tuple[Tensor, Tensor, TargetStates]:
    """Accept a path down each tree, and move its keys and values to its positions.

    Returns tokens and accepted as `_accept_chains`, and the states of the path in order, then of padding.
    """
    batch, width, depth, device = len(fed.context), tree.tokens.shape[1] + 1, tree.max_depth, logits.device
    choices = sampler.choices(logits, fed.positions.view(batch, width) + 1).view(batch, width)
    path = accept_tree(tree, choices, depth_limits=fed.drafted)

    # Rows after the path's end stay where they are (source = destination) and are overwritten by the next round.
    places = torch.arange(depth + 1, device=device).expand(batch, -1)
    on_path = places <= path.accepted[:, None]
    source = torch.where(on_path, torch.cat([places[:, :1], path.nodes + 1], dim=1), places)  # verify rows
    moved_from = slots_of(fed.tables, fed.context[:, None] + source, state.block_size)
    moved_to = slots_of(fed.tables, fed.context[:, None] + places, state.block_size)
    state.target_cache.move(moved_from.flatten(), moved_to.flatten())

    flat = (torch.arange(batch, device=device)[:, None] * width + source.clamp(max=width - 1)).flatten()
    if sampler.wants_logprobs:
        sampler.record_logprobs(logits[flat], path.tokens)
    settled = TargetStates(final=states.final[flat], aux=None if states.aux is None else states.aux[flat])
    return path.tokens, path.accepted, settled


def _extend_drafter(
    state: DeviceState,
    rows: Tensor,
    states: TargetStates,
    positions: Tensor,
    storage: PagedPass,
    settled: SettledRound,
    depth: int,
) -> Tensor:
    """Let the drafter read settled rows (states, tokens, positions), then draft for `rows` [batch] from the last ones.

    Row i pairs the feature at its position with the token emitted after it. Returns states of the deepest drafts,
    [batch, n]: what went wrong on the way to them shows there as NaN.
    """
    drafter = state.drafter
    assert drafter is not None
    try:
        if depth and state.tree is None:
            sample = partial(_sample_drafts, state, drafter, rows) if state.sample_drafts else None
            drafts, deepest = drafter.draft_chain(
                states, settled.tokens, positions, storage, settled.last_rows, settled.places, depth, sample
            )
            state.drafts[rows, :depth] = drafts
            return deepest
        out = drafter(settled.tokens, drafter.fuse(states), positions, storage)
        head, feature = out.head[settled.last_rows], out.feature[settled.last_rows]
        return _draft_trees(state, drafter, rows, head, feature, depth, state.tree) if depth and state.tree else head
    except Exception as error:
        raise DrafterError(describe(error)) from error


def _sample_drafts(state: DeviceState, drafter: Drafter, rows: Tensor, head: Tensor, step: int) -> Tensor:
    """Draw one draft for each row at its temperature, and keep the distribution it came from."""
    # A drafter gone wrong must still draft from a distribution, or rejection would not be lossless.
    logits = drafter.full_vocab_logits(head).float().nan_to_num(posinf=1e30, neginf=-torch.inf)
    probs = (logits / state.sampling.temperature[rows, None]).softmax(-1)
    # A greedy request drafts its best token, with certainty.
    best = torch.zeros_like(probs).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    probs = torch.where(state.sampling.is_greedy[rows, None], best, probs)
    state.draft_probs[rows, step] = probs
    # The settled row is at length - 1 and predicts the token at length + 1.
    return choose(probs, uniform(state.sampling.seed[rows], state.length[rows] + 1 + step, Stream.DRAFT))


def _draft_trees(
    state: DeviceState, drafter: Drafter, rows: Tensor, head: Tensor, feature: Tensor, depth: int, shape: TreeShape
) -> Tensor:
    """Grow a tree for each row, level by level, from the drafter's states [batch, hidden] at the last settled row.

    The rows of earlier levels are fed again with each level: attention is told who sees whom within one pass only,
    and the drafter is small. They sit behind the settled rows and are overwritten by the next round.
    """
    assert state.drafter_cache is not None
    batch, device = len(rows), rows.device
    tables, length = state.block_tables[rows], state.length[rows]
    head, feature = head[:, None], feature[:, None]  # [batch, frontier, hidden]
    scores = torch.zeros(batch, 1, device=device)
    tokens = depths = torch.zeros(batch, 0, dtype=torch.int64, device=device)  # of all rows drafted so far
    features = feature[:, :0]
    mask = torch.zeros(batch, 0, 0, dtype=torch.bool, device=device)  # which drafted row sees which
    levels: list[Expansion] = []
    for level in range(depth):
        logprobs = drafter.full_vocab_logits(head).float().log_softmax(-1)  # [batch, frontier, vocab]
        expansion = expand(scores, logprobs, shape.width)
        levels.append(expansion)
        if level + 1 == depth:
            break
        grown = expansion.frontier  # [batch, width]
        origins = expansion.origins.gather(1, grown)
        scores = expansion.scores.gather(1, grown)
        mask = _with_children(mask, origins, previous=head.shape[1] if level else 0)
        tokens = torch.cat([tokens, expansion.tokens.gather(1, grown)], dim=1)
        features = torch.cat([features, feature.gather(1, origins[..., None].expand(-1, -1, feature.shape[-1]))], dim=1)
        depths = torch.cat([depths, torch.full_like(grown, level)], dim=1)
        stored = length[:, None] + torch.arange(tokens.shape[1], device=device)
        slots = slots_of(tables, stored, state.block_size).flatten()
        storage = state.storage(state.drafter_cache, tables, length, slots, tree_mask=mask, depths=depths)
        out = drafter(tokens.flatten(), features.flatten(0, 1), (length[:, None] + depths).flatten(), storage)
        head = out.head.view(batch, -1, out.head.shape[-1])[:, -grown.shape[1] :]
        feature = out.feature.view(batch, -1, out.feature.shape[-1])[:, -grown.shape[1] :]
    tree = rank(levels, shape.budget)
    nodes = tree.tokens.shape[1]  # a shallower tree than the deepest may have fewer
    state.tree_tokens[rows, :nodes] = tree.tokens
    state.tree_parents[rows, :nodes] = tree.parents
    state.tree_depths[rows, :nodes] = tree.depths
    return head.flatten(1)


def _with_children(mask: Tensor, origins: Tensor, *, previous: int) -> Tensor:
    """Add the rows of `origins` [batch, width] to the mask [batch, n, n].

    Each sees itself and what its origin, one of the `previous` rows of the last level, sees.
    """
    (batch, width), drafted = origins.shape, mask.shape[1]
    inherited = mask.new_zeros(batch, width, drafted)
    if drafted:
        inherited = mask[:, drafted - previous :].gather(1, origins[..., None].expand(-1, -1, drafted))
    own = torch.eye(width, dtype=torch.bool, device=mask.device).expand(batch, -1, -1)
    above = torch.cat([mask, mask.new_zeros(batch, drafted, width)], dim=2)
    return torch.cat([above, torch.cat([inherited, own], dim=2)], dim=1)


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
    max_chunk: int  # no chunk is longer

    @classmethod
    def of(cls, packed: Tensor, *, tokens: int, chunks: int, max_chunk: int) -> "PrefillInputs":
        """Take apart what `lay_out` put together."""
        token_part, chunk_part = (-(-count // ALIGNMENT) * ALIGNMENT for count in (tokens, chunks))
        by_token, by_chunk, starts = packed.tensor_split((4 * token_part, 4 * token_part + 6 * chunk_part))
        columns: list[Any] = [*by_token.view(4, -1)[:, :tokens], *by_chunk.view(6, -1)[:, :chunks]]
        return cls(*[*columns, starts, max_chunk])


def lay_out(state: DeviceState, chunks: Sequence[Chunk], *, tokens: int, rows: int) -> Tensor:
    """Return `PrefillInputs` as one tensor, padded to that many tokens and chunks.

    Tokens of no chunk have their keys and values in block 0. Empty chunks are of the padding row, and end at the last
    of those tokens.
    """
    block_size, nobody = state.block_size, state.padding_row
    columns: list[list[int]] = [[] for _ in range(10)]
    read, following, positions, slots, in_rows, settled_rows, context_lens, lengths, ends, chooses = columns
    starts = [0]
    for chunk in chunks:
        request, span = chunk.request, range(chunk.start, chunk.end)
        row, blocks = request.running_row, request.table.blocks
        read += request.tokens[chunk.start : chunk.end]
        following += [*request.tokens[chunk.start + 1 : chunk.end + 1], 0][: len(span)]
        positions += span
        slots += [blocks[p // block_size] * block_size + p % block_size for p in span]
        starts.append(len(read))
        in_rows.append(row)
        settled_rows.append(row if chunk.completes else nobody)
        context_lens.append(chunk.start)
        lengths.append(chunk.end)
        ends.append(len(read) - 1)
        chooses.append(int(chunk.chooses))
    spare, extra = tokens - len(read), rows - len(chunks)
    assert spare > 0 or not extra, "an empty chunk has to end somewhere"
    slots += [p % block_size for p in range(spare)]
    fills = (0, 0, 0, 0, nobody, nobody, 0, 0, tokens - 1, 0)
    packed: list[int] = []
    for i, (column, fill) in enumerate(zip(columns, fills, strict=True)):
        packed += column
        packed += [fill] * ((tokens if i < 4 else rows) - len(column))
        packed += [0] * (-len(packed) % ALIGNMENT)
    return state.tensor(packed + starts + starts[-1:] * extra)


def run_prefill(state: DeviceState, inputs: PrefillInputs, sampler: Sampler, *, depth: int) -> PassOutcome:
    """Read the chunks; draft `depth` tokens for those that complete. Updates the state of their rows.

    Chunks that do not complete write to the padding row, which is to be reset afterwards.
    """
    drafter = state.drafter  # reads along even if nothing is drafted now: its rows are needed when it is
    aux_layer_ids = drafter.aux_layer_ids if drafter is not None else ()
    tables = state.block_tables[inputs.rows]

    def storage(cache: PagedCache) -> ChunkPass:
        return ChunkPass(
            cache=cache,
            block_tables=tables,
            context_lens=inputs.context_lens,
            query_starts=inputs.query_starts.to(torch.int32),
            slots=inputs.slots,
            max_chunk=inputs.max_chunk,
            max_context=state.max_length,
        )

    states = state.target(inputs.tokens, inputs.positions, storage(state.target_cache), aux_layer_ids)
    final = states.final[inputs.ends]
    logits = state.target.logits(final)
    choices = sampler.choices(logits, inputs.lengths[:, None])
    sampler.record_logprobs(logits, choices, states.final)
    first_tokens = torch.where(inputs.chooses != 0, choices, inputs.following[inputs.ends])
    inputs.following[inputs.ends] = first_tokens
    rows = inputs.settled_rows
    state.length[rows] = inputs.lengths
    state.last_token[rows] = first_tokens
    state.draft_count.index_fill_(0, rows, 0)  # assigning a number would copy it from the host, which graphs cannot
    health = [final.sum(-1, dtype=torch.float32)]
    if state.drafter_cache is not None and drafter is not None:
        length = state.length[rows]
        places = draft_places(length, state.block_tables[rows], depth=depth, block_size=state.block_size)
        settled = SettledRound(tokens=inputs.following, last_rows=inputs.ends, places=places)
        along = storage(state.drafter_cache)
        deepest = _extend_drafter(state, rows, states, inputs.positions, along, settled, depth)
        if depth:
            room = (state.draft_until[rows] - length - 2).clamp(min=0, max=depth)
            state.draft_count[rows] = torch.minimum(room, state.draft_limit[rows])
            health.append(deepest.sum(-1, dtype=torch.float32))
    return PassOutcome(tokens=first_tokens[:, None], health=torch.stack(health, dim=1), logprobs=sampler.logprobs)
