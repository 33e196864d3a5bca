"""The target's hidden states on disk, so that training needs no target: one row for each token, in the store's order.

    states.json                 what was captured, from what; written first
    shard-00000.bin ...         [tokens, (aux states + 1) * hidden], raw numbers: aux states side by side, then final
    target.safetensors          the target's embedding and head, which training needs too

A shard gets its name when it is complete, so an interrupted capture goes on with the first one that is missing.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fledge.devices import DTYPES
from fledge.errors import FledgeError
from fledge.files import atomic_path, read_json, remove_temporaries, write_json
from fledge.models.config import TargetConfig
from fledge.models.target.decoder import TargetStates
from fledge.progress import Progress
from fledge.records import Record
from fledge.training.capture import CaptureModel, TargetEnds
from fledge.training.data.packing import collate
from fledge.training.data.store import TokenStore

_HEADER, _ENDS = "states.json", "target.safetensors"
_FREE_BYTES_TO_LEAVE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StateFormat(Record):
    """What a store of hidden states holds, and of what. Two stores with equal formats hold the same states."""

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

    @property
    def raw(self) -> torch.dtype:
        """numpy has no bfloat16: numbers are kept as they are, and only their width is told."""
        return torch.int32 if DTYPES[self.dtype].itemsize == 4 else torch.int16

    def mapped(self, path: Path, tokens: int, mode: Any) -> np.memmap[Any, Any]:
        """A shard's numbers [tokens, width]."""
        return np.memmap(path, dtype=str(self.raw).removeprefix("torch."), mode=mode, shape=(tokens, self.width))


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
    remove_temporaries(directory)
    if read_json(directory / _HEADER) != form.to_dict():  # of another capture, or none
        for old in (*directory.glob("shard-*"), directory / _ENDS):
            old.unlink(missing_ok=True)
        write_json(directory / _HEADER, form.to_dict())
    shards = _shards(directory, form, store.offsets)
    needed = sum(form.bytes_of(tokens) for _, tokens, complete in shards if not complete)
    free = shutil.disk_usage(directory).free
    progress.say(
        f"capture: {store.total_tokens:,} tokens, {form.bytes_of(store.total_tokens):,} bytes of hidden states "
        f"({needed:,} to write, {free:,} free on the disk)"
    )
    if needed + _FREE_BYTES_TO_LEAVE > free:
        raise FledgeError(
            f"{directory}: {needed:,} bytes of hidden states do not fit on this disk ({free:,} bytes free, "
            f"{_FREE_BYTES_TO_LEAVE:,} of them left alone); use capture.mode=online, or another output directory"
        )
    ends = capture.ends
    if not (directory / _ENDS).is_file():
        tied = ends.head_weight.data_ptr() == ends.embedding_weight.data_ptr()
        tensors = {name: x for name, x in vars(ends).items() if x is not None and not (tied and name == "head_weight")}
        with atomic_path(directory / _ENDS) as temporary:
            save_file({name: x.contiguous().cpu() for name, x in tensors.items()}, temporary)
    with progress.task("capture", total=store.total_tokens) as advance:
        for (path, tokens, complete), examples in zip(shards, pairwise(form.shards), strict=True):
            if complete:
                advance(tokens)
                continue
            with atomic_path(path) as temporary:
                out, done = form.mapped(temporary, tokens, "w+"), 0
                for rows in _passes(store.lengths, *examples, batch_tokens):
                    batch = collate(store, rows, max(int(store.lengths[list(row)].sum()) for row in rows))
                    states = capture.states(batch.to(ends.head_weight.device), form.aux_layer_ids)
                    both = states.final if states.aux is None else torch.cat([states.aux, states.final], dim=-1)
                    numbers = both.view(form.raw).cpu()[batch.document >= 0]  # rows hold the examples in order
                    out[done : done + len(numbers)] = numbers.numpy()
                    done += len(numbers)
                    advance(len(numbers))
                out.flush()
                del out


def _passes(lengths: np.ndarray, first: int, last: int, batch_tokens: int) -> list[list[tuple[int, ...]]]:
    """Examples `first`..`last` as the rows of each pass: about `batch_tokens` places, rows as long as the longest."""
    width = int(lengths[first:last].max())
    rows: list[list[int]] = []
    room = 0
    for example, length in enumerate(lengths[first:last].tolist(), start=first):
        if length > room:
            rows.append([])
            room = width
        rows[-1].append(example)
        room -= length
    per_pass = max(1, batch_tokens // width)
    return [[tuple(row) for row in rows[i : i + per_pass]] for i in range(0, len(rows), per_pass)]


def _shards(directory: Path, form: StateFormat, offsets: np.ndarray) -> list[tuple[Path, int, bool]]:
    """Each shard's file, its tokens, and whether it is whole."""
    shards = []
    for i, (first, last) in enumerate(pairwise(form.shards)):
        path, tokens = directory / f"shard-{i:05}.bin", int(offsets[last] - offsets[first])
        shards.append((path, tokens, path.is_file() and path.stat().st_size == form.bytes_of(tokens)))
    return shards


class HiddenStateStore:
    """States of a token store's examples, read from disk as rows of training want them."""

    def __init__(
        self, directory: Path, store: TokenStore, *, target: str, aux_layer_ids: tuple[int, ...] | None
    ) -> None:
        """Open and check that these are the states of `store` from `target`, with the aux layers the drafter reads."""
        header = read_json(directory / _HEADER)
        if header is None:
            raise FledgeError(f"{directory / _HEADER}: missing; run the capture stage first")
        expected = {"examples": store.digest, "target": target, "aux_layer_ids": list(aux_layer_ids or ())}
        for name, value in expected.items():
            if header.get(name) != value:
                raise FledgeError(
                    f"{directory / _HEADER}: {name} is {header.get(name)!r}, expected {value!r}; "
                    "these states are of another run: capture again"
                )
        self.form = StateFormat.from_dict(header, str(directory / _HEADER))
        self._directory, self._offsets = directory, store.offsets
        self._shards: list[np.ndarray] = []
        for path, tokens, complete in _shards(directory, self.form, store.offsets):
            if not complete:
                raise FledgeError(f"{path}: missing or incomplete; run the capture stage again")
            self._shards.append(self.form.mapped(path, tokens, "r"))

    def read(self, rows: Sequence[tuple[int, ...]], length: int) -> TargetStates:
        """States [rows, length, ...] on the CPU, laid out as `collate` lays out tokens; zeros at padding."""
        both = torch.zeros(len(rows), length, self.form.width, dtype=self.form.raw)
        numbers = both.numpy()
        for i, row in enumerate(rows):
            used = 0
            for example in row:
                low, high = int(self._offsets[example]), int(self._offsets[example + 1])
                size = min(high - low, length - used)
                shard = int(np.searchsorted(self.form.shards, example, side="right")) - 1
                start = low - int(self._offsets[self.form.shards[shard]])
                numbers[i, used : used + size] = self._shards[shard][start : start + size]
                used += size
        states, hidden = both.view(DTYPES[self.form.dtype]), self.form.hidden_size
        aux = states[..., :-hidden].contiguous() if self.form.aux_layer_ids else None
        return TargetStates(final=states[..., -hidden:].contiguous(), aux=aux)

    def ends(self, device: torch.device | str) -> TargetEnds:
        """The target's embedding and head."""
        with safe_open(str(self._directory / _ENDS), framework="pt") as file:
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 - not a dict
        return TargetEnds(**{"head_weight": tensors["embedding_weight"], **tensors})
