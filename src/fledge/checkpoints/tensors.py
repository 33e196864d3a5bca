"""Reads the tensors of a model directory (safetensors or pickle, single or sharded), and writes model directories."""

import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fledge.errors import CheckpointError, describe
from fledge.files import atomic_directory, atomic_path, parse_json, write_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SHARD_NAME = re.compile(r"\w[\w.\- ]{0,254}", re.ASCII)
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"}
_TORCH_NAMES |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
_TORCH_NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}


@dataclass(frozen=True)
class TensorInfo:
    """The header of a stored tensor."""

    file: Path
    dtype: str  # torch's name
    shape: tuple[int, ...]


class TensorFiles:
    """All tensors of a directory by name. Opening reads only headers (of safetensors); `read` loads one tensor.

    Tensors are memory-mapped: copy those that must outlive the file. Files stay open as long as this object exists.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = _find_files(directory)
        self._readers: dict[Path, Callable[[str], Tensor]] = {}
        self.infos: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, dtype, shape in self._scan(file):
                if name in self.infos:
                    raise CheckpointError(
                        f"{file}: tensor '{name}' is also in {self.infos[name].file.name}; remove one of the two"
                    )
                self.infos[name] = TensorInfo(file, dtype, tuple(shape))

    def read(self, name: str) -> Tensor:
        return self._read(self.infos[name].file, name)

    def _read(self, file: Path, name: str) -> Tensor:
        with _errors_of(file):
            return self._readers[file](name)

    def _scan(self, file: Path) -> Iterator[tuple[str, str, Sequence[int]]]:
        if file.suffix == ".bin":
            tensors = _read_pickle(file)
            self._readers[file] = tensors.__getitem__
            for name, tensor in tensors.items():
                yield name, str(tensor.dtype).removeprefix("torch."), tensor.shape
            return
        with _errors_of(file):
            handle: Any = safe_open(str(file), framework="pt")
            self._readers[file] = handle.get_tensor
            for name in handle.keys():  # noqa: SIM118 - not a dict
                part = handle.get_slice(name)
                yield name, _TORCH_NAMES.get(part.get_dtype(), part.get_dtype()), part.get_shape()


def not_finite(tensor: Tensor) -> Tensor:
    """A mask of NaN and infinite values. Supports 8-bit floats, unlike `torch.isfinite`."""
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) & 0x7F) == 0x7F
    return ~(tensor.float() if tensor.element_size() == 1 else tensor).isfinite()


def _find_files(directory: Path) -> list[Path]:
    """The files of one complete set of weights: safetensors before pickle, sharded (with an index) before single."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    for single, index in ((_SINGLE, _INDEX), (_BIN, _BIN_INDEX)):
        if (directory / index).is_file():
            return _indexed_files(directory / index)
        if (directory / single).is_file():
            return [directory / single]
    loose = sorted(directory.glob("*.safetensors"))
    if len(loose) == 1:
        return loose
    if loose:
        raise CheckpointError(
            f"{directory}: {len(loose)} safetensors files but no {_INDEX} to say which belong together"
        )
    raise CheckpointError(f"{directory}: no {_SINGLE}, {_INDEX} or {_BIN}; this directory holds no weights")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index}: not a weight index (expected JSON with a 'weight_map' object)") from None
    for name in names:
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise CheckpointError(f"{index}: shard name {name!r:.80} is not the plain name of a file beside it")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: names shard '{name}', which is not there; the download is incomplete")
    return [index.parent / name for name in names]


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: truncated or corrupt safetensors file ({error}); fetch it again") from None


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # Unpickling arbitrary bytes can raise anything.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file}: truncated, corrupt or unsafe pickle file ({reason}); fetch it again") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise CheckpointError(f"{file}: expected a mapping of names to tensors")
    return tensors


def write_model(
    directory: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Mapping[str, Any]],
    copied: Iterable[Path] = (),
) -> None:
    """Write a model directory: tensors, JSON `files` by name, and `copied` files. Refuses an existing destination."""
    refuse_existing(directory)
    stored = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with atomic_directory(directory) as temporary:
        try:
            with atomic_path(temporary / _SINGLE) as file:
                save_file(stored, file, {"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{directory}: cannot be written: {describe(error)}") from None
        for name, values in files.items():
            write_json(temporary / name, values)
        for path in copied:
            shutil.copyfile(path, temporary / path.name)


def refuse_existing(destination: Path) -> None:
    """Raise CheckpointError if `destination` exists."""
    if destination.exists():
        raise CheckpointError(f"{destination}: already exists; choose another destination or remove it first")
