"""Toy models whose behaviour can be written down, for tests of the decoding loop.

`ToyTarget` is a Markov chain: a table says the logits after each token. `ToyDrafter` is another such table, so a
drafter can be made to agree with the target always, never or sometimes. `Prompter` drafts a text it was told, with
the right token at a rank it was told: with it a test decides which drafts stand, under any target.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.decoding.tree import DraftTree
from fledge.layers.attention import KeyValueStorage
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter, DraftStates
from fledge.models.target.decoder import TargetModel, TargetStates


def _layer(hidden_size: int) -> LayerConfig:
    """No toy has a layer, but configs must say something. States are one-hot, so the width is the vocabulary's."""
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        norm_eps=1e-6,
        rope=RopeConfig(),
    )


def _drafter_config(vocab_size: int, draft_vocab_size: int, max_positions: int) -> DrafterConfig:
    return DrafterConfig(
        architecture=Architecture.EAGLE1,
        layer=_layer(vocab_size),
        num_layers=0,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_positions=max_positions,
        target_hidden_size=vocab_size,
    )


class ToyTarget(TargetModel):
    """The next token depends on the last alone: `table` [vocab, vocab] has the logits after each token.

    `passes` records what each forward pass was fed, as (tokens, positions).
    """

    def __init__(self, table: Tensor, *, max_positions: int = 256) -> None:
        vocab_size = len(table)
        super().__init__(
            TargetConfig(
                family="toy",
                layer=_layer(vocab_size),
                num_layers=0,
                vocab_size=vocab_size,
                max_positions=max_positions,
                tied_head=False,
            )
        )
        self.lm_head.weight.data = table.T.contiguous()
        self.passes: list[tuple[list[int], list[int]]] = []

    def forward(
        self, tokens: Tensor, positions: Tensor, storage: KeyValueStorage, aux_layer_ids: tuple[int, ...] = ()
    ) -> TargetStates:
        self.passes.append((tokens.tolist(), positions.tolist()))
        return TargetStates(final=F.one_hot(tokens, self.config.vocab_size).float(), aux=None)


class ToyDrafter(Drafter):
    """The draft depends on the last token alone. With `target_ids` only those tokens can be drafted."""

    def __init__(self, table: Tensor, *, target_ids: Sequence[int] | None = None, max_positions: int = 256) -> None:
        ids = torch.arange(len(table)) if target_ids is None else torch.tensor(target_ids)
        super().__init__(_drafter_config(len(table), len(ids), max_positions))
        assert self.lm_head is not None
        self.lm_head.weight.data = table[:, ids].T.contiguous()
        if self.vocabulary is not None:
            self.vocabulary.d2t.copy_(ids - torch.arange(len(ids)))

    aux_layer_ids = ()

    def fuse(self, states: TargetStates) -> Tensor:
        return states.final

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        state = F.one_hot(tokens, self.config.vocab_size).float()
        return DraftStates(head=state, feature=state, hidden=state)


class Prompter(Drafter):
    """Drafts `text` (prompt included): the token due at index i is its (ranks[i] + 1)-th choice there.

    Rank 0 is a draft that stands; another rank is one that falls in a chain, and stands in a tree that is wide enough.
    """

    def __init__(self, text: Sequence[int], ranks: Sequence[int], *, vocab_size: int, max_positions: int = 256) -> None:
        super().__init__(_drafter_config(vocab_size, vocab_size, max_positions))
        self.preferences = torch.zeros(max_positions + 2, vocab_size)
        for i, token in enumerate(text):
            others = [other for other in range(vocab_size) if other != token]
            others.insert(ranks[i % len(ranks)], token)
            self.preferences[i, others] = -torch.arange(vocab_size, dtype=torch.float32)

    aux_layer_ids = ()

    def fuse(self, states: TargetStates) -> Tensor:
        return torch.zeros(len(states.final), self.config.hidden_size)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, storage: KeyValueStorage) -> DraftStates:
        head = self.preferences[positions + 2]  # row t predicts token t + 2
        return DraftStates(head=head, feature=features, hidden=head)

    def logits(self, head: Tensor) -> Tensor:
        return head


def random_table(vocab_size: int, seed: int, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))


def opposite(table: Tensor) -> Tensor:
    """A drafter's table that likes best what the target likes least."""
    return -4.0 * table


def check_tree(tree: DraftTree) -> None:
    """Assert what a draft tree promises."""
    depths, parents = tree.depths.tolist(), tree.parents.tolist()
    edges = list(zip(parents, tree.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges), "siblings carry different tokens"
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, "parents come before children"
        assert depths[node] == (1 if parent < 0 else depths[parent] + 1), "a child is one deeper"
        assert depths[node] <= tree.max_depth, "max_depth bounds the depths"
