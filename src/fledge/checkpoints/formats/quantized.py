"""What all quantised formats share: which linears are stored in fewer bits, how, and as what they are loaded.

A format says by name how a linear is stored: its `Scheme`, or that it is none of its own. A linear that lies there as
a plain matrix is dense whatever the config says of it: published lists name some of them only.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from torch import Tensor, nn

from fledge.checkpoints.formats.dense import DENSE, DENSE_DTYPES, Placement, StoredLinear, dense_tensor
from fledge.checkpoints.tensors import TensorInfo
from fledge.errors import CheckpointError
from fledge.kernels.quantized_linear import QuantizedWeight, dequantize, join_rows
from fledge.layers.linear import Linear
from fledge.layers.quantized import QuantizedLinear
from fledge.models.hf_config import ConfigFields

# Scales of activations, which a scheme may read, and of caches, which `kv_scales` reads.
UNREAD = {"input_scale", "input_scale_ub", "activation_scale", "input_global_scale", "output_scale"}
UNREAD |= {"q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale"}
_AS_MATRIX = ".kv_b_proj"  # latent attention reads it other than by a product


class Scheme(Protocol):
    """How one matrix is stored."""

    @property
    def description(self) -> str:
        """As in "4-bit integers, groups of 128"."""
        ...

    def parameters(self, held: Mapping[str, TensorInfo]) -> int:
        """How many numbers the matrix has."""
        ...

    def shapes(self, linear: StoredLinear) -> dict[str, tuple[int, ...]]:
        """The tensors of the matrix, and their shapes. Raises where it cannot be stored so."""
        ...

    def read(self, linear: StoredLinear, tensors: Mapping[str, Tensor]) -> QuantizedWeight: ...


@dataclass(frozen=True, kw_only=True)
class WeightSummary:
    """What `fledge inspect` says of weights that are not plain."""

    format: str
    kinds: Mapping[str, int]  # how many linears there are of each description
    dense: Sequence[str]  # linears that stay as they were, by their own names
    parameters: Mapping[str, int]  # of the others


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A `WeightFormat`. `scheme_of` says how a linear is stored, by its name and what is held; None: plainly."""

    name: str
    scheme_of: Callable[[str, Mapping[str, TensorInfo]], Scheme | None]

    def stored_shapes(self, linear: StoredLinear) -> Mapping[str, tuple[int, ...]]:
        scheme = self._scheme(linear.name, linear.held)
        return DENSE.stored_shapes(linear) if scheme is None else scheme.shapes(linear)

    def linear(
        self, empty: Linear, parts: Sequence[tuple[StoredLinear, Mapping[str, Tensor]]], placement: Placement
    ) -> nn.Module:
        weights = [self._read(linear, tensors, placement) for linear, tensors in parts]
        read = [weight for weight in weights if weight is not None]
        joined = join_rows(read) if len(read) == len(parts) and _AS_MATRIX not in parts[0][0].name else None
        if joined is None:
            return DENSE.linear(
                empty,
                [
                    (linear, tensors if weight is None else {**tensors, "weight": dequantize(weight, placement.dtype)})
                    for (linear, tensors), weight in zip(parts, weights, strict=True)
                ],
                placement,
            )
        bias = None
        if empty.bias is not None:
            bias = dense_tensor([tensors["bias"] for _, tensors in parts], empty.bias, placement)
        return QuantizedLinear(joined, bias, placement.dtype)

    def _read(
        self, linear: StoredLinear, tensors: Mapping[str, Tensor], placement: Placement
    ) -> QuantizedWeight | None:
        """The matrix where the model will be; always a copy, for what is mapped from a file would change with it."""
        if (scheme := self._scheme(linear.name, linear.held)) is None:
            return None
        return scheme.read(linear, {kind: t.to(device=placement.device, copy=True) for kind, t in tensors.items()})

    def summary(self, linears: Mapping[str, Mapping[str, TensorInfo]]) -> WeightSummary:
        """`linears` are all that a checkpoint holds: of each, what it holds."""
        schemes = {name: self._scheme(name, held) for name, held in linears.items()}
        found = {name: scheme for name, scheme in schemes.items() if scheme is not None}
        return WeightSummary(
            format=self.name,
            kinds=Counter(scheme.description for scheme in found.values()),
            dense=sorted({name.rpartition(".")[2] for name in schemes.keys() - found.keys()}),
            parameters={name: _parameters(scheme, name, linears[name]) for name, scheme in found.items()},
        )

    def _scheme(self, name: str, held: Mapping[str, TensorInfo]) -> Scheme | None:
        is_plain = held.keys() <= {"weight", "bias", *UNREAD} and "weight" in held
        if is_plain and held["weight"].dtype in DENSE_DTYPES:
            return None
        return self.scheme_of(name, held)


def _parameters(scheme: Scheme, name: str, held: Mapping[str, TensorInfo]) -> int:
    try:
        return scheme.parameters(held)
    except KeyError as error:
        file = next(iter(held.values())).file
        raise CheckpointError(f"{file}: tensor '{name}.{error.args[0]}' is missing; fetch it again") from None


def refusal(linear: StoredLinear, kind: str, expected: str) -> CheckpointError:
    """That a tensor of a linear is not as its format has it."""
    info = linear.held[kind]
    found = f"{info.dtype} of shape {list(info.shape)}"
    return CheckpointError(f"{info.file}: tensor '{linear.name}.{kind}' is {found}, expected {expected}")


def expect_dtypes(linear: StoredLinear, **kinds: Sequence[str] | str) -> None:
    """Raise where a tensor is of another dtype than these."""
    for kind, dtypes in kinds.items():
        allowed = [dtypes] if isinstance(dtypes, str) else list(dtypes)
        if linear.held[kind].dtype not in allowed:
            raise refusal(linear, kind, " or ".join(allowed))


def read_group_size(fields: ConfigFields, default: int) -> int | None:
    """How many columns share a scale; None: all of a row, for which configs say -1."""
    size = fields.values.get("group_size")
    size = default if size is None else size
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise fields.error("group_size", size, "a positive integer, or -1 for whole rows")
    return None if size == -1 else size


def names_of(fields: ConfigFields, *lists: str) -> Callable[[str], bool]:
    """Whether a linear is named by one of these lists of a config: in whole, in part, by `re:...` or by wildcards."""
    patterns: list[str] = []
    for field in lists:
        listed = fields.values.get(field) or []
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise fields.error(field, listed, "a list of names")
        patterns += listed
    return lambda name: any(matches(pattern, name, fields) for pattern in patterns)


def matches(pattern: str, name: str, fields: ConfigFields) -> bool:
    """Whether a pattern names a linear, or a part of the model that it is in."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise CheckpointError(f"{fields.where}: '{pattern}' is no regular expression: {error}") from None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
