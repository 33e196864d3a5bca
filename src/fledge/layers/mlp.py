"""The feed-forward half of a layer: one gated MLP, or a mixture of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.swiglu import swiglu
from fledge.layers.config import ExpertsConfig
from fledge.layers.linear import Linear


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up stacked into one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return out


class SparseMLP(nn.Module):
    """A router and its experts: the sum of the chosen experts' outputs, weighted by the router's probabilities.

    Rows are grouped by expert. On a GPU, without gradients, all experts are one grouped product that the host does not
    look at, so a round can still be captured; everywhere else each expert that has rows is run for itself.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(hidden_size, config.intermediate_size) for _ in range(config.num_experts))
        self._stacked: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, hidden]."""
        rows, chosen = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_token
        weights, experts = self.gate(rows).float().softmax(-1).topk(chosen)  # each [rows, chosen]
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        numbers, order = experts.flatten().sort(stable=True)  # (row, choice) pairs, by expert
        ends = torch.searchsorted(numbers, torch.arange(self.config.num_experts, device=x.device), right=True)
        grouped = rows[order // chosen]
        out = self._all_at_once(grouped, ends) if self._is_fused(x) else self._one_by_one(grouped, ends)
        out = out[order.argsort()].view(-1, chosen, x.shape[-1]) * weights[..., None].to(out.dtype)
        mixed: Tensor = out.sum(1).view(x.shape)
        return mixed

    def _one_by_one(self, grouped: Tensor, ends: Tensor) -> Tensor:
        """grouped [rows * chosen, hidden], sorted by expert; ends [experts]: where the rows of each end."""
        parts = torch.tensor_split(grouped, ends[:-1].cpu())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])

    def _is_fused(self, x: Tensor) -> bool:
        return x.is_cuda and not torch.is_grad_enabled() and all(type(expert) is SwiGLU for expert in self.experts)

    def _all_at_once(self, grouped: Tensor, ends: Tensor) -> Tensor:
        if self._stacked is None:
            self._stacked = self._stack("gate_up_proj"), self._stack("down_proj")
        gate_up, down = self._stacked
        ends = ends.to(torch.int32)
        return F.grouped_mm(swiglu(F.grouped_mm(grouped, gate_up.mT, offs=ends)), down.mT, offs=ends)

    @torch.inference_mode(False)
    def _stack(self, name: str) -> Tensor:
        """Return one matrix of all experts, [experts, ...]; their own become views of it, so that there is no copy."""
        linears = [getattr(expert, name) for expert in self.experts]
        stacked = torch.stack([linear.weight.detach() for linear in linears])
        for linear, weight in zip(linears, stacked, strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)
        return stacked
