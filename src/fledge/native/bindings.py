"""What Python knows of the library's structs and functions: it reads the C sources, so nothing is declared twice."""

import ctypes
import functools
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fledge.native.compiler import sources

_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "int": ctypes.c_int, "float": ctypes.c_float}


def bind(path: str) -> ctypes.CDLL:
    """Load the library and say what its functions take. OSError for what is not one, or lacks a function."""
    # torch is loaded already, and with it the one OpenMP whose threads both use.
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
    """The C sources without their comments."""
    return re.sub(r"/\*.*?\*/", "", "\n".join(sources().values()), flags=re.DOTALL)


def _declared(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and type of each variable of a declaration, or of one parameter: `const float *keys, *values`."""
    if found := re.fullmatch(r"(?:const )?(\w+) (.+)", text.strip(), re.DOTALL):
        for name in found[2].split(","):
            kind: Any = _Pointer if "*" in name else _TYPES.get(found[1]) or struct_type(found[1])
            yield re.findall(r"\w+", name)[-1], kind


_as_pointer = ctypes.c_void_p.from_param


class _Pointer(ctypes.c_void_p):
    """What C takes by its address: as an argument a tensor, a struct, an array or nothing."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        if isinstance(value, Tensor):  # first: a step has some fifty of them
            return _as_pointer(value.data_ptr())
        return ctypes.byref(value) if isinstance(value, ctypes.Structure) else _as_pointer(_address(value))


def _address(value: Any) -> Any:
    """The address of a tensor or an array; anything else as it is."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, ctypes.Array) else value


@functools.cache
def struct_type(name: str) -> type[Any]:
    """Return the C struct of this name, for ctypes."""
    found = re.search(rf"typedef struct {{([^}}]*)}} {name};", _declarations())
    assert found is not None, name
    fields = [
        (field, ctypes.c_void_p if kind is _Pointer else kind)
        for line in found[1].split(";")
        for field, kind in _declared(line)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def struct(name: str, **fields: Any) -> Any:
    """Return a C struct with these fields. Tensors and arrays go in by their addresses, and live as long as it does."""
    made = struct_type(name)(**{field: _address(value) for field, value in fields.items()})
    made.held = fields
    return made
