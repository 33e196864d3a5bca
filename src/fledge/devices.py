"""Torch devices and dtypes from the names that users type."""

import torch

from fledge.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_dtype(name: str) -> torch.dtype | None:
    """Return the dtype called `name`; None for "auto". Raises ConfigError for an unknown name."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype: found {name!r}, allowed is auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is a GPU if there is one. Raises ConfigError if it is not available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: found {name!r}, allowed is auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was requested, but torch finds no GPU here")
    return device
