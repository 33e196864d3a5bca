"""Loads the rows of an optimizer step, while the device works on the step before, and the target's states for them.

The states may be on disk, so that training needs no target: one row for each token, in the order of the examples.

    states.json                 what was captured, and from what; written first
    shard-00000.bin ...         raw [tokens, (aux states + 1) * hidden]: aux states side by side, then the final state
    target.safetensors          the target's embedding and head, which training needs too

A shard is renamed when it is complete, so an interrupted capture resumes with the first shard that is missing. Shards
and target.safetensors are sealed (`fledge.files.seal`): they end with a digest, which is checked when they are opened.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from fledge.devices import DTYPES
from fledge.errors import ConfigError, FledgeError
from fledge.files import SEAL_BYTES, atomic_path, check_seal, read_json, remove_temporaries, seal, write_json
from fledge.models.config import TargetConfig
from fledge.models.target.decoder import TargetStates
from fledge.progress import Progress
from fledge.records import Record
from fledge.training.capture import CaptureModel, TargetEnds
from fledge.training.data.examples import PackedBatch, TokenStore, collate, map_tensors, packed_rows
from fledge.training.data.stream import StateStream
from fledge.training.recipe import FitSection

_AGAIN = "capture again: --force capture"
_HEADER, _ENDS = "states.json", "target.safetensors"
_FREE_BYTES_TO_LEAVE = 1 << 30
# Where a step begins: epoch and row. A step may cross the end of an epoch, so all steps have the same number of rows.
RowPosition = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class StateFormat(Record):
    """Describes a store of hidden states. Two stores with equal formats hold the same states."""

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

    def shards_in(self, directory: Path, store: TokenStore) -> list[tuple[Path, int, bool]]:
        """Each shard's file, its tokens, and whether it is whole."""
        sizes = np.diff(store.offsets[list(self.shards)]).tolist()
        files = [(directory / f"shard-{i:05}.bin", tokens) for i, tokens in enumerate(sizes)]
        return [(f, n, f.is_file() and f.stat().st_size == self.bytes_of(n) + SEAL_BYTES) for f, n in files]

    def mapped(self, path: Path, tokens: int) -> Tensor:
        """Map a shard as [tokens, width]. The map is shared, because a private one would count as used memory."""
        numbers = torch.from_file(str(path), shared=True, size=tokens * self.width, dtype=DTYPES[self.dtype])
        return numbers.view(tokens, self.width)


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


# Yields the states [tokens, width] of the examples in these ranges, in order; no tensor spans two ranges.
StateSource = Callable[[Sequence[tuple[int, int]]], Iterator[Tensor]]


def write_states(
    directory: Path,
    store: TokenStore,
    ends: TargetEnds,
    form: StateFormat,
    source: StateSource,
    *,
    progress: Progress,
) -> None:
    """Write the states to `directory`. Reports their size, and raises FledgeError if the disk has too little room."""
    remove_temporaries(directory)
    if read_json(directory / _HEADER) != form.to_dict():  # there is another capture, or none
        for old in (*directory.glob("shard-*"), directory / _ENDS):
            old.unlink(missing_ok=True)
        write_json(directory / _HEADER, form.to_dict())
    shards = form.shards_in(directory, store)
    needed = sum(form.bytes_of(tokens) for _, tokens, complete in shards if not complete)
    free = shutil.disk_usage(directory).free
    what = f"{store.total_tokens:,} tokens, {form.bytes_of(store.total_tokens):,} bytes of hidden states"
    progress.say(f"capture: {what} ({needed:,} to write, {free:,} free on the disk)")
    if needed + _FREE_BYTES_TO_LEAVE > free:
        room = f"{free:,} bytes free, {_FREE_BYTES_TO_LEAVE:,} of them left alone"
        what = f"{needed:,} bytes of hidden states do not fit on this disk ({room})"
        raise FledgeError(f"{directory}: {what}; use capture.mode=online, or another output directory")
    if not (directory / _ENDS).is_file():
        tied = ends.head_weight.data_ptr() == ends.embedding_weight.data_ptr()
        tensors = {name: x for name, x in vars(ends).items() if x is not None and not (tied and name == "head_weight")}
        with atomic_path(directory / _ENDS) as temporary:
            save_file({name: x.contiguous().cpu() for name, x in tensors.items()}, temporary)
            seal(temporary)
    ranges = [pair for (*_, complete), pair in zip(shards, pairwise(form.shards), strict=True) if not complete]
    parts = source(ranges)
    with progress.task("capture", total=store.total_tokens) as advance:
        for path, tokens, complete in shards:
            if complete:
                advance(tokens)
                continue
            with atomic_path(path) as temporary:
                with temporary.open("r+b") as file:  # else writing to the map would end in SIGBUS on a full disk
                    os.posix_fallocate(file.fileno(), 0, form.bytes_of(tokens))
                out, done = form.mapped(temporary, tokens), 0
                while done < tokens:
                    states = next(parts)
                    out[done : done + len(states)] = states
                    done += len(states)
                    advance(len(states))
                del out  # unmaps the file
                seal(temporary)


def captured_states(store: TokenStore, capture: CaptureModel, form: StateFormat, batch_tokens: int) -> StateSource:
    """States that `capture` computes, about `batch_tokens` tokens in a forward pass."""

    def states_of(ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        for first, last in ranges:
            for rows in _passes(store.lengths, first, last, batch_tokens):
                batch = collate(store, rows, max(int(store.lengths[list(row)].sum()) for row in rows))
                states = capture.states(batch.to(capture.ends.head_weight.device), form.aux_layer_ids)
                both = states.final if states.aux is None else torch.cat([states.aux, states.final], dim=-1)
                yield both.cpu()[batch.document >= 0]  # rows hold the examples in order

    return states_of


def streamed_states(stream: StateStream) -> StateSource:
    """States that vLLM servers compute."""
    return lambda ranges: stream.of(example for first, last in ranges for example in range(first, last))


def _passes(lengths: np.ndarray, first: int, last: int, batch_tokens: int) -> list[list[tuple[int, ...]]]:
    """Pack examples `first`..`last` into rows as long as the longest, and rows into passes of about `batch_tokens`."""
    width, room = int(lengths[first:last].max()), 0
    rows: list[tuple[int, ...]] = []
    for example, length in enumerate(lengths[first:last].tolist(), start=first):
        if length > room:
            rows.append(())
            room = width
        rows[-1] += (example,)
        room -= length
    per_pass = max(1, batch_tokens // width)
    return [rows[i : i + per_pass] for i in range(0, len(rows), per_pass)]


class HiddenStateStore:
    """States of a token store's examples on disk, read for the rows of training."""

    def __init__(
        self,
        directory: Path,
        store: TokenStore,
        *,
        target: str,
        aux_layer_ids: tuple[int, ...] | None,
        verified: slice = slice(None),
    ) -> None:
        """Open, and check that these are the states of `store` from `target`, with the aux layers the drafter reads.

        Reads the `verified` shards once to find damage; several processes can verify a part each.
        """
        header = read_json(directory / _HEADER)
        if header is None:
            raise FledgeError(f"{directory / _HEADER}: missing; run the capture stage first")
        expected = {"examples": store.digest, "target": target, "aux_layer_ids": list(aux_layer_ids or ())}
        for name, value in expected.items():
            if header.get(name) != value:
                what = f"{name} is {header.get(name)!r}, expected {value!r}"
                raise FledgeError(f"{directory / _HEADER}: {what}; these states are of another run: capture again")
        self.form = StateFormat.from_dict(header, str(directory / _HEADER))
        self._directory, self._offsets = directory, store.offsets
        self._shards: list[Tensor] = []
        shards = self.form.shards_in(directory, store)
        for path, tokens, complete in shards:
            if not complete:
                raise FledgeError(f"{path}: missing or incomplete; run the capture stage again")
            self._shards.append(self.form.mapped(path, tokens))
        for path, *_ in shards[verified]:
            check_seal(path, _AGAIN)

    def begin(self, examples: Iterable[int]) -> None:
        """Nothing to do: all states are on disk."""

    def read(self, rows: Sequence[tuple[int, ...]], length: int) -> TargetStates:
        """Return states [rows, length, ...] on the CPU in the layout of `collate`; zeros at padding."""
        return _laid_out(rows, length, self.form.hidden_size, self._states_of)

    def _states_of(self, example: int) -> Tensor:
        low, high = int(self._offsets[example]), int(self._offsets[example + 1])
        shard = int(np.searchsorted(self.form.shards, example, side="right")) - 1
        start = int(self._offsets[self.form.shards[shard]])
        return self._shards[shard][low - start : high - start]

    def ends(self, device: torch.device | str) -> TargetEnds:
        """The target's embedding and head."""
        path = self._directory / _ENDS
        check_seal(path, _AGAIN)
        tensors = {name: x.to(device) for name, x in load(path.read_bytes()[:-SEAL_BYTES]).items()}
        return TargetEnds(**{"head_weight": tensors["embedding_weight"], **tensors})


class StreamedStates:
    """States that vLLM servers compute while training reads them, once and in the order of training."""

    def __init__(self, stream: StateStream) -> None:
        self._stream = stream
        self._arriving: Iterator[Tensor] = iter(())

    def begin(self, examples: Iterable[int]) -> None:
        """Start to request the states of exactly these examples, which will be read in this order."""
        self._arriving = self._stream.of(examples)

    def clear(self) -> None:
        """Remove remaining files: a sequence that two processes request at the same time is written twice."""
        self._stream.reader.files.clean(())

    def read(self, rows: Sequence[tuple[int, ...]], length: int) -> TargetStates:
        """As `HiddenStateStore.read`."""
        return _laid_out(rows, length, self._stream.reader.files.layers.hidden_size, lambda _next: next(self._arriving))


def _laid_out(
    rows: Sequence[tuple[int, ...]], length: int, hidden: int, states_of: Callable[[int], Tensor]
) -> TargetStates:
    parts = [[states_of(example)[:length] for example in row] for row in rows]
    width, dtype = parts[0][0].shape[1], parts[0][0].dtype
    states = torch.zeros(len(rows), length, width, dtype=dtype)
    for i, row in enumerate(parts):
        joined = torch.cat(row)
        states[i, : len(joined)] = joined[:length]
    aux = states[..., :-hidden].contiguous() if width > hidden else None
    return TargetStates(final=states[..., -hidden:].contiguous(), aux=aux)


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One process's part of one optimizer step, on the host."""

    parts: list[tuple[PackedBatch, TargetStates | None]]  # micro-batches; None: no states on disk
    supervised: Tensor  # int64 [depth]: slots of these batches that each draft step is trained on
    tokens: int  # of the whole step, all processes
    epoch: int
    following: RowPosition


class StepLoader:
    """Divides the examples into steps of `fit.rows` packed rows, of which this process loads `share`."""

    def __init__(
        self,
        store: TokenStore,
        fit: FitSection,
        *,
        share: slice,
        states: HiddenStateStore | StreamedStates | None = None,
        pinned: bool = False,
    ) -> None:
        self._store, self._fit, self._share, self._states, self._pinned = store, fit, share, states, pinned
        self._rows_of = lru_cache(2)(partial(packed_rows, store.lengths, length=fit.length, seed=fit.seed))
        if not len(store):
            raise ConfigError("fit: there are no training examples; see what the earlier stages left out")
        self.total_steps = fit.total_steps(len(self._rows_of(epoch=0)))  # that the recipe asks for

    def steps(self, start: RowPosition, count: int) -> Iterator[StepData]:
        """Yield `count` steps from `start`. The next step is prepared in the background."""
        if count <= 0:
            return
        if self._states is not None:
            self._states.begin(self._examples(start, count))
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            pending = pool.submit(self._step, start)
            for left in reversed(range(count)):
                data = pending.result()
                if left:
                    pending = pool.submit(self._step, data.following)
                yield data

    def _examples(self, start: RowPosition, count: int) -> Iterator[int]:
        """The examples of this process's rows in `count` steps."""
        for _ in range(count):
            rows, start = self._rows(start)
            for row in rows[self._share]:
                yield from row

    def _rows(self, start: RowPosition) -> tuple[list[tuple[int, ...]], RowPosition]:
        """The rows of a step, and where the next one begins."""
        rows: list[tuple[int, ...]] = []
        epoch, row = start
        while len(rows) < self._fit.rows:
            taken = self._rows_of(epoch=epoch)[row : row + self._fit.rows - len(rows)]
            rows += taken
            row += len(taken)
            if row >= len(self._rows_of(epoch=epoch)):
                epoch, row = epoch + 1, 0
        return rows, (epoch, row)

    def _step(self, start: RowPosition) -> StepData:
        rows, following = self._rows(start)
        length = self._fit.length
        members = np.fromiter((example for members in rows for example in members), dtype=np.int64)
        mine = rows[self._share]
        micro = min(self._fit.micro_rows or len(mine), len(mine))
        pinned: Callable[[Tensor], Tensor] = Tensor.pin_memory if self._pinned else Tensor.contiguous
        parts, supervised = [], torch.zeros(self._fit.depth, dtype=torch.int64)
        for part in (mine[i : i + micro] for i in range(0, len(mine), micro)):
            batch = collate(self._store, part, length)
            states = None if self._states is None else map_tensors(self._states.read(part, length), pinned)
            supervised += batch.supervised_counts(self._fit.depth)
            parts.append((map_tensors(batch, pinned), states))
        return StepData(
            parts=parts,
            supervised=pinned(supervised),
            tokens=int(np.minimum(self._store.lengths[members], length).sum()),
            epoch=start[0],
            following=following,
        )
