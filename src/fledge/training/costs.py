"""What fitting a drafter takes, by formula: parameters, memory by part, floating-point operations.

N is the slots of one pass (its rows times their length), H, Q, KV and I the widths of a layer's states, queries, keys
and MLP, V and D the vocabularies of target and drafter, b the bytes of a number in the dtype that is computed in.
docs/training.md explains every line.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.variants import build
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel
from fledge.training.recipe import FitSection, TargetSection
from fledge.training.ttt import CHUNK_ROWS

MASTER_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8  # float32 weights, gradients, and Adam's two averages


@dataclass(frozen=True, kw_only=True)
class FitShape:
    """One fit, as far as its costs depend on it."""

    target: TargetConfig
    target_parameters: int
    drafter: DrafterConfig
    fit: FitSection
    online: bool  # the target runs along
    document_length: float  # mean tokens of a document, which attention sees half of
    state_bytes: int  # of a number in the captured states
    compute_bytes: int  # of a number in the drafter's passes
    processes: int = 1

    @property
    def pass_slots(self) -> int:
        """N: slots in one pass of one process."""
        mine = self.fit.rows // self.processes
        return min(self.fit.micro_rows or mine, mine) * self.fit.length

    @property
    def aux_states(self) -> int:
        return 0 if self.drafter.architecture is Architecture.EAGLE1 else self.drafter.num_aux_states

    @property
    def state_bytes_per_token(self) -> int:
        """Aux states and the final one: (n + 1) * H numbers."""
        return (self.aux_states + 1) * self.target.hidden_size * self.state_bytes

    @property
    def parameters(self) -> int:
        return parameter_count(self.drafter)

    def memory(self) -> dict[str, int]:
        """Bytes on each device, by part."""
        drafter, target, n = self.drafter, self.target, self.pass_slots
        draft_vocab, b = drafter.draft_vocab_size, self.compute_bytes
        split = self.processes if self.fit.parallel == "fsdp2" else 1
        copies = 0 if b == MASTER_BYTES else b
        kept_steps = 1 if self.fit.activation_checkpointing else self.fit.depth
        step_inputs = n * (drafter.hidden_size + drafter.num_layers * drafter.layer.kv_cache.numbers_per_token) * b
        ends = (1 if target.tied_head else 2) * target.vocab_size * target.hidden_size
        chunk = min(n, CHUNK_ROWS) * target.vocab_size
        return {
            "target": (self.target_parameters if self.online else ends) * self.state_bytes,
            "weights": self.parameters * MASTER_BYTES // split + self.parameters * copies,
            "gradients": self.parameters * GRADIENT_BYTES // split,
            "optimizer": self.parameters * ADAM_BYTES // split,
            "states": n * self.state_bytes_per_token,
            "activations": n * self._activations_per_slot() * b * kept_steps + step_inputs * self.fit.depth,
            # The teacher's, and each kept step's own; some rows of the full vocabulary at a time.
            "logits": n * draft_vocab * self.state_bytes + kept_steps * n * draft_vocab * b + chunk * self.state_bytes,
        }

    def _activations_per_slot(self) -> int:
        """Numbers that one draft step keeps for the backward pass, for each slot."""
        layer = self.drafter.layer
        per_layer = (
            2 * layer.query_size
            + layer.kv_cache.numbers_per_token
            + 3 * layer.intermediate_size
            + 6 * layer.hidden_size
        )
        return self.drafter.num_layers * per_layer + 4 * layer.hidden_size  # layer 0 reads two states; the final norm

    def flops_per_slot(self) -> dict[str, float]:
        """Operations for each slot of a row, by part: 2 for a multiply-add, forward once and backward twice."""
        drafter, target, depth = self.drafter, self.target, self.fit.depth
        again = 4 / 3 if self.fit.activation_checkpointing else 1.0
        seen = self.document_length / 2
        layers = sum(_matrix_numbers(module) for name, module in _modules(drafter) if name.startswith("layers"))
        fuse = sum(_matrix_numbers(module) for name, module in _modules(drafter) if name.startswith(("fusion", "fc")))
        fused_steps = depth if drafter.architecture is Architecture.EAGLE1 else 1  # EAGLE-1's fc is run at each step
        head = drafter.hidden_size * drafter.draft_vocab_size
        attention = sum(_attention_flops(drafter.layer, drafter.num_layers, seen + step) for step in range(depth))
        parts = {
            "layers": 6.0 * again * (layers * depth + fuse * fused_steps),
            "attention": 3.0 * again * attention,
            "head": (6.0 if drafter.own_head else 4.0) * again * head * depth,
            "teacher": 2.0 * target.hidden_size * target.vocab_size,
        }
        if self.online:
            parts["target"] = target_flops_per_token(target, self.target_parameters, seen, head=False)
        return parts


def target_flops_per_token(target: TargetConfig, parameters: int, seen: float, *, head: bool) -> float:
    """Operations of one forward pass of the target for one token that attends to `seen` others."""
    ends = target.vocab_size * target.hidden_size
    blocks = parameters - (1 if target.tied_head else 2) * ends
    return 2.0 * (blocks + (ends if head else 0)) + _attention_flops(target.layer, target.num_layers, seen)


def _attention_flops(layer: LayerConfig, layers: int, seen: float) -> float:
    return 4.0 * layer.query_size * seen * layers


def parameter_count(drafter: DrafterConfig) -> int:
    """Return how many numbers are trained, exactly."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(drafter).parameters())


def target_parameter_count(section: TargetSection, target: TargetConfig, directory: str) -> int:
    """Return how many numbers the target has, without loading one."""
    with torch.device("meta"):
        if target.family in FAMILIES:
            return sum(parameter.numel() for parameter in TargetModel(target).parameters())
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - slow to import

        config = AutoConfig.from_pretrained(directory, trust_remote_code=section.trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code)
        return sum(parameter.numel() for parameter in model.parameters())


def _modules(drafter: DrafterConfig) -> list[tuple[str, nn.Module]]:
    with torch.device("meta"):
        return list(build(drafter).named_children())


def _matrix_numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)
