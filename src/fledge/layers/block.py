"""The decoder layer, as targets stack it and as drafters use it, and its MLP, or experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.swiglu import swiglu
from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.config import ExpertsConfig, LayerConfig
from fledge.layers.latent_attention import LatentAttention
from fledge.layers.linear import Linear, RMSNorm
from fledge.layers.rope import Rotation


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
    """A router and its experts: the sum of the chosen experts' outputs, weighted by the router's scores.

    Experts that all rows share are one MLP beside them.

    Rows are grouped by expert, and each expert that has rows is run. The host must look at the groups for that; on a
    GPU in bfloat16 all experts are one grouped product, which needs no look, so that a round can be captured.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.num_experts, bias=False)
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.num_experts)) if config.scoring_func == "sigmoid" else None
        )
        self.experts = nn.ModuleList(SwiGLU(hidden_size, config.intermediate_size) for _ in range(config.num_experts))
        shared = config.n_shared_experts
        self.shared_experts = SwiGLU(hidden_size, shared * config.intermediate_size) if shared else None
        self._stacked: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, hidden]."""
        rows, chosen = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_token
        weights, experts = self._route(rows)
        numbers, order = experts.flatten().sort(stable=True)  # (row, choice) pairs, by expert
        ends = torch.searchsorted(numbers, torch.arange(self.config.num_experts, device=x.device), right=True)
        grouped = rows[order // chosen]
        if self._is_groupable(x):
            out = self._all_at_once(grouped, ends)
        elif x.is_cuda and torch.cuda.is_current_stream_capturing():
            out = self._each_on_all(grouped, numbers)
        else:
            out = self._one_by_one(grouped, ends)
        out = out[order.argsort()].view(-1, chosen, x.shape[-1]) * weights[..., None].to(out.dtype)
        mixed: Tensor = out.sum(1).view(x.shape)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each row's experts, [rows, chosen] both."""
        config, logits = self.config, self.gate(rows).float()
        if self.e_score_correction_bias is None:
            scores = preference = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            preference = scores + self.e_score_correction_bias
        if config.n_group > 1:
            groups = preference.unflatten(-1, (config.n_group, -1))
            # DeepSeek V2 judges a group by its best expert, V3 by its best two.
            best = groups.topk(1 if config.scoring_func == "softmax" else 2).values.sum(-1)
            out = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(config.topk_group).indices, False)
            preference = groups.masked_fill(out[..., None], -torch.inf).flatten(-2)
        experts = preference.topk(config.num_experts_per_token).indices
        weights = scores.gather(-1, experts)
        if config.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)  # sigmoids can all be zero
        return weights * config.routed_scaling_factor, experts

    def _one_by_one(self, grouped: Tensor, ends: Tensor) -> Tensor:
        """grouped [rows * chosen, hidden], sorted by expert; ends [experts]: where the rows of each end."""
        parts = torch.tensor_split(grouped, ends[:-1].cpu())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])

    def _each_on_all(self, grouped: Tensor, numbers: Tensor) -> Tensor:
        """The same without a look at the groups, and much slower; numbers [rows * chosen]: the expert of each row."""
        out = torch.zeros_like(grouped)
        for number, expert in enumerate(self.experts):
            out = torch.where((numbers == number)[:, None], expert(grouped), out)
        return out

    def _is_groupable(self, x: Tensor) -> bool:
        return (
            x.is_cuda
            and x.dtype == torch.bfloat16
            and not torch.is_grad_enabled()
            and all(type(linear) is Linear for expert in self.experts for linear in expert.children())
        )

    def _all_at_once(self, grouped: Tensor, ends: Tensor) -> Tensor:
        """As `_one_by_one`, in three launches."""
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


def attention_of(
    config: LayerConfig, *, layer: int, input_size: int | None = None, sliding_window: int | None = None
) -> Attention | LatentAttention:
    """The attention of a layer, of the kind that its config says."""
    if config.latent is None:
        return Attention(config, layer=layer, input_size=input_size, sliding_window=sliding_window)
    assert sliding_window is None, "latent attention has no windows"
    return LatentAttention(config, layer=layer, input_size=input_size)


class DecoderLayer(nn.Module):
    """Attention and an MLP, each added to the residual stream; the config says of what kind, and where the norms are.

        pre     x += attention(norm(x)); x += mlp(norm(x)); without `input_norm` attention reads x as it is (EAGLE-1)
        post    x += norm(attention(x)); x += norm(mlp(x))

    The residual stream travels as two tensors whose sum it is, the stream and the last update to it, so that the
    addition can be fused with the norm that comes next.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        is_pre, hidden = config.norm_placement == "pre", config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.norm_eps) if input_norm and is_pre else None
        self.self_attn = attention_of(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = RMSNorm(hidden, config.norm_eps)
        self.mlp: SwiGLU | SparseMLP = (
            SparseMLP(hidden, config.experts)
            if config.experts is not None
            else SwiGLU(hidden, config.intermediate_size, bias=config.mlp_bias)
        )
        self.post_feedforward_layernorm = None if is_pre else RMSNorm(hidden, config.norm_eps)

    def forward(
        self, update: Tensor, stream: Tensor | None, rotation: Rotation, storage: KeyValueStorage
    ) -> tuple[Tensor, Tensor]:
        """Each [*lead, hidden_size]; `stream` is None before the first layer. Returns the new (update, stream)."""
        if self.input_layernorm is None:
            stream = update if stream is None else stream + update
            normed = stream
        elif stream is None:
            normed, stream = self.input_layernorm(update), update
        else:
            normed, stream = self.input_layernorm.add(update, stream)
        attended = self.self_attn(normed, rotation, storage)
        if self.post_feedforward_layernorm is not None:
            stream = stream + self.post_attention_layernorm(attended)
            return self.post_feedforward_layernorm(self.mlp(stream)), stream
        normed, stream = self.post_attention_layernorm.add(attended, stream)
        return self.mlp(normed), stream
