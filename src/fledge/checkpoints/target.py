"""Loads and saves target models in Hugging Face directories, and reads their configs, digests and stop tokens."""

import hashlib
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints.formats.dense import Placement
from fledge.checkpoints.formats.quantized import WeightSummary
from fledge.checkpoints.reading import PROVENANCE_FILE
from fledge.checkpoints.stacked_experts import StackedExpertFiles, stack_experts
from fledge.checkpoints.tensors import TensorFiles, not_finite, write_model
from fledge.checkpoints.weights import (
    load_weights,
    requested_format,
    stored_tensors,
    summarize_weights,
    weight_format,
    weight_names,
    without_weights,
)
from fledge.errors import CheckpointError, CheckpointWarning
from fledge.files import digest, file_digest, read_json
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import DTYPES, ConfigFields, read_rope, write_layers
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel
from fledge.models.target.family import Family
from fledge.progress import timed

_log = logging.getLogger("fledge.checkpoints")
# Older checkpoints store rotary frequencies, which are computed from the config.
_IGNORED_TENSOR = "rotary_emb.inv_freq"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_SAMPLE_BYTES = 1 << 20
_LANGUAGE_MODEL = "language_model."  # prefix of tensor names in multimodal checkpoints
_TOP_LEVEL_FIELDS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
_RECURRENT = {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"}
_RECURRENT |= {"mamba", "mamba2", "minimax", "nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
_RECURRENT |= {"qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2", "minimax_text_01", "minimax_m1"}


def read_target_config(directory: Path) -> TargetConfig:
    """Read a target's config from config.json; the dtype from its tensor files, if config.json has none.

    Raises CheckpointError for a drafter, an unsupported family or an unsupported weight format.
    """
    fields = _target_fields(directory)
    family, name = _family_of(fields), fields.text("model_type")
    if family is None and _is_recurrent(fields):
        raise CheckpointError(
            f"{fields.where}: model_type '{name}' has layers with a recurrent state (linear attention, Mamba), which "
            "Fledge does not run; vLLM serves it"
        )
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        what = f"model_type '{name}' is not a supported target (these are: {known}); vLLM may serve it"
        raise CheckpointError(f"{fields.where}: {what}")
    weight_format(fields)
    if "dtype" not in fields and "torch_dtype" not in fields:  # gpt-oss does not say
        fields = ConfigFields({**fields.values, "dtype": _stored_dtype(directory)}, fields.where)
    return family.config_from_hf(fields)


def _stored_dtype(directory: Path) -> str | None:
    """The unquantised dtype of most values in the directory's tensors; None if there are none."""
    try:
        infos = TensorFiles(directory).infos.values()
    except CheckpointError:
        return None
    values = Counter[str]()
    for info in infos:
        values[info.dtype] += math.prod(info.shape) if info.dtype in DTYPES else 0
    return values.most_common(1)[0][0] if values.total() else None


def is_supported_target(directory: Path) -> bool:
    """Whether a model, or the language model of a multimodal one, is of a supported family."""
    return _family_of(_language_fields(ConfigFields.from_file(directory / "config.json"))) is not None


def _family_of(fields: ConfigFields) -> Family | None:
    name = fields.text("model_type")
    known = (family for family in FAMILIES.values() if name == family.name or name in family.aliases)
    return None if _is_recurrent(fields) else next(known, None)


def _is_recurrent(fields: ConfigFields) -> bool:
    types = fields.values.get("layer_types")
    return fields.text("model_type") in _RECURRENT or (isinstance(types, list) and "linear_attention" in types)


def _target_fields(directory: Path) -> ConfigFields:
    fields = _language_fields(ConfigFields.from_file(directory / "config.json"))
    if "eagle" in str(fields.values.get("architectures")).lower() or "speculators_model_type" in fields:
        raise CheckpointError(f"{directory}: is an EAGLE drafter, where a target model was expected")
    return fields


def sketch_target_config(directory: Path) -> tuple[TargetConfig, str | None]:
    """Read a target's config for the checks of its drafters, and the reason why the engine cannot run it, or None.

    For a target that the engine cannot run, only number of layers, hidden size, vocabulary, positions, rope and tied
    head are meaningful; the other fields of its layer are placeholders.
    """
    fields = _target_fields(directory)
    try:
        return read_target_config(directory), None
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{fields.where}: ")
    try:
        return _sketch(fields), reason
    except CheckpointError as error:
        if _is_recurrent(fields):  # such a config may have no maximal position
            raise CheckpointError(f"{fields.where}: {reason}") from None
        raise error


def _sketch(fields: ConfigFields) -> TargetConfig:
    hidden_size = fields.integer("hidden_size")
    layer = LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden_size,
        norm_eps=1e-6,
        rope=read_rope_with_fallback(fields),
    )
    return TargetConfig(
        family=fields.text("model_type"),
        layer=layer,
        num_layers=fields.layers(),
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", False),
        dtype=fields.text("dtype", fields.text("torch_dtype", "unstated")).removeprefix("torch."),
    )


def read_rope_with_fallback(fields: ConfigFields) -> RopeConfig:
    """Read the rope of global attention; if its scaling is not supported, unscaled rope with a `CheckpointWarning`."""
    nested = fields.values.get("rope_parameters")
    if isinstance(nested, dict) and "full_attention" in nested:  # transformers 5, for some families: by layer type
        fields = ConfigFields({**fields.values, "rope_parameters": nested["full_attention"]}, fields.where)
    try:
        return read_rope(fields)
    except CheckpointError as error:
        holders = [fields.values.get("rope_parameters"), fields.values.get("rope_scaling"), fields.values]
        thetas = [holder.get("rope_theta") for holder in holders if isinstance(holder, Mapping)]
        theta = next((float(value) for value in thetas if isinstance(value, int | float)), RopeConfig.theta)
        text = f"{error}; taken for plain rotary positions with theta {theta:g}"
        warnings.warn(text, CheckpointWarning, stacklevel=2)
        return RopeConfig(theta=theta)


def load_target(
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ends_only: bool = False,
    quantization: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> TargetModel:
    """Load a target on `device`, in `dtype` or as stored. Raises for missing, unexpected or non-finite tensors.

    An unexpected class in `architectures` is a `CheckpointWarning`. `ends_only` loads embedding, final norm and head,
    without layers. `quantization` is vLLM's option: see `requested_format`. `progress`: see `load_weights`.
    """
    config = read_target_config(directory)
    whole = ConfigFields.from_file(directory / "config.json")
    fields = _language_fields(whole)
    family, declared = FAMILIES[config.family], fields.values.get("architectures")
    if "text_config" in whole:  # `architectures` names the multimodal wrapper, not the language model
        declared = None
    if isinstance(declared, list) and declared and not family.is_of([str(name) for name in declared]):
        warnings.warn(
            f"{fields.where}: architectures: found {declared[0]}, expected {family.architecture} for this model_type; "
            "read as the latter, as its tensors fit",
            CheckpointWarning,
            stacklevel=2,
        )
    files = target_files(directory, config.family)
    layers = (config.layer_at(i).experts for i in range(config.num_layers))
    if (parts := sum(1 if experts is None else experts.num_experts for experts in layers)) > len(files.infos):
        what = f"config.json describes {parts} layers and experts, and there are {len(files.infos)} tensors"
        raise CheckpointError(f"{directory}: {what}; fetch the complete checkpoint")
    names = {family.our_name(name): stored for name, stored in language_tensors(files.infos).items()}
    # Layers for multi-token prediction (MTP), stored after the last layer, are not loaded.
    further = max(fields.integer(field, 0, minimum=0) for field in ("num_nextn_predict_layers", "num_mtp_modules"))
    extra = range(config.num_layers, config.num_layers + further)
    ignored = (*family.ignores, *(["layers."] if ends_only else (f"layers.{i}." for i in extra)))
    names = {name: stored for name, stored in names.items() if not name.startswith(ignored)}
    if config.tied_head:
        names.pop("lm_head.weight", None)
    with timed(_log, "modules built"), without_weights():
        model = TargetModel(replace(config, num_layers=0) if ends_only else config)
    placement = Placement(device=device, dtype=dtype or getattr(torch, config.dtype))
    tied = ("lm_head",) if config.tied_head else ()
    form = requested_format(weight_format(fields, files), quantization, str(directory))
    load_weights(model, files, names, form, placement, tied=tied, progress=progress)
    if config.tied_head:
        model.lm_head.weight = model.embed_tokens.weight
    with timed(_log, "weights checked"):
        _check_finite(model, directory)
    return model.to(device=device).eval()


def target_files(directory: Path, family: str) -> StackedExpertFiles:
    """Open the tensor files of a target, with experts as separate tensors and vectors as vectors."""
    known = FAMILIES.get(family)
    if known is None:
        return StackedExpertFiles(directory)
    return StackedExpertFiles(directory, interleaves_gate=known.interleaves_gate, rows=known.stored_as_row)


def summarize_target_weights(files: TensorFiles) -> WeightSummary | None:
    """Summarise which weights are quantised, and how; None if none is."""
    fields = _target_fields(files.directory)
    form, family = weight_format(fields, files), _family_of(fields)
    # By our names, because some stored names suggest that a router's correction bias belongs to its linear.
    stored = language_tensors(files.infos)
    names = stored if family is None else {family.our_name(name): one for name, one in stored.items()}
    return summarize_weights(weight_names(names, form), files.infos, form)


def describe_quantization(directory: Path) -> str | None:
    """For example "compressed-tensors, 4-bit integers, groups of 64"; None: not quantised, or not supported."""
    try:
        family = _family_of(_target_fields(directory))
        summary = summarize_target_weights(target_files(directory, "" if family is None else family.name))
    except CheckpointError:
        return None  # transformers, or vLLM, may run it
    return None if summary is None else ", ".join([summary.format, *summary.kinds])


def _check_finite(model: TargetModel, directory: Path) -> None:
    """Raise CheckpointError for NaN or infinite weights, which do not always show in the output."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() > 1:
            low, high = tensor.aminmax()  # propagates NaN and inf, without the memory of `isfinite`
            if low.isfinite() & high.isfinite():
                continue
        if (wrong := not_finite(tensor)).any():
            stored = FAMILIES[model.config.family].stored_name(name)
            raise CheckpointError(
                f"{directory}: tensor '{stored}' has {int(wrong.sum())} values that are not finite, the first at "
                f"{wrong.nonzero()[0].tolist()}; the file is damaged, or training went wrong"
            )


def save_target(model: TargetModel, directory: Path) -> None:
    """Write a directory that transformers, vLLM and SGLang can load. Refuses an existing destination."""
    family = FAMILIES[model.config.family]
    tensors = stored_tensors(model, is_joined=family.is_joined)
    if model.config.tied_head:
        del tensors["lm_head.weight"]
    fields = hf_config(model.config, str(next(model.parameters()).dtype))
    tensors = {family.stored_name(name): tensor for name, tensor in tensors.items()}
    tensors = {
        name: tensor[None] if name.endswith(family.stored_as_row) else tensor for name, tensor in tensors.items()
    }
    if family.stacks_experts:
        tensors = stack_experts(tensors, family.interleaves_gate)
    write_model(directory, tensors, {"config.json": fields})


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
    """Digests of the tokenizer's files and of the chat template, sixteen hex digits each."""
    config = _optional_fields(directory / "tokenizer_config.json").values
    template = [file_digest(directory / name) for name in TEMPLATE_FILES if (directory / name).is_file()]
    files = {name: file_digest(directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()}
    return {"tokenizer": digest(files), "chat_template": digest([config.get("chat_template"), template])}


def weights_digest(directory: Path) -> str:
    """Digest of config.json and the weights, sixteen hex digits; of each weight file only size, first and last MiB."""
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
    """Digests that identify a target, for the provenance of its drafters; None for files that it does not have."""
    declared = (read_json(directory / "config.json") or {}).get("architectures")
    file = directory / "tokenizer.json"
    made_from = (read_json(directory / PROVENANCE_FILE) or {}).get("quantized_from")
    return {
        "architecture": str(declared[0]) if isinstance(declared, list) and declared else None,
        "weights_digest": weights_digest(directory),
        # The digest of the target that this one is a quantised copy of, written by `fledge convert`.
        "quantized_from": str(made_from["weights_digest"]) if isinstance(made_from, dict) else None,
        "tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
        "vocabulary_digest": _vocabulary_digest(file),
    }


def _vocabulary_digest(file: Path) -> str | None:
    """Digest of the vocabulary in tokenizer.json, independent of its formatting; None if there is none."""
    values = read_json(file) or {}
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict) or not model.get("vocab"):
        return None
    special = [[one.get("id"), one.get("content")] for one in added or () if isinstance(one, dict)]
    return digest([model["vocab"], sorted(special, key=str)])


def stop_ids(directory: Path, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the EOS token ids of config.json, generation_config.json and the tokenizer."""
    own = set() if tokenizer is None or tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    configs = [
        _language_fields(_optional_fields(directory / name)) for name in ("config.json", "generation_config.json")
    ]
    return tuple(sorted({token for config in configs for token in config.integers("eos_token_id") or ()} | own))


def vocab_size(directory: Path) -> int:
    """Return the target's vocabulary size: the rows of its head, which may be more than the tokenizer's tokens."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: has no config.json; target.path must name a model's directory")
    return _language_fields(ConfigFields.from_file(directory / "config.json")).integer("vocab_size")


def _optional_fields(path: Path) -> ConfigFields:
    return ConfigFields.from_file(path) if path.is_file() else ConfigFields({}, str(path))


def _language_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of the language model, which multimodal configs have in `text_config`.

    `_TOP_LEVEL_FIELDS` are those of the whole model.
    """
    inner = fields.nested("text_config")
    if inner is None:
        return fields
    whole = {name: fields.values[name] for name in _TOP_LEVEL_FIELDS if name in fields}
    return ConfigFields({**fields.values, **inner.values, **whole}, fields.where)


def language_tensors(names: Iterable[str]) -> dict[str, str]:
    """Map names of the language model's tensors, without a multimodal wrapper's prefix, to stored names."""
    stored = [name for name in names if _IGNORED_TENSOR not in name]
    if not any(_LANGUAGE_MODEL in name for name in stored):
        return {name: name for name in stored if not name.removeprefix("model.").startswith("visual.")}
    found = {name.partition(_LANGUAGE_MODEL)[2]: name for name in stored if _LANGUAGE_MODEL in name}
    return found | {name: name for name in stored if name.startswith("lm_head.")}
