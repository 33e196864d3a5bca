"""Draft trees between the passes of models, each one call. The kernels of the same names tell what they compute."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fledge.kernels.grow_trees import Candidates, Frontier, TreeLevel, TreeRows
from fledge.kernels.round_ends import OpenedRound
from fledge.kernels.tree_ends import AcceptedTrees, OpenedTrees, RootedRows
from fledge.native.library import required


def grow_trees(
    candidates: Candidates,
    frontier: Frontier | None,
    best: tuple[Tensor, Tensor],
    level: TreeLevel,
    *,
    length: Tensor,
    tables: Tensor,
    block_size: int,
) -> Frontier:
    logprobs, tokens = best
    made = Frontier.empty(length, level.width)
    required().fledge_grow_trees(
        len(length),
        len(tokens) // len(length),
        tokens.shape[1],
        logprobs,
        tokens,
        candidates.tokens.shape[1],
        candidates.tokens,
        candidates.parents,
        candidates.depths,
        candidates.scores,
        level.number,
        level.start,
        level.drafted,
        level.width,
        None if frontier is None else frontier.numbers,
        None if frontier is None else frontier.masks,
        length,
        tables.contiguous(),
        tables.shape[1],
        block_size,
        made.numbers,
        made.masks,
        made.tokens,
        made.origins,
        made.positions,
        made.slots,
    )
    return made


def rank_trees(rows: Tensor, state: TreeRows, candidates: Candidates, *, nodes: int, depth: int) -> None:
    del depth  # who has a parent sees what it sees
    required().fledge_rank_trees(
        rows,
        *candidates.tokens.shape,
        nodes,
        candidates.tokens,
        candidates.parents,
        candidates.depths,
        candidates.scores,
        state.tree_tokens,
        state.tree_parents,
        state.tree_depths,
        state.tree_masks,
        state.tree_tokens.stride(0),
        state.tree_masks.stride(0),
    )


def open_trees(rows: Tensor, state: RootedRows, opened: OpenedRound, *, nodes: int, block_size: int) -> OpenedTrees:
    made = OpenedTrees.empty(rows, nodes)
    required().fledge_open_trees(
        rows,
        len(rows),
        nodes + 1,
        block_size,
        state.last_token,
        state.tree_tokens,
        state.tree_depths,
        state.tree_masks,
        state.tree_tokens.stride(0),
        state.tree_masks.stride(0),
        opened.context,
        opened.tables,
        opened.tables.shape[1],
        made.tokens,
        made.positions,
        made.slots,
        made.masks,
        made.depths,
    )
    return made


def accept_trees(
    rows: Tensor, state: TreeRows, choices: Tensor, slots: Tensor, limits: Tensor, *, depth: int
) -> AcceptedTrees:
    path = AcceptedTrees.empty(rows, depth)
    required().fledge_accept_trees(
        rows,
        *choices.shape,
        depth + 1,
        state.tree_tokens,
        state.tree_parents,
        state.tree_tokens.stride(0),
        choices.contiguous(),
        slots,
        limits,
        path.tokens,
        path.accepted,
        path.rows,
        path.source,
        path.destination,
    )
    return path


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (grow_trees, rank_trees, open_trees, accept_trees)
}
