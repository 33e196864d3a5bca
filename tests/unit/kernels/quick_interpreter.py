"""Triton 3.6's interpreter, told not to work the same things out again: half of its time. What it computes is its own.

It patches `triton.language` anew for every call of a device function, though the launch has done so; it builds a table
of dtypes for every dtype it looks up; and it spells the types of blocks and of their shapes out for every value.
"""

import functools
from types import ModuleType
from typing import Any


def quicken(interpreter: ModuleType) -> None:
    """Put the functions below in the place of the interpreter's own."""
    interpreter._patch_lang = _once_a_launch(interpreter)
    interpreter._get_np_dtype = _np_dtypes(interpreter)
    core = interpreter.tl.core
    core.block_type.__init__ = _known_block_types(core)
    core._type_for_tuple_values = _known_tuple_types(core)


def _once_a_launch(interpreter: ModuleType) -> Any:
    """Return `_patch_lang` that leaves alone what this launch has patched: the launch restores it when it ends."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = {id(module) for module in (interpreter.tl, interpreter.tl.core)}
    patched: set[int] = set()

    @functools.cache
    def seen_by(function: Any) -> frozenset[int]:
        return frozenset(languages & {id(value) for value in function.__globals__.values()})

    def patch_once(function: Any) -> Any:
        seen = seen_by(function)
        if seen and seen <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen)
        return patch(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter.GridExecutor.__call__ = launch_anew
    return patch_once


def _np_dtypes(interpreter: ModuleType) -> Any:
    find = functools.cache(interpreter._get_np_dtype)
    blocks, pointers = interpreter.tl.block_type, interpreter.tl.pointer_type
    slow = interpreter._get_np_dtype

    def np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, blocks) else dtype
        return slow(element) if isinstance(element, pointers) else find(element)

    return np_dtype


def _known_block_types(core: ModuleType) -> Any:
    """Return `block_type.__init__`. A block of numbers is known by dtype and shape; one of pointers is made anew."""
    make = core.block_type.__init__
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:
            make(self, element_ty, shape)
            return
        key = (element_ty.name, *[size.value if isinstance(size, core.constexpr) else size for size in shape])
        if (fields := known.get(key)) is None:
            make(self, element_ty, shape)
            fields = known[key] = dict(vars(self))
        vars(self).update(fields)

    return init


def _known_tuple_types(core: ModuleType) -> Any:
    """Return `_type_for_tuple_values`: shapes are tuples of integers, and there are few of them."""
    make = core._type_for_tuple_values
    known: dict[Any, Any] = {}

    def tuple_type(values: Any, fields: Any = None) -> Any:
        key = tuple(value.value if type(value) is core.constexpr else None for value in values)
        if fields is not None or not all(type(size) is int for size in key):
            return make(values, fields)
        if (found := known.get(key)) is None:
            found = known[key] = make(values)
        return found

    return tuple_type
