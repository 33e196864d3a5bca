"""Drafter directories as others write them: one for each spelling that is in use, and what it must be read as.

Nothing can be downloaded where these tests run, so configs are put together from facts about the formats, with the
source of each in a comment; weights are small and random. What is refused is in `tests/broken_checkpoints.py`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.drafter import save_drafter
from fledge.layers.config import RopeConfig
from fledge.models.config import DrafterConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1
from tests.checkpoint_fixtures import (
    DRAFT_VOCAB,
    LATENT_LAYER,
    LAYER,
    TARGET,
    edit_tensors,
    make_drafter,
    rename_tensors,
    without,
)

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE31 = EAGLE_3_1.config_for(TARGET)
_IDS = {AUX_IDS: [2, 4, 5]}
_FLAGS = {"fc_norm": True, "norm_output": True}


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """A drafter of `config`, whose config.json says `fields`, and what is noticed about it."""

    config: DrafterConfig
    fields: dict[str, Any]
    layer_zero: str = "midlayer."
    findings: frozenset[str] = frozenset()
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors

    def write(self, directory: Path) -> Drafter:
        drafter = make_drafter(self.config)
        save_drafter(drafter, directory)
        (directory / "fledge_provenance.json").unlink()
        (directory / "config.json").write_text(json.dumps(self.fields))
        edit_tensors(directory, self.change)
        rename_tensors(directory, lambda name: name.replace("midlayer.", self.layer_zero))
        return drafter


def llama_fields(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "use_cache": True,
        **more,
    }


_BIASED = replace(LAYER, qkv_bias=True)
_NORMED = replace(LAYER, qk_norm=True)
_YARN = RopeConfig(type="yarn", factor=64.0, original_max_positions=4, mscale=1.0, mscale_all_dim=0.8)
_KIMI = {"q_lora_rank": 10, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_KIMI |= {"num_key_value_heads": 4}
_PARTIAL = RopeConfig(partial_factor=0.25)


def eagle3(architecture: str, **more: Any) -> dict[str, Any]:
    return llama_fields(architectures=[architecture], **more)


SPELLINGS = {
    # EAGLE's own, on the hub as yuhuili/EAGLE-LLaMA3-Instruct-8B: says LlamaForCausalLM, stores its own embedding
    "eagle1-original": Spelling(
        config=replace(EAGLE_1.config_for(TARGET), own_embedding=True), fields=eagle3("LlamaForCausalLM")
    ),
    # older EAGLE-1 heads have a bias on fc
    "eagle1-bias": Spelling(
        config=replace(EAGLE_1.config_for(TARGET), own_embedding=True, fc_bias=True),
        fields=eagle3("LlamaForCausalLM", bias=True),
        findings=frozenset({"fc-bias"}),
    ),
    # the same for a Qwen2 target (yuhuili/EAGLE-Qwen2-*): biases on query, key and value are the class's, not a field's
    "eagle1-qwen2": Spelling(
        config=replace(EAGLE_1.config_for(TARGET, layer=_BIASED), own_embedding=True),
        fields=eagle3("Qwen2ForCausalLM", model_type="qwen2"),
        findings=frozenset({"class-not-in-vllm"}),
        change=without("layers.0.self_attn.o_proj.bias"),
    ),
    # what SGLang calls these two: sglang/srt/models/llama_eagle.py and qwen2_eagle.py
    "sglang-eagle1": Spelling(
        config=EAGLE_1.config_for(TARGET),
        fields=eagle3("LlamaForCausalLMEagle"),
        findings=frozenset({"class-not-in-vllm"}),
    ),
    "sglang-eagle1-qwen2": Spelling(
        config=EAGLE_1.config_for(TARGET, layer=_BIASED),
        fields=eagle3("Qwen2ForCausalLMEagle", model_type="qwen2"),
        findings=frozenset({"class-not-in-vllm"}),
        change=without("layers.0.self_attn.o_proj.bias"),
    ),
    # yuhuili/EAGLE3-*: says LlamaForCausalLM, midlayer, reduced vocabulary, no aux ids
    "eagle3-original": Spelling(
        config=replace(EAGLE_3.config_for(TARGET), draft_vocab_size=DRAFT_VOCAB),
        fields=eagle3("LlamaForCausalLM", draft_vocab_size=DRAFT_VOCAB),
        findings=frozenset({"aux-ids-omitted"}),
    ),
    # AngelSlim/Qwen3-*_eagle3: vLLM's name, a Llama layer for a Qwen3 target, reduced vocabulary
    "angelslim": Spelling(
        config=replace(EAGLE_3.config_for(TARGET), draft_vocab_size=DRAFT_VOCAB),
        fields=eagle3("Eagle3LlamaForCausalLM", draft_vocab_size=DRAFT_VOCAB, head_dim=8, attention_bias=False),
        findings=frozenset({"aux-ids-omitted"}),
    ),
    # the smallest 3.1 config that vLLM runs
    "vllm-minimal": Spelling(
        config=EAGLE31,
        fields=eagle3("Eagle3LlamaForCausalLM", **_FLAGS),
        layer_zero="layers.0.",
        findings=frozenset({"aux-ids-omitted"}),
    ),
    "vllm-top-level-ids": Spelling(
        config=replace(EAGLE31, aux_layer_ids=(1, 4, 7)),
        fields=eagle3("LlamaForCausalLMEagle3", **_FLAGS, **{AUX_IDS: [1, 4, 7]}),
        layer_zero="layers.0.",
    ),
    # SpecForge and SGLang (lmsys/SGLang-EAGLE3-*, AQ-MedAI/*): nested ids that count outputs, when they begin with 1
    "specforge": Spelling(
        config=EAGLE31,
        fields=eagle3(
            "LlamaForCausalLMEagle3", **_FLAGS, eagle_config={"use_aux_hidden_state": True, AUX_IDS: [1, 3, 4]}
        ),
        findings=frozenset({"aux-ids-nested"}),
    ),
    # SpecForge stores both maps even where the vocabulary is whole
    "specforge-whole-vocabulary": Spelling(
        config=EAGLE_3.config_for(TARGET),
        fields=eagle3("LlamaForCausalLMEagle3", draft_vocab_size=64, **_IDS),
        findings=frozenset({"d2t-identity"}),
        change=lambda tensors: {
            **tensors,
            "d2t": torch.zeros(64, dtype=torch.int64),
            "t2d": torch.ones(64, dtype=torch.bool),
        },
    ),
    # ModelOpt (nvidia/gpt-oss-120b-Eagle3*): an `eagle_config` that describes the frame, an empty id list
    "modelopt": Spelling(
        config=replace(EAGLE_3.config_for(TARGET), draft_vocab_size=DRAFT_VOCAB),
        fields=eagle3(
            "LlamaForCausalLMEagle3",
            draft_vocab_size=DRAFT_VOCAB,
            eagle_config={
                "use_aux_hidden_state": True,
                AUX_IDS: [],
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        ),
        findings=frozenset({"aux-ids-omitted"}),
    ),
    # nested ids that count inputs, as TorchSpec's newer drafters have them
    "nested-inputs": Spelling(
        config=EAGLE31,
        fields=eagle3("LlamaForCausalLMEagle3", **_FLAGS, eagle_config={AUX_IDS: [2, 4, 5]}),
        findings=frozenset({"aux-ids-nested"}),
    ),
    "norm-before-fc-nested": Spelling(
        config=replace(EAGLE_3.config_for(TARGET), norm_before_fc=True),
        fields=eagle3("LlamaForCausalLMEagle3", eagle_config={"norm_before_fc": True}, **_IDS),
    ),
    # transformers 5 nests what belongs to the rope
    "rope-parameters": Spelling(
        config=EAGLE31,
        fields=eagle3(
            "LlamaForCausalLMEagle3",
            **_FLAGS,
            dtype="float32",
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            **_IDS,
        ),
    ),
    "rope-parameters-partial": Spelling(
        config=replace(EAGLE31, layer=replace(LAYER, rope=_PARTIAL)),
        fields=eagle3(
            "LlamaForCausalLMEagle3",
            **_FLAGS,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
            **_IDS,
        ),
        findings=frozenset({"rope-differs"}),
    ),
    # Llama-style drafters for Kimi and DeepSeek copy the target's yarn; vLLM 0.32 applies both mscales
    "yarn-mscale": Spelling(
        config=replace(EAGLE31, layer=replace(LAYER, rope=_YARN)),
        fields=eagle3(
            "LlamaForCausalLMEagle3",
            **_FLAGS,
            rope_scaling={
                "type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 4,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
            **_IDS,
        ),
        findings=frozenset({"rope-differs"}),
    ),
    # for a Qwen-VL target: the positions of a text have three equal parts
    "mrope": Spelling(
        config=EAGLE31,
        fields=eagle3(
            "Eagle3Qwen3vlForCausalLM", **_FLAGS, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, **_IDS
        ),
    ),
    "qwen3": Spelling(
        config=replace(EAGLE31, layer=_NORMED),
        fields=eagle3("Eagle3Qwen3ForCausalLM", **_FLAGS, head_dim=8, **_IDS),
        layer_zero="layers.0.",
    ),
    # named after the target's family, with the target's other fields left in: forks of SpecForge
    "qwen3-moe": Spelling(
        config=replace(EAGLE31, layer=_NORMED),
        fields=eagle3(
            "Qwen3MoeForCausalLMEagle3", **_FLAGS, model_type="qwen3_moe", head_dim=8, num_experts=128, **_IDS
        ),
        findings=frozenset({"class-not-in-vllm"}),
    ),
    "gpt-oss": Spelling(
        config=replace(EAGLE31, sliding_windows=(6,)),
        fields=eagle3(
            "GptOssForCausalLMEagle3",
            **_FLAGS,
            model_type="gpt_oss",
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"] * 4,  # the target's
            num_local_experts=32,
            **_IDS,
        ),
        findings=frozenset({"class-not-in-vllm"}),
    ),
    "llama4": Spelling(
        config=EAGLE31,
        fields=eagle3("Llama4ForCausalLMEagle3", **_FLAGS, model_type="llama4_text", **_IDS),
        findings=frozenset({"class-not-in-vllm"}),
    ),
    "mistral": Spelling(
        config=EAGLE31,
        fields=eagle3("Eagle3MistralForCausalLM", **_FLAGS, model_type="mistral", sliding_window=None, **_IDS),
        findings=frozenset({"class-not-in-vllm"}),
    ),
    # a window, as amd/MiniMax-M3-EAGLE3.1 has one: vLLM's Llama class goes by `layer_types`
    "window": Spelling(
        config=replace(EAGLE31, sliding_windows=(5,)),
        fields=eagle3(
            "Eagle3MiniMaxM2ForCausalLM", **_FLAGS, sliding_window=5, layer_types=["sliding_attention"], **_IDS
        ),
    ),
    "window-qwen": Spelling(
        config=replace(EAGLE31, layer=_NORMED, sliding_windows=(5,)),
        fields=eagle3(
            "Eagle3Qwen3ForCausalLM", **_FLAGS, head_dim=8, use_sliding_window=True, sliding_window=5, **_IDS
        ),
    ),
    # latent attention, as Kimi's are spelled: no head_dim, and layer 0 under its number
    "kimi": Spelling(
        config=replace(EAGLE31, layer=LATENT_LAYER),
        fields=eagle3("Eagle3DeepseekV2ForCausalLM", **_FLAGS, model_type="kimi_k2", **_KIMI, **_IDS),
        layer_zero="layers.0.",
    ),
    # speculators: layer fields apart; four ids and no number of them, which vLLM takes for three
    "speculators-four-aux": Spelling(
        config=replace(EAGLE31, norm_before_residual=True, aux_layer_ids=(1, 2, 4, 6), num_aux_states=4),
        fields={
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 64,
            "norm_before_residual": True,
            **_FLAGS,
            AUX_IDS: [1, 2, 4, 6],
            "transformer_layer_config": llama_fields(head_dim=8),
        },
        layer_zero="layers.0.",
        findings=frozenset({"aux-count-undeclared"}),
    ),
}
