"""What rounds and prompts work with (the models, their caches, how drafts are made), and what they give."""

from dataclasses import dataclass

from torch import Tensor

from fledge.decoding.drafting import TreeShape
from fledge.decoding.tree import DraftTree, tree_size
from fledge.engine.row_state import RowState
from fledge.layers.paged_cache import PagedCache, RoundPass
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel


@dataclass(frozen=True, kw_only=True)
class PassOutcome:
    """What the host reads of a round or of prompts, one launch late: a row for each request or chunk.

    Rows of padding, and of chunks that choose no token, mean nothing.
    """

    tokens: Tensor  # [rows, width]: emitted tokens, then PADDING; a prompt has one, the first of its answer
    health: Tensor  # [rows, width (+ 1 if it drafted)] sums of hidden states: finite where the models work
    accepted: Tensor | None = None  # [rows]; None where there are no drafts to accept: prompts
    drafted: Tensor | None = None  # [rows]: how many drafts there were to accept
    stamps: Tensor | None = None  # [4] nanoseconds: begun, verified, accepted, drafted; None if it is not timed


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

    def drafted_trees(self, state: RowState, rows: Tensor, depth: int) -> DraftTree:
        """Return the trees of `depth` levels that were drafted for `rows` [batch]."""
        assert self.tree is not None
        vocab_size = self.target.config.vocab_size
        nodes = tree_size(depth=depth, width=self.tree.width, budget=self.tree.budget, vocab_size=vocab_size)
        tokens = state.tree_tokens[rows, :nodes]
        return DraftTree(
            tokens=tokens,
            parents=state.tree_parents[rows, :nodes],
            depths=state.tree_depths[rows, :nodes],
            scores=tokens.float(),  # ranked already, and not asked for again
            max_depth=depth,
        )

    def require_drafter(self) -> tuple[Drafter, PagedCache]:
        assert self.drafter is not None
        assert self.drafter_cache is not None
        return self.drafter, self.drafter_cache

    def storage(self, cache: PagedCache, tables: Tensor, context: Tensor, slots: Tensor, rows: int) -> RoundPass:
        """Storage for `rows` new tokens of each sequence, one after another."""
        return RoundPass(
            cache=cache, block_tables=tables, context_lens=context, slots=slots, rows=rows, max_context=self.max_length
        )
