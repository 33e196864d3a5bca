"""ctypes bindings of the library. Structs and signatures are parsed from the C sources, not declared again."""

import ctypes
import functools
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fledge.native.compiler import sources

_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "int": ctypes.c_int, "float": ctypes.c_float}


def bind(path: str) -> ctypes.CDLL:
    """Load the library and set its functions' argument types. OSError if it is no library or lacks a function."""
    # torch is imported already, so that both use the same OpenMP runtime and its threads.
    loaded = ctypes.CDLL(path)
    try:
        for name, parameters in re.findall(r"^(?:void|int32_t) (fledge_\w+)\(([^)]*)\)", _declarations(), re.MULTILINE):
            getattr(loaded, name).argtypes = [kind for part in parameters.split(",") for _, kind in _declared(part)]
        for name in ("fledge_decode", "fledge_linear", "fledge_run", "fledge_draft", "fledge_weigh_rows"):
            getattr(loaded, name).restype = _check_memory
    except AttributeError as error:
        raise OSError(str(error)) from None
    return loaded


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for scratch space")


@functools.cache
def _declarations() -> str:
    """The C sources without comments."""
    return re.sub(r"/\*.*?\*/", "", "\n".join(sources().values()), flags=re.DOTALL)


def _declared(text: str) -> Iterator[tuple[str, Any]]:
    """Yield name and type of each variable in a declaration such as `const float *keys, *values`, or of a parameter."""
    if found := re.fullmatch(r"(?:const )?(\w+) (.+)", text.strip(), re.DOTALL):
        for name in found[2].split(","):
            kind: Any = _Pointer if "*" in name else _TYPES.get(found[1]) or struct_type(found[1])
            yield re.findall(r"\w+", name)[-1], kind


_as_pointer = ctypes.c_void_p.from_param


class _Pointer(ctypes.c_void_p):
    """A pointer argument: accepts a tensor, a struct, an array, an address or None."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        if isinstance(value, Tensor):  # first, because it is the most frequent: some fifty in a step
            return _as_pointer(value.data_ptr())
        return ctypes.byref(value) if isinstance(value, ctypes.Structure) else _as_pointer(_address(value))


def _address(value: Any) -> Any:
    """The address of a tensor or an array; other values unchanged."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, ctypes.Array) else value


@functools.cache
def struct_type(name: str) -> type[Any]:
    """Return the ctypes type of the C struct called `name`."""
    found = re.search(rf"typedef struct {{([^}}]*)}} {name};", _declarations())
    assert found is not None, name
    fields = [
        (field, ctypes.c_void_p if kind is _Pointer else kind)
        for line in found[1].split(";")
        for field, kind in _declared(line)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def struct(name: str, **fields: Any) -> Any:
    """Return a C struct. Tensors and arrays are stored as addresses; `held` keeps them alive as long as the struct."""
    made = struct_type(name)(**{field: _address(value) for field, value in fields.items()})
    made.held = fields
    return made
