"""Dequantise checkpoints with the compressed-tensors package. Run by the python of vLLM's environment.

    python run_compressed_tensors.py DIRECTORY...

Writes `dequantised.safetensors` into each, with the matrix of every linear that is stored in fewer bits.
"""

import json
import sys
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

for directory in map(Path, sys.argv[1:]):
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
    save_file(dense, directory / "dequantised.safetensors")
