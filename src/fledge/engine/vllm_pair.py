"""A pair for vLLM, held to the contract before vLLM loads it: it does so silently, right or wrong."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fledge.checkpoints.contract import check
from fledge.checkpoints.drafter import raise_errors
from fledge.checkpoints.reading import is_drafter, read_drafter
from fledge.checkpoints.source import bundled_directory, resolve
from fledge.checkpoints.target import sketch_target_config
from fledge.errors import CheckpointWarning, ConfigError, SwapRefusedError
from fledge.models.config import Architecture

_OURS = ("adaptive", "tree_width", "tree_budget")  # keys of a speculative config that vLLM does not have


def check_pair(target: Path, speculation: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a drafter that breaks its contract with the target; return the config as vLLM is to have it.

    `target` is its directory, or that of its config and tokenizer alone. A bundled drafter is written as its directory,
    and the method as the checkpoint is for: vLLM guesses that by the directory's name. Other methods (MTP, n-grams,
    ...) are vLLM's own.
    """
    if own := next((key for key in _OURS if speculation.get(key) not in (None, False)), None):
        raise ConfigError(f"speculative_config: '{own}' is for Fledge's own engine; leave it out for vLLM")
    speculation = {key: value for key, value in speculation.items() if key not in _OURS}
    name, method = speculation.get("model"), speculation.get("method")
    if name is None and method is None:
        raise ConfigError("speculative_config: 'model' is missing; it names the drafter's directory or hub name")
    if not isinstance(name, str) or method not in (None, "eagle", "eagle3"):
        return speculation
    drafter = resolve(name)
    if method is None and not is_drafter(drafter):
        return speculation
    checkpoint = read_drafter(drafter)
    # Weights say which target it is; of one on the hub, vLLM fetches them later.
    has_weights = any(target.glob("*.safetensors")) or any(target.glob("*.bin"))
    findings = check(checkpoint, sketch_target_config(target)[0], target if has_weights else None)
    raise_errors(checkpoint, findings)
    for finding in findings:
        warnings.warn(finding.message(drafter), CheckpointWarning, stacklevel=2)
    found = "eagle" if checkpoint.config.architecture is Architecture.EAGLE1 else "eagle3"
    if method not in (None, found):
        raise ConfigError(f"method: found '{method}', but {name} is a drafter for method '{found}'")
    return {**speculation, "model": str(bundled_directory(name) or name), "method": found}


def is_eagle(speculation: Mapping[str, Any]) -> bool:
    """Whether a checked config has a drafter of the kind that Fledge knows."""
    return speculation.get("method") in ("eagle", "eagle3") and isinstance(speculation.get("model"), str)


def check_exchange(target: Path, speculation: Mapping[str, Any], model: str) -> Path:
    """Return the directory of a drafter whose weights may take the place of those that a vLLM was started with.

    Raises FledgeError for one that breaks its contract, SwapRefusedError for one of another build: what vLLM made of
    the config, of tensors and of what it shares with the target stays as it is.
    """
    if not is_eagle(speculation):
        raise SwapRefusedError("vLLM exchanges EAGLE drafters only; start the server with the other one")
    check_pair(target, {**speculation, "model": model})
    old, new = read_drafter(resolve(speculation["model"])), read_drafter(resolve(model))
    stored = [{name: (info.shape, info.dtype) for name, info in one.files.infos.items()} for one in (old, new)]
    differs = "config" if old.config != new.config else "tensors" if stored[0] != stored[1] else None
    if differs is not None:
        message = f"{model}: its {differs} differ from those of the drafter that vLLM was started with"
        raise SwapRefusedError(f"{message}, and vLLM exchanges weights only; start the server with it instead")
    return new.directory
