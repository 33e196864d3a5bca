"""The decoder layer, as targets stack it and as drafters use it, and its MLP, or experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.swiglu import swiglu
from fledge.layers.attention import Attention, KeyValueStorage
from fledge.layers.config import Activation, ExpertsConfig, LayerConfig
from fledge.layers.latent_attention import LatentAttention
from fledge.layers.linear import Linear, norm_of
from fledge.layers.rope import Rotation

CLAMPED_SLOPE = 1.702  # of gpt-oss's gate, which is all but a GELU


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up stacked into one matrix; or with a gate of another kind.

    With a `limit` gate and up are clamped to it, the gate is steeper, and up is one more.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.limit = activation, limit
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gated(self.gate_up_proj(x)))
        return out

    @property
    def is_plain(self) -> bool:
        return self.activation == "silu" and self.limit is None

    def gated(self, gate_up: Tensor) -> Tensor:
        """[..., 2 * size] -> [..., size]."""
        if self.is_plain:
            return swiglu(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is None:
            return F.gelu(gate, approximate="none" if self.activation == "gelu" else "tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * CLAMPED_SLOPE) * (up + 1)


class SparseMLP(nn.Module):
    """A router and its experts: the sum of the chosen experts' outputs, weighted by the router's scores.

    A shared expert sees every token.

    Rows are grouped by expert, and each expert that has rows is run. The host must look at the groups for that; on a
    GPU in bfloat16 all experts are one grouped product, which needs no look, so that a round can be captured.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.num_experts, bias=config.bias)
        is_biased = config.scoring_func == "sigmoid"
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts)) if is_biased else None
        self.experts = nn.ModuleList(
            SwiGLU(hidden_size, config.intermediate_size, bias=config.bias, limit=config.swiglu_limit)
            for _ in range(config.num_experts)
        )
        self.shared_experts = SwiGLU(hidden_size, config.shared_size) if config.shared_size else None
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if config.shared_gate else None
        self._stacked: dict[str, tuple[Tensor, Tensor | None]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[*lead, hidden] -> [*lead, hidden]."""
        rows, chosen = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_token
        weights, experts = self._route(self.gate(rows).float())
        numbers, order = experts.flatten().sort(stable=True)  # (row, choice) pairs, by expert
        ends = torch.searchsorted(numbers, torch.arange(self.config.num_experts, device=x.device), right=True)
        grouped = rows[order // chosen]
        if self._is_groupable(x):
            out = self._all_at_once(grouped, numbers, ends)
        elif x.is_cuda and torch.cuda.is_current_stream_capturing():
            out = self._each_on_all(grouped, numbers)
        else:
            out = self._one_by_one(grouped, ends)
        out = out[order.argsort()].view(-1, chosen, x.shape[-1]) * weights[..., None].to(out.dtype)
        mixed: Tensor = out.sum(1).view(x.shape)
        if self.shared_experts is None:
            return mixed
        shared: Tensor = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return mixed + shared

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, experts] -> the weights and the numbers of those chosen, each [rows, chosen]."""
        config, bias = self.config, self.e_score_correction_bias
        scores = logits.softmax(-1) if bias is None else logits.sigmoid()
        liked = scores if bias is None else scores + bias
        if config.n_group > 1:
            groups = liked.view(len(liked), config.n_group, -1)
            # DeepSeek V2 judges a group by its best expert, V3 and GLM by its best two.
            best = groups.topk(1 if bias is None else 2).values.sum(-1).topk(config.topk_group).indices
            seen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            liked = groups.masked_fill(~seen[..., None], -torch.inf).flatten(-2)
        experts = liked.topk(config.num_experts_per_token).indices
        weights = scores.gather(-1, experts)
        if config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be nothing
        if config.routed_scaling_factor != 1:
            weights = weights * config.routed_scaling_factor
        return weights, experts

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

    def _all_at_once(self, grouped: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
        """As `_one_by_one`, in three launches, and one for each bias."""
        ends = ends.to(torch.int32)
        gate_up = self._grouped_linear("gate_up_proj", grouped, numbers, ends)
        first = self.experts[0]
        assert isinstance(first, SwiGLU)
        return self._grouped_linear("down_proj", first.gated(gate_up), numbers, ends)

    def _grouped_linear(self, name: str, grouped: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
        if name not in self._stacked:
            self._stacked[name] = self._stack(name, "weight"), self._stack(name, "bias") if self.config.bias else None
        weight, bias = self._stacked[name]
        out = F.grouped_mm(grouped, weight.mT, offs=ends)
        return out if bias is None else out + bias[numbers]

    @torch.inference_mode(False)
    def _stack(self, name: str, kind: str) -> Tensor:
        """Return one tensor of all experts, [experts, ...]; their own become views of it, so that there is no copy."""
        linears = [getattr(expert, name) for expert in self.experts]
        stacked = torch.stack([getattr(linear, kind).detach() for linear in linears])
        for linear, part in zip(linears, stacked, strict=True):
            setattr(linear, kind, nn.Parameter(part, requires_grad=False))
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
        both    x += norm(attention(norm(x))); x += norm(mlp(norm(x)))

    The residual stream travels as two tensors whose sum it is, the stream and the last update to it, so that the
    addition can be fused with the norm that comes next.
    """

    def __init__(
        self, config: LayerConfig, *, layer: int, sliding_window: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        placement, hidden = config.norm_placement, config.hidden_size
        self.input_layernorm = norm_of(config, hidden) if input_norm and placement != "post" else None
        self.self_attn = attention_of(config, layer=layer, sliding_window=sliding_window)
        self.post_attention_layernorm = norm_of(config, hidden)  # or, as Llama calls it and has it, before the MLP
        self.pre_feedforward_layernorm = norm_of(config, hidden) if placement == "both" else None
        self.mlp: SwiGLU | SparseMLP = (
            SparseMLP(hidden, config.experts)
            if config.experts is not None
            else SwiGLU(hidden, config.intermediate_size, bias=config.mlp_bias, activation=config.activation)
        )
        self.post_feedforward_layernorm = None if placement == "pre" else norm_of(config, hidden)

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
        if self.post_feedforward_layernorm is None:
            normed, stream = self.post_attention_layernorm.add(attended, stream)
            return self.mlp(normed), stream
        attended = self.post_attention_layernorm(attended)
        if self.pre_feedforward_layernorm is None:
            normed = stream = stream + attended
        else:
            normed, stream = self.pre_feedforward_layernorm.add(attended, stream)
        return self.post_feedforward_layernorm(self.mlp(normed)), stream
