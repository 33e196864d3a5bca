"""Logits of checkpoints in transformers, in float32. Run by the python of vLLM's environment, for compressed-tensors.

    python run_transformers.py IDS DIRECTORY...

IDS are token ids, comma-separated; `logits.safetensors` is written into each directory.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ids = torch.tensor([[int(one) for one in sys.argv[1].split(",")]])
for directory in map(Path, sys.argv[2:]):
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
    save_file({"logits": logits[0]}, directory / "logits.safetensors")
