"""What a round works with: the models, their caches, and how drafts are made."""

from dataclasses import dataclass

from torch import Tensor

from fledge.decoding.drafting import TreeShape
from fledge.engine.paged_cache import PagedCache, RoundPass, slots_of
from fledge.engine.row_state import RowState
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel


@dataclass(frozen=True, kw_only=True)
class RoundModels:
    """The models, where they keep their keys and values, and how drafts are made."""

    target: TargetModel
    target_cache: PagedCache
    drafter: Drafter | None
    drafter_cache: PagedCache | None
    max_length: int  # bound on any sequence, lookahead included
    block_size: int
    tree: TreeShape | None = None  # draft trees instead of chains
    sample_drafts: bool = False  # sampled requests: draft at random, accept by rejection

    def require_drafter(self) -> tuple[Drafter, PagedCache]:
        assert self.drafter is not None
        assert self.drafter_cache is not None
        return self.drafter, self.drafter_cache


def chain_pass(cache: PagedCache, models: RoundModels, state: RowState, rows: Tensor, positions: Tensor) -> RoundPass:
    """Storage for new rows at `positions` [batch, n], each sequence's one after another."""
    tables = state.block_tables[rows]
    return RoundPass(
        cache=cache,
        block_tables=tables,
        context_lens=positions[:, 0],
        slots=slots_of(tables, positions, models.block_size).flatten(),
        rows=positions.shape[1],
        max_context=models.max_length,
    )
