"""Putting tensors into a model, all or nothing."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from fledge.errors import CheckpointError


def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], where: Path, optional: frozenset[str] = frozenset()
) -> None:
    """Put `tensors` into a model built on the meta device, or say in one line which do not fit.

    `optional` names tensors that the caller will provide itself.
    """
    expected = {n: t for n, t in model.state_dict().items() if n not in optional}
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"{where}: tensor '{missing[0]}' is missing{_and_more(missing)}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(f"{where}: unexpected tensor '{unknown[0]}'{_and_more(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{where}: tensor '{name}' has shape {list(tensor.shape)}, but config.json makes it "
                f"{list(expected[name].shape)}"
            )
    model.load_state_dict(tensors, strict=False, assign=True)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
