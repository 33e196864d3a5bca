"""The kernels of draft trees against their references and against `decoding/`. All integers agree exactly.

Log-probabilities are coarse: equal ones and minus infinity are everywhere. Some logits are not numbers.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_tree
from fledge.decoding.tree import DraftTree, Expansion, expand, level_widths, rank, tree_size, visibility
from fledge.kernels import grow_trees as growing
from fledge.kernels import top_rows as choosing
from fledge.kernels import tree_ends as ends
from fledge.kernels.grow_trees import Candidates, Frontier, TreeLevel
from fledge.kernels.round_ends import OpenedRound, slots_of
from tests.unit.kernels.interpreter import in_triton

Run = Callable[[Callable[..., Any]], Callable[..., Any]]  # of a public function: what runs the kernel in question
BLOCK_SIZE = 4
ROWS = [3, 0, 4, 1]  # of the state: the trees of a batch are anywhere


def packed(mask: Tensor) -> Tensor:
    """Bool [..., n, n] -> bits [..., n]."""
    return (mask.long() << torch.arange(mask.shape[-1], device=mask.device)).sum(-1)


def coarse(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    values = -torch.randint(0, 4, shape, device=device).to(dtype) / 2
    return values.masked_fill(torch.rand(shape, device=device) < 0.2, -torch.inf)


def top_rows(rows: int, vocab: int, count: int, dtype: torch.dtype, device: str, run: Run = in_triton) -> None:
    logits = torch.randn(rows, vocab, device=device).to(dtype)
    logits[0] = coarse(vocab, device=device, dtype=dtype)
    logits[-1, vocab // 2] = torch.nan
    logits[rows // 2] = -torch.inf
    logits[rows // 3, vocab // 3 :: 7] = torch.inf
    offsets = torch.arange(vocab, device=device) * 3
    wide = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    first = wide.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    expected = (wide.gather(1, first).double() - logits.double().logsumexp(-1, keepdim=True)).float()
    expected = expected.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    for function in (run(choosing.top_rows), choosing.top_rows_reference):
        logprobs, tokens = function(logits, count)
        assert torch.equal(tokens, first)
        assert torch.equal(function(logits, count, offsets)[1], 4 * first)
        assert logprobs.max() <= 0
        torch.testing.assert_close(logprobs, expected.clamp(max=0.0), rtol=1e-5, atol=2e-5)


def empty_state(requests: int, nodes: int, device: str) -> SimpleNamespace:
    names = ("tree_tokens", "tree_parents", "tree_depths", "tree_masks")
    rows = {name: torch.full((requests, nodes + 2), -7, device=device) for name in names}
    return SimpleNamespace(**rows, last_token=torch.randint(50, (requests,), device=device), block_size=BLOCK_SIZE)


def trees(width: int, budget: int, depth: int, vocab: int, device: str, run: Run = in_triton) -> None:
    """Grow and rank; then read the trees, accept a path of each and move it."""
    batch, count = len(ROWS), min(width, vocab)
    widths = level_widths(depth=depth, width=width, vocab_size=vocab)
    nodes = tree_size(depth=depth, width=width, budget=budget, vocab_size=vocab)
    rows = torch.tensor(ROWS, device=device)
    length = torch.randint(0, 30, (batch,), device=device)
    tables = torch.randperm(batch * 40, device=device).view(batch, 40).int()
    states = [empty_state(6, nodes, device) for _ in range(2)]
    tables_of = [Candidates.empty(batch, count * sum(widths), torch.device(device)) for _ in range(2)]
    frontiers: list[Frontier | None] = [None, None]
    levels: list[list[Expansion]] = [[] for _ in range(batch)]
    scores, seen = torch.zeros(batch, 1, device=device), torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
    start = drafted = 0
    for number, (read, following) in enumerate(zip(widths, [*widths[1:], 0], strict=True)):
        logprobs = coarse(batch, read, vocab, device=device)
        best = choosing.first_largest(logprobs, count)
        for tree in range(batch):
            levels[tree].append(expand(scores[tree], logprobs[tree], width))
        level = TreeLevel(number, start, drafted, following, length, tables, BLOCK_SIZE)
        flat = (best[0].view(-1, count), best[1].view(-1, count))
        for side, grow in enumerate((growing.grow_trees_reference, run(growing.grow_trees))):
            frontiers[side] = grow(tables_of[side], frontiers[side], flat, level)
        expected, found = frontiers
        for name in ("numbers", "masks", "tokens", "origins", "positions", "slots"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        if not following:
            break
        grown = torch.stack([own[-1].frontier for own in levels])
        origins = torch.stack([own[-1].origins for own in levels]).gather(1, grown)
        scores = torch.stack([own[-1].scores for own in levels]).gather(1, grown)
        own = torch.eye(following, dtype=torch.bool, device=device).expand(batch, -1, -1)
        seen = torch.cat([seen.gather(1, origins[..., None].expand(-1, -1, drafted)), own], dim=2)
        assert torch.equal(found.numbers, grown + start)
        assert torch.equal(found.masks, packed(seen))
        assert torch.equal(found.positions, (length + number).repeat_interleave(following))
        start, drafted = start + count * read, drafted + following
    for name in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(tables_of[1], name), getattr(tables_of[0], name)), name

    growing.rank_trees_reference(rows, states[0], tables_of[0], nodes=nodes, depth=depth)
    run(growing.rank_trees)(rows, states[1], tables_of[1], nodes=nodes, depth=depth)
    ranked = [rank(own, budget) for own in levels]
    for state in states:
        for row, tree in zip(ROWS, ranked, strict=True):
            assert torch.equal(state.tree_tokens[row, :nodes], tree.tokens)
            assert torch.equal(state.tree_parents[row, :nodes], tree.parents)
            assert torch.equal(state.tree_depths[row, :nodes], tree.depths)
            assert torch.equal(state.tree_masks[row, : nodes + 1], packed(visibility(tree.parents)))
            assert (state.tree_tokens[row, nodes:] == -7).all(), "nothing is written beyond the tree"
            assert (state.tree_masks[row, nodes + 1 :] == -7).all()
        assert (state.tree_tokens[2] == -7).all(), "nor for others"
    tree_ends(rows, states[0], ranked, length, tables, depth, run)


def tree_ends(
    rows: Tensor,
    state: SimpleNamespace,
    ranked: list[DraftTree],
    length: Tensor,
    tables: Tensor,
    depth: int,
    run: Run,
) -> None:
    device, batch, nodes = rows.device, len(rows), len(ranked[0].tokens)
    nothing = rows.new_zeros(0)
    opened = OpenedRound(
        tokens=nothing,
        positions=nothing,
        slots=nothing,
        tables=tables,
        context=length,
        drafted=nothing,
        confidence=nothing,
    )
    expected = ends.open_trees_reference(rows, state, opened, nodes)
    found = run(ends.open_trees)(rows, state, opened, nodes)
    for name in ("tokens", "positions", "slots", "masks", "depths"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    stored = length[:, None] + torch.arange(nodes + 1, device=device)
    assert torch.equal(found.slots.view(batch, -1), slots_of(tables, stored, BLOCK_SIZE))

    # Mostly what some child of the row carries, so that paths are long.
    choices = torch.randint(50, (batch, nodes + 1), device=device)
    for entry, tree in enumerate(ranked):
        for node in torch.randperm(nodes).tolist():
            if torch.rand(()) < 0.8:
                choices[entry, tree.parents[node] + 1] = tree.tokens[node]
    for limits in (torch.full((batch,), depth, device=device), torch.randint(0, depth + 1, (batch,), device=device)):
        given = (rows, state, choices, found.slots, limits)
        one = ends.accept_trees_reference(*given, depth=depth)
        other = run(ends.accept_trees)(*given, depth=depth)
        for name in ("tokens", "accepted", "rows", "source", "destination"):
            assert torch.equal(getattr(other, name), getattr(one, name)), name
        for entry, tree in enumerate(ranked):
            path = accept_tree(tree, choices[entry], depth_limits=limits[entry])
            accepted = int(path.accepted)
            assert torch.equal(one.tokens[entry], path.tokens)
            assert int(one.accepted[entry]) == accepted
            on_path = one.rows.view(batch, -1)[entry, 1 : accepted + 1] - entry * (nodes + 1) - 1
            assert torch.equal(on_path, path.nodes[:accepted])
        caches = [torch.randn(3, batch * 40 * BLOCK_SIZE, 24, device=device) for _ in range(2)]
        moved = [cache.clone() for cache in caches]
        run(ends.move_rows)(*moved, one.source, one.destination)
        for before, after in zip(caches, moved, strict=True):
            wanted = before.clone()
            wanted[:, one.destination.flatten()] = before[:, one.source.flatten()]
            assert torch.equal(after, wanted)
