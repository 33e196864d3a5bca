"""The parts of a round that differ for draft trees: verifying them, accepting a path, growing the next ones.

`decoding/tree.py` and `decoding/acceptance.py` are the same for one sequence, without optimisations. A tree's keys and
values are in slots after its sequence's: in the target's cache node n at slot length + 1 + n while it is verified, in
the drafter's cache level after level while it grows. The next round overwrites both.
"""

from torch import Tensor

from fledge.decoding.tree import level_widths
from fledge.engine.device_state import DeviceState
from fledge.engine.sampler import Sampler
from fledge.kernels.grow_trees import Candidates, Frontier, TreeLevel, grow_trees, rank_trees
from fledge.kernels.round_ends import OpenedRound
from fledge.kernels.tree_ends import OpenedTrees, accept_trees, open_trees
from fledge.layers.paged_cache import RoundPass
from fledge.models.drafter.base import Drafter, DraftStates, state_norms
from fledge.models.target.decoder import TargetStates


def lay_out_trees(state: DeviceState, rows: Tensor, opened: OpenedRound, depth: int) -> tuple[OpenedTrees, RoundPass]:
    """Return the target's inputs for whole trees of `depth` levels, and their storage."""
    fed = open_trees(rows, state, opened, state.tree_nodes(depth))
    cache, masks, depths = state.target_cache, fed.masks, fed.depths
    return fed, state.storage(cache, opened.tables, opened.context, fed.slots, tree_mask=masks, depths=depths)


def accept_paths(
    state: DeviceState,
    sampler: Sampler,
    opened: OpenedRound,
    fed: OpenedTrees,
    logits: Tensor,
    states: TargetStates,
    depth: int,
) -> tuple[Tensor, Tensor, TargetStates, Tensor]:
    """Accept a path down each tree, and move its keys and values to its positions.

    Returns tokens [batch, depth + 1] padded with PADDING, the number of accepted drafts [batch], the target's states
    of the path (undefined after its end), and the path's rows.
    """
    batch = len(sampler.rows)
    choices = sampler.choices(logits, fed.positions.view(batch, -1) + 1).view(batch, -1)
    path = accept_trees(sampler.rows, state, choices, fed.slots, opened.drafted, depth=depth)
    state.target_cache.move(path.source, path.destination)
    aux = None if states.aux is None else states.aux[path.rows]
    return path.tokens, path.accepted, TargetStates(final=states.final[path.rows], aux=aux), path.rows


def draft_trees(
    state: DeviceState, drafter: Drafter, rows: Tensor, tables: Tensor, settled: DraftStates, depth: int
) -> Tensor:
    """Grow a tree for each row, level by level, from the drafter's states [batch, hidden] at the last settled row.

    Writes the ranked trees. Returns `state_norms` [batch, depth + 1]: of each level's best node, and of the sum of the
    last level's heads.
    """
    assert state.drafter_cache is not None
    assert state.tree is not None
    batch, length, head, feature = len(rows), state.length[rows], settled.head, settled.feature
    hidden = [settled.hidden]
    widths = level_widths(depth=depth, width=state.tree.width, vocab_size=state.draft_vocab)
    count = min(state.tree.width, state.draft_vocab)
    candidates = Candidates.empty(batch, count * sum(widths), rows.device)
    frontier: Frontier | None = None
    start = drafted = 0
    for number, (width, following) in enumerate(zip(widths, [*widths[1:], 0], strict=True)):
        best = drafter.top_k_tokens(head, count)
        level = TreeLevel(number, start, drafted, following, length, tables, state.block_size)
        frontier = grow_trees(candidates, frontier, best, level)
        if following:
            start, drafted = start + count * width, drafted + following
            storage = state.storage(
                state.drafter_cache,
                tables,
                length,
                frontier.slots,
                tree_mask=frontier.masks,
                depths=state.read_depths[:1, :drafted],
            )
            out = drafter(frontier.tokens, feature[frontier.origins], frontier.positions, storage)
            head, feature = out.head, out.feature
            hidden.append(out.hidden.view(batch, -1, out.hidden.shape[-1])[:, 0])
    rank_trees(rows, state, candidates, nodes=state.tree_nodes(depth), depth=depth)
    return state_norms(hidden, head.view(batch, -1, head.shape[-1]).sum(1))
