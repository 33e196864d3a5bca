"""Resolves the name of a model: a local directory, a model bundled with the package, or a name on the hub."""

import os
import re
from importlib.resources import files
from pathlib import Path

from fledge.errors import CheckpointError

# The bundled models: a small chat model, and two drafters for it by variant.
TARGET = "fledgling"
DRAFTERS = {"EAGLE-3": "fledgling-eagle3", "EAGLE-3.1": "fledgling-eagle3.1"}
NAMES = (TARGET, *DRAFTERS.values())

_HUB_NAME = re.compile(r"[\w][\w.\-]*/[\w][\w.\-]*")
_WANTED = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def bundled_directory(name: str) -> Path | None:
    """Return the directory of the bundled model called `name`, or None."""
    return Path(str(files("fledge"))) / "bundled" / name if name in NAMES else None


def resolve(name_or_path: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """Return the local directory of a model: a path, the name of a bundled model, or a hub name, which is downloaded.

    Without `weights`, only config, tokenizer and chat template are downloaded. The hub's cache and environment
    variables (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`, ...) apply.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.exists():
        raise CheckpointError(f"{name}: is a file; name the directory that holds config.json and the weights")
    if (bundled := bundled_directory(name)) is not None:
        return bundled
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name}: no such directory, and not a Hugging Face name (owner/model) nor a bundled model "
            f"({', '.join(NAMES)})"
        )
    # Imported here, because `fledge --help` imports this module and must not wait for the hub's client.
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    wanted = [one for one in _WANTED if weights or not one.endswith((".safetensors", ".bin"))]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except errors.RepositoryNotFoundError:
        what = "no such directory, and no such model on the Hugging Face hub (private models need HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else "no network?"
        what = f"no such directory, not in the local Hugging Face cache, and the hub cannot be reached ({why})"
    except Exception as error:  # The hub client does not wrap the errors of its HTTP library.
        is_name = not isinstance(error, errors.HFValidationError)
        what = "fetching it from the Hugging Face hub failed" if is_name else "not a valid Hugging Face name"
        what += f": {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    raise CheckpointError(f"{name}: {what}")
