"""The target's hidden states on disk, so that training needs no target: one row for each token, in the store's order.

    states.json                 what was captured, from what; written first
    shard-00000.bin ...         [tokens, (aux states + 1) * hidden], raw numbers: aux states side by side, then final
    target.safetensors          the target's embedding and head, which training needs too

A shard gets its name when it is complete, so an interrupted capture goes on with the first one that is missing.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fledge.errors import FledgeError
from fledge.models.config import TargetConfig
from fledge.models.target.decoder import TargetStates
from fledge.progress import Progress
from fledge.training.capture import DTYPES, CaptureModel
from fledge.training.data.packing import collate
from fledge.training.data.store import TokenStore

_HEADER, _ENDS = "states.json", "target.safetensors"
_FREE_BYTES_TO_LEAVE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """What a state store holds, and of what. Two stores with equal formats hold the same states."""

    examples: str  # digest of the token store
    target: str  # digest of its weights
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    shards: tuple[int, ...]  # first example of each shard, then the number of examples

    @property
    def width(self) -> int:
        return (len(self.aux_layer_ids) + 1) * self.hidden_size

    def bytes_of(self, tokens: int) -> int:
        return tokens * self.width * DTYPES[self.dtype].itemsize


def plan_states(
    store: TokenStore, target: TargetConfig, target_digest: str, aux_layer_ids: tuple[int, ...], shard_tokens: int
) -> StateFormat:
    """Cut the examples into shards of about `shard_tokens` tokens."""
    number = (np.cumsum(store.lengths) - store.lengths) // shard_tokens  # shard of each example
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return StateFormat(
        examples=store.digest,
        target=target_digest,
        aux_layer_ids=aux_layer_ids,
        hidden_size=target.hidden_size,
        dtype=target.dtype,
        shards=(*map(int, first), len(store)),
    )


def write_states(
    directory: Path,
    store: TokenStore,
    capture: CaptureModel,
    form: StateFormat,
    *,
    batch_tokens: int,
    progress: Progress,
) -> None:
    """Fill `directory`. Says how many bytes that takes and refuses when the disk has no room for them."""
    if _read_header(directory) != _as_json(form):  # of another capture, or none
        for old in (*directory.glob("shard-*"), directory / _ENDS):
            old.unlink(missing_ok=True)
        _write_atomically(directory / _HEADER, json.dumps(_as_json(form), indent=2).encode())
    lengths = store.lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sizes = [form.bytes_of(int(starts[b] - starts[a])) for a, b in zip(form.shards, form.shards[1:], strict=False)]
    missing = [i for i, size in enumerate(sizes) if not _is_complete(_shard(directory, i), size)]
    needed, free = sum(sizes[i] for i in missing), shutil.disk_usage(directory).free
    progress.say(
        f"capture: {store.total_tokens:,} tokens, {sum(sizes):,} bytes of hidden states "
        f"({needed:,} to write, {free:,} free on the disk)"
    )
    if needed + _FREE_BYTES_TO_LEAVE > free:
        raise FledgeError(
            f"{directory}: {needed:,} bytes of hidden states do not fit on this disk ({free:,} bytes free, "
            f"{_FREE_BYTES_TO_LEAVE:,} of them left alone); use capture.mode=online, or another output directory"
        )
    if not (directory / _ENDS).is_file():
        _write_ends(directory / _ENDS, capture)
    with progress.task("capture", total=store.total_tokens) as advance:
        for i, size in enumerate(sizes):
            first, last = form.shards[i], form.shards[i + 1]
            if i not in missing:
                advance(int(starts[last] - starts[first]))
                continue
            temporary = _shard(directory, i).with_suffix(".partial")
            out = np.memmap(temporary, dtype=_raw(form.dtype), mode="w+", shape=(size // _row_bytes(form), form.width))
            for rows in _passes(lengths, first, last, batch_tokens):
                _capture_pass(out, starts - starts[first], lengths, store, capture, form, rows)
                advance(sum(int(lengths[e]) for row in rows for e in row))
            out.flush()
            del out
            os.replace(temporary, _shard(directory, i))


def _passes(lengths: np.ndarray, first: int, last: int, batch_tokens: int) -> list[list[tuple[int, ...]]]:
    """Examples `first`..`last` as the rows of each pass: about `batch_tokens` places, rows as long as the longest."""
    width = int(lengths[first:last].max())
    rows: list[tuple[int, ...]] = []
    row: list[int] = []
    used = 0
    for example in range(first, last):
        if row and used + lengths[example] > width:
            rows.append(tuple(row))
            row, used = [], 0
        row.append(example)
        used += int(lengths[example])
    rows.append(tuple(row))
    per_pass = max(1, batch_tokens // width)
    return [rows[i : i + per_pass] for i in range(0, len(rows), per_pass)]


def _capture_pass(
    out: np.memmap,
    starts: np.ndarray,
    lengths: np.ndarray,
    store: TokenStore,
    capture: CaptureModel,
    form: StateFormat,
    rows: Sequence[tuple[int, ...]],
) -> None:
    width = max(sum(int(lengths[e]) for e in row) for row in rows)
    states = capture.states(collate(store, rows, width).to(capture.device), form.aux_layer_ids)
    both = states.final if states.aux is None else torch.cat([states.aux, states.final], dim=-1)
    numbers = both.view(_raw_torch(form.dtype)).cpu().numpy()  # [rows, width, form.width]
    for i, row in enumerate(rows):
        at = 0
        for example in row:
            size = int(lengths[example])
            out[starts[example] : starts[example] + size] = numbers[i, at : at + size]
            at += size


class StateStore:
    """States of a token store's examples, read from disk as rows of training want them."""

    def __init__(self, directory: Path, form: StateFormat, lengths: np.ndarray) -> None:
        self.form = form
        self._lengths = lengths
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._shards: list[np.ndarray] = []
        for i, (first, last) in enumerate(zip(form.shards, form.shards[1:], strict=False)):
            tokens = int(self._starts[last] - self._starts[first])
            path = _shard(directory, i)
            if not _is_complete(path, form.bytes_of(tokens)):
                raise FledgeError(f"{path}: missing or incomplete; run the capture stage again")
            self._shards.append(np.memmap(path, dtype=_raw(form.dtype), mode="r", shape=(tokens, form.width)))
        self._directory = directory

    @classmethod
    def open(
        cls, directory: Path, store: TokenStore, *, target: str, aux_layer_ids: tuple[int, ...] | None
    ) -> "StateStore":
        """Open and check that these are the states of `store` from `target`, with the aux layers the drafter reads."""
        header = _read_header(directory)
        if header is None:
            raise FledgeError(f"{directory / _HEADER}: missing; run the capture stage first")
        expected = {"examples": store.digest, "target": target, "aux_layer_ids": list(aux_layer_ids or ())}
        for name, value in expected.items():
            if header.get(name) != value:
                raise FledgeError(
                    f"{directory / _HEADER}: {name} is {header.get(name)!r}, expected {value!r}; "
                    "these states are of another run: capture again"
                )
        tuples = {name: tuple(header[name]) for name in ("aux_layer_ids", "shards")}
        return cls(directory, StateFormat(**{**header, **tuples}), store.lengths)

    def read(self, rows: Sequence[tuple[int, ...]], length: int) -> TargetStates:
        """States [rows, length, ...] on the CPU, laid out as `collate` lays out tokens; zeros at padding."""
        numbers = np.zeros((len(rows), length, self.form.width), dtype=_raw(self.form.dtype))
        for i, row in enumerate(rows):
            at = 0
            for example in row:
                size = min(int(self._lengths[example]), length - at)
                shard = int(np.searchsorted(self.form.shards, example, side="right")) - 1
                start = int(self._starts[example] - self._starts[self.form.shards[shard]])
                numbers[i, at : at + size] = self._shards[shard][start : start + size]
                at += size
        both = torch.from_numpy(numbers).view(DTYPES[self.form.dtype])
        hidden = self.form.hidden_size
        aux = both[..., :-hidden].contiguous() if self.form.aux_layer_ids else None
        return TargetStates(final=both[..., -hidden:].contiguous(), aux=aux)

    def ends(self, device: torch.device | str) -> "TargetEnds":
        """The target's embedding and head."""
        with safe_open(str(self._directory / _ENDS), framework="pt") as file:
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 - not a dict
        return TargetEnds(
            embedding_weight=tensors["embedding_weight"],
            head_weight=tensors.get("head_weight", tensors["embedding_weight"]),
            head_bias=tensors.get("head_bias"),
        )


@dataclass(frozen=True, kw_only=True)
class TargetEnds:
    """Both ends of a target: all of it that training needs when its states are on disk."""

    embedding_weight: Tensor  # [vocab, hidden]
    head_weight: Tensor  # [vocab, hidden]
    head_bias: Tensor | None = None  # [vocab]


def _write_ends(path: Path, capture: CaptureModel) -> None:
    tensors = {"embedding_weight": capture.embedding_weight}
    if capture.head_weight.data_ptr() != capture.embedding_weight.data_ptr():
        tensors["head_weight"] = capture.head_weight
    if capture.head_bias is not None:
        tensors["head_bias"] = capture.head_bias
    temporary = path.with_suffix(".partial")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
    os.replace(temporary, path)


def _shard(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05}.bin"


def _is_complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _raw(dtype: str) -> np.dtype[Any]:
    """numpy has no bfloat16: numbers are kept as they are, and only their width is told."""
    return np.dtype(np.int32 if DTYPES[dtype].itemsize == 4 else np.int16)


def _raw_torch(dtype: str) -> torch.dtype:
    return torch.int32 if DTYPES[dtype].itemsize == 4 else torch.int16


def _row_bytes(form: StateFormat) -> int:
    return form.bytes_of(1)


def _as_json(form: StateFormat) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(form)))
    return values


def _read_header(directory: Path) -> dict[str, Any] | None:
    try:
        values = json.loads((directory / _HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)
