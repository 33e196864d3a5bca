"""Devices and precisions by the names users give them."""

import torch

from fledge.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of that name; None for "auto"."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype: found {name!r}, allowed is auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: found {name!r}, allowed is auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no GPU here")
    return device
