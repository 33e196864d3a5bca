"""The language models of multimodal checkpoints, as transformers writes them, against the whole models on text."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from fledge.checkpoints.contract import describe_target
from fledge.checkpoints.quantize import quantize_target
from fledge.checkpoints.target import load_target, stop_ids
from fledge.checkpoints.tensors import TensorFiles
from fledge.errors import CheckpointError
from fledge.files import read_json
from fledge.layers.dense_cache import DenseCache
from tests.checkpoint_fixtures import edit_tensors
from tests.tiny_models import randomise

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
VISUAL = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
VISUAL |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_GLM_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1]}
# Where the names of tensors have the language model: in front, in front of nothing, and behind `model.`.
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 5, "sliding_window_pattern": 2},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 1,
    },
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 40, "num_local_experts": 3, "attention_chunk_size": 6},
        "vision_config": {**TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**TOWER, "model_type": "pixtral"},
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "vision_config": VISUAL,
    },
    "qwen3_vl_moe": {  # whose experts are one tensor a layer
        "text_config": {
            **TEXT,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
        "vision_config": VISUAL,
    },
    "glm4v": {
        "text_config": {**TEXT, "rope_parameters": _GLM_ROPE},
        "vision_config": VISUAL,
    },
    "glm4v_moe": {
        "text_config": {
            **TEXT,
            "rope_parameters": _GLM_ROPE,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
        "vision_config": VISUAL,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": VISUAL,
    },
}


@pytest.mark.filterwarnings("error::fledge.errors.CheckpointWarning")
@pytest.mark.parametrize("name", WRAPPERS)
@torch.no_grad()
def test_the_language_model_of_a_wrapper_is_read(name: str, tmp_path: Path) -> None:
    theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **WRAPPERS[name])).eval()
    randomise(theirs, seed=2)
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    tokens, positions = torch.randint(10, 60, (20,)), torch.arange(20)
    states = ours(tokens, positions, DenseCache(ours.config.num_layers).extend(positions))
    torch.testing.assert_close(ours.logits(states.final), theirs(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)
    described = describe_target(ours.config, TensorFiles(tmp_path))
    assert described["size"]["parameters"] == sum(parameter.numel() for parameter in ours.parameters())
    assert stop_ids(tmp_path) == ours.config.eos_ids == (2,)


def test_stacked_experts_lie_either_way(tmp_path: Path) -> None:
    """Qwen3-VL-MoE as it was published has them [experts, in, out], as transformers 5 writes it [experts, out, in]."""
    fields = WRAPPERS["qwen3_vl_moe"]
    AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen3_vl_moe", **fields)).save_pretrained(tmp_path)
    as_written = load_target(tmp_path)
    edit_tensors(tmp_path, lambda tensors: {n: t.mT if ".experts." in n else t for n, t in tensors.items()})
    published = load_target(tmp_path)
    for name, tensor in as_written.state_dict().items():
        assert torch.equal(published.state_dict()[name], tensor)
    with pytest.raises(CheckpointError, match="experts of qwen3_moe lie in one tensor"):
        quantize_target(tmp_path, tmp_path / "never", "int8")


def test_what_is_no_language_model_is_not_called_quantised(tmp_path: Path) -> None:
    """A group has every linear that is not ignored, also those of the towers."""
    fields = WRAPPERS["gemma3"]
    AutoModelForImageTextToText.from_config(AutoConfig.for_model("gemma3", **fields)).save_pretrained(tmp_path / "it")
    frequencies = {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # in older files
    edit_tensors(tmp_path / "it", lambda tensors: {**tensors, **frequencies})
    quantize_target(tmp_path / "it", tmp_path / "out", "int8")
    ignored = (read_json(tmp_path / "out" / "config.json") or {})["quantization_config"]["ignore"]
    patterns = [re.compile(one.removeprefix("re:")) for one in ignored if one.startswith("re:")]
    for name, info in TensorFiles(tmp_path / "out").infos.items():
        is_tower = not name.startswith("language_model.")
        for module in (name, f"model.{name}"):  # as it is stored, and as transformers has it
            assert is_tower == any(pattern.match(module) for pattern in patterns)
        assert info.dtype == "float32" or not is_tower
