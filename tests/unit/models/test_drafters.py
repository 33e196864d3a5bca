"""The drafters against their mathematics, written out once more with plain matrices in float64.

The formulas are those of the EAGLE papers and of vLLM's models: full-sequence causal attention, no cache. Tolerance
1e-4: float32 against float64; a missing norm, a swapped half or a residual from the wrong place is off by 0.1 and more.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fledge.layers.config import LayerConfig, RopeConfig
from fledge.layers.dense_cache import DenseCache
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, build
from fledge.models.target.decoder import TargetStates
from tests.tiny_models import TINY_LAYER, TINY_TARGET, drafter_configs, make_drafter, make_target

TOLERANCE = 1e-4
LLAMA_STYLE = replace(TINY_LAYER, norm_eps=1e-2, rope=RopeConfig(theta=500.0))  # an eps that cannot be overlooked
QWEN3_STYLE = replace(LLAMA_STYLE, qk_norm=True, head_dim=16, num_kv_heads=1)
WITH_BIASES = replace(LLAMA_STYLE, qkv_bias=True, output_bias=True, mlp_bias=True)

Weights = dict[str, Tensor]


# --- the formulas -----------------------------------------------------------------------------------------------


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def rms_norm(x: Tensor, weights: Weights, name: str, layer: LayerConfig) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + layer.norm_eps).sqrt() * weights[f"{name}.weight"]


def rope(x: Tensor, theta: float) -> Tensor:
    """x [rows, heads, dim] at positions 0, 1, ...: dimensions i and i + dim / 2 are a complex number that turns."""
    rows, _, dim = x.shape
    turns = torch.arange(rows)[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
    turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.exp(1j * turns)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(x: Tensor, weights: Weights, name: str, layer: LayerConfig) -> Tensor:
    queries, keys = layer.num_heads, layer.num_kv_heads
    heads = linear(x, weights, f"{name}.qkv_proj").view(len(x), queries + 2 * keys, layer.head_dim)
    query, key, value = heads[:, :queries], heads[:, queries : queries + keys], heads[:, queries + keys :]
    if layer.qk_norm:
        query = rms_norm(query, weights, f"{name}.q_norm", layer)
        key = rms_norm(key, weights, f"{name}.k_norm", layer)
    query, key = rope(query, layer.rope.theta), rope(key, layer.rope.theta)
    mixed = []
    for head in range(queries):
        shared = head * keys // queries
        scores = query[:, head] @ key[:, shared].T / layer.head_dim**0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, shared])
    return linear(torch.cat(mixed, dim=-1), weights, f"{name}.o_proj")


def mlp(x: Tensor, weights: Weights, name: str) -> Tensor:
    gate, up = linear(x, weights, f"{name}.gate_up_proj").chunk(2, dim=-1)
    return linear(gate * gate.sigmoid() * up, weights, f"{name}.down_proj")


def ordinary_layer(x: Tensor, weights: Weights, name: str, layer: LayerConfig, *, input_norm: bool = True) -> Tensor:
    normed = rms_norm(x, weights, f"{name}.input_layernorm", layer) if input_norm else x
    x = x + attention(normed, weights, f"{name}.self_attn", layer)
    return x + mlp(rms_norm(x, weights, f"{name}.post_attention_layernorm", layer), weights, f"{name}.mlp")


def eagle3_fusion(aux: Tensor, weights: Weights, config: DrafterConfig) -> Tensor:
    if config.norm_before_fc:
        aux = rms_norm(aux, weights, "input_norm", config.layer)
    if config.fc_norm:
        width = config.target_hidden_size
        states = [aux[:, i * width : (i + 1) * width] for i in range(config.num_aux_states)]
        normed = [rms_norm(state, weights, f"fc_norm.{i}", config.layer) for i, state in enumerate(states)]
        aux = torch.cat(normed, dim=-1)
    return linear(aux, weights, "fc")


def eagle3(embeddings: Tensor, features: Tensor, weights: Weights, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Return what the head reads and what the next step is fed."""
    layer = config.layer
    e = rms_norm(embeddings, weights, "layers.0.input_layernorm", layer)
    x = rms_norm(features, weights, "layers.0.hidden_norm", layer)
    r = x if config.norm_before_residual else features
    r = r + attention(torch.cat([e, x], dim=-1), weights, "layers.0.self_attn", layer)
    r = r + mlp(rms_norm(r, weights, "layers.0.post_attention_layernorm", layer), weights, "layers.0.mlp")
    for i in range(1, config.num_layers):
        r = ordinary_layer(r, weights, f"layers.{i}", layer)
    y = rms_norm(r, weights, "norm", layer)
    return y, y if config.norm_output else r


def eagle1(embeddings: Tensor, features: Tensor, weights: Weights, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    x = linear(torch.cat([embeddings, features], dim=-1), weights, "fc")
    for i in range(config.num_layers):
        x = ordinary_layer(x, weights, f"layers.{i}", config.layer, input_norm=i > 0)
    return x, x


# --- the modules follow them ------------------------------------------------------------------------------------


@torch.no_grad()
def check(config: DrafterConfig) -> None:
    """Fuse and run six verified rows in two passes over a cache, then two steps on the drafter's own features."""
    drafter = make_drafter(config, make_target())
    weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    eagle1_style = config.architecture is Architecture.EAGLE1
    final = torch.randn(6, config.target_hidden_size)
    # Real aux states differ in size from layer to layer: that is what fc_norm is for.
    aux = torch.cat([3.0**i * torch.randn(6, config.target_hidden_size) for i in range(config.num_aux_states)], dim=-1)
    features = drafter.fuse(TargetStates(final=final, aux=aux))
    expected_features = final.double() if eagle1_style else eagle3_fusion(aux.double(), weights, config)
    torch.testing.assert_close(features.double(), expected_features, atol=TOLERANCE, rtol=TOLERANCE)

    tokens = torch.randint(0, config.vocab_size, (8,))
    embeddings = drafter.embed(tokens).double()
    cache = DenseCache(config.num_layers)
    formulas = eagle1 if eagle1_style else eagle3
    for rows in (range(4), range(4, 6), range(6, 7), range(7, 8)):
        positions = torch.tensor(rows)
        states = drafter(tokens[positions], features[positions], positions, cache.extend(positions))
        head, feature = formulas(embeddings[: rows.stop], expected_features[: rows.stop], weights, config)
        for found, expected in ((states.head, head[positions]), (states.feature, feature[positions])):
            bound = TOLERANCE * float(expected.abs().max())  # where attention is undecided, rounding is of that size
            torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0)
        if rows.stop >= 6:  # from here on the drafter lives on its own states: rounding, which it amplifies, left out
            expected_features = torch.cat([expected_features, feature[-1:]])
            features = torch.cat([features, feature[-1:].float()])


@pytest.mark.parametrize("style", [LLAMA_STYLE, QWEN3_STYLE, WITH_BIASES], ids=["llama", "qwen3", "biases"])
@pytest.mark.parametrize(
    "switches", list(itertools.product([False, True], repeat=4)), ids=lambda on: "".join(str(int(s)) for s in on)
)
def test_eagle3_with_every_switch(switches: tuple[bool, ...], style: LayerConfig) -> None:
    fc_norm, norm_output, norm_before_fc, norm_before_residual = switches
    check(
        replace(
            EAGLE_3.config_for(TINY_TARGET, layer=style),
            fc_norm=fc_norm,
            norm_output=norm_output,
            norm_before_fc=norm_before_fc,
            norm_before_residual=norm_before_residual,
            num_layers=2 if norm_output else 1,
            fc_bias=norm_before_fc,
        )
    )


def test_eagle3_of_another_width_than_its_target() -> None:
    config = drafter_configs()["narrow"]
    assert config.hidden_size != config.target_hidden_size
    check(replace(config, num_aux_states=2, aux_layer_ids=(0, 5)))


@pytest.mark.parametrize("style", [LLAMA_STYLE, WITH_BIASES], ids=["llama", "biases"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle1(style: LayerConfig, num_layers: int) -> None:
    check(replace(EAGLE_1.config_for(TINY_TARGET, layer=style), num_layers=num_layers, fc_bias=num_layers == 2))


# --- embeddings, heads and the draft vocabulary -----------------------------------------------------------------


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("own_head", [False, True])
def test_what_is_not_its_own_is_the_targets(own_embedding: bool, own_head: bool) -> None:
    target = make_target()
    drafter = build(replace(EAGLE_3.config_for(TINY_TARGET), own_embedding=own_embedding, own_head=own_head))
    assert ("embed_tokens.weight" in drafter.state_dict()) == own_embedding
    assert ("lm_head.weight" in drafter.state_dict()) == own_head
    drafter.share_with(target)
    assert (drafter.embed_tokens is target.embed_tokens) == (not own_embedding)
    assert (drafter.lm_head is target.lm_head) == (not own_head)
    tokens, head = torch.tensor([3, 1]), torch.randn(2, TINY_LAYER.hidden_size)
    torch.testing.assert_close(drafter.embed(tokens), drafter.embed_tokens.weight[tokens])
    torch.testing.assert_close(drafter.logits(head), head @ drafter.lm_head.weight.T)


@torch.no_grad()
def test_a_reduced_vocabulary_drafts_target_ids() -> None:
    drafter: Drafter = make_drafter(drafter_configs()["reduced-vocabulary"], make_target())
    assert drafter.vocabulary is not None
    ids = drafter.vocabulary.target_ids
    logits = drafter.logits(head := torch.randn(5, TINY_LAYER.hidden_size))
    assert logits.shape == (5, 20)

    full = drafter.full_vocab_logits(head)
    assert full.shape == (5, 40)
    assert torch.equal(full[:, ids], logits)
    outside = [token for token in range(40) if token not in ids.tolist()]
    assert (full[:, outside] == -torch.inf).all()
    assert torch.equal(drafter.to_target_ids(logits.argmax(-1)), full.argmax(-1))


def test_a_full_vocabulary_needs_no_map() -> None:
    drafter = make_drafter(drafter_configs()["eagle3.1"], make_target())
    head = torch.randn(2, TINY_LAYER.hidden_size)
    assert drafter.vocabulary is None
    assert torch.equal(drafter.to_target_ids(torch.tensor([7, 0])), torch.tensor([7, 0]))
    assert torch.equal(drafter.full_vocab_logits(head), drafter.logits(head))
