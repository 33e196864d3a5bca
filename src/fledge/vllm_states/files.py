"""Files with hidden states from vLLM servers: one file for each sequence, removed after it is read.

vLLM's side (`connector`) writes the files into a directory that all servers and the reader share. A file's name is a
digest of target, layers and tokens, so states that exist already are found again. After a crash of reader or server,
files that are complete are used, and others are made again. Servers do not run far ahead of the reader.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fledge.devices import DTYPES
from fledge.errors import ConfigError, DataError, FledgeError
from fledge.files import SEAL_BYTES, digest
from fledge.models.config import TargetConfig

SUFFIX, ERROR = ".states", ".error"
ARRIVAL_SECONDS = 120.0  # between vLLM's answer and the file
ATTEMPTS = 3
_POLL_SECONDS = (0.005, 0.2)  # at first, and at most
_RETRY_SECONDS = 1.0
_STALE_SECONDS = 3600.0  # unfinished files older than this were left by writers that died
TokenIds = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class CapturedLayers:
    """Which states of which target: for the options of a server, and for the checks of its files."""

    target: str  # digest of its weights
    aux_layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, config: TargetConfig, weights: str, aux_layer_ids: tuple[int, ...]) -> "CapturedLayers":
        """Raises ConfigError for a layer at which vLLM crashes."""
        if config.layer.latent is not None and 0 in aux_layer_ids:
            what = "vLLM does not give the input of the first block of targets with latent attention (MLA)"
            raise ConfigError(f"aux layers {list(aux_layer_ids)}: {what}; choose layers from 1 on")
        sizes = {"num_layers": config.num_layers, "hidden_size": config.hidden_size, "dtype": config.dtype}
        return cls(target=weights, aux_layer_ids=aux_layer_ids, **sizes)  # type: ignore[arg-type]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The states are the inputs of these blocks; `num_layers` is the input of the final norm."""
        return tuple(dict.fromkeys((*self.aux_layer_ids, self.num_layers)))

    @property
    def key(self) -> str:
        return digest([self.target, self.dtype, self.layer_ids])

    @property
    def width(self) -> int:
        """Size of a token's row as training reads it: aux states side by side, then the final state."""
        return (len(self.aux_layer_ids) + 1) * self.hidden_size

    def file_bytes(self, tokens: int) -> int:
        """About the size of a file."""
        return tokens * (len(self.layer_ids) * self.hidden_size * DTYPES[self.dtype].itemsize + 8)


class StateFiles:
    """The files of one target's states in a directory that others write to."""

    def __init__(self, directory: Path, layers: CapturedLayers) -> None:
        self.directory, self.layers = directory, layers

    def path(self, token_ids: TokenIds) -> Path:
        """The file for the states of these tokens. The connector uses the same name."""
        sha = hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()
        return self.directory / f"{self.layers.key}-{sha[:32]}{SUFFIX}"

    def read(self, token_ids: TokenIds) -> Tensor | None:
        """Return states [tokens, layers, hidden]; None if there is no complete file. Incomplete files are removed.

        Raises DataError for unexpected layers or dtype: the server was started for something else.
        """
        path, layers = self.path(token_ids), self.layers
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        body = memoryview(content)[:-SEAL_BYTES]
        if hashlib.sha256(body).digest() != content[-SEAL_BYTES:]:
            path.unlink(missing_ok=True)
            return None
        try:
            tensors: dict[str, Tensor] = load(bytes(body))
            states, ids = tensors["hidden_states"], tensors["token_ids"]
        except (SafetensorError, KeyError) as error:
            raise DataError(f"{path}: not written by Fledge's connector ({error!r}); remove it") from None
        shape = (len(token_ids), len(layers.layer_ids), layers.hidden_size)
        if states.shape != shape or states.dtype != DTYPES[layers.dtype]:
            found = f"{list(states.shape)} {str(states.dtype).removeprefix('torch.')}"
            what = f"states are {found}, expected {list(shape)} {layers.dtype}"
            raise DataError(f"{path}: {what}; start vLLM with the command that `--print-vllm-command` prints")
        if not np.array_equal(ids.numpy(), token_ids):
            path.unlink(missing_ok=True)
            return None
        return states

    def remove(self, token_ids: TokenIds) -> None:
        self.path(token_ids).unlink(missing_ok=True)

    def bytes_there(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob(f"{self.layers.key}-*{SUFFIX}"))

    def clean(self, wanted: Iterable[TokenIds]) -> int:
        """Remove files of sequences that are not `wanted`, and stale temporary files. Returns the bytes kept."""
        names, kept = {self.path(ids).name for ids in wanted}, 0
        for path in self.directory.glob(f"{self.layers.key}-*"):
            if path.name in names:
                kept += path.stat().st_size
            else:
                path.unlink(missing_ok=True)
        for path in self.directory.glob(f".{self.layers.key}-*.tmp"):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink(missing_ok=True)
        return kept


class StateReader:
    """Requests the states of sequences, waits for the files, reads and removes them. Thread-safe."""

    def __init__(self, files: StateFiles, ask: Callable[[list[int]], object], *, norm: nn.Module) -> None:
        """`ask` requests the states of a sequence from vLLM. `norm` is the target's final norm."""
        self.files, self._ask, self._norm = files, ask, norm
        self.closing = threading.Event()  # threads that wait for a file give up

    def take(self, token_ids: TokenIds) -> Tensor:
        """Return states [tokens, width] on the CPU, see `CapturedLayers.width`; requests them if necessary."""
        layers, ids = self.files.layers, np.asarray(token_ids, dtype=np.int64)
        if not len(ids):
            return torch.zeros(0, layers.width, dtype=DTYPES[layers.dtype])
        states = self._read(ids)
        aux = [layers.layer_ids.index(layer) for layer in layers.aux_layer_ids]
        rows = torch.cat([states[:, aux].flatten(1), self._final(states)], dim=-1)
        self.files.remove(ids)
        return rows

    def ahead(self, sequences: Iterable[TokenIds], *, max_bytes: int, in_flight: int) -> Iterator[Tensor]:
        """Yield what `take` returns for each sequence, while the next ones are being computed.

        At most `max_bytes` are requested and not yet read, in at most `in_flight` requests at a time.
        """
        left, pending, unread = iter(sequences), deque[tuple[TokenIds, int, Future[None]]](), 0
        following = next(left, None)
        self.closing.clear()
        pool = ThreadPoolExecutor(in_flight, thread_name_prefix="states")
        try:
            while following is not None or pending:
                while following is not None:
                    size = self.files.layers.file_bytes(len(following))
                    if pending and unread + size > max_bytes:
                        break  # the reader is behind
                    pending.append((following, size, pool.submit(self._have_written, following)))
                    unread += size
                    following = next(left, None)
                ids, size, written = pending.popleft()
                written.result()
                states = self.take(ids)
                unread -= size
                yield states
        finally:
            self.closing.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _have_written(self, token_ids: TokenIds) -> None:
        """Wait until the file of a sequence exists; request it if necessary. Runs in several threads."""
        if len(token_ids) and not self.closing.is_set() and not self.files.path(token_ids).exists():
            self._request(np.asarray(token_ids, dtype=np.int64))

    def final_of(self, token_ids: TokenIds) -> Tensor:
        """Return the final states [tokens, hidden] of a sequence that was just requested, and remove its file."""
        ids = np.asarray(token_ids)
        if (reason := self._arrival(ids)) is not None:
            raise FledgeError(f"{self.files.path(ids)}: {reason}")
        final = self._final(self._read(ids))
        self.files.remove(token_ids)
        return final

    def _final(self, states: Tensor) -> Tensor:
        with torch.no_grad():
            final: Tensor = self._norm(states[:, self.files.layers.layer_ids.index(self.files.layers.num_layers)])
        return final

    def _read(self, ids: NDArray[np.int64]) -> Tensor:
        """Return states [tokens, layers, hidden]. If the file is missing or incomplete, request it again."""
        for _ in range(ATTEMPTS):
            states = self.files.read(ids)
            if states is not None:
                return states
            self._request(ids)
        what = f"not whole after {ATTEMPTS} attempts"
        raise FledgeError(f"{self.files.path(ids)}: {what}; is the storage that vLLM writes to sound?")

    def _request(self, ids: NDArray[np.int64]) -> None:
        """Request the states of a sequence, and wait for the file."""
        for attempt in range(1, ATTEMPTS + 1):
            self._ask(ids.tolist())
            if (reason := self._arrival(ids)) is None:
                return
            if self.closing.wait(attempt * _RETRY_SECONDS):  # a full disk may have room again after a while
                break
        raise FledgeError(f"{self.files.path(ids)}: {reason}")

    def _arrival(self, ids: NDArray[np.int64]) -> str | None:
        """Wait for a file that was requested. Returns why it does not come; None if it exists."""
        path = self.files.path(ids)
        refused = path.with_name(path.name + ERROR)
        pause, until = _POLL_SECONDS[0], time.monotonic() + ARRIVAL_SECONDS
        while not path.exists():
            if refused.exists():
                reason = refused.read_text(encoding="utf-8")
                refused.unlink(missing_ok=True)
                return f"vLLM could not write it: {reason}; lower vllm.storage_gb, or give it more room"
            if time.monotonic() > until:
                what = f"vLLM answered, and no file came within {ARRIVAL_SECONDS:g} s"
                return f"{what}; is vllm.storage the same directory on its machine?"
            if self.closing.wait(pause):
                return "the run is ending"
            pause = min(2 * pause, _POLL_SECONDS[1])
        return None
