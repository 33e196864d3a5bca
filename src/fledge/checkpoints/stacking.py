"""Checkpoints store query, key and value (and gate and up) apart; our layers stack them into one matrix each."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fledge.layers.config import LayerConfig

_STACKS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def stack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the parts. A part without its siblings is left as it is, for the caller's missing-tensor report."""
    out = dict(tensors)
    for name in tensors:
        for stacked, parts in _STACKS.items():
            if f"{parts[0]}." not in name:
                continue
            names = [name.replace(parts[0], part) for part in parts]
            if all(part in out for part in names):
                out[name.replace(parts[0], stacked)] = torch.cat([out.pop(part) for part in names])
    return out


def unstack(tensors: Mapping[str, Tensor], layer: LayerConfig) -> dict[str, Tensor]:
    """The inverse of `stack`, bit for bit."""
    sizes = {
        "self_attn.qkv_proj": [layer.query_size, layer.kv_size, layer.kv_size],
        "mlp.gate_up_proj": [layer.intermediate_size, layer.intermediate_size],
    }
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = next((s for s in _STACKS if f"{s}." in name), None)
        if stacked is None:
            out[name] = tensor
        else:
            for part, rows in zip(_STACKS[stacked], torch.split(tensor, sizes[stacked]), strict=True):
                out[name.replace(stacked, part)] = rows
    return out
