"""Small random targets and drafters of every kind, for tests. Weights are large enough for attention to matter."""

from dataclasses import replace

import torch
from torch import nn

from fledge.layers.config import ExpertsConfig, LatentConfig, LayerConfig, RopeConfig, TemperatureConfig
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1, build
from fledge.models.target.decoder import TargetModel

TINY_LAYER = LayerConfig(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeConfig(),
)
TINY_TARGET = TargetConfig(
    family="llama",
    layer=TINY_LAYER,
    num_layers=8,
    vocab_size=40,
    max_positions=256,
    tied_head=False,
    eos_ids=(1,),
)

_LLAMA3_ROPE = RopeConfig(
    type="llama3", theta=500000.0, factor=8.0, original_max_positions=16, low_freq_factor=1.0, high_freq_factor=4.0
)
_YARN_ROPE = RopeConfig(type="yarn", factor=4.0, original_max_positions=16, mscale=1.5, mscale_all_dim=0.5)
_LONG_ROPE = RopeConfig(
    type="longrope",
    partial_factor=0.5,
    factor=16.0,
    original_max_positions=16,
    attention_factor=1.4,
    short_factor=(1.0, 1.1),
    long_factor=(1.5, 3.0),
)

_EXPERTS = ExpertsConfig(num_experts=6, num_experts_per_token=2, intermediate_size=48)
_QWEN3_MOE_LAYER = replace(
    TINY_LAYER, qk_norm=True, experts=replace(_EXPERTS, intermediate_size=20, num_experts_per_token=3, normalised=False)
)

_LOCAL = (True, True, False, True, True, False, True, True)
_GEMMA3_LAYER = replace(
    TINY_LAYER,
    qk_norm=True,
    norm_placement="both",
    norm_offset=True,
    activation="gelu_pytorch_tanh",
    attention_scale=20**-0.5,
    rope=RopeConfig(theta=1e6, type="linear", factor=4.0),
)
_GEMMA3_LOCAL = replace(_GEMMA3_LAYER, rope=RopeConfig(theta=5000.0))
_GLM_LAYER = replace(TINY_LAYER, qkv_bias=True, rope=RopeConfig(partial_factor=0.5, interleaved=True))
_GLM4_MOE_LAYER = replace(
    TINY_LAYER,
    qk_norm=True,
    qkv_bias=True,
    rope=RopeConfig(partial_factor=0.5),
    experts=ExpertsConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=20,
        shared_size=40,
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
)
_QWEN2_MOE_LAYER = replace(
    TINY_LAYER,
    qkv_bias=True,
    experts=replace(_EXPERTS, intermediate_size=20, normalised=False, shared_size=36, shared_gate=True),
)

# The two ways to attend to latents change over at 10 and at 25 rows.
_DEEPSEEK_V2_LAYER = replace(
    TINY_LAYER,
    num_kv_heads=4,
    head_dim=4,
    latent=LatentConfig(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=4),
    rope=replace(_YARN_ROPE, mscale=0.7, mscale_all_dim=0.5, interleaved=True),
    experts=replace(_EXPERTS, intermediate_size=20, normalised=False, n_group=3, topk_group=2, shared_size=40),
    mlp_bias=False,
)
_DEEPSEEK_V3_LAYER = replace(
    TINY_LAYER,
    num_kv_heads=4,
    latent=LatentConfig(q_lora_rank=10, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10),
    rope=replace(_YARN_ROPE, mscale=1.0, mscale_all_dim=1.0, interleaved=True),
    experts=replace(
        _EXPERTS,
        intermediate_size=20,
        scoring_func="sigmoid",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        shared_size=20,
    ),
    qkv_bias=True,
    output_bias=True,
)

_GLM4_LITE_LAYER = replace(
    _DEEPSEEK_V3_LAYER,
    qkv_bias=False,
    output_bias=False,
    rope=RopeConfig(theta=1e6, interleaved=True),
    experts=replace(_DEEPSEEK_V3_LAYER.experts, n_group=1, topk_group=1, routed_scaling_factor=1.8),
)
_OLMO3_LAYER = replace(
    TINY_LAYER,
    norm_placement="post",
    qk_norm=True,
    qk_norm_whole=True,
    rope=replace(_YARN_ROPE, theta=500000.0, mscale=None, mscale_all_dim=None, attention_factor=1.2),
)

_SMOLLM3_LAYER = replace(TINY_LAYER, rope=RopeConfig(theta=2e6), qkv_bias=True, output_bias=True, mlp_bias=True)
_SMOLLM3_STILL = replace(_SMOLLM3_LAYER, rope=RopeConfig(theta=2e6, partial_factor=0.0))
_ERNIE_LAYER = replace(TINY_LAYER, rope=RopeConfig(theta=5e5, interleaved=True))
_ERNIE_MOE_LAYER = replace(
    _ERNIE_LAYER,
    experts=replace(_EXPERTS, intermediate_size=20, num_experts_per_token=3, shared_size=40, corrected_choice=True),
)

_EXAONE4_LAYER = replace(TINY_LAYER, norm_placement="post", qk_norm=True, rope=_LLAMA3_ROPE)
_DOTS1_LAYER = replace(
    TINY_LAYER, qk_norm=True, experts=replace(_EXPERTS, intermediate_size=20, shared_size=40, scoring_func="sigmoid")
)

# Every second layer has experts, every fourth does not rotate. Rotations are scaled or not, none blended, as in Scout.
_LLAMA4_LAYER = replace(
    TINY_LAYER,
    rope=replace(_LLAMA3_ROPE, high_freq_factor=1.0, interleaved=True),
    experts=replace(_EXPERTS, intermediate_size=20, shared_size=20, normalised=False, weighted_inputs=True),
    rotated_norm=True,
    chunked=True,
)
_LLAMA4_STILL = replace(
    _LLAMA4_LAYER,
    rope=replace(_LLAMA4_LAYER.rope, partial_factor=0.0),
    rotated_norm=False,
    temperature=TemperatureConfig(floor_scale=5, attn_scale=0.6),
    chunked=False,
)
_LLAMA4_DENSE = replace(_LLAMA4_LAYER, experts=None)

TARGET_CONFIGS = {
    "llama2": replace(TINY_TARGET, layer=replace(TINY_LAYER, num_kv_heads=4)),
    "llama3-tied": replace(TINY_TARGET, layer=replace(TINY_LAYER, rope=_LLAMA3_ROPE), tied_head=True),
    "llama-biases": replace(
        TINY_TARGET,
        layer=replace(
            TINY_LAYER, qkv_bias=True, output_bias=True, mlp_bias=True, rope=RopeConfig(type="dynamic", factor=2.0)
        ),
    ),
    "llama4": replace(
        TINY_TARGET,
        family="llama4_text",
        layer=_LLAMA4_LAYER,
        layers=(_LLAMA4_DENSE, _LLAMA4_LAYER, _LLAMA4_DENSE, _LLAMA4_STILL) * 2,
        sliding_windows=(6, 6, 6, None) * 2,
    ),
    "mistral": replace(TINY_TARGET, family="mistral", sliding_windows=(5,) * 8),
    "mistral-no-window": replace(TINY_TARGET, family="mistral"),
    "qwen2": replace(TINY_TARGET, family="qwen2", layer=replace(TINY_LAYER, qkv_bias=True), tied_head=True),
    "qwen2-window": replace(
        TINY_TARGET,
        family="qwen2",
        layer=replace(TINY_LAYER, qkv_bias=True),
        sliding_windows=(None, None, None, None, 4, 4, 4, 4),
    ),
    "qwen3": replace(TINY_TARGET, family="qwen3", layer=replace(TINY_LAYER, qk_norm=True, head_dim=16)),
    "qwen3-yarn": replace(TINY_TARGET, family="qwen3", layer=replace(TINY_LAYER, qk_norm=True, rope=_YARN_ROPE)),
    "mixtral": replace(TINY_TARGET, family="mixtral", layer=replace(TINY_LAYER, experts=_EXPERTS)),
    "qwen3-moe": replace(
        TINY_TARGET,
        family="qwen3_moe",
        layer=_QWEN3_MOE_LAYER,
        layers=(*[_QWEN3_MOE_LAYER] * 3, replace(_QWEN3_MOE_LAYER, experts=None), *[_QWEN3_MOE_LAYER] * 4),
    ),
    "deepseek-v2": replace(
        TINY_TARGET,
        family="deepseek_v2",
        layer=_DEEPSEEK_V2_LAYER,
        layers=(replace(_DEEPSEEK_V2_LAYER, experts=None),) + (_DEEPSEEK_V2_LAYER,) * 7,
    ),
    "deepseek-v3": replace(
        TINY_TARGET,
        family="deepseek_v3",
        layer=_DEEPSEEK_V3_LAYER,
        layers=(replace(_DEEPSEEK_V3_LAYER, experts=None),) * 3 + (_DEEPSEEK_V3_LAYER,) * 5,
    ),
    "kimi-k2": replace(
        TINY_TARGET,
        family="kimi_k2",
        layer=replace(
            _DEEPSEEK_V3_LAYER,
            rope=RopeConfig(theta=50000.0),
            experts=replace(_EXPERTS, scoring_func="sigmoid", normalised=False, shared_size=48),
            qkv_bias=False,
            output_bias=False,
        ),
    ),
    "olmo2": replace(
        TINY_TARGET,
        family="olmo2",
        layer=replace(TINY_LAYER, norm_placement="post", qk_norm=True, qk_norm_whole=True, activation="gelu"),
    ),
    "olmo3": replace(
        TINY_TARGET,
        family="olmo3",
        layer=_OLMO3_LAYER,
        layers=tuple(
            _OLMO3_LAYER if i % 4 == 3 else replace(_OLMO3_LAYER, rope=RopeConfig(theta=500000.0)) for i in range(8)
        ),
        sliding_windows=(6, 6, 6, None) * 2,
    ),
    "minimax-m2": replace(
        TINY_TARGET,
        family="minimax_m2",
        layer=replace(
            TINY_LAYER,
            qk_norm=True,
            qk_norm_whole=True,
            rope=RopeConfig(theta=5e6, partial_factor=0.5),
            experts=replace(_EXPERTS, scoring_func="sigmoid"),
        ),
    ),
    "glm4-moe-lite": replace(
        TINY_TARGET,
        family="glm4_moe_lite",
        layer=_GLM4_LITE_LAYER,
        layers=(replace(_GLM4_LITE_LAYER, experts=None),) + (_GLM4_LITE_LAYER,) * 7,
    ),
    "ministral3": replace(
        TINY_TARGET,
        family="ministral3",
        layer=replace(
            TINY_LAYER,
            rope=replace(_YARN_ROPE, mscale=1.0, mscale_all_dim=1.0),
            temperature=TemperatureConfig(floor_scale=16, attn_scale=0.4, first=0),
        ),
    ),
    "seed-oss": replace(TINY_TARGET, family="seed_oss", layer=replace(TINY_LAYER, qkv_bias=True, mlp_bias=True)),
    "phi3": replace(
        TINY_TARGET,
        family="phi3",
        layer=replace(TINY_LAYER, rope=RopeConfig(partial_factor=0.5)),
        sliding_windows=(9,) * 8,
    ),
    "phi4-mini": replace(
        TINY_TARGET,
        family="phi3",
        layer=replace(TINY_LAYER, rope=_LONG_ROPE),
        tied_head=True,
    ),
    "gemma3": replace(
        TINY_TARGET,
        family="gemma3_text",
        layer=_GEMMA3_LAYER,
        layers=tuple(
            replace(_GEMMA3_LAYER, rope=RopeConfig(theta=5000.0)) if is_local else _GEMMA3_LAYER for is_local in _LOCAL
        ),
        sliding_windows=tuple(5 if is_local else None for is_local in _LOCAL),
        tied_head=True,
        embedding_scale=32**0.5,
    ),
    "gemma2": replace(
        TINY_TARGET,
        family="gemma2",
        layer=replace(
            TINY_LAYER,
            norm_placement="both",
            norm_offset=True,
            activation="gelu_pytorch_tanh",
            attention_scale=5**-0.5,
            softcap=1.5,
        ),
        sliding_windows=(5, None) * 4,
        tied_head=True,
        embedding_scale=32**0.5,
        logits_softcap=4.0,
    ),
    "gpt-oss": replace(
        TINY_TARGET,
        family="gpt_oss",
        layer=replace(
            TINY_LAYER,
            qkv_bias=True,
            output_bias=True,
            sinks=True,
            rope=replace(_YARN_ROPE, truncate=False, attention_factor=1.3),
            experts=replace(_EXPERTS, bias=True, swiglu_limit=1.5),
        ),
        sliding_windows=(6, None) * 4,
    ),
    "glm": replace(TINY_TARGET, family="glm", layer=_GLM_LAYER),
    "glm4": replace(TINY_TARGET, family="glm4", layer=replace(_GLM_LAYER, norm_placement="both")),
    "glm4-moe": replace(
        TINY_TARGET,
        family="glm4_moe",
        layer=_GLM4_MOE_LAYER,
        layers=(*[replace(_GLM4_MOE_LAYER, experts=None)] * 2, *[_GLM4_MOE_LAYER] * 6),
    ),
    "qwen2-moe": replace(
        TINY_TARGET,
        family="qwen2_moe",
        layer=_QWEN2_MOE_LAYER,
        layers=(replace(_QWEN2_MOE_LAYER, experts=None), *[_QWEN2_MOE_LAYER] * 7),
        sliding_windows=(7, None) * 4,
    ),
    "granite": replace(
        TINY_TARGET,
        family="granite",
        layer=replace(
            TINY_LAYER,
            attention_scale=0.21,
            residual_multiplier=0.37,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        ),
        tied_head=True,
        embedding_scale=3.0,
        logits_scaling=2.5,
    ),
    "smollm3": replace(
        TINY_TARGET,
        family="smollm3",
        layer=_SMOLLM3_LAYER,
        layers=(*[_SMOLLM3_LAYER] * 3, _SMOLLM3_STILL) * 2,
        tied_head=True,
    ),
    "smollm3-window": replace(
        TINY_TARGET,
        family="smollm3",
        layer=_SMOLLM3_LAYER,
        layers=(_SMOLLM3_STILL, *[_SMOLLM3_LAYER] * 3) * 2,
        sliding_windows=(5, None, None, None) * 2,
    ),
    "ernie4.5": replace(
        TINY_TARGET,
        family="ernie4_5",
        layer=replace(_ERNIE_LAYER, head_dim=16, qkv_bias=True, output_bias=True, mlp_bias=True),
        tied_head=True,
    ),
    "ernie4.5-moe": replace(
        TINY_TARGET,
        family="ernie4_5_moe",
        layer=_ERNIE_MOE_LAYER,
        layers=tuple(_ERNIE_MOE_LAYER if i in (1, 3, 5) else replace(_ERNIE_MOE_LAYER, experts=None) for i in range(8)),
    ),
    "exaone4": replace(
        TINY_TARGET,
        family="exaone4",
        layer=_EXAONE4_LAYER,
        layers=(*[_EXAONE4_LAYER] * 3, replace(_EXAONE4_LAYER, rope=replace(_LLAMA3_ROPE, partial_factor=0.0))) * 2,
        sliding_windows=(6, 6, 6, None) * 2,
    ),
    "exaone4-no-window": replace(TINY_TARGET, family="exaone4", layer=_EXAONE4_LAYER, tied_head=True),
    "olmoe": replace(
        TINY_TARGET,
        family="olmoe",
        layer=replace(TINY_LAYER, qk_norm=True, qk_norm_whole=True, experts=replace(_EXPERTS, normalised=False)),
    ),
    "dots1": replace(
        TINY_TARGET,
        family="dots1",
        layer=_DOTS1_LAYER,
        layers=(replace(_DOTS1_LAYER, experts=None), *[_DOTS1_LAYER] * 7),
        sliding_windows=(None,) * 5 + (6,) * 3,
    ),
    "llama-linear-rope": replace(
        TINY_TARGET, layer=replace(TINY_LAYER, rope=RopeConfig(type="linear", factor=2.0, theta=20000.0))
    ),
}


def drafter_configs(target: TargetConfig = TINY_TARGET) -> dict[str, DrafterConfig]:
    eagle3 = EAGLE_3.config_for(target)
    return {
        "eagle1": EAGLE_1.config_for(target),
        "eagle1-own-embedding-fc-bias": replace(EAGLE_1.config_for(target), own_embedding=True, fc_bias=True),
        "eagle3": eagle3,
        "eagle3.1": EAGLE_3_1.config_for(target),
        "norm-before-residual": replace(eagle3, norm_before_residual=True),
        "norm-before-fc": replace(eagle3, norm_before_fc=True),
        "reduced-vocabulary": replace(eagle3, draft_vocab_size=target.vocab_size // 2),
        "own-embedding": replace(eagle3, own_embedding=True),
        "shared-head": replace(eagle3, own_head=False),
        "two-layers": replace(EAGLE_3_1.config_for(target), num_layers=2),
        "windows": replace(EAGLE_3_1.config_for(target), num_layers=2, sliding_windows=(5, 4)),
        "qwen3-style": replace(EAGLE_3_1.config_for(target), layer=replace(target.layer, qk_norm=True)),
        "four-aux-states": replace(EAGLE_3_1.config_for(target), aux_layer_ids=(0, 2, 4, 6), num_aux_states=4),
        "latent": replace(
            EAGLE_3_1.config_for(target),
            layer=replace(
                target.layer.as_drafter,
                num_kv_heads=target.layer.num_heads,
                head_dim=4,
                latent=LatentConfig(
                    q_lora_rank=10, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
                ),
                rope=replace(target.layer.as_drafter.rope, interleaved=True),
            ),
        ),
        "narrow": replace(
            EAGLE_3_1.config_for(target),
            layer=replace(target.layer, hidden_size=16, intermediate_size=24),
            own_embedding=True,
        ),
    }


def randomise(module: nn.Module, seed: int) -> None:
    """Fill every weight from `seed`: matrices with gain 1.5, norms around 1, so that no part can go unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                fan_in = 1 if "embed" in name else parameter.shape[1]
                parameter.copy_(1.5 * noise / fan_in**0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1 + 0.2 * noise)


def make_target(config: TargetConfig = TINY_TARGET, seed: int = 0) -> TargetModel:
    model = TargetModel(config)
    randomise(model, seed)
    return model.eval().requires_grad_(False)


def make_drafter(config: DrafterConfig, target: TargetModel, seed: int = 1) -> Drafter:
    drafter = build(config)
    randomise(drafter, seed)
    if drafter.vocabulary is not None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        drafter.vocabulary.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.share_with(target)
    return drafter.eval().requires_grad_(False)
