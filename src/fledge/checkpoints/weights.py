"""Loads the tensors of a checkpoint into a model: for targets and drafters, on every device.

Our layers stack query, key and value (and gate and up) in one linear. Checkpoints store them separately or stacked. How
the weight of a linear is stored depends on the weight format (`formats/`).
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fledge.checkpoints import formats
from fledge.checkpoints.formats.at_load import Fp8AtLoad, check_spelling
from fledge.checkpoints.formats.dense import (
    DENSE,
    DENSE_DTYPES,
    Placement,
    StoredLinear,
    WeightFormat,
    dense_tensor,
)
from fledge.checkpoints.formats.quantized import UNREAD, Quantized, WeightSummary
from fledge.checkpoints.kv_scales import load_kv_scales
from fledge.checkpoints.staging import map_in_threads
from fledge.checkpoints.tensors import TensorFiles, TensorInfo
from fledge.errors import CheckpointError, ConfigError
from fledge.layers.attention import Attention
from fledge.layers.linear import Linear
from fledge.models.hf_config import ConfigFields
from fledge.progress import timed

Infos = Mapping[str, TensorInfo]  # by stored name

_log = logging.getLogger("fledge.checkpoints")
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FLOAT32_TENSOR = "e_score_correction_bias"  # float32 in any model: it decides between nearly equal experts


class _Uninitialized(TorchFunctionMode):
    """Disables `torch.nn.init`, which on the meta device would import torch.compile for nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_init = getattr(func, "__module__", None) == nn.init.__name__
        return kwargs["tensor"] if is_init else func(*args, **kwargs)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models on the meta device, without initialisation: with shapes, without memory."""
    with torch.device("meta"), _Uninitialized():
        yield


def weight_format(fields: ConfigFields, files: TensorFiles | None = None) -> WeightFormat:
    """The weight format that config.json declares; with `files`, also checks that undeclared weights are dense.

    Raises CheckpointError, with method and bits, for an unsupported format.
    """
    quantization = _quantization_of(fields)
    if quantization is None:
        for name, info in files.infos.items() if files else ():
            if info.dtype not in DENSE_DTYPES and (len(info.shape) > 1 or name.endswith((".weight", ".bias"))):
                raise CheckpointError(
                    f"{info.file}: tensor '{name}' is {info.dtype}, and config.json has no quantization_config that "
                    "says how to read it; only unquantised float32, float16 and bfloat16 weights need none"
                )
        return DENSE
    for module in pkgutil.iter_modules(formats.__path__, f"{formats.__name__}."):
        of = getattr(importlib.import_module(module.name), "weight_format", None)
        found: WeightFormat | None = of(quantization) if of else None
        if found is not None:
            return found
    raise CheckpointError(
        f"{fields.where}: weights quantised with {_described(quantization.values)}, which Fledge does not read; "
        "docs/quantised.md lists what it does"
    )


def requested_format(form: WeightFormat, asked: str | None, where: str) -> WeightFormat:
    """The format to load with, given vLLM's option `quantization`; None: the checkpoint's own. Raises ConfigError.

    Allowed are the checkpoint's own format, and fp8 for a checkpoint that is not quantised.
    """
    if asked is None:
        return form
    if isinstance(form, Quantized):
        check_spelling(asked, form.name, where)
        return form
    if asked != Fp8AtLoad.name:
        raise ConfigError(
            f"quantization: found '{asked}', but the weights of {where} are not quantised; allowed is fp8, which "
            "rounds them as they are loaded, or none"
        )
    return Fp8AtLoad()


def _quantization_of(fields: ConfigFields) -> ConfigFields | None:
    """The `quantization_config` of a config, or ModelOpt's hf_quant_config.json beside it."""
    beside = Path(fields.where).with_name("hf_quant_config.json")
    if "quantization_config" in fields or not beside.is_file():
        return fields.nested("quantization_config")
    found = ConfigFields.from_file(beside)
    return ConfigFields({"quant_method": "modelopt", **found.values}, found.where)


def _described(quantization: Mapping[str, Any]) -> str:
    """Method and bits, as far as the config has them."""
    method = quantization.get("quant_method") or quantization.get("quant_algo") or "an unnamed method"
    bits = [quantization.get("bits"), quantization.get("w_bit")]
    groups = quantization.get("config_groups")  # compressed-tensors: one for each kind of layer
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    bits += [number for number in (4, 8) if quantization.get(f"load_in_{number}bit")]  # bitsandbytes
    known = sorted({str(number) for number in bits if isinstance(number, int)})
    return f"{method}" + (f" ({' and '.join(known)} bits)" if known else "")


def stored_shapes(
    model: nn.Module, form: WeightFormat, names: Mapping[str, str], infos: Infos, *, tied: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of `model` must have, by our names before stacking.

    names: ours -> stored. Linears that are stored stacked are expected so. `tied` linears are not stored.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    parts, held = _parts(model, weight_names(names, form)), _held(names, infos)
    for name, tensor in model.state_dict().items():
        if name not in parts:
            shapes[name] = tuple(tensor.shape)
        elif name.rpartition(".")[0] not in tied:
            for part, rows in parts[name].items():
                linear = _stored_linear(part, rows, tensor.shape[-1], names, held)
                kinds = form.stored_shapes(linear) if tensor.dim() > 1 else {"bias": (rows,)}
                shapes |= {f"{part}.{kind}": shape for kind, shape in kinds.items()}
    return shapes


def weight_names(names: Mapping[str, str], form: WeightFormat, expected: Collection[str] = ()) -> dict[str, str]:
    """`names` without scales of activations, keys and values, except for those in `expected`."""
    unread = () if form is DENSE else UNREAD
    return {ours: stored for ours, stored in names.items() if ours in expected or ours.rpartition(".")[2] not in unread}


def summarize_weights(names: Mapping[str, str], infos: Infos, form: WeightFormat) -> WeightSummary | None:
    """Summarise the linears of a checkpoint in a quantised format `form`; None for other formats."""
    if not isinstance(form, Quantized):
        return None
    held = {name: kinds for name, kinds in _held(names, infos).items() if _is_linear(kinds)}
    return form.summary({_stored_name(name, kinds, names): kinds for name, kinds in held.items()})


def linear_of(part: str) -> str:
    """The linear of our layers that contains a stored linear: the stacked one, or the same."""
    parent, _, own = part.rpartition(".")
    return f"{parent}.{next((joined for joined, parts in _STACKED.items() if own in parts), own)}"


def _is_linear(kinds: Mapping[str, TensorInfo]) -> bool:
    return any(len(info.shape) > 1 for info in kinds.values())


def _held(names: Mapping[str, str], infos: Infos) -> dict[str, dict[str, TensorInfo]]:
    """The stored tensors by module and suffix, both of our names."""
    held: dict[str, dict[str, TensorInfo]] = {}
    for ours, stored in names.items():
        module, _, kind = ours.rpartition(".")
        held.setdefault(module, {})[kind] = infos[stored]
    return held


def _stored_name(module: str, kinds: Collection[str], names: Mapping[str, str]) -> str:
    """The stored name of a module."""
    return next((names[f"{module}.{kind}"].removesuffix(f".{kind}") for kind in kinds), module)


def _stored_linear(
    part: str, rows: int, columns: int, names: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]]
) -> StoredLinear:
    kinds = held.get(part, {})
    return StoredLinear(name=_stored_name(part, kinds, names), rows=rows, columns=columns, held=kinds)


def load_weights(
    model: nn.Module,
    files: TensorFiles,
    names: Mapping[str, str],
    form: WeightFormat,
    placement: Placement,
    *,
    tied: Collection[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Fill a model that was built on the meta device, one linear at a time; calls `progress(done, total)`.

    names: ours (before stacking) -> stored. Raises CheckpointError before reading if they are not exactly the
    `stored_shapes`. `tied` linears are left to the caller.
    """
    if form is not DENSE:
        load_kv_scales(model, files, names)
    shapes = stored_shapes(model, form, names, files.infos, tied=tied)
    names = weight_names(names, form, shapes)
    names = {name: stored for name, stored in names.items() if name in shapes or not _is_zero_bias(stored, files, form)}
    _check_names(files, names, shapes)
    parts, held = _parts(model, names), _held(names, files.infos)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, Linear) and n not in tied}
    precise = replace(placement, dtype=torch.float32)
    others = {name: like for name, like in model.state_dict().items() if name not in parts}

    def fill(name: str) -> nn.Module | Tensor:
        if name in others:
            place = precise if name.endswith(_FLOAT32_TENSOR) else placement
            return dense_tensor([files.read(names[name])], others[name], place)
        empty, tensors = linears[name], []
        for part, rows in parts[f"{name}.weight"].items():
            linear = _stored_linear(part, rows, empty.in_features, names, held)
            kinds = [*form.stored_shapes(linear), *(["bias"] if empty.bias is not None else [])]
            tensors.append((linear, {kind: files.read(names[f"{part}.{kind}"]) for kind in kinds}))
        return form.linear(empty, tensors, placement)

    # Largest first, so that no thread is left with the embeddings at the end.
    sizes = {name: like.numel() for name, like in others.items()} | {n: m.weight.numel() for n, m in linears.items()}
    order = sorted(sizes, key=lambda name: -sizes[name])
    filled: dict[str, nn.Module | Tensor] = {}
    with timed(_log, "weights read", len(order)):
        for name, made in zip(order, map_in_threads(fill, order, placement.device), strict=True):
            filled[name] = made
            if progress is not None:
                progress(len(filled), len(order))
    model.load_state_dict({name: filled[name] for name in others}, strict=False, assign=True)
    for name, empty in linears.items():
        linear = filled[name]
        if linear is not empty and isinstance(linear, nn.Module):
            model.set_submodule(name, linear)


def stored_tensors(model: nn.Module, *, is_joined: Callable[[str], bool] = lambda _name: False) -> dict[str, Tensor]:
    """The tensors of a dense model as a checkpoint stores them: stacked linears are split, except where `is_joined`."""
    out: dict[str, Tensor] = {}
    parts = _parts(model, [name for name in model.state_dict() if is_joined(name)])
    for name, tensor in model.state_dict().items():
        if name not in parts:
            out[name] = tensor
            continue
        kind, pieces = name.rpartition(".")[2], torch.split(tensor, list(parts[name].values()))
        out |= {f"{part}.{kind}": rows for part, rows in zip(parts[name], pieces, strict=True)}
    return out


def _parts(model: nn.Module, stored: Collection[str] = ()) -> dict[str, dict[str, int]]:
    """For each parameter of a linear: the stored linears that it consists of, in order, and their numbers of rows.

    A linear in `stored` under its own name is stored stacked.
    """
    joined = {name.rpartition(".")[0] for name in stored}
    found: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            parts = {name: module.out_features}
            parent, _, own = name.rpartition(".")
            if own in _STACKED and name not in joined:
                sizes = [module.out_features // 2] * 2
                if own == "qkv_proj":
                    attention = model.get_submodule(parent)
                    assert isinstance(attention, Attention)
                    sizes = [attention.config.query_size, attention.config.kv_size, attention.config.kv_size]
                parts = {f"{parent}.{part}": rows for part, rows in zip(_STACKED[own], sizes, strict=True)}
            found |= {f"{name}.{kind}": parts for kind in module.state_dict()}
    return found


def _is_zero_bias(stored: str, files: TensorFiles, form: WeightFormat) -> bool:
    """Whether a tensor is a bias of zeros, which AutoGPTQ writes for linears that have no bias."""
    return isinstance(form, Quantized) and stored.endswith(".bias") and not files.read(stored).any()


def _check_names(files: TensorFiles, names: Mapping[str, str], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - names.keys())
    unknown = sorted(names[name] for name in names.keys() - expected.keys())
    for wrong, form in ((missing, "tensor '{}' is missing{}"), (unknown, "unexpected tensor '{}'{}")):
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise CheckpointError(f"{files.directory}: {form.format(wrong[0], more)}")
    for name, shape in expected.items():
        info = files.infos[names[name]]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor '{names[name]}' has shape {list(info.shape)}, but config.json makes it "
                f"{list(shape)}"
            )
