"""Triton 3.6's interpreter takes a one-element array for an integer, which numpy refuses since 2.4."""

import importlib

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
    quicken(interpreter)
