"""The drafter at the start of training: its config, its initial weights, and the weights it shares with the target."""

import warnings
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.checkpoints.drafter import load_drafter
from fledge.checkpoints.source import resolve
from fledge.errors import CheckpointWarning, ConfigError
from fledge.layers.config import LayerConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter, DraftVocabulary
from fledge.models.drafter.variants import EAGLE_1, EAGLE_3, EAGLE_3_1, build
from fledge.models.target import FAMILIES
from fledge.training.capture import TargetEnds
from fledge.training.recipe import DrafterSection

_VARIANTS = {"eagle1": EAGLE_1, "eagle3": EAGLE_3, "eagle3.1": EAGLE_3_1}


def drafter_config(section: DrafterSection, target: TargetConfig, draft_vocab_size: int | None = None) -> DrafterConfig:
    """Return the config of the recipe's drafter. What the recipe leaves open follows the target, rope always does."""
    variant = _VARIANTS[section.variant]
    eagle1 = variant.architecture is Architecture.EAGLE1
    draft_vocab_size = min(draft_vocab_size or target.vocab_size, target.vocab_size)
    if eagle1 and draft_vocab_size < target.vocab_size:
        what = "EAGLE-1 drafts with the target's own head, over its whole vocabulary"
        raise ConfigError(f"vocab.size: {what}; set it to null")
    if eagle1 and (section.fc_norm or section.norm_output or section.norm_before_residual or section.aux_layer_ids):
        raise ConfigError("drafter: fc_norm, norm_output, norm_before_residual and aux_layer_ids are of EAGLE-3")
    # A plain Llama-style layer of the target's sizes, which every engine supports: no biases, no norms of heads.
    plain = replace(target.layer.as_drafter, qk_norm=False, qkv_bias=False, output_bias=False, mlp_bias=False)
    plain = replace(plain, intermediate_size=section.intermediate_size or plain.intermediate_size)
    layer = _latent_layer(section, target, plain) if section.attention == "mla" else _plain_layer(section, plain)
    max_positions, longest = section.max_positions or target.max_positions, target.max_positions
    if max_positions < longest:
        text = f"drafter.max_positions is {max_positions}, less than the target's {longest}"
        warnings.warn(f"{text}: acceptance collapses on longer inputs", CheckpointWarning, stacklevel=2)
    aux_ids = section.aux_layer_ids or target.default_aux_layer_ids
    if not eagle1 and (list(aux_ids) != sorted(set(aux_ids)) or aux_ids[0] < 0 or aux_ids[-1] > target.num_layers):
        found = "found" if section.aux_layer_ids else "not set, and the usual ones do not suit this target:"
        allowed = f"ascending layer inputs from 0 to {target.num_layers}"
        raise ConfigError(f"drafter.aux_layer_ids: {found} {list(aux_ids)}, allowed are {allowed}")
    config = variant.config_for(target, layer=layer)
    return replace(
        config,
        num_layers=section.num_layers,
        draft_vocab_size=draft_vocab_size,
        max_positions=max_positions,
        sliding_windows=() if section.sliding_window is None else (section.sliding_window,) * section.num_layers,
        own_embedding=section.train_embedding,
        norm_before_residual=section.norm_before_residual,
        fc_norm=variant.fc_norm if section.fc_norm is None else section.fc_norm,
        norm_output=variant.norm_output if section.norm_output is None else section.norm_output,
        aux_layer_ids=None if eagle1 else aux_ids,
        num_aux_states=config.num_aux_states if eagle1 else len(aux_ids),
    )


def _plain_layer(section: DrafterSection, plain: LayerConfig) -> LayerConfig:
    heads, head_dim = section.num_heads or plain.num_heads, section.head_dim or plain.head_dim
    kv_heads = section.num_kv_heads or (plain.num_kv_heads if heads % plain.num_kv_heads == 0 else heads)
    if heads % kv_heads:
        raise ConfigError(f"drafter.num_kv_heads: found {kv_heads}, allowed is a divisor of {heads}, its heads")
    if head_dim % 2:
        raise ConfigError(f"drafter.head_dim: found {head_dim}, allowed is an even number")
    return replace(plain, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def _latent_layer(section: DrafterSection, target: TargetConfig, plain: LayerConfig) -> LayerConfig:
    """A layer with the target's latent attention. Its rope is always interleaved, as in vLLM's drafter class."""
    if target.layer.latent is None:
        what = f"mla takes its shape from the target, and {target.family} has no latent attention"
        raise ConfigError(f"drafter.attention: {what}; use gqa")
    if section.variant == "eagle1":
        raise ConfigError("drafter.attention: mla is of EAGLE-3, no engine has such an EAGLE-1; use gqa")
    for key in ("num_kv_heads", "head_dim", "sliding_window"):
        if (found := getattr(section, key)) is not None:
            raise ConfigError(f"drafter.{key}: found {found}, allowed is null with drafter.attention mla")
    heads, rope = section.num_heads or plain.num_heads, replace(plain.rope, interleaved=True)
    # vLLM's class needs low-rank queries; if the target has none, the rank is chosen as in DeepSeek's models.
    latent = target.layer.latent
    latent = replace(latent, q_lora_rank=latent.q_lora_rank or 3 * latent.kv_lora_rank)
    size = latent.qk_rope_head_dim
    return replace(plain, latent=latent, num_heads=heads, num_kv_heads=heads, head_dim=size, rope=rope)


def make_drafter(
    section: DrafterSection,
    config: DrafterConfig,
    target: TargetConfig,
    ends: TargetEnds,
    vocabulary: DraftVocabulary | None,
    *,
    device: torch.device | str,
    seed: int,
    compute: torch.dtype = torch.float32,
    target_directory: Path | None = None,
) -> Drafter:
    """Build the drafter in float32 on `device`. A seed gives the same weights on any device.

    `compute` is the dtype that its layers will run in.
    """
    if not config.own_head and ends.head_bias is not None:
        raise ConfigError("drafter.variant: EAGLE-1 drafts with the target's head, and this target's has a bias; use 3")
    drafter = build(config)
    _initialise(drafter, seed)
    with torch.no_grad():
        if drafter.vocabulary is not None:
            assert vocabulary is not None, "a reduced vocabulary must be given"
            drafter.vocabulary.d2t.copy_(vocabulary.d2t)
        if config.own_embedding and drafter.embed_tokens is not None:
            drafter.embed_tokens.weight.copy_(ends.embedding_weight)
        if config.own_head and drafter.lm_head is not None and section.head_from_target:
            head, ids = ends.head_weight, None if drafter.vocabulary is None else drafter.vocabulary.target_ids
            drafter.lm_head.weight.copy_(head if ids is None else head[ids.to(head.device)])
        if section.init_from is not None:
            _load_weights(drafter, resolve(section.init_from), target, target_directory)
    drafter = drafter.to(device)
    if not config.own_embedding:
        drafter.embed_tokens = Borrowed(ends.embedding_weight.to(device), compute)  # type: ignore[assignment]
    if not config.own_head:
        drafter.lm_head = Borrowed(ends.head_weight.to(device))  # type: ignore[assignment]
    return drafter.train()


def _initialise(drafter: Drafter, seed: int) -> None:
    """Normal weights that preserve the scale of their input; smaller in projections to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    layers = drafter.config.num_layers
    for name, parameter in drafter.named_parameters():  # in the order of the modules, which is fixed
        if parameter.dim() == 2:
            scale = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= (2 * layers) ** -0.5
            nn.init.normal_(parameter, std=scale, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)


def _load_weights(drafter: Drafter, directory: Path, target: TargetConfig, target_directory: Path | None) -> None:
    """Load the weights of a checkpoint of the same shape. If its draft vocabulary differs, rows follow their tokens."""
    # The contract only knows families that we serve; for others it is checked as for Llama.
    known = target if target.family in FAMILIES else replace(target, family="llama")
    earlier = load_drafter(directory, known, target_directory=target_directory)
    # These may differ: they only change the number of rows of head and embedding, or no weight at all.
    free = {"dtype", "max_positions", "draft_vocab_size", "own_embedding", "own_head", "sliding_windows"}
    for field in fields(DrafterConfig):
        found, wanted = getattr(earlier.config, field.name), getattr(drafter.config, field.name)
        if field.name not in free and found != wanted:
            difference = f"has {field.name} {found}, but the recipe asks for {wanted}"
            raise ConfigError(f"drafter.init_from: {directory} {difference}")
    if earlier.lm_head is not None and drafter.lm_head is not None:
        old_ids = torch.arange(earlier.config.draft_vocab_size)
        old_row = torch.full((target.vocab_size,), -1)
        old_row[earlier.to_target_ids(old_ids)] = old_ids
        ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size))
        known_ids = old_row[ids] >= 0
        drafter.lm_head.weight[known_ids] = earlier.lm_head.weight.float()[old_row[ids[known_ids]]]
    names = drafter.state_dict().keys() - {"vocabulary.d2t", "lm_head.weight"}
    state = {name: value.float() for name, value in earlier.state_dict().items() if name in names}
    drafter.load_state_dict(state, strict=False)


class Borrowed(nn.Module):
    """An embedding or head of the target that the drafter uses: frozen, shared in memory, not saved with it."""

    weight: Tensor

    def __init__(self, weight: Tensor, embeds: torch.dtype | None = None) -> None:
        """An embedding that returns the dtype `embeds`; None: a head."""
        super().__init__()
        self.embeds = embeds
        self.register_buffer("weight", weight.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embeds is not None:
            return F.embedding(x, self.weight).to(self.embeds)
        return F.linear(x.to(self.weight.dtype), self.weight)
