"""EAGLE-3 and 3.1 drafters enlarged with their target, by the rules of `inflate.py`: the same drafts, at more cost."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from fledge.bench.inflate import (
    LayerMap,
    TargetPlan,
    fill_block,
    inflate_target,
    large_layer,
    like,
    put,
    random_matrix,
    randomise,
)
from fledge.errors import ConfigError
from fledge.layers.block import DecoderLayer
from fledge.layers.norm import RMSNorm
from fledge.layers.rope import RotaryEmbedding
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.eagle3 import Eagle3Drafter, Eagle3FirstLayer
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetModel


def inflate_drafter(
    small: Drafter,
    small_target: TargetModel,
    large_target: TargetModel,
    *,
    shape: TargetConfig,
    seed: int = 0,
) -> Drafter:
    """Return the drafter of `small_target` for `large_target`, which `inflate_target` made of it."""
    if not isinstance(small, Eagle3Drafter):
        raise ConfigError("inflate: the drafter is EAGLE-1; only EAGLE-3 and EAGLE-3.1 can be enlarged")
    config = drafter_config(small.config, small_target.config, large_target.config, shape)
    weight = large_target.embed_tokens.weight
    with torch.device("meta"):
        large = build(config)
    assert isinstance(large, Eagle3Drafter)
    large.to(weight.dtype).to_empty(device=weight.device)
    large.rope = RotaryEmbedding(config.layer.rope, config.layer.head_dim).to(weight.device)
    with torch.no_grad():
        _fill_drafter(large, small, seed=seed)
    large.share_with(large_target)
    return large.eval().requires_grad_(False)


def inflate_modules(
    target: TargetModel,
    drafter: Drafter,
    shape: TargetConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pad_vocab: bool = True,
    seed: int = 0,
) -> tuple[TargetModel, Drafter]:
    """Both of a pair, in memory."""
    large = inflate_target(target, shape, dtype, device, pad_vocab=pad_vocab, seed=seed)
    return large, inflate_drafter(drafter, target, large, shape=shape, seed=seed)


def drafter_config(
    small: DrafterConfig, small_target: TargetConfig, large_target: TargetConfig, shape: TargetConfig
) -> DrafterConfig:
    """A drafter with one layer of the shape (or as many as the small one has), for the enlarged target."""
    if small.architecture is not Architecture.EAGLE3:
        raise ConfigError("inflate: the drafter is EAGLE-1; only EAGLE-3 and EAGLE-3.1 can be enlarged")
    if small.hidden_size != small.target_hidden_size or small.aux_layer_ids is None:
        raise ConfigError(
            f"inflate: the drafter is {small.hidden_size} wide and its target {small.target_hidden_size}; "
            "only a drafter as wide as its target can be enlarged"
        )
    plan = TargetPlan(small=small_target, large=large_target, seed=0)
    padded = large_target.vocab_size > small_target.vocab_size
    # A head of its own where rows are repeated; not the whole vocabulary, which would need no map from copies to ids.
    draft_vocab = max(small.draft_vocab_size, (large_target.vocab_size - 1) // 64 * 64)
    return replace(
        small,
        layer=large_layer(small.layer, shape.layer),
        vocab_size=large_target.vocab_size,
        draft_vocab_size=draft_vocab if padded else small.draft_vocab_size,
        own_head=small.own_head or padded,
        target_hidden_size=large_target.hidden_size,
        aux_layer_ids=tuple(plan.aux_layer(i) for i in small.aux_layer_ids),
        dtype=large_target.dtype,
    )


def _fill_drafter(large: Eagle3Drafter, small: Eagle3Drafter, *, seed: int) -> None:
    place = LayerMap(small=small.config.layer, large=large.config.layer)
    width, states = small.config.hidden_size, small.config.num_aux_states
    for number, module in enumerate([large.fusion, *large.layers]):
        randomise(module, seed * 1000 + 999_000 + number)
    inputs = torch.cat([i * large.config.target_hidden_size + place.hidden for i in range(states)])
    fc = large.fusion.fc
    fc.weight[width:] = 0
    for i in range(states):  # what the target's spare dimension carries is for its head alone
        fc.weight[:, i * large.config.target_hidden_size + width : (i + 1) * large.config.target_hidden_size] = 0
    put(fc.weight, place.hidden, inputs, small.fusion.fc.weight)
    if fc.bias is not None:
        fc.bias.zero_()
        fc.bias[:width] = like(small.fusion.fc.bias, fc.bias)
    for new, old in _norm_pairs(large, small):
        place.fill_norm(new, old)
    if large.fusion.input_norm is not None and small.fusion.input_norm is not None:
        large.fusion.input_norm.weight.zero_()
        scaled = small.fusion.input_norm.weight.float() * place.norm_scale
        large.fusion.input_norm.weight[inputs] = like(scaled, large.fusion.input_norm.weight)
    first, small_first = large.layers[0], small.layers[0]
    assert isinstance(first, Eagle3FirstLayer)
    assert isinstance(small_first, Eagle3FirstLayer)
    both = torch.cat([place.hidden, large.config.hidden_size + place.hidden])
    place.fill_attention(first.self_attn, small_first.self_attn, both)
    place.fill_mlp(first.mlp, small_first.mlp)
    for layer, small_layer in zip(large.layers[1:], small.layers[1:], strict=True):
        assert isinstance(layer, DecoderLayer)
        assert isinstance(small_layer, DecoderLayer)
        fill_block(place, layer, small_layer)
    if large.embed_tokens is not None:
        assert small.embed_tokens is not None
        vocab = small.config.vocab_size
        large.embed_tokens.weight.zero_()
        large.embed_tokens.weight[:vocab, :width] = like(small.embed_tokens.weight, large.embed_tokens.weight)
    if large.lm_head is not None:
        _fill_draft_head(large, small, seed)


def _fill_draft_head(large: Eagle3Drafter, small: Eagle3Drafter, seed: int) -> None:
    """Every row of the small head as often as there is room, and the draft vocabulary likewise, ascending."""
    assert large.lm_head is not None
    assert small.lm_head is not None
    new, old = large.config.draft_vocab_size, small.config.draft_vocab_size
    source = (torch.arange(new) * old // new).to(small.lm_head.weight.device)
    weight = large.lm_head.weight
    random_matrix(weight, seed * 1000 + 999_999)
    weight[:, : small.config.hidden_size] = like(small.lm_head.weight[source], weight)
    if large.vocabulary is not None:
        ids = source if small.vocabulary is None else small.vocabulary.target_ids[source]
        large.vocabulary.d2t.copy_(ids - torch.arange(new, device=ids.device))


def _norm_pairs(large: Eagle3Drafter, small: Eagle3Drafter) -> Iterator[tuple[RMSNorm, RMSNorm]]:
    """The norms outside ordinary layers, each of one hidden size."""
    for owner in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield getattr(large.layers[0], owner), getattr(small.layers[0], owner)
    yield large.norm, small.norm
    if large.fusion.fc_norm is not None and small.fusion.fc_norm is not None:
        for new, old in zip(large.fusion.fc_norm, small.fusion.fc_norm, strict=True):
            assert isinstance(new, RMSNorm)
            assert isinstance(old, RMSNorm)
            yield new, old
