"""The MLP of a decoder layer: gated (SwiGLU and variants), or a mixture of experts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels._triton import runs_triton
from fledge.kernels.experts import MANY_PAIRS, Stacked, few_experts, reads_codes, routed_experts
from fledge.kernels.quantize_rows import QuantizedRows
from fledge.kernels.quantized_linear import QuantizedWeight
from fledge.kernels.route import Routing, add_norm_router, route
from fledge.kernels.swiglu import quantized_swiglu, swiglu
from fledge.layers.config import Activation, ExpertsConfig
from fledge.layers.linear import Linear, RMSNorm, join_rows
from fledge.layers.quantized import QuantizedLinear, join_quantized

PROJECTIONS = "gate_up_proj", "down_proj"
CLAMPED_SLOPE = 1.702  # gpt-oss: x * sigmoid(1.702 x) approximates GELU


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up stacked into one matrix; or with another activation.

    With a `limit` (gpt-oss) gate and up are clamped to it, and it is `gate * sigmoid(1.702 gate) * (up + 1)`.
    """

    quantizes_intermediate = False  # `down_proj` is given `QuantizedRows`: see `block.fuse_input_quantization`

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
        self.activation, self.limit, self.has_bias = activation, limit, bias
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        gate_up = self.gate_up_proj(x)
        out: Tensor = self.down_proj(quantized_swiglu(gate_up) if self.quantizes_intermediate else self.gated(gate_up))
        return out

    @property
    def is_plain(self) -> bool:
        return self.activation == "silu" and self.limit is None

    def gated(self, gate_up: Tensor) -> Tensor:
        """Apply the gate: [..., 2 * size] -> [..., size]."""
        if self.is_plain:
            return swiglu(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is None:
            return F.gelu(gate, approximate="none" if self.activation == "gelu" else "tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * CLAMPED_SLOPE) * (up + 1)


class SparseMLP(nn.Module):
    """Mixture of experts: the sum of the top-k experts' outputs, weighted by the router, plus a shared expert if any.

    In torch, rows are sorted by expert and each expert that has rows is run, which synchronises with the host. On a GPU
    kernels run all experts without synchronisation, so that the pass can be captured in a CUDA graph.
    """

    batch_invariant = False  # on a GPU: bits of a row's result do not depend on the other rows

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config, self.in_features = config, hidden_size
        self.gate = Linear(hidden_size, config.num_experts, bias=config.bias)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts)) if config.is_biased else None
        self.experts = nn.ModuleList(
            SwiGLU(hidden_size, config.intermediate_size, bias=config.bias, limit=config.swiglu_limit)
            for _ in range(config.num_experts)
        )
        self.shared_experts = SwiGLU(hidden_size, config.shared_size) if config.shared_size else None
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if config.shared_gate else None
        self._stacked: dict[str, Stacked] | None = None

    def norm_and_forward(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (self(norm(x + residual)), x + residual), with norm and router logits in one kernel on a GPU."""
        if type(norm) is not RMSNorm or type(self.gate) is not Linear or self.batch_invariant:
            normed, total = norm.add(x, residual)
            return self(normed), total
        rows, added = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
        router = self.gate.weight, self.gate.bias
        normed, total, logits = add_norm_router(rows, added, norm.weight, norm.eps, *router)
        return self(normed.view(x.shape), logits), total.view(x.shape)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """[*lead, hidden] -> [*lead, hidden]. `logits` [rows, experts]: the router's, if they are computed already."""
        rows, config = x.reshape(-1, x.shape[-1]), self.config
        has_kernels = len(rows) > 0 and runs_triton(rows) and not torch.is_grad_enabled() and self.has_kernels
        # With many rows the products are compute-bound, and torch's grouped GEMM is faster.
        is_prefill_sized = rows.dtype == torch.bfloat16 and len(rows) * config.num_experts_per_token > MANY_PAIRS
        is_prefill_sized = is_prefill_sized and self._is_plain and not self.batch_invariant
        # Our kernels treat a shared expert as additional experts that are always chosen.
        parts = self._shared_parts if has_kernels and not is_prefill_sized else 0
        logits = self.gate(rows) if logits is None else logits
        routing = Routing(
            chosen=config.num_experts_per_token,
            n_group=config.n_group,
            topk_group=config.topk_group,
            normalised=config.normalised,
            scale=config.routed_scaling_factor,
            shared=parts,
            corrected_softmax=config.corrected_choice,
        )
        if has_kernels and not is_prefill_sized and not config.weighted_inputs and not config.corrected_choice:
            mixed = routed_experts(rows, logits, self.e_score_correction_bias, routing, **self._kernel_weights(parts))
        else:
            weights, experts = route(logits, self.e_score_correction_bias, routing)
            if config.weighted_inputs:  # one weighted input row per (row, expert) pair; outputs are summed unweighted
                weights = logits.float().gather(-1, experts).sigmoid()
                rows = (rows[:, None] * weights[..., None].to(rows.dtype)).flatten(0, 1)
                weights, experts = torch.ones_like(weights).view(-1, 1), experts.reshape(-1, 1)
            if has_kernels and not is_prefill_sized:
                mixed = few_experts(rows, weights, experts, **self._kernel_weights(parts))
            else:
                run = self._run_grouped_mm if has_kernels else self._run_each
                mixed = self._run_sorted(rows, weights, experts, run)
            if config.weighted_inputs:
                mixed = mixed.view(-1, config.num_experts_per_token, x.shape[-1]).sum(1)
        mixed = mixed.view(x.shape)
        if self.shared_experts is None or parts:
            return mixed
        shared_out: Tensor = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared_out = shared_out * self.shared_expert_gate(x).sigmoid()
        return mixed + shared_out

    @property
    def _shared_parts(self) -> int:
        """How many routed experts have the size of the shared one, if kernels can run it as so many; else 0."""
        config = self.config
        can_split = (
            self.shared_experts is not None
            and all(type(linear) is Linear for linear in self.shared_experts.children())
            and self._is_plain
            and not (config.shared_gate or config.weighted_inputs or config.bias or config.swiglu_limit)
            and config.shared_size % config.intermediate_size == 0
        )
        return config.shared_size // config.intermediate_size if can_split else 0

    def _kernel_weights(self, parts: int) -> dict[str, Any]:
        """Keyword arguments of the expert kernels: stacked weights, the shared expert's if it has `parts`, options."""
        shared = None
        if parts and self.shared_experts is not None:
            shared = self.shared_experts.gate_up_proj.weight, self.shared_experts.down_proj.weight
        options = {"shared": shared, "limit": self.config.swiglu_limit, "invariant": self.batch_invariant}
        stacked = self._stack()
        return {"gate_up": stacked["gate_up_proj"], "down": stacked["down_proj"], **options}

    @property
    def has_kernels(self) -> bool:
        """Whether the GPU kernels support these experts. The first access stacks their weights."""
        return bool(self._stack())

    @property
    def _is_plain(self) -> bool:
        return all(type(getattr(expert, name)) is Linear for expert in self.experts for name in PROJECTIONS)

    def join(self) -> None:
        """Stack the experts' weights now instead of in the first forward pass: see `join_weights`."""
        self._stack()

    def _run_sorted(
        self, rows: Tensor, weights: Tensor, experts: Tensor, run: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Sort (row, expert) pairs by expert, `run` them, and return the weighted sum for each row.

        weights and experts [rows, k].
        """
        chosen = experts.shape[1]
        ids, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(self.config.num_experts, device=rows.device), right=True)
        out = run(rows[order // chosen], ids, ends)
        out = out[order.argsort()].view(-1, chosen, rows.shape[1]) * weights[..., None].to(out.dtype)
        return out.sum(1)

    def _run_each(self, pairs: Tensor, ids: Tensor, ends: Tensor) -> Tensor:  # noqa: ARG002 - as `_run_grouped_mm`
        """pairs [pairs, hidden], sorted by expert; ids [pairs]: their experts; ends [experts]: of the groups."""
        parts = torch.tensor_split(pairs, ends[:-1].cpu())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])

    def _run_grouped_mm(self, pairs: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """As `_run_each`, with grouped GEMMs: three launches, and one for each bias."""
        first, ends = self.experts[0], ends.to(torch.int32)
        assert isinstance(first, SwiGLU)

        def product(name: str, rows: Tensor) -> Tensor:
            weight, bias = self._stack()[name]
            assert isinstance(weight, Tensor)
            out = F.grouped_mm(rows, weight.mT, offs=ends)
            return out if bias is None else out + bias[ids]

        return product("down_proj", first.gated(product("gate_up_proj", pairs)))

    def _stack(self) -> dict[str, Stacked]:
        """Return stacked weights and biases by projection; the experts' own become views. {}: no kernels for them."""
        if self._stacked is None:
            linears = {name: [getattr(expert, name) for expert in self.experts] for name in PROJECTIONS}
            weights = self._weights(linears)
            self._stacked = {}
            for name, weight in weights.items():
                shape = len(self.experts), linears[name][0].out_features
                self._stacked[name] = weight, join_rows(linears[name], "bias").view(shape) if self.config.bias else None
        return self._stacked

    def _weights(self, linears: Mapping[str, Sequence[nn.Module]]) -> Mapping[str, Tensor | QuantizedWeight]:
        """Concatenate each projection of all experts, if they have one layout that the kernels support; else {}."""
        if self._is_plain:
            joined = {name: join_rows(several) for name, several in linears.items()}
            return {name: rows.view(len(self.experts), -1, rows.shape[1]) for name, rows in joined.items()}
        quantized = {name: [one for one in some if type(one) is QuantizedLinear] for name, some in linears.items()}
        every = [one for some in quantized.values() for one in some]
        if len(every) < len(PROJECTIONS) * len(self.experts) or not all(reads_codes(one.quantized) for one in every):
            return {}
        return join_quantized(quantized) or {}


def host_runs_experts(model: nn.Module) -> bool:
    """Whether experts of a model on a GPU run one by one, which synchronises, so that no pass can be captured."""
    return any(isinstance(module, SparseMLP) and not module.has_kernels for module in model.modules())
