"""Scales of an FP8 KV cache, which checkpoints store with each attention module under several names.

They are used only with an FP8 cache. As in vLLM, a layer without scales uses 1.0, and one with a single scale uses it
for keys and values.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from fledge.checkpoints.tensors import TensorFiles
from fledge.layers.attention import Attention
from fledge.layers.latent_attention import LatentAttention

# self_attn.k_scale, .attn.k_scale, .k_proj.k_scale, .qkv_proj.k_scale, .kv_scale, and older .k_proj.output_scale
_NAME = re.compile(r"(.*\.self_attn)\.(?:(?:\w+\.)*(kv|k|v)_scale|([kv])_proj\.output_scale)")


def load_kv_scales(model: nn.Module, files: TensorFiles, names: Mapping[str, str]) -> None:
    """Set `spec.kv_scales` of each attention module. names: ours -> stored."""
    found: dict[str, dict[str, float]] = {}
    for ours, stored in names.items():
        if (match := _NAME.fullmatch(ours)) is not None:
            found.setdefault(match[1], {})[match[2] or match[3]] = _positive(files.read(stored))
    for name, module in model.named_modules():
        if isinstance(module, Attention | LatentAttention) and name in found:
            scales = found[name]
            either = scales.get("kv", next(iter(scales.values())))
            key, value = scales.get("k", either), scales.get("v", either)
            # With MLA, the cached rows are keys and values at once.
            module.spec = replace(module.spec, kv_scales=(key, key if isinstance(module, LatentAttention) else value))


def _positive(stored: Tensor) -> float:
    """The scale; NaN if it is not positive and finite or not a scalar, for which an FP8 cache is refused."""
    scale = float(stored.float()) if stored.numel() == 1 else math.nan
    return scale if 0 < scale < math.inf else math.nan
