"""The dense cache against attention by its definition, over random histories of feeding and forgetting."""

import random
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.layers.dense_cache import DenseCache
from fledge.layers.rope import Rotation

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LAYERS = (
    AttentionSpec(layer=0, scale=0.3, sliding_window=None),
    AttentionSpec(layer=1, scale=0.5, sliding_window=4),
)


SHAPE = LayerConfig(
    hidden_size=32,
    intermediate_size=32,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    norm_eps=1e-5,
    rope=RopeConfig(),
)


def as_projected(query: Tensor, key: Tensor, value: Tensor) -> ProjectedHeads:
    """Heads that are finished as they are: position 0 rotates nothing."""
    at_zero = Rotation(torch.zeros(len(query), dtype=torch.int64), torch.ones(HEAD_DIM // 2), 1.0, torch.float32)
    qkv = torch.cat([query, key, value], dim=1).flatten(1)
    return ProjectedHeads(qkv=qkv, rotation=at_zero, config=SHAPE, q_norm=None, k_norm=None)


@dataclass
class Row:
    position: int
    keys: Tensor  # [layers, kv_heads, head_dim]
    values: Tensor


def attention(query: Tensor, rows: list[Row], spec: AttentionSpec) -> Tensor:
    """One query [heads, head_dim] over the rows it may see, one head at a time."""
    out = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        keys = torch.stack([row.keys[spec.layer, shared] for row in rows]).double()
        values = torch.stack([row.values[spec.layer, shared] for row in rows]).double()
        out.append((keys @ query[head].double() * spec.scale).softmax(0) @ values)
    return torch.stack(out).float()


def feed(cache: DenseCache, rows: list[Row], positions: list[int], visible: Tensor | None) -> None:
    """Extend cache and model by random rows, and compare the attention of every new row in every layer."""
    count = len(positions)
    keys, values = torch.randn(2, count, len(LAYERS), KV_HEADS, HEAD_DIM)
    queries = torch.randn(count, len(LAYERS), HEADS, HEAD_DIM)
    rows.extend(Row(*row) for row in zip(positions, keys, values, strict=True))
    storage = cache.extend(torch.tensor(positions), visible)
    for spec in LAYERS:
        found = storage.attend(as_projected(queries[:, spec.layer], keys[:, spec.layer], values[:, spec.layer]), spec)
        for i, position in enumerate(positions):
            if visible is None:
                seen = rows[: len(rows) - count + i + 1]
            else:
                window = len(rows) - visible.shape[1]
                seen = rows[:window] + [row for row, sees in zip(rows[window:], visible[i], strict=True) if sees]
            if spec.sliding_window is not None:
                seen = [row for row in seen if row.position > position - spec.sliding_window]
            torch.testing.assert_close(found[i], attention(queries[i, spec.layer], seen, spec), atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    steps=st.lists(st.sampled_from(["chain", "tree", "truncate", "keep"]), min_size=1, max_size=10),
)
def test_feeding_and_forgetting(seed: int, steps: list[str]) -> None:
    torch.manual_seed(seed)
    dice = random.Random(seed)
    cache, rows = DenseCache(len(LAYERS)), []
    feed(cache, rows, list(range(dice.randint(1, 5))), None)
    for step in steps:
        end = rows[-1].position + 1 if rows else 0
        match step:
            case "chain":  # now and then past the capacity of the first allocation
                feed(cache, rows, list(range(end, end + dice.choice([1, 3, 70]))), None)
            case "tree":  # new rows see any of each other and of some rows before
                count, before = dice.randint(1, 6), dice.randint(0, min(3, len(rows)))
                visible = torch.rand(count, before + count) < 0.5
                visible[:, before:].fill_diagonal_(True)
                feed(cache, rows, [end + dice.randint(0, 3) for _ in range(count)], visible)
            case "truncate":
                del rows[dice.randint(0, len(rows)) :]
                cache.truncate(len(rows))
            case "keep":
                start = dice.randint(0, len(rows))
                kept = sorted(dice.sample(range(len(rows) - start), dice.randint(0, len(rows) - start)))
                rows[start:] = [rows[start + i] for i in kept]
                cache.keep(start, torch.tensor(kept, dtype=torch.int64))
        assert cache.length == len(rows)
    feed(cache, rows, [rows[-1].position + 1 if rows else 0], None)


def test_a_draft_sees_its_ancestors_and_all_text_before() -> None:
    """The tree of a round, drawn: after text t0 t1 come siblings a, b and then a's child."""
    cache, rows = DenseCache(len(LAYERS)), []
    feed(cache, rows, [0, 1], None)
    feed(cache, rows, [2, 2], torch.eye(2, dtype=torch.bool))
    feed(cache, rows, [3], torch.tensor([[True, False, True]]))
    cache.keep(2, torch.tensor([0, 2]))  # a and its child stand
    del rows[3]
    feed(cache, rows, [4, 5], None)
