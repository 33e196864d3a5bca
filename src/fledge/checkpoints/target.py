"""Target models from Hugging Face directories, and back; and what is read there without loading the model."""

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.formats.dense import Placement
from fledge.checkpoints.tensors import TensorFiles, write_model
from fledge.checkpoints.weights import load_weights, stored_tensors, weight_format, without_weights
from fledge.errors import CheckpointError, CheckpointWarning, nearest_name_hint
from fledge.files import digest, file_digest, read_json
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, write_layers
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel

# Older checkpoints store the rope frequencies, which follow from the config.
_IGNORED_TENSOR = "rotary_emb.inv_freq"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_SAMPLE_BYTES = 1 << 20


def read_target_config(directory: Path) -> TargetConfig:
    """Read what a target is, from config.json alone. Raises for a drafter, an unknown family, unknown weights."""
    fields = ConfigFields.from_file(directory / "config.json")
    if "eagle" in str(fields.values.get("architectures")).lower() or "speculators_model_type" in fields:
        raise CheckpointError(f"{directory}: is an EAGLE drafter, where a target model was expected")
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{fields.where}: model_type '{family}' is not a supported target.{nearest_name_hint(family, FAMILIES)}"
        )
    weight_format(fields)
    return FAMILIES[family].config_from_hf(fields)


def load_target(
    directory: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TargetModel:
    """Build the model on `device`, in `dtype` or as stored. Every tensor must be there, finite, and no other.

    A class that is not its family's is a `CheckpointWarning`.
    """
    config = read_target_config(directory)
    fields = ConfigFields.from_file(directory / "config.json")
    family, declared = FAMILIES[config.family], fields.values.get("architectures")
    if isinstance(declared, list) and declared and family.architecture not in declared:
        warnings.warn(
            f"{fields.where}: architectures: found {declared[0]}, expected {family.architecture} for this model_type; "
            "read as the latter, as its tensors fit",
            CheckpointWarning,
            stacklevel=2,
        )
    files = TensorFiles(directory)
    layers = (config.layer_at(i).experts for i in range(config.num_layers))
    if (parts := sum(1 if experts is None else experts.num_experts for experts in layers)) > len(files.infos):
        what = f"config.json describes {parts} layers and experts, and there are {len(files.infos)} tensors"
        raise CheckpointError(f"{directory}: {what}; fetch the complete checkpoint")
    names = {family.our_name(name): name for name in files.infos if _IGNORED_TENSOR not in name}
    if family.stores_mtp:
        names = {ours: stored for ours, stored in names.items() if not _is_past(ours, config.num_layers)}
    if config.tied_head:
        names.pop("lm_head.weight", None)
    with without_weights():
        model = TargetModel(config)
    placement = Placement(device=device, dtype=dtype or getattr(torch, config.dtype))
    tied = ("lm_head",) if config.tied_head else ()
    load_weights(model, files, names, weight_format(fields, files), placement, tied=tied)
    if config.tied_head:
        model.lm_head.weight = model.embed_tokens.weight
    _check_finite(model, directory)
    return model.to(device=device).eval()


def _is_past(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer after the last."""
    found = re.match(r"layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= num_layers


def _check_finite(model: TargetModel, directory: Path) -> None:
    """Refuse weights that are no numbers. In a head they would only make a token that is never, or always, chosen."""
    for name, tensor in model.state_dict().items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not tensor.numel():
            continue
        low, high = tensor.aminmax()  # of which one is not finite if anything is not; no copy is made
        if not (low.isfinite() & high.isfinite()):
            wrong, stored = ~tensor.isfinite(), FAMILIES[model.config.family].stored_name(name)
            raise CheckpointError(
                f"{directory}: tensor '{stored}' has {int(wrong.sum())} values that are not finite, the first at "
                f"{wrong.nonzero()[0].tolist()}; the file is damaged, or training went wrong"
            )


def save_target(model: TargetModel, directory: Path) -> None:
    """Write a directory that transformers, vLLM and SGLang load. Refuses an existing destination."""
    family = FAMILIES[model.config.family]
    tensors = model.state_dict() if family.stores_joined else stored_tensors(model)
    if model.config.tied_head:
        del tensors["lm_head.weight"]
    fields = hf_config(model.config, str(next(model.parameters()).dtype))
    write_model(directory, {family.stored_name(n): t for n, t in tensors.items()}, {"config.json": fields})


def hf_config(config: TargetConfig, dtype: str) -> dict[str, object]:
    """The fields of config.json."""
    values: dict[str, object] = {
        "architectures": [FAMILIES[config.family].architecture],
        **write_layers(config, config.family, tied_head=config.tied_head),
        "torch_dtype": dtype.removeprefix("torch."),
    }
    if config.bos_id is not None:
        values["bos_token_id"] = config.bos_id
    if config.eos_ids:
        values["eos_token_id"] = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids)
    return values | FAMILIES[config.family].extra_fields(config)


def tokenizer_digests(directory: Path) -> dict[str, str]:
    """Sixteen hex digits each for the tokenizer's files and for the chat template's."""
    config = _language_fields(directory / "tokenizer_config.json").values
    template = [file_digest(directory / name) for name in _TEMPLATE_FILES if (directory / name).is_file()]
    files = {name: file_digest(directory / name) for name in _TOKENIZER_FILES if (directory / name).is_file()}
    return {"tokenizer": digest(files), "chat_template": digest([config.get("chat_template"), template])}


def weights_digest(directory: Path) -> str:
    """Sixteen hex digits that follow from the config and the weights: of large files, from size, start and end."""
    parts: list[Any] = [file_digest(directory / "config.json") if (directory / "config.json").is_file() else None]
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHT_SUFFIXES:
            size, sha = path.stat().st_size, hashlib.sha256()
            with path.open("rb") as file:
                sha.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                sha.update(file.read(_SAMPLE_BYTES))
            parts.append([path.name, size, sha.hexdigest()])
    return digest(parts)


def identify_target(directory: Path) -> dict[str, str | None]:
    """What tells a target from others, for the provenance of its drafters; None for what it does not have."""
    declared = (read_json(directory / "config.json") or {}).get("architectures")
    file = directory / "tokenizer.json"
    return {
        "architecture": str(declared[0]) if isinstance(declared, list) and declared else None,
        "weights_digest": weights_digest(directory),
        "tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
        "vocabulary_digest": _vocabulary_digest(file),
    }


def _vocabulary_digest(file: Path) -> str | None:
    """Follows from which id means which text, however a tokenizer.json is written; None where it does not say."""
    values = read_json(file) or {}
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict) or not model.get("vocab"):
        return None
    special = [[one.get("id"), one.get("content")] for one in added or () if isinstance(one, dict)]
    return digest([model["vocab"], sorted(special, key=str)])


def stop_ids(directory: Path, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids that end an answer: those of the config and the generation config, and the tokenizer's own."""
    own = set() if tokenizer is None or tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    configs = [_language_fields(directory / name) for name in ("config.json", "generation_config.json")]
    return tuple(sorted({token for config in configs for token in config.integers("eos_token_id") or ()} | own))


def vocab_size(directory: Path) -> int:
    """Return the size of the target's vocabulary (its head's rows, which may be more than the tokenizer's tokens)."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: has no config.json; target.path must name a model's directory")
    return _language_fields(directory / "config.json").integer("vocab_size")


def _language_fields(path: Path) -> ConfigFields:
    """The fields of the language model, which multimodal models keep one level down; none if there is no such file."""
    fields = ConfigFields.from_file(path) if path.is_file() else ConfigFields({}, str(path))
    inner = fields.nested("text_config")
    return fields if inner is None else ConfigFields({**inner.values, **fields.values}, fields.where)
