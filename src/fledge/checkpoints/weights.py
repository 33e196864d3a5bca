"""Where the weights of a model are made from what a checkpoint holds: for targets and drafters, on every device.

Checkpoints store query, key and value (and gate and up) apart, or already joined; our layers have one linear for
each group. How the matrix of a linear is stored is the business of its weight format (`formats/`).
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fledge.checkpoints import formats
from fledge.checkpoints.formats.dense import DENSE_DTYPES, Dense, Placement, WeightFormat, dense_tensor
from fledge.checkpoints.tensors import TensorFiles
from fledge.errors import CheckpointError
from fledge.layers.config import LayerConfig
from fledge.layers.linear import Linear
from fledge.models.hf_config import ConfigFields

DENSE = Dense()
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def weight_format(fields: ConfigFields, files: TensorFiles | None = None) -> WeightFormat:
    """The format of the weights beside a config.json; with `files`, also whether these are what the config says.

    Raises, naming method and bits, for a format that is not read.
    """
    quantization = fields.nested("quantization_config")
    if quantization is None:
        for name, info in files.infos.items() if files else ():
            if len(info.shape) > 1 and info.dtype not in DENSE_DTYPES:
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
        "expected an unquantised checkpoint (bf16, fp16 or fp32)"
    )


def _described(quantization: Mapping[str, Any]) -> str:
    """Method and bits, as far as the config says them."""
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
    model: nn.Module,
    layer: LayerConfig,
    form: WeightFormat,
    *,
    stored: Collection[str] = (),
    tied: Collection[str] = (),
) -> dict[str, tuple[int, ...]]:
    """The tensors a checkpoint of `model` must have, under our names before joining.

    `stored` are the names it has: linears that it stores joined are expected so. `tied` are linears that are not
    stored, because the caller gives them another module's matrix.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in _plain_tensors(model).items()}
    for name, linear, parts in _linears(model, layer, stored):
        for part, rows in parts.items() if name not in tied else ():
            shapes |= {f"{part}.{kind}": shape for kind, shape in _part_shapes(part, rows, linear, form).items()}
    return shapes


def load_weights(
    model: nn.Module,
    layer: LayerConfig,
    files: TensorFiles,
    names: Mapping[str, str],
    form: WeightFormat,
    placement: Placement,
    *,
    tied: Collection[str] = (),
) -> None:
    """Fill a model that was built on the meta device, one linear at a time.

    `names` are what the files call each tensor, by our names before joining: exactly the `stored_shapes`, or one line
    says which do not fit, before anything is read. The caller completes `tied` linears itself.
    """
    _check_names(files, names, stored_shapes(model, layer, form, stored=names, tied=tied))
    plain = {n: dense_tensor([files.read(names[n])], like, placement) for n, like in _plain_tensors(model).items()}
    model.load_state_dict(plain, strict=False, assign=True)
    for name, empty, parts in list(_linears(model, layer, names)):
        if name in tied:
            continue
        tensors = [
            {kind: files.read(names[f"{part}.{kind}"]) for kind in _part_shapes(part, rows, empty, form)}
            for part, rows in parts.items()
        ]
        filled = form.linear(empty, tensors, placement)
        if filled is not empty:
            model.set_submodule(name, filled)


def unstack(tensors: Mapping[str, Tensor], layer: LayerConfig) -> dict[str, Tensor]:
    """The tensors of a dense model as a checkpoint stores them: joined linears apart, bit for bit."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        rows = _parts(module, len(tensor), layer) if module else {}
        if len(rows) < 2:
            out[name] = tensor
        else:
            out |= {f"{n}.{kind}": t for n, t in zip(rows, torch.split(tensor, list(rows.values())), strict=True)}
    return out


def _linears(
    model: nn.Module, layer: LayerConfig, stored: Collection[str]
) -> Iterator[tuple[str, Linear, dict[str, int]]]:
    """Each linear with its name and the stored linears it is made of, with their numbers of rows."""
    joined = {name.rpartition(".")[0] for name in stored}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            rows = module.out_features
            yield name, module, {name: rows} if name in joined else _parts(name, rows, layer)


def _parts(name: str, rows: int, layer: LayerConfig) -> dict[str, int]:
    parent, _, own = name.rpartition(".")
    sizes = {"qkv_proj": (layer.query_size, layer.kv_size, layer.kv_size), "gate_up_proj": (rows // 2, rows // 2)}
    if own not in _STACKED:
        return {name: rows}
    return {f"{parent}.{part}": size for part, size in zip(_STACKED[own], sizes[own], strict=True)}


def _part_shapes(name: str, rows: int, linear: Linear, form: WeightFormat) -> dict[str, tuple[int, ...]]:
    """What a checkpoint holds of one stored linear, by what follows its name."""
    return {**form.stored_shapes(name, rows, linear.in_features), **({} if linear.bias is None else {"bias": (rows,)})}


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is no linear's: norms, embeddings, maps."""
    linears = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    return {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in linears}


def _check_names(files: TensorFiles, names: Mapping[str, str], expected: Mapping[str, tuple[int, ...]]) -> None:
    where = files.directory
    if missing := sorted(expected.keys() - names.keys()):
        raise CheckpointError(f"{where}: tensor '{missing[0]}' is missing{_and_more(missing)}")
    if unknown := sorted(names[name] for name in names.keys() - expected.keys()):
        raise CheckpointError(f"{where}: unexpected tensor '{unknown[0]}'{_and_more(unknown)}")
    for name, shape in expected.items():
        info = files.infos[names[name]]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor '{names[name]}' has shape {list(info.shape)}, but config.json makes it "
                f"{list(shape)}"
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
