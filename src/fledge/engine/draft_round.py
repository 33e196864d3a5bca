"""The drafting half of a round, for a batch: chains, or trees. `decoding/drafting.py` is the same for one sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fledge.decoding.drafting import TreeShape
from fledge.decoding.random import Stream, uniform
from fledge.decoding.sampling import choose
from fledge.decoding.tree import Expansion, expand, rank
from fledge.engine.round_models import RoundModels
from fledge.engine.row_state import RowState
from fledge.errors import describe
from fledge.kernels.round_ends import DraftPlaces, slots_of
from fledge.layers.paged_cache import PagedPass, RoundPass
from fledge.models.drafter.base import DraftStates
from fledge.models.target.decoder import TargetStates


class DrafterError(Exception):
    """The drafter raised. Nobody loses anything but speed: the target's work of the step is done by then."""


@contextmanager
def drafter_errors() -> Iterator[None]:
    """Whatever is raised inside is the drafter's doing."""
    try:
        yield
    except Exception as error:
        raise DrafterError(describe(error)) from error


def extend_and_draft(
    models: RoundModels,
    state: RowState,
    rows: Tensor,
    states: TargetStates,
    tokens: Tensor,
    positions: Tensor,
    storage: PagedPass,
    last_rows: Tensor,
    places: DraftPlaces,
    depth: int,
) -> Tensor:
    """Let the drafter read settled rows (states, tokens, positions), then draft for `rows` [batch] from `last_rows`.

    Row i pairs the feature at its position with the token emitted after it. Returns states of the deepest drafts,
    [batch, n]: what went wrong on the way to them shows there as NaN.
    """
    drafter, _ = models.require_drafter()
    if models.tree is None:
        choose = partial(_sample, models, state, rows) if models.sample_drafts else None
        chain = drafter.draft_chain(states, tokens, positions, storage, last_rows, places, depth, choose)
        state.drafts[rows, :depth], deepest = chain
        return deepest
    out = drafter(tokens, drafter.fuse(states), positions, storage)
    settled = DraftStates(head=out.head[last_rows], feature=out.feature[last_rows])
    return _draft_trees(models, state, rows, settled, depth, models.tree)


def _sample(models: RoundModels, state: RowState, rows: Tensor, head: Tensor, step: int) -> Tensor:
    """Draw one draft for each row at its temperature, and keep the distribution it came from."""
    drafter, _ = models.require_drafter()
    # A drafter gone wrong must still draft from a distribution, or rejection would not be lossless.
    logits = drafter.full_vocab_logits(head).float().nan_to_num(posinf=1e30, neginf=-torch.inf)
    probs = (logits / state.temperature[rows, None]).softmax(-1)
    # A greedy request drafts its best token, with certainty.
    best = torch.zeros_like(probs).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    probs = torch.where(state.is_greedy[rows, None], best, probs)
    state.draft_probs[rows, step] = probs
    # The settled row is at length - 1 and predicts the token at length + 1.
    return choose(probs, uniform(state.seed[rows], state.length[rows] + 1 + step, Stream.DRAFT))


def _draft_trees(
    models: RoundModels, state: RowState, rows: Tensor, states: DraftStates, depth: int, shape: TreeShape
) -> Tensor:
    """Grow a tree for each row, level by level.

    The rows of earlier levels are fed again with each level: attention is told who sees whom within one pass only,
    and the drafter is small. They sit behind the settled rows and are overwritten by the next round.
    """
    drafter, cache = models.require_drafter()
    batch, device = len(rows), rows.device
    tables, length = state.block_tables[rows], state.length[rows]
    head, feature = states.head[:, None], states.feature[:, None]  # [batch, frontier, hidden]
    scores = torch.zeros(batch, 1, device=device)
    tokens = torch.zeros(batch, 0, dtype=torch.int64, device=device)  # of all rows drafted so far
    features = feature[:, :0]
    depths = tokens
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
        mask = _with_children(mask, origins, width=grown.shape[1], previous=head.shape[1] if level else 0)
        tokens = torch.cat([tokens, expansion.tokens.gather(1, grown)], dim=1)
        features = torch.cat([features, feature.gather(1, origins[..., None].expand(-1, -1, feature.shape[-1]))], dim=1)
        depths = torch.cat([depths, torch.full_like(grown, level)], dim=1)
        stored = length[:, None] + torch.arange(tokens.shape[1], device=device)
        storage = RoundPass(
            cache=cache,
            block_tables=tables,
            context_lens=length,
            slots=slots_of(tables, stored, models.block_size).flatten(),
            rows=tokens.shape[1],
            max_context=models.max_length,
            tree_mask=mask,
            depths=depths,
        )
        out = drafter(tokens.flatten(), features.flatten(0, 1), (length[:, None] + depths).flatten(), storage)
        head = out.head.view(batch, -1, out.head.shape[-1])[:, -grown.shape[1] :]
        feature = out.feature.view(batch, -1, out.feature.shape[-1])[:, -grown.shape[1] :]
    tree = rank(levels, shape.budget)
    nodes = tree.tokens.shape[1]  # a shallower tree than the deepest may have fewer
    state.tree_tokens[rows, :nodes] = tree.tokens
    state.tree_parents[rows, :nodes] = tree.parents
    state.tree_depths[rows, :nodes] = tree.depths
    return head.flatten(1)


def _with_children(mask: Tensor, origins: Tensor, *, width: int, previous: int) -> Tensor:
    """Add `width` rows to the mask [batch, n, n]: each sees itself and what its origin, of the last level, sees."""
    batch, drafted = mask.shape[0], mask.shape[1]
    inherited = mask.new_zeros(batch, width, drafted)
    if drafted:
        inherited = mask[:, drafted - previous :].gather(1, origins[..., None].expand(-1, -1, drafted))
    own = torch.eye(width, dtype=torch.bool, device=mask.device).expand(batch, -1, -1)
    above = torch.cat([mask, mask.new_zeros(batch, drafted, width)], dim=2)
    return torch.cat([above, torch.cat([inherited, own], dim=2)], dim=1)
