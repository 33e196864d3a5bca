"""Rotary embedding against transformers, for each scaling rule."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from fledge.layers.config import RopeConfig
from fledge.layers.rope import RotaryEmbedding
from fledge.models.hf_config import write_rope
from tests.tiny_models import TINY_LAYER, make_target

HEAD_DIM = 64
ROPES = {
    "default": RopeConfig(theta=500000.0),
    "linear": RopeConfig(type="linear", factor=4.0),
    "llama3": RopeConfig(
        type="llama3",
        theta=500000.0,
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": RopeConfig(type="yarn", theta=1e6, factor=4.0, original_max_positions=4096),
    "dynamic": RopeConfig(type="dynamic", factor=4.0),
    "yarn-mscale": RopeConfig(type="yarn", factor=64.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=0.6),
    "yarn-mscale-alone": RopeConfig(type="yarn", factor=64.0, original_max_positions=4096, mscale=0.7),
    "yarn-all-fields": RopeConfig(
        type="yarn",
        factor=16.0,
        original_max_positions=1024,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.25,
        truncate=False,
    ),
}


def theirs(rope: RopeConfig) -> LlamaRotaryEmbedding:
    fields = write_rope(rope)
    parameters = {"rope_type": "default", "rope_theta": rope.theta, **fields.get("rope_scaling", {})}
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=int((rope.original_max_positions or 2048) * rope.factor),
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ROPES)
def test_against_transformers(name: str) -> None:
    reference, ours = theirs(ROPES[name]), RotaryEmbedding(ROPES[name], HEAD_DIM)
    torch.testing.assert_close(ours.inverse_frequencies, reference.inv_freq, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(reference.attention_scaling)

    # A last-bit difference in a frequency grows with the position: 500 positions at 6e-8 each.
    positions = torch.tensor([0, 1, 2, 7, 63, 500])
    query, key = torch.randn(2, len(positions), 3, HEAD_DIM)
    cos, sin = reference(query, positions[None])
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for x, rotated in zip((query, key), expected, strict=True):
        found = ours(positions, torch.float32).apply(x)
        torch.testing.assert_close(found, rotated[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


def test_every_rule_differs_from_the_default_where_it_should() -> None:
    """Guards the test above: a rule that transformers ignored would compare equal to one that we ignored."""
    for name, rope in ROPES.items():
        plain = RotaryEmbedding(RopeConfig(theta=rope.theta), HEAD_DIM).inverse_frequencies
        scaled = theirs(rope).inv_freq
        assert (name in ("default", "dynamic")) == torch.allclose(plain, scaled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_stay_in_float32(dtype: torch.dtype) -> None:
    """Rounded to bfloat16, position 4000 would be off by whole turns."""
    positions = torch.tensor([4000])
    x = torch.randn(1, 2, TINY_LAYER.head_dim)
    precise = RotaryEmbedding(TINY_LAYER.rope, TINY_LAYER.head_dim)(positions, torch.float32).apply(x)

    model = make_target().to(dtype)
    assert model.embed_tokens.weight.dtype == dtype
    assert model.rope.inverse_frequencies.dtype == torch.float32
    torch.testing.assert_close(model.rope(positions, torch.float32).apply(x), precise, atol=0, rtol=0)
    assert model.rope(positions, dtype).apply(x.to(dtype)).dtype == dtype
    assert not any("frequencies" in name for name in model.state_dict())
