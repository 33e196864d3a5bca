"""All kernels ask for the same split of a multiprocessor's memory."""

import ctypes
from types import SimpleNamespace

import pytest

from fledge.kernels import _overlap

triton = pytest.importorskip("triton")


def test_every_kernel_that_triton_loads_prefers_shared_memory(monkeypatch):
    asked = []
    driver = SimpleNamespace(cuFuncSetAttribute=lambda function, *request: asked.append((function.value, *request)))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    hooks = triton.knobs.runtime.kernel_load_end_hook
    monkeypatch.setattr(hooks, "calls", [])
    _overlap._split_memory_alike.__wrapped__()
    hooks(None, 4096, "a_kernel", {}, "hash")
    assert asked == [(4096, 9, 100)]


def test_a_machine_without_the_driver_loads_kernels_as_before(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    hooks = triton.knobs.runtime.kernel_load_end_hook
    monkeypatch.setattr(hooks, "calls", [])
    _overlap._split_memory_alike.__wrapped__()
    assert hooks.calls == []
