"""What training data depends on in a target's directory, read without loading the model."""

import hashlib
from pathlib import Path
from typing import Any

from fledge.errors import CheckpointError
from fledge.files import digest, file_digest
from fledge.models.hf_config import ConfigFields

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


def config_stop_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids that end an answer by the config and the generation config."""
    configs = [_language_fields(directory / name) for name in ("config.json", "generation_config.json")]
    return tuple(sorted({token for config in configs for token in config.integers("eos_token_id") or ()}))


def stop_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end an answer: those of the config files, and the tokenizer's own."""
    own = set() if tokenizer is None or tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    return tuple(sorted({*config_stop_ids(directory), *own}))


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
