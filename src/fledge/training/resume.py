"""The state to resume from: one file that is either the old one or the new one, never a part."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.errors import FledgeError
from fledge.files import atomic_path

FILE = "resume.pt"


@dataclass(frozen=True, kw_only=True)
class ResumeState:
    """A run between two optimizer steps. With it, going on gives what an uninterrupted run gives."""

    key: str  # of all that the run's result depends on
    step: int  # optimizer steps done
    epoch: int  # where the next step's rows begin
    row: int
    tokens: int  # read so far
    model: dict[str, Any]
    optimizer: dict[str, Any]
    counters: dict[str, int]
    sums: list[torch.Tensor]  # since the last log line
    log_bytes: int  # length of the log; what comes after it will be written again
    random: dict[str, Any]

    def save(self, directory: Path) -> None:
        with atomic_path(directory / FILE) as temporary:
            torch.save(vars(self), temporary)

    @classmethod
    def load(cls, directory: Path, key: str) -> "ResumeState | None":
        """Return the state in `directory`; None if there is none. One of another recipe is refused."""
        path = directory / FILE
        if not path.is_file():
            return None
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            state = cls(**values)
        except Exception as error:  # the unpickler fails in many ways
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FledgeError(f"{path}: cannot be read ({reason}); remove it to start training again") from None
        if state.key != key:
            raise FledgeError(f"{path}: belongs to another recipe or other data; remove it to start training again")
        return state


def random_states() -> dict[str, Any]:
    """The state of every generator that code may draw from."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), gauss_next],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = states["python"]
    random.setstate((version, tuple(words), gauss_next))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
