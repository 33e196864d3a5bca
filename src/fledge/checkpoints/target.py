"""Target models from Hugging Face directories, and back."""

from pathlib import Path

import torch

from fledge.checkpoints.loading import load_tensors
from fledge.checkpoints.stacking import stack, unstack
from fledge.checkpoints.tensors import TensorFiles, new_directory, write_json, write_tensors
from fledge.errors import CheckpointError, nearest_name_hint
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, write_layer
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel

# Older checkpoints store the rope frequencies, which follow from the config.
IGNORED_TENSOR = "rotary_emb.inv_freq"


def read_target_config(directory: Path) -> TargetConfig:
    fields = ConfigFields.from_file(directory / "config.json")
    if "eagle" in str(fields.values.get("architectures")).lower() or "speculators_model_type" in fields:
        raise CheckpointError(f"{directory}: is an EAGLE drafter, where a target model was expected")
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{fields.where}: model_type '{family}' is not a supported target.{nearest_name_hint(family, FAMILIES)}"
        )
    if "quantization_config" in fields:
        raise fields.error("quantization_config", "set", "an unquantised checkpoint (bf16, fp16 or fp32)")
    return FAMILIES[family].config_from_hf(fields)


def load_target(
    directory: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TargetModel:
    """Build the model on `device`, in `dtype` or as stored. Every tensor must be there, and no other."""
    config = read_target_config(directory)
    files = TensorFiles(directory)
    # Copies: tensors mapped from a file are badly aligned, and would change with the file.
    tensors = {_our_name(n): t.clone() for n, t in files.read_all().items() if IGNORED_TENSOR not in n}
    if config.tied_head:
        tensors.pop("lm_head.weight", None)
    with torch.device("meta"):
        model = TargetModel(config)
    load_tensors(model, stack(tensors), directory, optional=frozenset(["lm_head.weight"] if config.tied_head else []))
    if config.tied_head:
        model.lm_head.weight = model.embed_tokens.weight
    return model.to(device=device, dtype=dtype or getattr(torch, config.dtype)).eval()


def save_target(model: TargetModel, directory: Path) -> None:
    """Write a directory that transformers, vLLM and SGLang load. Refuses an existing destination."""
    tensors = unstack(model.state_dict(), model.config.layer)
    if model.config.tied_head:
        del tensors["lm_head.weight"]
    with new_directory(directory) as temporary:
        write_tensors(temporary, {hf_name(n): t for n, t in tensors.items()})
        write_json(temporary / "config.json", hf_config(model.config, str(next(model.parameters()).dtype)))


def _our_name(name: str) -> str:
    return name.removeprefix("model.")


def hf_name(name: str) -> str:
    """The name a tensor has in Hugging Face's files."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def hf_config(config: TargetConfig, dtype: str) -> dict[str, object]:
    """The fields of config.json."""
    values: dict[str, object] = {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        **write_layer(config.layer),
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": dtype.removeprefix("torch."),
    }
    if config.bos_id is not None:
        values["bos_token_id"] = config.bos_id
    if config.eos_ids:
        values["eos_token_id"] = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids)
    windows = set(config.sliding_windows) - {None}
    if config.family == "mistral":
        values["sliding_window"] = windows.pop() if windows else None
    elif windows:
        values |= {
            "use_sliding_window": True,
            "sliding_window": windows.pop(),
            "layer_types": [("full" if w is None else "sliding") + "_attention" for w in config.sliding_windows],
        }
    return values
