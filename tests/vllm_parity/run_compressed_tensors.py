"""Dequantise checkpoints with the compressed-tensors package. Run by the python of vLLM's environment.

    python run_compressed_tensors.py INPUTS DIRECTORY...

Writes `dequantised.safetensors` into each, with the matrix of every linear that is stored in fewer bits, in the dtype
of its scales, and, where activations are in fewer bits too, the product in float32 of the linear with what INPUTS has
for its size.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from safetensors.torch import load_file, save_file


def product(x: torch.Tensor, matrix: torch.Tensor, tensors: dict[str, torch.Tensor], args: object) -> torch.Tensor:
    module = torch.nn.Module()
    module.quantization_status = QuantizationStatus.COMPRESSED
    if "input_scale" in tensors:
        module.input_scale = tensors["input_scale"]
    return torch.nn.functional.linear(forward_quantize(module, x, "input", args), matrix.float())


inputs = load_file(sys.argv[1])
for directory in map(Path, sys.argv[2:]):
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**{**config["config_groups"]["group_0"], "format": config["format"]})
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    modules: dict[str, dict] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        modules.setdefault(module, {})[kind] = tensor
    dense = {
        f"{name}.weight": compressor.decompress(tensors, scheme)["weight"].data.contiguous()
        for name, tensors in modules.items()
        if "weight_scale" in tensors
    }
    if scheme.input_activations is not None:
        for name, tensors in modules.items():
            if "weight_scale" in tensors:
                matrix = dense[f"{name}.weight"]
                x = inputs[str(matrix.shape[1])]
                dense[f"{name}.product"] = product(x, matrix, tensors, scheme.input_activations)
    save_file(dense, directory / "dequantised.safetensors")
