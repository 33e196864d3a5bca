"""Reads and writes checkpoints in which one tensor holds all experts of a layer (gpt-oss, Llama 4), expert by expert.

stored      experts.gate_up_proj [experts, in, out], experts.gate_up_proj_bias [experts, out]
            gpt-oss interleaves gate and up; transformers 5 writes other families (Qwen3-VL-MoE) as [experts, out, in]
here        experts.3.gate_up_proj.weight [out, in], experts.3.gate_up_proj.bias [out]; all of gate before up

In MXFP4 there are `_blocks` and `_scales` in place of the matrix, [experts, out, ...]. A vector that is stored as
the one row of a matrix, as what corrects ERNIE's router, is a vector here.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fledge.checkpoints.tensors import TensorFiles, TensorInfo

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(bias|blocks|scales))?")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.(weight|bias)")


class StackedExpertFiles(TensorFiles):
    """`TensorFiles` that present stacked experts as separate tensors for each expert.

    Tensors whose names end in one of `rows` are vectors that are stored as matrices of one row.
    """

    def __init__(self, directory: Path, *, interleaves_gate: bool = False, rows: tuple[str, ...] = ()) -> None:
        super().__init__(directory)
        self._interleaves_gate = interleaves_gate
        self._rows = {name for name, info in self.infos.items() if name.endswith(rows) and info.shape[:-1] == (1,)}
        self.infos |= {name: replace(self.infos[name], shape=self.infos[name].shape[1:]) for name in self._rows}
        self._places: dict[str, tuple[str, int]] = {}
        self._stores_rows = {
            match[1]: _stores_rows(info.shape, self.infos[f"{match[1]}.down_proj"].shape)
            for stored, info in self.infos.items()
            if (match := _STACKED.fullmatch(stored)) and match.groups()[1:] == ("gate_up_proj", None)
            if f"{match[1]}.down_proj" in self.infos
        }
        for stored, info in list(self.infos.items()):
            if (match := _STACKED.fullmatch(stored)) is None or len(info.shape) < 2 or 0 in info.shape:
                continue
            experts, linear, kind = match.groups(default="weight")
            is_transposed = kind == "weight" and not self._stores_rows.get(experts, False)
            shape = info.shape[:0:-1] if is_transposed else info.shape[1:]
            del self.infos[stored]
            for i in range(info.shape[0]):
                name = f"{experts}.{i}.{linear}.{kind}"
                self.infos[name] = TensorInfo(info.file, info.dtype, shape)
                self._places[name] = stored, i

    @property
    def has_stacks(self) -> bool:
        return bool(self._places)

    def read(self, name: str) -> Tensor:
        if name not in self._places:
            return super().read(name)[0] if name in self._rows else super().read(name)
        stored, i = self._places[name]
        rows = self._read(self.infos[name].file, stored)[i]
        if name.endswith(".weight") and not self._stores_rows.get(stored.rpartition(".")[0], False):
            rows = rows.t()
        return torch.cat([rows[::2], rows[1::2]]) if self._interleaves_gate and ".gate_up_proj." in name else rows


def _stores_rows(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether matrices are [experts, out, in]: only then gate_up has twice as many rows as down has columns."""
    return len(gate_up) == len(down) == 3 and (gate_up[1], gate_up[2]) == (2 * down[2], down[1])


def stack_experts(tensors: Mapping[str, Tensor], interleaves_gate: bool) -> dict[str, Tensor]:
    """Inverse of `StackedExpertFiles`: stack the tensors of experts, given by stored names."""
    out: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _SINGLE.fullmatch(name)) is None:
            out[name] = tensor
            continue
        experts, _, linear, kind = match.groups()
        in_turns = interleaves_gate and linear == "gate_up_proj"
        rows = torch.stack(tensor.chunk(2), dim=1).flatten(0, 1) if in_turns else tensor
        stacks.setdefault(f"{experts}.{linear}{'_bias' if kind == 'bias' else ''}", []).append(rows.t())
    return out | {name: torch.stack(parts) for name, parts in stacks.items()}
