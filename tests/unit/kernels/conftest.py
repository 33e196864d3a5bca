"""Triton 3.6's interpreter takes a one-element array for an integer, which numpy refuses since 2.4.

It does not round to eight-bit floats as GPUs do, and its fused multiply-add rounds twice where theirs rounds once.
"""

import importlib

import numpy as np
import torch

from tests.unit.kernels.quick_interpreter import quicken

try:
    interpreter = importlib.import_module("triton.runtime.interpreter")
except ImportError:
    interpreter = None

if interpreter is not None:
    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_for_numpy(tensor, scope):
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_for_numpy
    _convert = interpreter._convert_float

    def _convert_codes(data, source, destination, rounding):
        """It does not carry where a mantissa of E4M3 is rounded up, and knows no NaN of it: torch does."""
        dtypes = [
            torch.float8_e4m3fn
            if one.name == "fp8e4nv"
            else {"fp16": torch.float16, "fp32": torch.float32}.get(one.name)
            for one in (source, destination)
        ]
        if torch.float8_e4m3fn not in dtypes or None in dtypes:
            return _convert(data, source, destination, rounding)
        converted = torch.from_numpy(data.copy()).view(dtypes[0]).to(dtypes[1])
        return converted.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[converted.element_size()]).numpy()

    interpreter._convert_float = _convert_codes
    _fma = interpreter.InterpreterBuilder.create_fma

    def _fma_rounded_once(self, x, y, z):
        """Of float32: a product is exact in float64, and so is the sum where the two nearly cancel."""
        if z.data.dtype != np.float32:
            return _fma(self, x, y, z)
        with np.errstate(invalid="ignore"):  # inf times 0, and inf - inf: not a number, as there
            exact = x.data.astype(np.float64) * y.data + z.data
        with np.errstate(over="ignore"):
            return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = _fma_rounded_once
    quicken(interpreter)
