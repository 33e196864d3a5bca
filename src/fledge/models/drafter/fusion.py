"""Fusion: from several hidden states of the target to one feature of the drafter."""

from torch import Tensor, nn

from fledge.kernels.rms_norm import rms_norm_parts
from fledge.layers.linear import Linear
from fledge.layers.norm import RMSNorm
from fledge.models.config import DrafterConfig


class FeatureFusion(nn.Module):
    """`fc(aux states side by side)`, with the optional norms before it.

    Without `fc_norm` the highest layer, whose states are the largest, dominates the sum that fc forms: one of the two
    causes of attention drift.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        states, width, eps = config.num_aux_states, config.target_hidden_size, config.layer.norm_eps
        self.eps = eps
        self.input_norm = RMSNorm(states * width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(states)) if config.fc_norm else None
        self.fc = Linear(states * width, config.hidden_size, bias=config.fc_bias)

    def state_norms(self) -> list[Tensor]:
        """Return the weights [target_hidden] of the norms of the aux states; none without `fc_norm`."""
        return [norm.weight for norm in self.fc_norm or () if isinstance(norm, RMSNorm)]

    def forward(self, aux: Tensor) -> Tensor:
        """Aux [*lead, states * target_hidden] -> [*lead, hidden]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            aux = rms_norm_parts(aux, self.state_norms(), self.eps)
        out: Tensor = self.fc(aux)
        return out
