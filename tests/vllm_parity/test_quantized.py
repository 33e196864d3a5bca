"""Quantised checkpoints mean to us, to the last bit, what they mean to the compressed-tensors package.

Products with activations in eight bits are the same but for the order of sums, in float32.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.quantize import WIDTHS, quantize_target
from fledge.checkpoints.target import load_target, save_target
from fledge.layers.dense_cache import DenseCache
from tests.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.tiny_models import TINY_LAYER, TINY_TARGET, make_target

VLLM_PYTHON = os.environ.get("FLEDGE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="FLEDGE_VLLM_PYTHON is not set (make test-vllm sets it)"),
]
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
CONFIG = replace(TINY_TARGET, num_layers=1, layer=replace(TINY_LAYER, **_SIZES))
# The package takes blocks that do not divide a matrix for smaller ones, and one column of blocks for rows.
LEFT_OUT = ("ct-fp8-block",)
ROUNDED = ("ct-fp8-dynamic", "ct-fp8-static", "fp8-dynamic")
PARTS = {
    "self_attn.qkv_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
}


def test_weights_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    save_target(make_target(CONFIG).to(torch.bfloat16), tmp_path / "dense")
    names = [name for name in FORMATS if name.startswith("ct-") and name not in LEFT_OUT]
    for name in names:
        quantize_checkpoint(tmp_path / "dense", tmp_path / name, tmp_path / f"{name}-meant", FORMATS[name])
    for width in WIDTHS:
        quantize_target(tmp_path / "dense", tmp_path / width, width)
    directories = [tmp_path / name for name in (*names, *WIDTHS)]
    sizes = torch.logspace(-3, 1, 7)[:, None]
    inputs = {str(columns): torch.randn(1, 7, columns) * sizes for columns in (256, 512)}
    save_file(inputs, tmp_path / "inputs.safetensors")
    script = [str(VLLM_PYTHON), Path(__file__).with_name("run_compressed_tensors.py"), tmp_path / "inputs.safetensors"]
    done = subprocess.run([*script, *directories], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for directory in directories:
        theirs = load_file(directory / "dequantised.safetensors")
        layer = load_target(directory, dtype=torch.float32).layers[0]
        for linear, parts in PARTS.items():
            block = linear.partition(".")[0]
            names = [f"model.layers.0.{block}.{part}_proj" for part in parts]
            expected, module = torch.cat([theirs[f"{name}.weight"] for name in names]), layer.get_submodule(linear)
            assert torch.equal(module.weight.to(expected.dtype), expected), (directory.name, linear)
            is_rounded = module.activations is not None
            assert is_rounded == (directory.name in ROUNDED)
            if is_rounded:
                product = torch.cat([theirs[f"{name}.product"] for name in names], dim=-1)
                found = module(inputs[str(module.in_features)])
                torch.testing.assert_close(found, product, rtol=1e-5, atol=1e-5 * float(product.abs().max()))


@torch.no_grad()
def test_transformers_loads_what_convert_writes(tmp_path: Path) -> None:
    """And computes the same with it, in float32."""
    save_target(make_target(CONFIG).to(torch.bfloat16), tmp_path / "dense")
    for width in WIDTHS:
        quantize_target(tmp_path / "dense", tmp_path / width, width)
    tokens = torch.arange(3, 13)
    script = [str(VLLM_PYTHON), Path(__file__).with_name("run_transformers.py"), ",".join(map(str, tokens.tolist()))]
    done = subprocess.run([*script, *(tmp_path / w for w in WIDTHS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for width in WIDTHS:
        target = load_target(tmp_path / width, dtype=torch.float32)
        positions = torch.arange(len(tokens))
        logits = target.logits(target(tokens, positions, DenseCache(CONFIG.num_layers).extend(positions)).final)
        theirs = load_file(tmp_path / width / "logits.safetensors")["logits"]
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4, msg=lambda text, w=width: f"{w}: {text}")
