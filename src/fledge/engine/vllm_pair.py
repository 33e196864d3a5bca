"""Contract checks of target and drafter for vLLM, which loads any pair without checking."""

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

_OURS = ("adaptive", "tree_width", "tree_budget")  # keys of our speculative config that vLLM lacks


def check_pair(target: Path, speculation: Mapping[str, Any]) -> dict[str, Any]:
    """Check the drafter's contract with the target; return the speculative config to give to vLLM.

    `target`: its directory, which may lack the weights. A bundled drafter's name becomes its directory. The method is
    set from the checkpoint, as vLLM guesses it from the directory's name. Other methods (MTP, n-grams, ...) are not
    checked. Raises FledgeError.
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
    # The digest of the target's weights is checked only if they are here: vLLM may still have to download them.
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
    """Whether a checked config has an EAGLE drafter."""
    return speculation.get("method") in ("eagle", "eagle3") and isinstance(speculation.get("model"), str)


def check_exchange(target: Path, speculation: Mapping[str, Any], model: str) -> Path:
    """Return the directory of a drafter whose weights may replace those that a vLLM was started with.

    Raises FledgeError if it breaks the contract, SwapRefusedError if its config or tensor shapes differ: vLLM can only
    exchange weights.
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
