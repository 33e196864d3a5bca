"""Attention as seen by a storage: what it is given, and that the model does not care for the leading shape."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fledge.layers.attention import Attention, AttentionSpec, ProjectedHeads
from fledge.layers.dense_cache import DenseCache
from fledge.layers.rope import RotaryEmbedding
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_target, randomise


@dataclass
class PaddedBatch:
    """A storage with another layout: [batch, rows] in one causal pass, and nothing kept but the specs."""

    specs: list[AttentionSpec] = field(default_factory=list)

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        self.specs.append(spec)
        groups = query.shape[-2] // key.shape[-2]
        key, value = key.repeat_interleave(groups, dim=-2), value.repeat_interleave(groups, dim=-2)
        rows = torch.arange(query.shape[1])
        distance = rows[:, None] - rows
        seen = distance >= 0
        if spec.sliding_window is not None:
            seen &= distance < spec.sliding_window
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * spec.scale
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def test_a_batch_in_another_storage_gives_the_same_states() -> None:
    target = make_target(replace(TINY_TARGET, sliding_windows=(None, 3) * 4))
    tokens = torch.randint(0, 40, (3, 9))
    positions = torch.arange(9).expand(3, 9)
    batched = target(tokens, positions, PaddedBatch(), (2, 6))
    for i in range(3):
        storage = DenseCache(target.config.num_layers).extend(positions[i])
        alone = target(tokens[i], positions[i], storage, (2, 6))
        torch.testing.assert_close(batched.final[i], alone.final, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batched.aux[i], alone.aux, atol=1e-4, rtol=1e-4)


def test_a_storage_is_told_layer_scale_and_window() -> None:
    target = make_target(replace(TINY_TARGET, sliding_windows=(None, None, None, None, None, 4, 5, 6)))
    storage = PaddedBatch()
    target(torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], storage)
    scale = TINY_LAYER.head_dim**-0.5
    assert storage.specs == [
        AttentionSpec(layer=i, scale=scale, sliding_window=window)
        for i, window in enumerate((None, None, None, None, None, 4, 5, 6))
    ]


@torch.no_grad()
def test_positions_matter_only_by_their_distance() -> None:
    """Rotary embedding turns keys and queries, and values not at all; distances decide, so a shift changes nothing."""
    for qk_norm in (False, True):
        attention = Attention(replace(TINY_LAYER, qk_norm=qk_norm), layer=0, input_size=20)
        randomise(attention, seed=5)
        x, positions = torch.randn(1, 6, 20), torch.arange(6)[None]
        rope = RotaryEmbedding(TINY_LAYER.rope, TINY_LAYER.head_dim)
        here, shifted, stretched = (
            attention(x, rope(moved, x.dtype), PaddedBatch()) for moved in (positions, positions + 13, 2 * positions)
        )
        torch.testing.assert_close(shifted, here, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(stretched, here, atol=1e-2)
