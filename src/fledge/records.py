"""Frozen dataclasses to JSON or YAML values and back, checked by their annotations.

Decodes recipes, benchmark results and drift results. Not msgspec or cattrs, which are not installed on hosts that have
only torch and transformers (see README, "GPU hosts").

Supported annotations: bool, int, float, str, Any, Literal, X | None, tuple[X, ...], tuple[X, Y], dict, Mapping, and
dataclasses of these. A field with a default is optional.
"""

import math
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from fledge.errors import ConfigError, nearest_name_hint

_T = TypeVar("_T")
_TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


class Record:
    """Base of frozen dataclasses that are written to files."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, tuples as lists."""
        return _encoded_fields(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str | None = None) -> Self:
        """Inverse of `to_dict`. Keys that are not fields (derived values) are ignored."""
        return decode(cls, values, where or cls.__name__, strict=False)


def encode(value: Any) -> Any:
    """Return JSON values: dataclasses as objects (by their own `to_dict` if they have one), tuples as lists."""
    if is_dataclass(value):
        return value.to_dict() if isinstance(value, Record) else _encoded_fields(value)
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def _encoded_fields(value: Any) -> dict[str, Any]:
    return {f.name: encode(getattr(value, f.name)) for f in fields(value)}


def decode(cls: type[_T], values: Any, where: str, *, strict: bool = True) -> _T:
    """Construct a `cls` from JSON or YAML values; raises ConfigError that names the key and what was expected.

    `strict` is for files that people write: unknown keys are errors that suggest the closest known one, a single value
    is accepted for a list, and so are values that YAML 1.1 misreads (1e-4 as text, on and off as booleans).
    """
    return _Decoder(where, strict).record(cls, values, "")  # type: ignore[no-any-return]


class _Decoder:
    def __init__(self, where: str, strict: bool) -> None:
        self.where = where
        self.strict = strict

    def error(self, key: str, found: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key.rstrip('.')}: found {found!r:.80}, {expected}")

    def record(self, cls: Any, values: Any, prefix: str) -> Any:
        if values is None and self.strict:
            values = {}
        if not isinstance(values, Mapping):
            raise self.error(prefix or "it", values, "expected a section" if self.strict else "expected an object")
        known = _known(cls)
        if self.strict and (unknown := [name for name in values if name not in known]):
            hint = nearest_name_hint(str(unknown[0]), known)
            raise ConfigError(f"{self.where}: unknown key '{prefix}{unknown[0]}'.{hint}")
        for name, (_, required) in known.items():
            if required and name not in values:
                other = "" if self.strict else "; was it written by another version?"
                raise ConfigError(f"{self.where}: '{prefix}{name}' is missing{other}")
        given = ((name, hint) for name, (hint, _) in known.items() if name in values)
        return cls(**{name: self.value(hint, values[name], f"{prefix}{name}") for name, hint in given})

    def value(self, hint: Any, value: Any, key: str) -> Any:
        if is_dataclass(hint):
            return self.record(hint, value, f"{key}.")
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            inner = [argument for argument in arguments if argument is not types.NoneType]
            if value is None and len(inner) < len(arguments):
                return None
            # The first alternative of the value's own type; else the first one, which then raises the error.
            fitting = next((one for one in inner if (get_origin(one) or one) is type(value)), inner[0])
            return self.value(fitting, value, key)
        if origin is Literal:
            return self.literal(arguments, value, key)
        if origin is tuple:
            return self.items(arguments, value, key)
        if hint is dict or origin in (dict, Mapping):
            if not isinstance(value, Mapping):
                raise self.error(key, value, "expected an object")
            inner_hint = arguments[1] if arguments else Any
            return {name: self.value(inner_hint, item, f"{key}.{name}") for name, item in value.items()}
        if hint is Any or hint is object:
            return value
        if hint is float and isinstance(value, (int | float | str) if self.strict else (int | float)):
            with suppress(ValueError):
                value = value if isinstance(value, bool) else float(value)
        if type(value) is not hint:
            raise self.error(key, value, f"expected {_TYPE_NAMES.get(hint, hint.__name__)}")
        if hint is float and not self.strict and not math.isfinite(value):
            raise self.error(key, value, "expected a finite number")
        return value

    def literal(self, allowed: tuple[Any, ...], value: Any, key: str) -> Any:
        if self.strict and isinstance(value, bool):
            value = "on" if value else "off"
        elif self.strict and isinstance(value, float):
            value = str(value)  # YAML reads 3.1 and the like as numbers
        if value not in allowed:
            raise self.error(key, value, f"allowed is {' or '.join(map(repr, allowed))}")
        return value

    def items(self, arguments: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            if not self.strict:
                raise self.error(key, value, "expected a list")
            value = [value]
        hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(hints) != len(value):
            raise ConfigError(f"{self.where}: {key}: found {len(value)} values, expected {len(hints)}")
        return tuple(self.value(hint, item, key) for hint, item in zip(hints, value, strict=True))


@cache
def _known(cls: Any) -> dict[str, tuple[Any, bool]]:
    """By field name: its annotation, and whether it is required."""
    hints = get_type_hints(cls)
    return {
        f.name: (hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(cls) if f.init
    }
