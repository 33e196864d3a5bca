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


class Experts(nn.Module):
    """The matrices of all experts of a layer, stacked: one grouped product each for gate and up, and for down."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        count, size = config.num_experts, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, size))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, hidden] sorted by expert; the rows of expert e are those before ends[e] int32 and not before e's."""
        gated = swiglu(F.grouped_mm(x, self.gate_up_proj.mT, offs=ends))
        return F.grouped_mm(gated, self.down_proj.mT, offs=ends)


class SparseMLP(nn.Module):
    """A router and its experts: the sum of the chosen experts' outputs, weighted by the router's probabilities.

    Rows are grouped by expert on the device, with no look at them from the host, so a round can still be captured.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.num_experts, bias=False)
        self.experts = Experts(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, hidden]."""
        rows, chosen = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_token
        weights, experts = self.gate(rows).float().softmax(-1).topk(chosen)  # each [rows, chosen]
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)  # (row, choice) pairs by expert
        counts = F.one_hot(experts.flatten(), self.config.num_experts).sum(0)
        out = self.experts(rows[order // chosen], counts.cumsum(0).to(torch.int32))
        out = out * weights.flatten()[order, None].to(out.dtype)
        return torch.zeros_like(out).index_copy(0, order, out).view(-1, chosen, x.shape[-1]).sum(1).view(x.shape)
